"""How vectors flow through four kinds of attention: boxes in rows, arrows downward, and a shape at every arrow.

    diagrams.multi_head()

A function gives a `Diagram`, which a notebook shows: an SVG whose ink is that of the page around it, light or dark.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from clearhead.explanation.motion import WIDTH, Picture

HIGH, LANE = 28, 12  # of a box; and from the edge to an arrow that passes boxes by
STYLE = """.diagram{display:block;width:100%;max-width:30rem;margin:0 auto;color:inherit}
.diagram text{font:11.5px system-ui,sans-serif;fill:currentColor}.diagram .shape{font-size:10.5px}
.diagram rect{fill:none;stroke:currentColor;stroke-opacity:.55}.diagram rect.data{fill:#3b82c4;fill-opacity:.2}
.diagram rect.learnt{fill:#e08a3c;fill-opacity:.25}.diagram rect.group{stroke-dasharray:4 3}
.diagram path{fill:none;stroke:currentColor}.diagram path.tip{fill:currentColor}"""


class Box(NamedTuple):
    """`first`, `last`: the columns that it reaches over. `look`: "data" for tensors, "learnt" where parameters are."""

    row: int
    first: int
    last: int
    words: str
    look: str = "step"


@dataclass(frozen=True)
class Diagram:
    """`boxes` by name; `arrows`: from, to, shape.

    `groups`: dashed frames, as (name, first row, last row, first column, last column). Of two columns the right one is
    the mirror image of the left one: each has room at its outer edge for the arrows that pass boxes by.
    """

    words: str
    boxes: dict[str, Box]
    arrows: Sequence[tuple[str, str, str]]
    groups: Sequence[tuple[str, int, int, int, int]] = ()
    columns: int = 3
    step: int = 60  # from row to row

    def _repr_html_(self) -> str:
        drawn = self.picture().svg(self.words, look="diagram themed")
        return f"<style>{STYLE}</style>{drawn}"

    def picture(self) -> Picture:
        picture = Picture(self._top(max(box.row for box in self.boxes.values())) + HIGH + 10)
        for n, (words, top, bottom, first, last) in enumerate(self.groups):
            (left, _), (_, right) = self._sides(first), self._sides(last)
            y, end, mirrored = self._top(top) - 5, self._top(bottom) + HIGH + 6, self._mirrored(last)
            left, right = left - 8, right + 8
            if self.columns == 2:
                left, right = (left + 4, WIDTH - 4) if mirrored else (4, right - 4)
            picture.rect(f"group {n}", left, y, right - left, end - y, look="group", rx=8)
            x, anchor = (right, "end") if mirrored else (left, "start")
            picture.text(f"group name {n}", x, end + 12, words, look="shape", anchor=anchor)
        for name, box in self.boxes.items():
            left, right, y = *self._across(box), self._top(box.row)
            picture.rect(f"box {name}", left, y, right - left, HIGH, look=box.look, rx=12 if box.look == "data" else 3)
            picture.text(f"words {name}", (left + right) / 2, y + 18, box.words)
        for n, (a, b, shape) in enumerate(self.arrows):
            self._arrow(picture, n, self.boxes[a], self.boxes[b], shape)
        return picture

    def _top(self, row: int) -> float:
        return 10 + row * self.step

    def _mirrored(self, column: int) -> bool:
        return self.columns == 2 and column == 1

    def _sides(self, column: int) -> tuple[float, float]:
        """Of a column: two have room between them, and at the edges, for arrows."""
        if self.columns == 2:
            return (30, 154) if column == 0 else (WIDTH - 154, WIDTH - 30)
        wide = (WIDTH - 12) / self.columns
        return 12 + column * wide, column * wide + wide

    def _across(self, box: Box) -> tuple[float, float]:
        return self._sides(box.first)[0], self._sides(box.last)[1]

    def _arrow(self, picture: Picture, n: int, a: Box, b: Box, shape: str) -> None:
        """With its shape: to the right, within a row; past the boxes between the two; or downward.

        Downward it stands near the middle of the narrower box.
        """
        (left, right), (to_left, to_right) = self._across(a), self._across(b)
        top, bottom, side = self._top(a.row) + HIGH, self._top(b.row), -1 if self._mirrored(b.first) else 1
        if a.row == b.row:
            y = top - HIGH / 2
            self._line(picture, n, [(right, y), (to_left - 1, y)])
            picture.text(f"shape {n}", right + 3, y - 6, shape, look="shape", anchor="start")
            return
        x = (left + right if right - left <= to_right - to_left else to_left + to_right) / 2 - 14 * side
        if any(box.first == a.first and a.row < box.row < b.row for box in self.boxes.values()):
            lane, end = (LANE, to_left - 1) if side > 0 else (WIDTH - LANE, to_right + 1)
            self._line(picture, n, [(x, top + 6), (lane, top + 6), (lane, bottom + HIGH / 2), (end, bottom + HIGH / 2)])
            place = (lane + (13 if side > 0 else -4), (top + bottom + HIGH) / 2)
            turned = f"rotate(-90 {place[0]} {place[1]})"
            picture.text(f"shape {n}", *place, shape, look="shape", transform=turned)
            return
        self._line(picture, n, [(x, top), (x, bottom - 1)])
        y, anchor = top + (self.step - HIGH) / 2 + 3, "start" if side > 0 else "end"
        picture.text(f"shape {n}", x + 7 * side, y, shape, look="shape", anchor=anchor)

    def _line(self, picture: Picture, n: int, points: list[tuple[float, float]]) -> None:
        """With a tip at its end."""
        (x, y), (to_x, to_y) = points[-2:]
        length = abs(to_x - x) + abs(to_y - y)  # it runs along an axis
        across, down = (to_x - x) / length, (to_y - y) / length
        picture.path(f"arrow {n}", [*points[:-1], (to_x - across, to_y - down)], look="arrow")
        back = (to_x - 6 * across, to_y - 6 * down)
        tip = [(back[0] - 4 * down, back[1] - 4 * across), (to_x, to_y), (back[0] + 4 * down, back[1] + 4 * across)]
        picture.path(f"tip {n}", tip, look="tip")


def scaled_dot_product() -> Diagram:
    boxes = {
        "query": Box(0, 0, 0, "queries Q", "data"),
        "key": Box(0, 1, 1, "keys K", "data"),
        "value": Box(0, 2, 2, "values V", "data"),
        "scores": Box(1, 0, 1, "all dot products: Q Kᵀ"),
        "scale": Box(2, 0, 1, "divide by √E"),
        "mask": Box(3, 0, 1, "mask: −∞ where hidden"),
        "softmax": Box(4, 0, 1, "softmax along each row"),
        "average": Box(5, 0, 2, "weighted averages: W V"),
        "output": Box(6, 0, 2, "outputs", "data"),
    }
    arrows = [
        ("query", "scores", "(Lq, E)"),
        ("key", "scores", "(Lk, E)"),
        ("scores", "scale", "(Lq, Lk)"),
        ("scale", "mask", "scores (Lq, Lk)"),
        ("mask", "softmax", "(Lq, Lk)"),
        ("softmax", "average", "weights W (Lq, Lk)"),
        ("value", "average", "(Lk, Ev)"),
        ("average", "output", "(Lq, Ev)"),
    ]
    words = (
        "Scaled dot-product attention. Queries (Lq, E) and keys (Lk, E) give all dot products (Lq, Lk), which are "
        "divided by the root of E, masked, and made weights (Lq, Lk) by a softmax along each row. With the values "
        "(Lk, Ev) the weights make averages: outputs (Lq, Ev)."
    )
    return Diagram(words, boxes, arrows)


def additive() -> Diagram:
    boxes = {
        "query": Box(0, 0, 0, "queries", "data"),
        "key": Box(0, 1, 1, "keys", "data"),
        "value": Box(0, 2, 2, "values", "data"),
        "W_q": Box(1, 0, 0, "times W_q", "learnt"),
        "W_k": Box(1, 1, 1, "times W_k", "learnt"),
        "sums": Box(2, 0, 1, "add each query to each key"),
        "tanh": Box(3, 0, 1, "tanh of every entry"),
        "w_v": Box(4, 0, 1, "times w_v, summed up", "learnt"),
        "softmax": Box(5, 0, 1, "softmax along each row"),
        "average": Box(6, 0, 2, "weighted averages"),
        "output": Box(7, 0, 2, "outputs", "data"),
    }
    arrows = [
        ("query", "W_q", "(Lq, E)"),
        ("key", "W_k", "(Lk, E)"),
        ("W_q", "sums", "(Lq, hidden)"),
        ("W_k", "sums", "(Lk, hidden)"),
        ("sums", "tanh", "(Lq, Lk, hidden)"),
        ("tanh", "w_v", "(Lq, Lk, hidden)"),
        ("w_v", "softmax", "scores (Lq, Lk)"),
        ("softmax", "average", "weights (Lq, Lk)"),
        ("value", "average", "(Lk, Ev)"),
        ("average", "output", "(Lq, Ev)"),
    ]
    words = (
        "Additive attention. The alignment network: queries (Lq, E) times W_q and keys (Lk, E) times W_k are "
        "(Lq, hidden) and (Lk, hidden); each query is added to each key, (Lq, Lk, hidden); after a tanh, the product "
        "with w_v gives the scores (Lq, Lk). Then a softmax makes weights (Lq, Lk), and with the values (Lk, Ev) these "
        "make outputs (Lq, Ev)."
    )
    return Diagram(words, boxes, arrows, [("alignment network", 1, 4, 0, 1)])


def multi_head() -> Diagram:
    names = ("query", "key", "value")
    boxes = {"x": Box(0, 0, 2, "x: the same vectors, or others for keys and values", "data")}
    boxes |= {
        f"W {name}": Box(1, n, n, f"times {w}", "learnt")
        for n, (name, w) in enumerate(zip(names, ("W_q", "W_k", "W_v"), strict=True))
    }
    boxes |= {f"cut {name}": Box(2, n, n, "cut into heads") for n, name in enumerate(names)}
    boxes |= {
        "scores": Box(3, 0, 1, "Q Kᵀ / √D in each head"),
        "softmax": Box(4, 0, 1, "softmax along each row"),
        "average": Box(5, 0, 2, "weighted averages in each head"),
        "join": Box(6, 0, 2, "join the heads, side by side"),
        "W_o": Box(7, 0, 2, "times W_o", "learnt"),
        "output": Box(8, 0, 2, "outputs", "data"),
    }
    arrows = [("x", f"W {name}", "(B, L, E)") for name in names]
    arrows += [(f"W {name}", f"cut {name}", "(B, L, H·D)") for name in names]
    arrows += [
        ("cut query", "scores", "(B, H, L, D)"),
        ("cut key", "scores", "(B, H, L, D)"),
        ("scores", "softmax", "scores (B, H, L, L)"),
        ("softmax", "average", "weights (B, H, L, L)"),
        ("cut value", "average", "(B, H, L, D)"),
        ("average", "join", "(B, H, L, D)"),
        ("join", "W_o", "(B, L, H·D)"),
        ("W_o", "output", "(B, L, E)"),
    ]
    words = (
        "Multi-head attention. Vectors (B, L, E) times W_q, W_k and W_v are (B, L, H·D) each, and are cut into "
        "heads, (B, H, L, D). In each head the scores and the weights are (B, H, L, L), and the averages (B, H, L, "
        "D). The heads are joined, (B, L, H·D), and W_o makes outputs (B, L, E)."
    )
    return Diagram(words, boxes, arrows, [("H heads, each alone", 3, 5, 0, 2)])


def encoder_decoder() -> Diagram:
    """Each column is a chain of boxes. What a part adds meets the stream that went past it."""
    encoder = {
        "tokens": ("input tokens", "data"),
        "embed": ("embed + positions", "learnt"),
        "norm attend": ("layer norm", "learnt"),
        "attend": ("self-attention", "learnt"),
        "add attend": ("add: x + f(x)", "step"),
        "norm feed": ("layer norm", "learnt"),
        "feed": ("feed-forward layer", "learnt"),
        "add feed": ("add: x + f(x)", "step"),
        "memory": ("layer norm", "learnt"),
    }
    decoder = {
        "answer": ("answer so far", "data"),
        "embed 2": ("embed + positions", "learnt"),
        "norm causal": ("layer norm", "learnt"),
        "causal": ("causal self-attention", "learnt"),
        "add causal": ("add: x + f(x)", "step"),
        "norm cross": ("layer norm", "learnt"),
        "cross": ("cross-attention", "learnt"),
        "add cross": ("add: x + f(x)", "step"),
        "norm feed 2": ("layer norm", "learnt"),
        "feed 2": ("feed-forward layer", "learnt"),
        "add feed 2": ("add: x + f(x)", "step"),
        "norm": ("layer norm, linear", "learnt"),
        "logits": ("logits", "data"),
    }
    boxes = dict[str, Box]()
    arrows = list[tuple[str, str, str]]()
    for column, (chain, first, length) in enumerate(((encoder, 0, "L"), (decoder, 2, "M"))):
        names = list(chain)
        boxes |= {name: Box(first + n, column, column, *chain[name]) for n, name in enumerate(names)}
        shapes = dict.fromkeys(names, f"(B, {length}, E)") | {names[0]: f"(B, {length})"}
        shapes |= {"norm": f"(B, {length}, words)"}
        arrows += [(a, b, shapes[a]) for a, b in pairwise(names)]
        arrows += [(names[n - 3], name, shapes[name]) for n, name in enumerate(names) if name.startswith("add")]
    arrows.append(("memory", "cross", "(B, L, E)"))
    words = (
        "An encoder and a decoder. Encoder: input tokens (B, L), embedding and positions (B, L, E), then in every "
        "block self-attention and a feed-forward layer, (B, L, E) each; a layer norm at the end. Decoder: answer so "
        "far (B, M), embedding and positions (B, M, E), then in every block causal self-attention, cross-attention, "
        "which takes keys and values (B, L, E) from the encoder, and a feed-forward layer, (B, M, E) each; at the end "
        "a layer norm and logits (B, M, words). Each of these parts reads its input through a layer norm. What it "
        "gives is added to that input, which goes past the part unchanged."
    )
    groups = [("a block", 2, 7, 0, 0), ("a block", 4, 12, 1, 1)]
    return Diagram(words, boxes, arrows, groups, columns=2, step=52)
