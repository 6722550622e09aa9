"""The explanation of a problem: an instrumented run of the functions that the engine `tiled` is made of."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead._attention import Arguments
from clearhead.base.arrays import accumulated
from clearhead.base.dropout import factors
from clearhead.base.shapes import Sizes
from clearhead.base.symbolic.expressions import short
from clearhead.base.symbolic.steps import PAIRS, Operand, Step, made, number
from clearhead.base.torch_state.modules import with_parameters
from clearhead.biases.base import ends_in, numbers_alone
from clearhead.biases.dense import DenseBias
from clearhead.engines.tiled import tiles
from clearhead.explanation.explanation import Explanation, Part
from clearhead.explanation.shown import FEW, SAID, Shown, choose, narrowed, settle
from clearhead.masks.base import Mask
from clearhead.masks.dense import DenseMask
from clearhead.problem.guard import guard
from clearhead.problem.problem import ABSENT, Problem
from clearhead.problem.regions import cut
from clearhead.scores.base import SCORES, ByTile, changed, name_of
from clearhead.scores.dot import Dot


def scores_part(rows: Problem, query: Step, key: Step, bias: list[Step]) -> list[Step]:
    """The score's own steps, then scale, softcap and the steps of the bias; the last step is called "scores"."""
    scores = rows.scores
    assert isinstance(scores, ByTile)
    steps = with_parameters(scores.score, lambda p: p.to(query.value.dtype))._explain(query, key)

    def before(name: str) -> Step:
        """The last step under this name, since it is not the finished scores yet."""
        steps[-1] = steps[-1].called(name)
        return steps[-1]

    if scores.scale != 1.0:
        products = before("products" if isinstance(scores.score, Dot) else "unscaled")
        why = _why_scaled(products.value, scores.scale, query.value.shape[-1], scores.score)
        steps.append(made("scores", why, products * scores.scale))
    if scores.softcap is not None:
        cap = short(scores.softcap)
        why = f"The softcap bounds every score between -{cap:g} and {cap:g}, smoothly."
        steps.append(made("scores", why, cap * (before("uncapped") / cap).tanh()))
    if scores.score.changed_by is not None:
        why = "A function of the score, the sequence, the head and the places of query and key gives the new score."
        formula = f"scores[i, j] = {name_of(scores.score.changed_by)}(unchanged[i, j], b, h, i, j)"
        steps.append(Step("scores", why, changed(scores, before("unchanged").value), SCORES, formula=formula))
    if bias:
        given_bias = None if rows.bias is None else rows.bias.given
        of_mask = isinstance(given_bias, DenseBias) and given_bias.of_mask
        why = _why_added("mask" if of_mask else "bias", bias[-1].value)
        steps += [*bias, made("scores", why, before("unbiased") + bias[-1])]
    if rows.poison is not None:
        of_query, of_key = rows.poison
        poison = of_query + of_key.repeat_interleave(rows.sizes.heads // of_key.shape[1], 1)
        why = "Inputs hold NaN or ∞, which stand above as 0. NaN is put here for each pair of such a query or key."
        given = Step("not_finite", why, poison.to(query.value.dtype), SCORES)
        why = "So NaN reaches the queries that may see such an input, and no others."
        steps += [given, made("scores", why, before("of_finite") + given)]
    return steps


def _why_added(name: str, numbers: Tensor) -> str:
    less, more = bool((numbers < 0).any()), bool((numbers > 0).any())
    found = ["where it is below 0 the score is smaller"] * less
    found += ["where it is above 0 it is larger" if less else "where it is above 0 the score is larger"] * more
    return f"The {name} is added to the score: {', '.join(found) or 'here it is 0'}."


def _why_scaled(before: Tensor, scale: float, width: int, score: object) -> str:
    if isinstance(score, Dot) and width and math.isclose(scale, width**-0.5, rel_tol=1e-6):
        why = (
            f"{number(scale)} is 1/√{width}. Sums of {width} products lie about √{width} times as far apart as single "
            "products, and the scale undoes that: scores far apart would give one key nearly all the weight, and "
            "gradients near 0."
        )
    else:
        why = "The larger the scale, the more of the weight goes to the keys with the largest scores."
    finite = before[before.isfinite()].detach()
    if finite.numel() <= 1:
        return why
    variance = float(finite.var(correction=0))
    return (
        f"{why} The variance of the scores is {number(variance)} before and {number(variance * scale * scale)} after."
    )


def bias_part(problem: Problem, rows: Problem, shown: Shown, dtype: torch.dtype) -> list[Step]:
    """The bias's own steps, where they are known, else its numbers; the last step is called "bias".

    Empty where the problem has no bias. `rows`: the chosen rows of the problem. `dtype`: the dtype of the scores.
    """
    if problem.bias is None or rows.bias is None:
        return []
    given, every = problem.bias.given, slice(None)
    numbers = rows.bias.tile(every, every, every, every, rows.sizes).to(dtype)
    if given is not None:
        sides = (*shown.region.sides[:3], every)
        steps = given._explain(problem.sizes, sides)
        # the bias of a recorded call may read a tensor that has been written to since
        if ends_in(steps, numbers.expand(rows.sizes.shape)):
            if torch.promote_types(steps[-1].value.dtype, dtype) == dtype:
                return steps
            steps = given._explain(problem.sizes, sides, "bias_wide")
            return [*steps, made("bias", f"Rounded to {dtype}, which the scores have.", steps[-1].to(dtype), PAIRS)]
    return numbers_alone("bias", numbers)


def mask_part(mask: Any, sizes: Sizes, shown: Shown, scores: Step) -> list[Step]:
    """The mask's own steps, and the scores with −∞ where it is False: the last step, "masked"."""
    if isinstance(mask, Tensor | np.ndarray):
        mask = DenseMask(mask)
    assert isinstance(mask, Mask)
    steps = mask._explain(sizes, (*shown.region.sides[:3], slice(None)))
    first = next(n for n, step in enumerate(steps) if step.value.dtype == torch.bool)
    steps[first] = steps[first].but(
        why=f"{steps[first].why} A filled cell, ■, is True: the query may see the key. · is False."
    )
    keep = steps[-1].value.expand(scores.value.shape)
    hidden = int((~keep).sum())
    why = (
        f"Where the mask is False the score becomes -∞: here for {hidden:,} of {keep.numel():,} pairs. "
        "exp(-∞) is 0, so these keys get the weight 0, and the weights of the other keys sum to 1."
    )
    if not hidden:
        why = f"The mask is True for all {keep.numel():,} pairs here, so no score changes."
    return [*steps, made("masked", why, scores.masked_fill(~steps[-1], -torch.inf))]


ROW = ("B", "H", "Lq", "1")


def softmax_part(rows: Problem, scores: Step) -> list[Step]:
    """From finished scores to the step "weights"."""
    steps, sinks, tile = [], tiles.sinks(rows), scores.value
    empty = scores.eq(-torch.inf).all(-1, keepdim=True)
    blind: Operand | None = empty if rows.visible is not None else None  # on a page a changed mask may leave no key
    if bool(empty.value.any()):
        why = f"{int(empty.value.sum())} of {empty.value.numel()} queries may see no key at all: "
        blind = made("blind", f"{why}their weights and output are 0.", empty, ROW)
        steps.append(blind)
    largest, sink = scores.amax(-1, keepdim=True), None
    if sinks is not None:
        why = "Learnt, one number per head. It is one more score in the sum below, with a weight and no value."
        sink = Step("sink", why, sinks[None, :, :, None], ("B", "H", "1", "1"))
        steps.append(sink)
        largest = largest.maximum(sink)
    why = (
        "The largest score of each row, kept as a column, (…, 1), so that it is repeated for each key below. It is "
        "subtracted so that exp does not become too large; exp(-maximum) cancels in the division, so no weight changes."
    )
    maximum = made("maximum", why, largest if blind is None else largest.masked_fill(blind, 0.0), ROW)
    why = (
        "The numerator of each weight, from 0 to 1: the larger the score, the larger it is."
        + " exp(-∞) is 0." * bool((tile == -torch.inf).any())
    )
    numerator = made("numerator", why, (scores - maximum).exp())
    why = "The sum over the keys, the last axis: the weights of one query, over all keys, have to sum to 1."
    sums = numerator.sum(-1, keepdim=True)
    sums = sums if sink is None else sums + (sink - maximum).exp()
    total = made("total", why, sums if blind is None else sums.masked_fill(blind, 1.0), ROW)
    rest = "" if sink is None else ", together with the sink's,"
    why = f"Each weight is from 0 to 1, and those of a row{rest} sum to 1. These four steps are the softmax."
    # from the value of the step "sink", so that the step gets the gradient of the sinks
    value = tiles.softmax(tile, tiles.may_be_empty(rows), None if sink is None else sink.value[0, :, :, 0])
    shares = numerator / total
    if bool(((tile == -torch.inf) & total.value.isnan()).any()):
        shares = shares.masked_fill(scores.eq(-torch.inf), 0.0)
    return [*steps, maximum, numerator, total, made("weights", why, shares, value=value, by=scores.softmax(-1))]


def wrong_axis(scores: Step, values: bool) -> list[Step]:
    """The softmax over the queries, as a mistake; no step where there is one query, or a key that no query sees."""
    if scores.value.shape[-2] < 2 or bool((scores.value == -torch.inf).all(-2).any()):
        return []
    wrong = scores.softmax(-2)
    why = (
        "A common mistake: a softmax over the queries makes each column sum to 1, and not each row. "
        f"{_row_sums(wrong.value)}{', so the outputs would not be averages of the values' * values}."
    )
    return [made("wrong_axis", why, wrong, aside=True)]


def masked_after(scores: Step, mask: Step, values: bool) -> list[Step]:
    """Weights set to 0 after the softmax, as a mistake; no step where the mask hides no pair that is shown."""
    if bool(mask.value.all()):
        return []
    late = scores.softmax(-1).masked_fill(~mask, 0.0)
    why = (
        "A common mistake: weights set to 0 after the softmax. The masked keys are still in the totals. "
        f"{_row_sums(late.value)}, not all to 1{', and the masked keys change the output' * values}."
    )
    return [made("masked_after", why, late, aside=True)]


def _row_sums(matrix: Tensor) -> str:
    sums = matrix.detach()[0, 0].sum(-1)
    which = " of the first table" if matrix.shape[0] * matrix.shape[1] > 1 else ""
    return f"The rows{which} sum to " + ", ".join([number(x) for x in sums[:4]] + ["…"] * (len(sums) > 4))


def lead_axes(shown: Shown) -> tuple[str, ...]:
    """The leading axes that the scores have."""
    return tuple(axis for axis in ("B", "H") if axis not in shown.absent)


def attention_parts(
    problem: Problem, given: Any, shown: Shown, before: list[Step]
) -> tuple[list[Part], Tensor, Tensor | None]:
    """The parts from the scores to the output, the weights, and the mask (None: every query sees every key).

    `given`: the mask as the caller gave it. `before`: the steps before; they include "query", "key" and, where an
    output is wanted, "value", with the keys repeated for each query head.
    """
    rows = _rows(problem, shown)
    found = {step.name: step for step in before}
    query, key, value = found["query"], found["key"], found.get("value")
    bias = bias_part(problem, rows, shown, query.value.dtype)
    steps = scores_part(rows, query, key, bias)
    parts = [Part("Scores: how well each query fits each key", tuple(steps))]
    more, weights, mask = _weights_parts(rows, given, problem.sizes, shown, steps[-1], value is not None)
    parts += more
    if value is not None:
        output = output_part(rows, weights, value, shown, mask)
        parts.append(Part("Output: a weighted mixture of the values", tuple(output)))
    return parts, weights.value, None if mask is None else mask.value


def _weights_parts(
    rows: Problem, given: Any, sizes: Sizes, shown: Shown, scores: Step, values: bool
) -> tuple[list[Part], Step, Step | None]:
    """The parts from the finished scores to the weights, the step "weights", and the last step of the mask, if any.

    `given`: the mask as the caller gave it. `values`: whether there are values.
    """
    parts, mask, otherwise = list[Part](), None, list[Step]()
    if rows.visible is not None:
        masked = mask_part(given, sizes, shown, scores)
        parts.append(Part("Mask: who may see whom", tuple(masked)))
        *_, mask, last = masked
        otherwise = masked_after(scores, mask, values)
        scores = last
    softmax = softmax_part(rows, scores)
    otherwise = wrong_axis(scores, values) + otherwise if rows.sinks is None else []
    parts.append(Part("Softmax: from scores to weights", (*softmax, *otherwise)))
    return parts, softmax[-1], mask


def _rows(problem: Problem, shown: Shown) -> Problem:
    """The chosen rows. Where an input is not finite, `guard` puts 0 in its place, and a poison beside it."""
    rows = cut(problem, shown.region)
    tensors = (t for t in (rows.query, rows.key, rows.value) if t is not None)
    return rows if all(bool(t.isfinite().all()) for t in tensors) else guard(rows)


def input_steps(problem: Problem, shown: Shown) -> list[Step]:
    """Query, key and value of the chosen rows, in the dtype of the scores, with keys repeated for each query head."""
    rows = _rows(problem, shown)
    dtype, heads = accumulated(rows.query.dtype), rows.sizes.heads
    why = {
        "query": "One vector for each query.",
        "key": "One vector for each key. The better a key fits a query, the larger its weight.",
        "value": "One vector for each key: value j belongs to key j.",
    }
    if rows.value is not None:
        why["query"] += " Each query gets one output: a weighted sum of the values."
    same = rows.query.shape[-1] == rows.key.shape[-1]
    steps = []
    for name, given, length, width in (
        ("query", rows.query, "Lq", "E" if same else "Eq"),
        ("key", rows.key, "Lk", "E" if same else "Ek"),
        ("value", rows.value, "Lk", "Ev"),
    ):  # fmt: skip
        if given is None:
            continue
        group = heads // given.shape[1]
        # a copy: later writes to the inputs change nothing here, and each of the three has a gradient of its own
        tensor = given.to(dtype).clone() if group == 1 else given.to(dtype).repeat_interleave(group, 1)
        shared = "" if group == 1 else " Heads that share a key head have the same rows."
        copies = tuple(n if stride == 0 else 1 for n, stride in zip(given.shape[:2], given.stride()[:2], strict=True))
        axes = ("B", "H", length, width)
        steps.append(Step(name, why[name] + shared, tensor, axes, copies=(copies[0], copies[1] * group)))
    return steps


def output_part(rows: Problem, weights: Step, value: Step, shown: Shown, mask: Step | None) -> list[Step]:
    """From the step "weights" and the step "value" to the step "output"."""
    steps = []
    few = narrowed(settle(shown, weights.value, None if mask is None else mask.value), FEW)
    if rows.seed is not None:
        p = rows.dropout_p
        why = f"Dropout: each weight is multiplied by 0 with probability {p:g}, else by 1 / {1 - p:g}."
        factor = factors(rows.seed, p, rows.sizes, rows.origin, weights.value.dtype)
        kept = Step("kept", why, factor, SCORES)
        why = "The weights after dropout. A row sums to 1 on average only."
        weights = made("dropped", why, weights * kept)
        steps += [kept, weights]
    first = ", in the first table" * (weights.value.shape[0] * weights.value.shape[1] > 1)
    why = f"Each output is the sum of the values, each times its weight{first}: {_shares(weights.value, few)}."
    steps.append(made("output", why, weights @ value))
    unseen = None if mask is None else ~mask.any(-2).unsqueeze(-1)
    if unseen is not None and bool(unseen.value.any()):
        why = "A check: with 100 in place of the values of the keys that no query may see, the output is the same."
        steps.append(made("other_padding", why, weights @ value.masked_fill(unseen, 100.0), aside=True))
    return steps


def _shares(weights: Tensor, shown: Shown) -> str:
    """The largest weights of the first few rows, in words: of the keys that every view shows."""
    found = []
    for i, row in zip(shown.queries, weights.detach()[0, 0].nan_to_num()[:SAID], strict=False):
        largest = [j for j in row.sort(descending=True, stable=True).indices[:2].tolist() if row[j] >= 0.005]
        best = [j for j in largest if j in shown.keys] or largest[:1]  # none is shown where other keys were asked for
        shares = " and ".join(f"{float(row[j]):.0%} of the value of {shown.name('Lk', j)}" for j in best)
        if best:
            last = f"{float(row[best[-1]]):.0%}"
            equal = [j for j in range(len(row)) if j not in best and f"{float(row[j]):.0%}" == last]
            more = shown.name("Lk", equal[0]) if len(equal) == 1 else f"{len(equal):,} more keys"
            shares += f", and as much of {more}" * bool(equal)
        found.append(f"{shown.name('Lq', i)} takes {shares or 'nothing'}")
    return "; ".join(found + ["…"] * (weights.shape[2] > len(found)))


def explain_softmax(scores: Tensor, mask: Mask | None, at: Any = None, align: Any = None) -> Explanation:
    """The masked softmax of scores (..., Lq, Lk), over the keys."""
    width = scores.shape[-1]  # the scores stand in the place of queries, and no number of a key is read
    keys = scores.detach().new_zeros(()).expand(*scores.shape[:-2], width, width)
    whole = Arguments(scores, keys, ABSENT, scale=1.0, mask=mask, align=align).problem()
    shown = choose(at, whole.sizes)
    problem = cut(whole, shown.region)
    why = "One number for each query and key: the better they fit, the larger it is."
    given = Step("scores", why, problem.query.to(accumulated(scores.dtype)), SCORES)
    parts, weights, keep = _weights_parts(problem, mask, whole.sizes, shown, given, False)
    first = Part("Scores", (given,), letters_of=lead_axes(shown))
    shown = settle(shown, weights.value, None if keep is None else keep.value)
    return Explanation("Softmax over the keys, step by step", (first, *parts), shown)
