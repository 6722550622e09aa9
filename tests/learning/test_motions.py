"""The course's pictures that move, and its diagrams: their numbers are those of plain PyTorch; no word is hidden."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diagrams
import motions
import numpy as np
import pytest
import torch
from browser import Opened
from drawn import draw
from motions import checkpoints
from moving import drawn, expected
from torch.nn import functional as F

import clearhead as ch
from clearhead.base.output.pages import bundled, write_page
from clearhead.explanation.motion import Motion

DIAGRAMS = (diagrams.scaled_dot_product, diagrams.additive, diagrams.multi_head, diagrams.encoder_decoder)


def truth(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return 2 * np.sin(x) + x**0.8


X = np.sort(np.random.default_rng(0).uniform(0, 5, 50))
Y = truth(X) + 0.5 * np.random.default_rng(1).standard_normal(50)
WORDS = ["the", "cat", "sleeps", "pad", "pad", "pad"]
QUERY, KEY, VALUE = draw(1, 4), 1.5 * draw(22, 4, seed=1), draw(22, 2, seed=2)
FLAT, JOINED = draw(2, 3, 24), draw(2, 3, 24, seed=1)

MOTIONS: dict[str, Callable[[], Motion]] = {
    "bandwidth": lambda: motions.bandwidth(X, Y, truth, at=2.0),
    "scores": lambda: motions.scores_to_weights(draw(5, 3), draw(6, 3, seed=1)),
    "mask": lambda: motions.scores_to_weights(draw(3, 4), draw(6, 4, seed=1), ch.Lengths([3]), WORDS[:3], WORDS),
    "causal": lambda: motions.scores_to_weights(draw(4, 4), draw(4, 4, seed=1), ch.Causal()),
    "heads": lambda: motions.split_heads(FLAT, JOINED, 6),
    "rotary": lambda: motions.rotary(draw(8), draw(8, seed=1)),
    "induction": motions.induction,
    "online": lambda: motions.online_softmax(QUERY, KEY, VALUE),
}


@pytest.fixture(scope="module")
def made() -> dict[str, Motion]:
    return {name: make() for name, make in MOTIONS.items()}


def number(motion: Motion, frame: int, name: str) -> float:
    """The last number of a text."""
    return float(re.findall(r"-?\d+\.\d+", motion.frames[frame][1].shapes[name].text.replace("−", "-"))[-1])


def attribute(motion: Motion, frame: int, name: str, attribute: str) -> float:
    return float(motion.frames[frame][1].shapes[name].attributes[attribute])


def table(motion: Motion, frame: int, rows: int, columns: int) -> torch.Tensor:
    """The numbers of a table; what is masked is −∞, or 0 after the softmax."""
    shapes = motion.frames[frame][1].shapes
    texts = [[shapes[f"number {i} {j}"].text for j in range(columns)] for i in range(rows)]
    return torch.tensor([[float(text.replace("−", "-").replace("∞", "inf")) for text in row] for row in texts])


def near(found: Any, wanted: Any, tolerance: float = 0.006) -> None:
    torch.testing.assert_close(
        torch.as_tensor(found), torch.as_tensor(wanted), atol=tolerance, rtol=0, check_dtype=False
    )


def test_the_bandwidth_falls_and_the_weights_follow(made: dict[str, Motion]) -> None:
    motion = made["bandwidth"]
    assert len(motion.frames) == 13
    for n in (0, 6, 12):
        sigma = 3 * 0.01 ** (n / 12)
        assert number(motion, n, "bandwidth") == pytest.approx(sigma, abs=0.006)
        weights = F.softmax(-((2.0 - torch.from_numpy(X)) ** 2) / (2 * sigma**2), 0)
        heights = [attribute(motion, n, f"weight {j}", "height") for j in range(50)]
        near(heights, 52 * weights.sqrt(), 0.01)
        average = float(weights @ torch.from_numpy(Y))
        assert f"Their average is {average:.2f}; the truth is {truth(np.array(2.0)):.2f}." in motion.frames[n][0]
        assert f" {int((weights > 0.01).sum())} of 50" in motion.frames[n][0]
    off = [number(motion, n, "off") for n in range(13)]
    assert off[motion.still] == min(off) < min(off[0], off[-1])


def test_the_scores_fill_row_by_row_and_become_weights(made: dict[str, Motion]) -> None:
    motion = made["scores"]
    scores = draw(5, 3) @ draw(6, 3, seed=1).T / 3**0.5
    for n in range(5):
        filled = {name for name in motion.frames[n][1].shapes if name.startswith("number")}
        assert filled == {f"number {i} {j}" for i in range(n + 1) for j in range(6)}
    near(table(motion, 4, 5, 6), scores)
    near(table(motion, 5, 5, 6), scores.exp())
    near([number(motion, 5, f"sum {i}") for i in range(5)], scores.exp().sum(-1))
    near(table(motion, 6, 5, 6), scores.softmax(-1))
    assert len(motion.frames) == 7


@pytest.mark.parametrize("name", ("mask", "causal"))
def test_a_mask_cuts_key_after_key(name: str, made: dict[str, Motion]) -> None:
    motion, queries, keys = made[name], {"mask": 3, "causal": 4}[name], {"mask": 6, "causal": 4}[name]
    keep = torch.arange(6) < 3 if name == "mask" else torch.ones(4, 4).tril().bool()
    keep = keep.expand(queries, keys)
    scores = draw(queries, 4) @ draw(keys, 4, seed=1).T / 2
    near(table(motion, 0, queries, keys), scores)
    cut = scores.masked_fill(~keep, -math.inf)
    near(table(motion, len(motion.frames) - 3, queries, keys), cut)
    near(table(motion, len(motion.frames) - 1, queries, keys), cut.softmax(-1))
    hidden = [int(table(motion, n, queries, keys).isinf().any(0).sum()) for n in range(4)]
    assert hidden == [0, 1, 2, 3]


def test_each_head_takes_its_numbers_along(made: dict[str, Motion]) -> None:
    motion = made["heads"]
    texts = [picture.shapes["shape"].text for _, picture in motion.frames]
    assert [text.split(" = ")[1] for text in texts] == [
        "(2, 3, 24)", "(2, 3, 6, 4)", "(2, 6, 3, 4)", "(2, 6, 3, 4)", "(2, 3, 6, 4)", "(2, 3, 24)"
    ]  # fmt: skip
    for frame, numbers in ((2, FLAT), (3, JOINED)):
        heads = numbers.reshape(2, 3, 6, 4).transpose(1, 2)[0]
        corners = torch.tensor(
            [[[attribute(motion, frame, f"number {place} {4 * head + n}", key) for key in ("x", "y")] for n in range(4)]
             for head in range(6) for place in range(3)]
        ).view(6, 3, 4, 2)  # fmt: skip
        # within a head entries lie side by side, and positions below each other
        assert (corners[:, :, 1:, 0] > corners[:, :, :-1, 0]).all() and (corners[:, :, :, 1].diff(dim=2) == 0).all()
        assert (corners[:, 1:, :, 1] > corners[:, :-1, :, 1]).all() and (corners[..., 0].diff(dim=1) == 0).all()
        shown = [
            attribute(motion, frame, f"number {place} {entry}", "opacity") for place in range(3) for entry in range(24)
        ]
        order = torch.tensor(shown).view(3, 6, 4).transpose(0, 1)
        near(order, 0.3 + 0.7 * heads.abs() / heads.abs().max(), 0.01)


def test_the_hands_are_the_pairs_as_they_are_turned(made: dict[str, Motion]) -> None:
    motion, turn = made["rotary"], ch.nn.RotaryEmbedding(8, base=100.0)
    places = [(p + 2, p) for p in range(7)] + [(p, 6) for p in range(9, 14)]
    longest, scores = torch.stack([draw(8), draw(8, seed=1)]).view(2, 2, 4).norm(dim=1).max(), []
    for n, (i, j) in enumerate(places):
        q, k = turn(draw(8)[None], offset=i)[0], turn(draw(8, seed=1)[None], offset=j)[0]
        scores.append(number(motion, n, "score"))
        near(scores[-1], (q @ k).item(), 0.0006)
        for name, x in (("query", q), ("key", k)):
            for pair in range(4):
                shape = motion.frames[n][1].shapes[f"{name} {pair}"].attributes
                angle = math.radians(-float(re.findall(r"-?[\d.]+", shape["transform"])[0]))
                size = float(shape["x2"]) - float(shape["x1"])
                found = torch.tensor([math.cos(angle), math.sin(angle)]) * size
                near(found / 39, x.view(2, 4)[:, pair] / longest, 0.002)
    assert len(motion.frames) == len(places)
    assert max(scores[:7]) - min(scores[:7]) < 0.0011 and max(scores) - min(scores) > 0.1


def test_the_blocks_walk_to_the_softmax_of_all(made: dict[str, Motion]) -> None:
    motion = made["online"]
    scores = (QUERY @ KEY.T)[0] / 2
    assert len(motion.frames) == 6
    for n in range(6):
        seen = scores[: 4 * (n + 1)]
        near(
            [number(motion, n, "largest"), number(motion, n, "sum")],
            [seen.max().item(), (seen - seen.max()).exp().sum().item()],
        )
        heights = [attribute(motion, n, f"key {j}", "height") for j in range(22)]
        near(heights[: len(seen)], 90 * (seen - seen.max()).exp(), 0.01)
        assert max([0.0, *heights[len(seen) :]]) == 0
    rises = [n for n in range(1, 6) if scores[: 4 * n].max() < scores[4 * n : 4 * n + 4].max()]
    assert rises == [n for n in range(6) if motion.frames[n][1].shapes["scaled"].text] and rises
    output = (scores.softmax(0) @ VALUE).tolist()
    sides = [attribute(motion, 5, f"so far {e}", "width") * (1 if output[e] > 0 else -1) for e in range(2)]
    assert sides[0] / sides[1] == pytest.approx(output[0] / output[1], rel=1e-2)
    for e in range(2):  # the line of the final output is where the last bar ends
        end = attribute(motion, 5, f"so far {e}", "x") + (sides[e] if sides[e] > 0 else 0)
        assert end == pytest.approx(attribute(motion, 0, f"final {e}", "x1"), abs=0.02)


def test_the_checkpoints_show_induction_forming(made: dict[str, Motion]) -> None:
    stored = json.loads(checkpoints.FILE.read_text(encoding="utf-8"))
    assert [at["step"] for at in stored] == [*checkpoints.STEPS] and len(made["induction"].frames) == 12
    assert stored[0]["induction"] < 0.1 and stored[-1]["induction"] > 0.9 and stored[-1]["again"] < 0.1
    for n, at in enumerate(stored):
        for layer, rows in enumerate(at["maps"]):
            assert [len(row) for row in rows] == [*range(1, 25)]
            assert all(abs(sum(row) - 100) < 8 for row in rows)  # each weight is rounded to a hundredth
            for i, j in ((20, 19), (20, 13), (20, 5)):
                shape = made["induction"].frames[n][1].shapes.get(f"{layer} {i} {j}")
                if shape:
                    assert float(shape.attributes["opacity"]) == pytest.approx(min(1, rows[i][j] / 60), abs=0.006)
    last, tokens = stored[-1]["maps"], checkpoints.sequence()[0]
    followed = [sum(last[1][i][j] for j in range(1, i + 1) if tokens[j - 1] == tokens[i]) for i in range(8, 24)]
    assert sum(followed) / 16 > 80


def test_the_checkpoints_are_those_of_the_training() -> None:
    again = checkpoints.trained((0, 20))
    stored = json.loads(checkpoints.FILE.read_text(encoding="utf-8"))
    for new, old in zip(again, stored, strict=False):
        for name in ("step", "new", "again", "previous", "induction"):
            assert new[name] == pytest.approx(old[name], abs=0.02), name
        for one, other in zip(new["maps"], old["maps"], strict=True):
            for row, before in zip(one, other, strict=True):
                assert row == pytest.approx(before, abs=3)


# The words that are seen in each drawing, and where they lie: outside of it, or two upon each other
READ = """() => [...document.querySelectorAll("svg")].flatMap((svg, n) => {
  const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
  const seen = (e) => e.textContent.trim() && e.getAttribute("opacity") !== "0";
  const placed = (e) => {  // getBBox knows nothing of the element's own turn
    const box = e.getBBox(), turn = e.transform.baseVal.consolidate();
    if (!turn) return box;
    const [a, b] = [[box.x, box.y], [box.x + box.width, box.y + box.height]]
      .map(([x, y]) => new DOMPoint(x, y).matrixTransform(turn.matrix));
    return { x: Math.min(a.x, b.x), y: Math.min(a.y, b.y), width: Math.abs(a.x - b.x), height: Math.abs(a.y - b.y) };
  };
  const texts = [...svg.querySelectorAll("text")].filter(seen).map((e) => [e.textContent, placed(e)]);
  const inside = (b) => b.x >= 0 && b.y >= 0 && b.x + b.width <= width && b.y + b.height <= height;
  const apart = (a, b) => a.x + a.width <= b.x + 0.5 || b.x + b.width <= a.x + 0.5
    || a.y + a.height <= b.y + 6 || b.y + b.height <= a.y + 6;
  return texts.flatMap(([words, box], i) => [
    ...(inside(box) ? [] : [`${n}: ${words} is outside`]),
    ...texts.slice(0, i).flatMap(([other, place]) => apart(box, place) ? [] : [`${n}: ${words} is on ${other}`]),
  ]);
})"""


def test_no_word_is_outside_or_on_another(made: dict[str, Motion], browser: Any, tmp_path: Path) -> None:
    """In every frame of every motion, and in every diagram."""
    pictures = [picture.svg(words) for motion in made.values() for words, picture in motion.frames]
    pictures += [make()._repr_html_() for make in DIAGRAMS]
    page = f"<!doctype html><meta charset=utf-8><style>{bundled('motion.css')}</style><body>{''.join(pictures)}"
    path = write_page(tmp_path / "all.html", [page])
    opened = browser.open(path, Opened, viewport={"width": 390, "height": 800})
    assert opened.page.locator("svg").count() == len(pictures) > 60
    assert opened.page.evaluate(READ) == []
    browser.close(opened)


@pytest.mark.parametrize("name", MOTIONS)
def test_the_page_shows_the_frames(name: str, made: dict[str, Motion], browser: Any, tmp_path: Path) -> None:
    motion = made[name]
    path = write_page(tmp_path / "motion.html", [motion.html()])
    opened = browser.open(path, Opened, viewport={"width": 390, "height": 800})
    assert drawn(opened.page) == expected(motion, 0)
    opened.page.keyboard.press("End")
    assert drawn(opened.page) == expected(motion, len(motion.frames) - 1)
    assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert opened.page.evaluate("motion.offsetHeight") <= motion.frame().height
    browser.close(opened)


def test_a_diagram_has_a_shape_at_every_arrow_and_says_all_of_it() -> None:
    for make in DIAGRAMS:
        diagram = make()
        picture, html = diagram.picture(), diagram._repr_html_()
        arrows = [name for name in picture.shapes if name.startswith("arrow")]
        assert len(arrows) == len(diagram.arrows)
        for n, (a, b, shape) in enumerate(diagram.arrows):
            assert re.search(r"\([^()]+\)$", shape) and picture.shapes[f"shape {n}"].text == shape
            assert diagram.boxes[a].row <= diagram.boxes[b].row
            assert re.findall(r"\(.*\)", shape)[0] in diagram.words
        assert f'aria-label="{diagram.words}"' in html and "<script" not in html
        reached = {b for _, b, _ in diagram.arrows}
        first = {a for a, _, _ in diagram.arrows} - reached
        assert all(diagram.boxes[name].look == "data" for name in first)
        assert reached | first == set(diagram.boxes)


def test_the_shapes_of_the_diagrams_are_those_that_are_computed() -> None:
    sizes = {
        "Lq": 2,
        "Lk": 3,
        "L": 5,
        "M": 6,
        "B": 2,
        "H": 4,
        "D": 3,
        "E": 7,
        "Ev": 4,
        "hidden": 8,
        "H·D": 12,
        "words": 9,
    }

    def shapes(make: Callable[[], diagrams.Diagram]) -> dict[tuple[str, str], tuple[int, ...]]:
        return {
            (a, b): tuple(sizes[part] for part in re.findall(r"\((.*)\)", shape)[0].split(", "))
            for a, b, shape in make().arrows
        }

    query, key, value = draw(2, 7), draw(3, 7), draw(3, 4)
    found = shapes(diagrams.scaled_dot_product)
    steps = ch.explain(query, key, value)
    assert found["scale", "mask"] == tuple(steps["scores"].squeeze().shape) and found["softmax", "average"] == (2, 3)
    assert found["average", "output"] == ch.attention(query, key, value).shape
    found = shapes(diagrams.additive)
    W_q, W_k = draw(8, 7), draw(8, 7)
    sums = (query @ W_q.T)[:, None] + key @ W_k.T
    assert found["W_q", "sums"] == (query @ W_q.T).shape and found["sums", "tanh"] == sums.shape
    assert found["w_v", "softmax"] == (sums @ draw(8)).shape
    found = shapes(diagrams.multi_head)
    layer = ch.nn.MultiHeadAttention(7, 4, head_dim=3)
    x = draw(2, 5, 7)
    output = layer(x, x, x)
    assert (
        found["W query", "cut query"] == layer.W_q(x).shape
        and found["softmax", "average"] == layer.attention_weights.shape
    )
    assert found["cut query", "scores"] == layer.W_q(x).reshape(2, 5, 4, 3).transpose(1, 2).shape
    assert found["W_o", "output"] == output.shape == found["x", "W key"]
    found = shapes(diagrams.encoder_decoder)
    assert (
        found["memory", "cross"] == (2, 5, 7)
        and found["cross", "add cross"] == (2, 6, 7)
        and found["norm", "logits"] == (2, 6, 9)
    )


def test_each_part_of_a_transformer_has_a_norm_before_it_and_the_stream_goes_past_both() -> None:
    diagram = diagrams.encoder_decoder()
    arrows = {(a, b): shape for a, b, shape in diagram.arrows}
    added = [name for name in diagram.boxes if name.startswith("add")]
    assert len(added) == 5
    for name in added:
        norm, part = name.replace("add", "norm"), name.removeprefix("add ")
        before = [a for a, b in arrows if b == norm]
        assert len(before) == 1 and {a for a, b in arrows if b == name} == {part, before[0]}
        assert arrows[before[0], norm] == arrows[norm, part] == arrows[part, name] == arrows[before[0], name]
        [passing] = [n for n, (a, b, _) in enumerate(diagram.arrows) if (a, b) == (before[0], name)]
        line = diagram.picture().shapes[f"arrow {passing}"].attributes["d"]
        assert line.count("L") == 3, "it turns twice, around the boxes between"
