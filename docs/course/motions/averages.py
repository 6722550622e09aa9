"""Chapters 1 to 3: the weighted average by its bandwidth; scores, masked or not, that become weights."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import clearhead as ch
from clearhead.explanation.motion import Motion, Picture, short

Array = np.ndarray[Any, Any]


def bandwidth(x: Array, y: Array, truth: Callable[[Array], Array], at: float) -> Motion:
    """The guess for each moment by one bandwidth after the other, and the weights of one moment, `at`.

    x, y (n,): the measurements. `truth`: the curve that they are of.
    """
    t = np.linspace(x.min(), x.max(), 80)
    low, high = y.min() - 0.3, y.max() + 0.3

    def right(moments: Array) -> Array:
        return 16 + 328 * (moments - t[0]) / (t[-1] - t[0])

    def up(values: Array) -> Array:
        return 176 - 160 * (np.clip(values, low, high) - low) / (high - low)

    frames = []
    for width in np.geomspace(3, 0.03, 13):
        score = ch.Gaussian(float(width))
        guess = ch.attention(t[:, None], x[:, None], y[:, None], score=score)[:, 0]
        weights = ch.weights(np.array([[at]]), x[:, None], score=score)[0]
        average = float(weights @ y)
        off = np.sqrt(np.mean((guess - truth(t)) ** 2))
        picture = Picture(270)
        picture.path("truth", zip(right(t), up(truth(t)), strict=True), look="truth")
        for j, (a, b, w) in enumerate(zip(right(x), up(y), weights, strict=True)):
            size, share = 2.2 + 4 * min(1.0, 4 * w), 0.35 + 0.65 * min(1.0, 8 * w)
            picture.add(f"measured {j}", "circle", "accent", cx=a, cy=b, r=size, opacity=share)
            picture.rect(f"weight {j}", a - 1.5, 250 - 52 * w**0.5, 3, 52 * w**0.5, look="accent")
        picture.path("guess", zip(right(t), up(guess), strict=True))
        there, found = float(right(np.array(at))), float(up(np.array(average)))
        picture.line("moment", there, 10, there, 180)
        picture.line("moment below", there, 200, there, 250)
        picture.add("average", "circle", "dot", cx=there, cy=found, r=5)
        picture.line("ground", 16, 250, 344, 250)
        what = f"weights for the moment {at:g} (height: the root of a weight)"
        picture.text("what", 16, 194, what, look="faint", anchor="start")
        picture.text("bandwidth", 16, 265, f"σ = {width:.2f}", look="strong", anchor="start")
        picture.text("off", 344, 265, f"off by {off:.2f}", anchor="end")
        count = int((weights > 0.01).sum())
        words = (
            f"σ = {width:.2f}: for the moment {at:g}, {count} of {len(x)} measurements have a weight above 0.01. "
            f"Their average is {average:.2f}; the truth is {truth(np.array(at)):.2f}."
        )
        frames.append((words, picture))
    best = min(range(len(frames)), key=lambda n: float(frames[n][1].shapes["off"].text.split()[-1]))
    return Motion("The bandwidth σ falls", frames, pause=0.6, still=best)


def scores_to_weights(
    query: Tensor,
    key: Tensor,
    mask: Any = None,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
) -> Motion:
    """The scores q · k / √d, row by row, and how the softmax makes weights of them. A mask cuts them key by key.

    query (Lq, E), key (Lk, E). `queries` and `keys`: their names.
    """
    steps = ch.explain(query, key, key, mask=mask)
    scores, weights = (steps[name].reshape(len(query), len(key)) for name in ("scores", "weights"))
    allowed = torch.ones_like(weights, dtype=torch.bool) if mask is None else weights > 0
    table = _Table(queries or [f"query {i}" for i in range(len(query))], keys or [f"key {j}" for j in range(len(key))])
    everything = torch.ones_like(allowed)
    filled, exponentials = torch.zeros_like(allowed), scores.exp()
    frames = []
    for i, name in enumerate(table.rows):
        filled[i] = True
        if mask is None or i == len(query) - 1:
            words = f"The scores of {name}: its product with each key, divided by √{query.shape[1]}."
            words = words if mask is None else "All scores, as if there were no mask."
            frames.append((words, table.drawn(scores, filled, everything, chosen=i if mask is None else None)))
    seen = everything.clone()
    for j in range(len(key)):
        if not allowed[:, j].all():
            seen[:, j] = allowed[:, j]
            whom = "no query" if not allowed[:, j].any() else "not every query"
            words = f"The mask: {whom} may see {table.columns[j]}. Its score becomes −∞."
            frames.append((words, table.drawn(scores, filled, seen)))
    sums = (exponentials * allowed).sum(-1)
    words = "The softmax takes e to the power of each score" + (
        " (e to the power of −∞ is 0)" if mask is not None else ""
    )
    frames.append((f"{words}, and the sum of each row.", table.drawn(exponentials, filled, allowed, sums, masked="0")))
    words = "Each number is divided by the sum of its row. These are the weights: each row sums to 1."
    frames.append((words, table.drawn(weights, filled, allowed, weights.sum(-1), masked="0")))
    return Motion("From scores to weights" if mask is None else "A mask cuts scores", frames)


class _Table:
    """A table with a row for each query and a column for each key."""

    LEFT, TOP, HIGH = 62, 30, 27

    def __init__(self, rows: Sequence[str], columns: Sequence[str]) -> None:
        self.rows, self.columns = rows, columns
        self.wide = (360 - self.LEFT - 50) / len(columns)

    def drawn(
        self,
        numbers: Tensor,
        filled: Tensor,
        seen: Tensor,
        sums: Tensor | None = None,
        chosen: int | None = None,
        masked: str = "−∞",
    ) -> Picture:
        """`filled`, `seen` (Lq, Lk): where there is a number yet, and where it is not masked."""
        picture, largest = Picture(self.TOP + len(self.rows) * self.HIGH + 12), numbers[seen].abs().max().item()
        for j, name in enumerate(self.columns):
            picture.text(f"column {j}", self.LEFT + (j + 0.5) * self.wide, self.TOP - 9, name, look="faint small")
        for i, name in enumerate(self.rows):
            y = self.TOP + i * self.HIGH
            picture.text(
                f"row {i}", self.LEFT - 6, y + 18, name, look="strong" if i == chosen else "faint", anchor="end"
            )
            for j in range(len(self.columns)):
                x, number = self.LEFT + j * self.wide, numbers[i, j].item()
                share = abs(number) / largest if filled[i, j] and seen[i, j] else 0.0
                look = "minus" if number < 0 else "square"
                picture.rect(f"ground {i} {j}", x + 1, y + 1, self.wide - 2, self.HIGH - 2, look="ground")
                picture.rect(f"cell {i} {j}", x + 1, y + 1, self.wide - 2, self.HIGH - 2, look=look, opacity=share)
                lines = _hatching(x + 1, y + 1, self.wide - 2, self.HIGH - 2)
                picture.add(f"cut {i} {j}", "path", "hatch", d=lines, opacity=0.0 if seen[i, j] else 1.0)
                if filled[i, j]:
                    text = f"{number:.2f}".replace("-", "−") if seen[i, j] else masked
                    picture.text(f"number {i} {j}", x + self.wide / 2, y + 18, text)
            if sums is not None:
                picture.text(f"sum {i}", 356, y + 18, f"Σ {sums[i]:.2f}", anchor="end")
        if chosen is not None:
            width = len(self.columns) * self.wide
            picture.rect("chosen", self.LEFT, self.TOP + chosen * self.HIGH, width, self.HIGH, look="chosen")
        return picture


def _hatching(x: float, y: float, width: float, height: float) -> str:
    """The path of slanted lines over a cell."""
    lines = []
    for s in range(6, int(width + height), 6):
        begin, end = (max(0.0, s - height), min(s, height)), (min(s, width), max(0.0, s - width))
        lines.append(f"M{short(x + begin[0])} {short(y + begin[1])}L{short(x + end[0])} {short(y + end[1])}")
    return "".join(lines)
