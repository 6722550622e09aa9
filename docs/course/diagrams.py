"""How vectors flow through four kinds of attention: boxes in rows, arrows downward, and a shape at every arrow.

    diagrams.multi_head()

A function gives a `Diagram`, which a notebook shows: an SVG whose ink is that of the page around it, light or dark.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from clearhead.explanation.motion import WIDTH, Picture

STEP, HIGH = 60, 28  # from row to row, and of a box
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

    `groups`: dashed frames, as (name, first row, last row, first column, last column).
    """

    words: str
    boxes: dict[str, Box]
    arrows: Sequence[tuple[str, str, str]]
    groups: Sequence[tuple[str, int, int, int, int]] = ()
    columns: int = 3

    def _repr_html_(self) -> str:
        drawn = self.picture().svg(self.words, look="diagram themed")
        return f"<style>{STYLE}</style>{drawn}"

    def picture(self) -> Picture:
        picture = Picture((max(box.row for box in self.boxes.values()) + 1) * STEP - STEP + HIGH + 20)
        for n, (words, top, bottom, first, last) in enumerate(self.groups):
            (left, _), (_, right) = self._sides(first), self._sides(last)
            y, end = 10 + top * STEP - 6, 10 + bottom * STEP + HIGH + 6
            picture.rect(f"group {n}", left - 8, y, right - left + 16, end - y, look="group", rx=8)
            picture.text(f"group name {n}", left - 8, end + 12, words, look="shape", anchor="start")
        for name, box in self.boxes.items():
            left, right, y = *self._across(box), 10 + box.row * STEP
            picture.rect(f"box {name}", left, y, right - left, HIGH, look=box.look, rx=12 if box.look == "data" else 3)
            picture.text(f"words {name}", (left + right) / 2, y + 18, box.words)
        for n, (a, b, shape) in enumerate(self.arrows):
            self._arrow(picture, n, self.boxes[a], self.boxes[b], shape)
        return picture

    def _sides(self, column: int) -> tuple[float, float]:
        """Of a column: two stand at the edges, with room for an arrow between them."""
        if self.columns == 2:
            return (12, 142) if column == 0 else (WIDTH - 142, WIDTH - 12)
        wide = (WIDTH - 12) / self.columns
        return 12 + column * wide, column * wide + wide

    def _across(self, box: Box) -> tuple[float, float]:
        return self._sides(box.first)[0], self._sides(box.last)[1]

    def _arrow(self, picture: Picture, n: int, a: Box, b: Box, shape: str) -> None:
        """Downward, near the middle of the narrower box, with the shape on its right; or to the right, within a row."""
        (left, right), (to_left, to_right) = self._across(a), self._across(b)
        if a.row == b.row:
            y = 10 + a.row * STEP + HIGH / 2
            picture.path(f"arrow {n}", [(right, y), (to_left - 2, y)], look="arrow")
            picture.path(f"tip {n}", [(to_left - 7, y - 4), (to_left - 1, y), (to_left - 7, y + 4)], look="tip")
            picture.text(f"shape {n}", (right + to_left) / 2, y - 6, shape, look="shape")
            return
        x = (left + right if right - left <= to_right - to_left else to_left + to_right) / 2 - 14
        top, bottom = 10 + a.row * STEP + HIGH, 10 + b.row * STEP
        picture.path(f"arrow {n}", [(x, top), (x, bottom - 2)], look="arrow")
        picture.path(f"tip {n}", [(x - 4, bottom - 7), (x, bottom - 1), (x + 4, bottom - 7)], look="tip")
        picture.text(f"shape {n}", x + 7, top + 20, shape, look="shape", anchor="start")


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
    boxes = {
        "tokens": Box(0, 0, 0, "input tokens", "data"),
        "embed": Box(1, 0, 0, "embed + positions", "learnt"),
        "attend": Box(2, 0, 0, "self-attention", "learnt"),
        "feed": Box(3, 0, 0, "feed-forward layer", "learnt"),
        "memory": Box(4, 0, 0, "layer norm", "learnt"),
        "answer": Box(1, 1, 1, "answer so far", "data"),
        "embed 2": Box(2, 1, 1, "embed + positions", "learnt"),
        "causal": Box(3, 1, 1, "causal self-attention", "learnt"),
        "cross": Box(4, 1, 1, "cross-attention", "learnt"),
        "feed 2": Box(5, 1, 1, "feed-forward layer", "learnt"),
        "norm": Box(6, 1, 1, "layer norm, linear", "learnt"),
        "logits": Box(7, 1, 1, "logits", "data"),
    }
    arrows = [
        ("tokens", "embed", "(B, L)"),
        ("embed", "attend", "(B, L, E)"),
        ("attend", "feed", "(B, L, E)"),
        ("feed", "memory", "(B, L, E)"),
        ("memory", "cross", "(B, L, E)"),
        ("answer", "embed 2", "(B, M)"),
        ("embed 2", "causal", "(B, M, E)"),
        ("causal", "cross", "(B, M, E)"),
        ("cross", "feed 2", "(B, M, E)"),
        ("feed 2", "norm", "(B, M, E)"),
        ("norm", "logits", "(B, M, words)"),
    ]
    words = (
        "An encoder and a decoder. Encoder: input tokens (B, L), embedding and positions (B, L, E), then self- "
        "attention and a feed-forward layer, (B, L, E) each, in every block. Decoder: answer so far (B, M), "
        "embedding and positions (B, M, E), then causal self-attention, cross-attention, which takes keys and "
        "values (B, L, E) from the encoder, and a feed-forward layer, (B, M, E) each; at the end logits (B, M, "
        "words)."
    )
    groups = [("a block", 2, 3, 0, 0), ("a block", 3, 5, 1, 1)]
    return Diagram(words, boxes, arrows, groups, columns=2)
