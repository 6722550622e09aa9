"""The checks of chapters 4 to 6: additive attention, heads, positions."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import clearhead as ch
from checks.compared import AXES, answered, called, case, drawn, numbers, same, two

# Chapter 4


def additive_attention(additive: Callable[..., Any]) -> None:
    W_q, W_k, w_v = drawn(6, 3), drawn(6, 5), drawn(6)
    right: list[str] = []
    for name, axes in AXES.items():
        query, key, value = drawn(*axes, 2, 3), drawn(*axes, 4, 5), drawn(*axes, 4, 2)
        sums = (query @ W_q.T)[..., :, None, :] + (key @ W_k.T)[..., None, :, :]
        scores = sums.tanh() @ w_v
        but = {
            "these are scores, and the softmax is missing": scores,
            "the tanh is missing": (sums @ w_v).softmax(-1),
            "w_v is missing: the entries were only added up": sums.tanh().sum(-1).softmax(-1),
            "the softmax runs over the queries: the columns sum to 1, not the rows": scores.softmax(-2),
            "the scores were divided, as dot products are": (scores / 6**0.5).softmax(-1),
            "the tanh was taken of the sum over the entries": (sums @ w_v).tanh().softmax(-1),
            "the output and the weights are exchanged: the output comes first": scores.softmax(-1) @ value,
        }
        with case(name, right):
            result = called(additive, query, key, value, W_q, W_k, w_v, what="additive")
            output, weights = two(result, "additive, with the output and the weights")
            same(weights, scores.softmax(-1), "the weights", but=but)
            same(output, scores.softmax(-1) @ value, "the output")
    print("right: additive attention")


def without_tanh(rows: Any, q: Tensor, k: Tensor, w_v: Tensor) -> None:
    sums = q[:, None, :] + k[None, :, :]
    scores = sums @ w_v
    but = {
        "all weights are equal: the rows are alike, and the keys are not": torch.full_like(scores, 1 / len(k)),
        "the tanh is still there": (sums.tanh() @ w_v).softmax(-1),
        "these are scores, and the softmax is missing": scores,
        "the softmax runs over the queries: the columns sum to 1, not the rows": scores.softmax(0),
        "w_v is missing": sums.sum(-1).softmax(-1),
    }
    same(rows, scores.softmax(-1), "the weights", but=but)
    print("right: both rows are one")


def shares_by_format(share: Any, right: Callable[[Any], float], held_out: Any) -> None:
    """`right`: the share of items that the model rewrites exactly. Three of the formats are tried again."""
    from dates_data import FORMATS, written

    if not share:
        answered("the shares", None)
    templates = [form[1] for form in FORMATS]
    unknown = [key for key in share if key not in templates]
    if unknown or len(share) != len(templates):
        said = f"{unknown[0]!r} is no template" if unknown else f"{len(share)} of {len(templates)} formats"
        raise AssertionError(f"the shares: {said}. A template is the second part of an entry of FORMATS.")
    values = numbers(list(share.values()), "the shares")
    if values.max() > 1:
        raise AssertionError("the shares: a share is 1 at most. Is this a count, or a percentage?")
    for form in (FORMATS[i] for i in (4, 5, 8)):  # those with a year of two figures
        found = right([written(day, form) for day in held_out[:1000]])
        same(share[form[1]], found, f"the share of {form[1]}", 2e-3, {"this is the share of mistakes": 1 - found})
    print("right: the shares")


# Chapter 5


def split_and_merge(split: Callable[..., Any], merge: Callable[..., Any]) -> None:
    for batch, places, heads, width in ((2, 7, 3, 4), (1, 2, 5, 3)):
        flat = torch.arange(float(batch * places * heads * width)).reshape(batch, places, -1)
        cut = flat.reshape(batch, places, heads, width)
        parts = cut.transpose(1, 2)
        but = {
            "this is the reshape without the transposition": flat.reshape(batch, heads, places, width),
            "the places still stand before the heads": cut,
            "the last axis is cut into heads of every n-th number, not of neighbours": (
                flat.reshape(batch, places, width, heads).permute(0, 3, 1, 2)
            ),
        }
        same(called(split, flat, heads, what="split"), parts, "split(flat, heads)", but=but)
        but = {
            "this is the reshape without the transposition": parts.reshape(batch, places, -1),
            "the numbers of a head no longer stand side by side": parts.permute(0, 2, 3, 1).flatten(-2),
        }
        same(called(merge, parts, what="merge"), flat, "merge(parts)", but=but)
    print("right: split and merge")


def contributions_of_heads(contributions: Any, heads: Tensor, W_o: nn.Linear) -> None:
    count, width = heads.shape[1], heads.shape[-1]
    matrix, bias = W_o.weight.detach(), W_o.bias.detach()
    each = heads.detach() @ matrix.unflatten(1, (count, width)).permute(1, 2, 0)
    scrambled = matrix.reshape(count, width, -1)
    but = {
        "the bias is in every head, and belongs to none": each + bias,
        "the bias was shared out, and belongs to no head": each + bias / count,
        "each head got the same share of the output": (each.sum(1, True) / count).expand_as(each),
        "the matrix was cut by a reshape: a head has neighbouring columns, not rows": heads.detach() @ scrambled,
    }
    same(contributions, each, "the contributions", but=but)
    print("right: the contributions")


def count_of_parameters(count: Callable[..., Any]) -> None:
    right: list[str] = []
    for E, H, D, Hk in ((5, 6, 4, 6), (5, 6, 4, 2), (7, 4, 3, 1)):
        weights = 2 * E * H * D + 2 * E * Hk * D
        expected = weights + H * D + 2 * Hk * D + E
        but = {
            "the biases are missing": weights,
            "all heads have keys and values of their own here, and H_k have": 4 * E * H * D + 3 * H * D + E,
            "W_o has H · D biases here, and gives E numbers": expected - E + H * D,
            "the bias of W_o is missing": expected - E,
            "W_o is missing": expected - E * H * D - E,
            "W_k is counted and W_v is not": expected - (E + 1) * Hk * D,
            "W_o takes H_k · D numbers here, and the heads have H · D": expected - E * H * D + E * Hk * D,
        }
        with case(f"E = {E}, H = {H}, D = {D}, H_k = {Hk}", right):
            same(called(count, E, H, D, Hk, what="count"), expected, "the number of parameters", 0, but)
    print("right: the number of parameters")


def sequences_apart(mended: Any) -> None:
    answered("the module", mended)
    two_sequences = drawn(2, 3, 8)

    def outputs(x: Tensor) -> Tensor:
        result = called(partial(mended, x, x, x), what="the module")
        output: Tensor = result[0] if isinstance(result, tuple) else result
        same(output.shape, (2, 3, 8), "the shape of the output")
        return output.detach()

    def reached(sequence: int, place: int) -> Tensor:
        """Which outputs change with one input, (2, 3)."""
        changed = two_sequences.clone()
        changed[sequence, place] += 1.0
        return (outputs(changed) - outputs(two_sequences)).abs().amax(-1) > 1e-6

    if isinstance(mended, nn.Module) and mended.training:
        mended = mended.eval()  # no dropout
    moved = reached(1, 2)
    if moved[0].any():
        raise AssertionError(
            "the module: it still attends from one sequence to the other. Which axis does it attend over?"
        )
    if not moved[1].all():
        raise AssertionError("the module: no leak is left, but the places of one sequence don't see each other either.")
    print("right: the sequences are apart")


# Chapter 6


def waves(sinusoidal: Callable[..., Any]) -> None:
    for length, width in ((64, 32), (5, 6)):
        places, pair = torch.arange(length)[:, None], torch.arange(0, width, 2)

        def table(angles: Tensor, first: str = "sin", second: str = "cos") -> Tensor:
            return torch.stack([getattr(angles, first)(), getattr(angles, second)()], -1).flatten(-2)

        speeds = 10000.0 ** (-pair / width)
        right = places * speeds
        but = {
            "all sines stand before all cosines: they stand in turn": torch.cat([right.sin(), right.cos()], -1),
            "sines and cosines are exchanged": table(right, "cos", "sin"),
            "the places begin at 1, not at 0": table((places + 1) * speeds),
            "the exponent is half of what it should be: pair n has the exponent −2n / E": table(places * speeds**0.5),
            "the exponent is positive: later pairs are faster": table(places / speeds),
            "both of a pair are sines": table(right, "sin", "sin"),
            "each entry has a speed of its own, and the two of a pair have one": torch.where(
                torch.arange(width) % 2 == 0,
                *(f(places * 10000.0 ** (-torch.arange(width) / width)) for f in (torch.sin, torch.cos)),
            ),
        }
        same(called(sinusoidal, length, width, what="the table"), table(right), "the table", 1e-4, but)
    print("right: the table")


def turned(turn: Callable[..., Any]) -> None:
    for count, speed in ((40, 1.0), (7, 0.3)):
        x, places = drawn(count, 2), torch.arange(count)
        complex_numbers, b = torch.view_as_complex(x), x[:, 1]
        cos, sin = (places * speed).cos(), (places * speed).sin()
        a = x[:, 0] * cos - b * sin

        def by(angle: Tensor, z: Tensor = complex_numbers) -> Tensor:
            return torch.view_as_real(z * torch.polar(torch.ones_like(angle), angle))

        but = {
            "the vectors are turned the other way": by(-places * speed),
            "all vectors are turned by the same angle": by(torch.full((count,), speed)),
            "the places begin at 1, not at 0": by((places + 1) * speed),
            "the speed is not used": by(places * 1.0),
            "the first entry was turned before it was used for the second": torch.stack([a, b * cos + a * sin], -1),
        }
        same(called(turn, x, speed, what="the vectors"), by(places * speed), "the vectors", 1e-4, but)
    print("right: turned")


def places_by_a_mask(query: Any, key: Any, value: Any) -> None:
    query, key, value = parts = [numbers(x, "query, key and value") for x in (query, key, value)]
    for name, part in zip(("query", "key", "value"), parts, strict=True):
        same(part.shape, (6, 1), f"the shape of {name}")
        for i in range(2, 6):
            if part[i] != part[1]:
                raise AssertionError(f"{name}: places 1 and {i} differ. A mark at place 0 is all that may tell places.")
    output = ch.attention(query, key, value, mask=ch.Causal())[:, 0]
    but = {
        "nothing marks the first place: every output is the same": torch.full((6,), value[1, 0].item()),
        "the mark is in all other values: its share is what the output tells": 1 - 1 / torch.arange(1.0, 7.0),
    }
    same(output, 1 / torch.arange(1.0, 7.0), "the output", 1e-4, but)
    print("right: the output tells the place")


def both_positions(both: Any, share: Any, right: Callable[..., float], target: Any) -> None:
    answered("the model, and its share", both, share)
    if not isinstance(both.positions, ch.nn.SinusoidalPositionalEncoding) or both.attend.rotary is None:
        raise AssertionError("the model: it has one kind of position. Give it sinusoidal and rotary positions.")
    found = right(both, target)
    but = {"this is the share of wrong symbols": 1 - found, "this is a percentage, not a share": 100 * found}
    same(share, found, "the share of right symbols", 0.02, but)
    if found <= 0.9:
        raise AssertionError(f"the model: {found:.0%} of its symbols are right. Train it to reverse.")
    print("right: it reverses")
