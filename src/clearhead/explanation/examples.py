"""The built-in examples, each with few and simple numbers. `clearhead explain NAME` prints one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.base.shapes import Sizes
from clearhead.base.symbolic.steps import Step, made
from clearhead.explanation.explain import explain
from clearhead.explanation.explanation import Explanation, Part, shown_as
from clearhead.explanation.of_problem import ROW, explain_softmax
from clearhead.explanation.shown import Shown
from clearhead.masks.causal import Causal
from clearhead.masks.lengths import Lengths
from clearhead.nn.multi_head_attention import MultiHeadAttention
from clearhead.nn.sinusoidal_positional_encoding import SinusoidalPositionalEncoding
from clearhead.scores.additive import Additive
from clearhead.scores.base import SCORES
from clearhead.scores.gaussian import Gaussian

ABOUT = (
    "Attention is computed over two blocks of keys, each by itself, and the two outputs are merged. So no whole row of "
    "scores is needed."
)


def explain_online_softmax(scores: Tensor, value: Tensor, first: int) -> Explanation:
    """Attention of scores (Lq, Lk) over value (Lk, Ev): the first keys in one block, the rest in another, then merged.

    Formula: docs/maths/softmax.md. Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".
    """
    queries, keys = scores.shape
    sizes = Sizes(1, 1, queries, keys, leading=())
    places = tuple(range(queries)), tuple(range(keys))
    shown = Shown(sizes, (0,), (0,), *places, (0, 0, 0, 0), ("B", "H"), (), places[1])
    s = Step("scores", "One number for each query and key.", scores[None, None], SCORES)
    v = Step("value", "One vector for each key.", value[None, None], ("B", "H", "Lk", "Ev"))
    one, two = _block("first", s, v, slice(0, first)), _block("second", s, v, slice(first, keys))
    parts = [
        Part("Inputs", (s, v), ABOUT, letters_of=()),
        Part(f"The first block: keys 0 to {first - 1}", tuple(one)),
        Part(f"The second block: keys {first} to {keys - 1}", tuple(two)),
        Part("Merged: exactly the softmax over all keys", tuple(_merged(one, two, s, v))),
    ]
    return Explanation("Online softmax, step by step", tuple(parts), shown)


def _block(name: str, scores: Step, value: Step, keys: slice) -> list[Step]:
    """Attention over some of the keys alone."""
    part, rows = scores[..., keys], value[..., keys, :]
    why = f"The largest score of the keys {keys.start} to {keys.stop - 1}."
    maximum = made(f"{name}_maximum", why, part.amax(-1, keepdim=True), ROW)
    why = "The columns are the keys of this block. Nothing of the other block is needed."
    numerator = made(f"{name}_numerator", why, (part - maximum).exp(), ("B", "H", "Lq", "n"))
    total = made(f"{name}_total", "The sum of this block.", numerator.sum(-1, keepdim=True), ROW)
    output = made(f"{name}_output", "The output as if there were no other keys.", numerator / total @ rows)
    return [maximum, numerator, total, output]


def _merged(one: list[Step], two: list[Step], scores: Step, value: Step) -> list[Step]:
    maximum = made("maximum", "The largest score of all keys.", one[0].maximum(two[0]), ROW)
    shares = []
    for name, (own, _, total, _) in (("first", one), ("second", two)):
        why = (
            f"The block's total as if the larger maximum had been subtracted: exp(score - {name}_maximum) · "
            f"exp({name}_maximum - maximum) = exp(score - maximum)."
        )
        shares.append(made(f"{name}_share", why, total * (own - maximum).exp(), ROW))
    first, second = shares
    why = "Each block's output, times its share of the sum of both."
    output = made("output", why, (first * one[-1] + second * two[-1]) / (first + second), one[-1].axes)
    why = "A check: the same output from all keys at once."
    return [maximum, *shares, output, made("at_once", why, scores.softmax(-1) @ value)]


def example(name: str, title: str | None = None, digits: int | None = None) -> Explanation:
    """A built-in example's explanation, by its name: see `EXAMPLES`. `title`, `digits`: as for `explain`."""
    if name not in EXAMPLES:
        raise ClearheadError(f"no example is called {name!r:.60}; the examples are {', '.join(EXAMPLES)}.")
    with torch.device("cpu"):
        return shown_as(EXAMPLES[name], title, digits)


def _numbers(*rows: object) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32, device="cpu")


def _drawn(*shape: int, seed: int) -> Tensor:
    """Normal numbers with one digit after the point, so that each can be followed by hand."""
    drawn = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float32, device="cpu")
    return (drawn * 10).round() / 10


def _dot() -> Explanation:
    """Scaled dot-product attention of two queries over three keys."""
    query, key = _numbers([1, 0, 2, 1], [0, 2, 1, -1]), _numbers([1, 0, 1, 0], [0, 1, 0, -1], [2, 1, 0, 1])
    return explain(query, key, _numbers([1, 0], [0, 1], [2, 2]))


def _masked_softmax() -> Explanation:
    """A softmax over scores, of two sequences padded to one length."""
    scores = _numbers([[0.5, 1.0, 0.1, 2.0], [1.5, 0.5, 0.2, 0.3]], [[0.3, 0.9, 1.2, 0.8], [0.0, 0.4, 0.7, 1.9]])
    return explain_softmax(scores, Lengths([2, 3]))


def _additive() -> Explanation:
    """Bahdanau's additive attention: a tanh network scores pairs."""
    W_q, W_k, w_v = _numbers([0.5, -0.2], [0.1, 0.4]), _numbers([0.3, 0.6], [-0.5, 0.2]), _numbers(1, -2)
    score = Additive.from_weights(W_q, W_k, w_v)
    query, key = _numbers([1, 2], [-1, 1]), _numbers([1, 0], [0, 1], [2, -1])
    return explain(query, key, _numbers([1, 0], [0, 1], [2, 2]), score=score)


def _causal() -> Explanation:
    """Self-attention that may not look ahead."""
    x = _drawn(4, 3, seed=1)
    return explain(x, x, x, mask=Causal())


def _padding() -> Explanation:
    """Two sequences in one batch, the first one padded."""
    query, key, value = _drawn(2, 2, 2, seed=3), _drawn(2, 3, 2, seed=2), _drawn(2, 3, 2, seed=9)
    return explain(query, key, value, mask=Lengths([2, 3]))


def _cross() -> Explanation:
    """Queries of one sequence over the keys and values of another."""
    return explain(_drawn(2, 3, seed=4), _drawn(4, 3, seed=5), _drawn(4, 2, seed=6), mask=Lengths([3]))


def _multi_head() -> Explanation:
    """Multi-head self-attention: two heads of two, of four features."""
    with torch.random.fork_rng(devices=[]):
        module = MultiHeadAttention(4, 2).to("cpu", torch.float32)
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(_drawn(*parameter.shape, seed=10 + seed))
    x = _drawn(1, 3, 4, seed=7)
    return explain(module, x, x, x)


def _positional() -> Explanation:
    """Sines and cosines of the place, added to each vector."""
    return explain(SinusoidalPositionalEncoding(4), _drawn(4, 4, seed=20))


def _regression() -> Explanation:
    """Nadaraya and Watson's regression: averages of near values."""
    seen, values = _numbers([0.0], [1.0], [2.0], [4.0]), _numbers([0.0], [0.8], [0.9], [-0.8])
    return explain(_numbers([0.5], [3.0]), seen, values, score=Gaussian(0.5))


def _wrong_axis() -> Explanation:
    """A softmax over the queries, where it should be over the keys."""
    return explain_softmax(_numbers([1.0, 2.0, 3.0, 6.0], [2.0, 4.0, 5.0, 6.0], [3.0, 8.0, 7.0, 6.0]), None)


def _online_softmax() -> Explanation:
    """The same output from two blocks of keys, merged."""
    return explain_online_softmax(_numbers([1.0, 2.0, 3.0, 6.0], [2.0, 4.0, 5.0, 1.0]), _drawn(4, 2, seed=8), 2)


EXAMPLES: dict[str, Callable[[], Explanation]] = {
    "dot": _dot,
    "masked-softmax": _masked_softmax,
    "wrong-axis": _wrong_axis,
    "causal": _causal,
    "padding": _padding,
    "cross": _cross,
    "additive": _additive,
    "multi-head": _multi_head,
    "positional": _positional,
    "regression": _regression,
    "online-softmax": _online_softmax,
}
