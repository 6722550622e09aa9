"""The part of an explanation that turns scores into weights."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.base.steps import Operand, Step, made, number
from clearhead.engines.tiled import tiles
from clearhead.problem.problem import Problem

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


def wrong_axis(scores: Step) -> list[Step]:
    """The softmax over the queries, as a mistake; no step where there is one query, or a key that no query sees."""
    if scores.value.shape[-2] < 2 or bool((scores.value == -torch.inf).all(-2).any()):
        return []
    wrong = scores.softmax(-2)
    why = (
        "A common mistake: a softmax over the queries makes each column sum to 1, and not each row. "
        f"{_row_sums(wrong.value)}, so the outputs would not be averages of the values."
    )
    return [made("wrong_axis", why, wrong, aside=True)]


def masked_after(scores: Step, mask: Step) -> list[Step]:
    """Weights set to 0 after the softmax, as a mistake; no step where the mask hides no pair that is shown."""
    if bool(mask.value.all()):
        return []
    late = scores.softmax(-1).masked_fill(~mask, 0.0)
    why = (
        "A common mistake: weights set to 0 after the softmax. The masked keys are still in the totals. "
        f"{_row_sums(late.value)}, not all to 1, and the masked keys change the output."
    )
    return [made("masked_after", why, late, aside=True)]


def _row_sums(matrix: Tensor) -> str:
    sums = matrix.detach()[0, 0].sum(-1)
    which = " of the first table" if matrix.shape[0] * matrix.shape[1] > 1 else ""
    return f"The rows{which} sum to " + ", ".join([number(x) for x in sums[:4]] + ["…"] * (len(sums) > 4))
