"""Pictures of a mask: in characters, with matplotlib, and in a notebook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.base.output.pictures import Axes, Panel, Side, Style
from clearhead.base.output.pictures import draw as drawn_panels
from clearhead.base.output.text import escaped, said, short
from clearhead.base.output.thumbnails import picture
from clearhead.base.shapes import Sizes
from clearhead.masks._spans import Spans

CELLS = 12  # the most rows and columns of a picture in characters
LARGEST = 1024  # the most queries or keys of a picture; it leaves out later ones
LINED = 40  # the most rows and columns of a picture that has lines between its cells
PLOTTED = 512  # the most rows and columns of a picture with matplotlib
SMALL = 64  # the most rows and columns of a picture in a notebook


def sizes_drawn(mask: Any) -> Sizes:
    """Return the sizes at which to draw a mask if the caller gives none."""
    batch, heads, queries, keys = mask.drawn().shape
    keys = keys or max(queries, mask._count_drawn_keys()) or 6
    return Sizes(batch, heads, queries or keys, keys)


def text(mask: Any) -> str:
    """Draw a mask in characters, only the part that is shown.

    Returns "" if the mask fits no common size, needs an alignment or has no values. A user-defined mask may raise any
    other error; its message then replaces the picture.
    """
    at = ""
    try:
        sizes = sizes_drawn(mask)
        at = f" at {sizes.queries} × {sizes.keys}"
        shown = [min(size, limit) for size, limit in zip(sizes.shape, (4, 3, LARGEST, LARGEST), strict=True)]
        keep = mask._compute_part(sizes, tuple(slice(0, size) for size in shown))
        return draw(keep.expand(shown), sizes.shape)
    except Exception as error:  # a repr must not raise
        raised = error.__cause__ or error  # the cause is the error that a user's function raised
        if isinstance(raised, ClearheadError) or type(raised).__module__.startswith("torch."):
            return ""
        return short(said(raised, lambda: f"not drawn{at}: {type(raised).__name__}: {raised}".splitlines()[0]))


def draw(keep: Tensor, shape: tuple[int, int, int, int]) -> str:
    """Draw the first part of a mask of this shape: ■ allowed, · masked, ▪ some of the pairs of the cell allowed."""
    pictures = []
    for b, h in [(b, h) for b in range(min(keep.shape[0], 3)) for h in range(min(keep.shape[1], 2))]:
        lines = _matrix(keep[b, h])
        names = [f"batch {b}"] * (shape[0] > 1) + [f"head {h}"] * (shape[1] > 1)
        pictures.append("\n".join([", ".join(names), *lines] if names else lines))
    if shape[0] > 3:
        pictures.append(f"… {shape[0] - 3} more sequences")
    if max(shape[2:]) > LARGEST:
        pictures.append(f"… the first {LARGEST} of {shape[2]} queries × {shape[3]} keys")
    return "\n".join(pictures)


def _matrix(keep: Tensor) -> list[str]:
    if not keep.numel():
        return [f"(no pairs: {keep.shape[0]} queries, {keep.shape[1]} keys)"]
    keep = keep.cpu()
    rows, columns = (torch.arange(n, device="cpu") * min(n, CELLS) // n for n in keep.shape)
    shape = (int(rows[-1]) + 1, int(columns[-1]) + 1)
    cell = (rows[:, None] * shape[1] + columns[None, :]).flatten()
    counts = torch.zeros(2, shape[0] * shape[1], dtype=torch.float32, device="cpu")
    counts[0].index_add_(0, cell, keep.float().flatten())
    counts[1].index_add_(0, cell, torch.ones(cell.numel(), dtype=torch.float32, device="cpu"))
    text = ["■" if some == every else "▪" if some else "·" for some, every in counts.T.tolist()]
    return [" ".join(text[i * shape[1] : (i + 1) * shape[1]]) for i in range(shape[0])]


def shares(allowed: Callable[[slice], Tensor], queries: int, keys: int, cell: tuple[int, int]) -> NDArray[Any]:
    """Compute the share of allowed pairs in each cell, (⌈Lq / height⌉, ⌈Lk / width⌉).

    Args:
        allowed: Returns the rows of a slice of queries, bool (…, Lk). It runs on a few rows at a time, so that no Lq ×
            Lk array exists.
        queries: Lq.
        keys: Lk.
        cell: The height and the width of a cell.
    """
    height, width = cell
    columns, block = -(-keys // width), max(2**22 // max(height * keys, 1), 1) * height
    found = []
    for first in range(0, queries, block):
        rows = allowed(slice(first, min(first + block, queries))).cpu().numpy()
        spare = (-len(rows) % height, -keys % width)
        counts = np.pad(rows, ((0, spare[0]), (0, spare[1]))).reshape(-1, height, columns, width).sum((1, 3))
        high = np.minimum(height, len(rows) - height * np.arange(len(counts)))
        wide = np.minimum(width, keys - width * np.arange(columns))
        found.append(counts / (high[:, None] * wide[None, :]))
    return np.concatenate(found) if found else np.zeros((0, columns))


def cell_of(queries: int, keys: int, most: int) -> tuple[int, int]:
    """Return the numbers of queries and keys in a cell, for a map of at most `most` rows and columns, as in `Pool`."""
    return -(-queries // most) or 1, -(-keys // most) or 1


def panels(mask: Any, sizes: Sizes, most: int) -> list[Panel]:
    """Return a picture for each sequence and head in which the spans differ."""
    spans = mask._resolve(sizes)
    shape = (spans.start, spans.stop, *(spans.gaps or ()))
    batch, heads = (
        size if spans.residual is not None else max(edge.shape[side] for edge in shape)
        for side, size in enumerate(sizes.shape[:2])
    )
    cell = cell_of(sizes.queries, sizes.keys, most)
    found = []
    for b, h in [(b, h) for b in range(batch) for h in range(heads)][:LARGEST]:
        share = shares(lambda rows: of(spans, b, h, rows, sizes.keys), sizes.queries, sizes.keys, cell)  # noqa: B023
        names = [f"sequence {b}"] * (batch > 1) + [f"head {h}"] * (heads > 1)
        found.append(Panel(share, share == 0, ", ".join(names)))
    return found


def of(spans: Spans, batch: int, head: int, rows: slice, keys: int) -> Tensor:
    """Compute some rows of one head, bool (rows, Lk)."""
    one = [slice(place, place + 1) for place in (batch, head)]
    return spans.keep(one[0], one[1], rows, slice(None), keys)[0, 0].expand(rows.stop - rows.start, keys)


def plot(
    mask: Any, sizes: Sizes, words: tuple[Sequence[str] | None, Sequence[str] | None], style: Style
) -> Axes | np.ndarray:
    """Draw the mask with matplotlib: see `Mask.plot`."""
    rows = Side("query", sizes.queries, words[0], "query_labels")
    columns = Side("key", sizes.keys, words[1], "key_labels")
    found = panels(mask, sizes, PLOTTED)
    pooled = cell_of(sizes.queries, sizes.keys, PLOTTED) != (1, 1)
    lines = not pooled and max(sizes.queries, sizes.keys) <= LINED
    style = Style(short(mask.title(), 60) if style.title is None else style.title, ax=style.ax, lines=lines)
    return drawn_panels(found, rows, columns, style, "share that may attend" if pooled else None)


def html(mask: Any) -> str:
    """Return the HTML of a mask: see `Mask._repr_html_`."""
    title = f"<p><code>{escaped(short(said(mask, mask.title), 400))}</code></p>"
    drawn = text(mask)
    plain = f"<div>{title}<pre>{escaped(drawn, lines=True)}</pre></div>"
    if not drawn:
        return plain
    try:
        sizes = sizes_drawn(mask)
        if any(size > most for size, most in zip(sizes.shape, (4, 3, LARGEST, LARGEST), strict=True)):
            return plain  # the first part of a large mask looks like the mask of a smaller size
        images = "".join(picture(panel, 0.1) for panel in panels(mask, sizes, SMALL))
    except Exception:  # a user-defined mask may raise any error
        return plain
    queries, keys = sizes.shape[2:]
    sides = f"{queries} {'query' if queries == 1 else 'queries'} × {keys} key{'s' * (keys > 1)}"
    return f"<div>{title}{images}<p>{sides}; grey: may not attend</p></div>"
