"""The part of an explanation that turns scores into weights."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.base.steps import Step, number, signed, total
from clearhead.engines.tiled import tiles
from clearhead.problem.problem import Problem
from clearhead.scores.base import SCORES

ROW = ("B", "H", "Lq", "1")


def softmax_part(rows: Problem, name: str, tile: Tensor) -> list[Step]:
    """From finished scores, the step `name`, to the step "weights"."""
    sinks = tiles.sinks(rows)
    maximum, above, sums, blind = tiles.exponentials(tile)
    steps = []
    if bool(blind.any()):
        why = f"{int(blind.sum())} of {blind.numel()} queries see no key at all: their weights and output are 0."
        formula, code = f"blind[i] = every {name}[i, j] is -∞", f"blind = ({name} == -inf).all(-1, keepdim=True)"
        steps.append(Step("blind", formula, why, blind.unsqueeze(-1), ROW, code))
    fill = ".masked_fill(blind, {})" if bool(blind.any()) else ""
    largest, of_sink, code_of_sink = f"{name}.amax(-1, keepdim=True)", "", ""
    if sinks is not None:
        why = "Learnt, one logit a head: one term more in the sum below. It takes a share, and has no value to give."
        steps.append(Step("sink", "", why, sinks[None, :, :, None], ("B", "H", "1", "1")))
        sinks = steps[-1].value[0, :, :, 0]  # so that the gradient of the step is that of the sinks
        maximum = torch.maximum(maximum, sinks).masked_fill(blind, 0.0)
        above = (tile - maximum.unsqueeze(-1)).exp()
        sums = (above.sum(-1) + (sinks - maximum).exp()).masked_fill(blind, 1.0)
        largest = f"torch.maximum({largest}, sink)"
        of_sink, code_of_sink = " + exp(sink - maximum[i])", " + torch.exp(sink - maximum)"

    def one_above(at: tuple[int, ...]) -> str:
        return f"exp({number(tile[at])} - {signed(maximum[at[:3]])})"

    def summed(at: tuple[int, ...]) -> str:
        terms = [number(x) for x in above[at[:3]] if x]
        if sinks is not None and not blind[at[:3]]:
            terms.append(f"exp({number(sinks[at[1], 0])} - {signed(maximum[at[:3]])})")
        return total(terms) if terms else "1, since nothing is seen"

    why = "The largest score of each row. It is subtracted before exp: that changes no weight, and exp can't overflow."
    formula = f"maximum[i] = max_j {name}[i, j]" + (", or the sink where that is larger" if of_sink else "")
    code = f"maximum = {largest}{fill.format('0.0')}"
    steps.append(Step("maximum", formula, why, maximum.unsqueeze(-1), ROW, code))
    why = "Every score becomes a number from 0 to 1; a masked one becomes 0."
    formula, code = f"above[i, j] = exp({name}[i, j] - maximum[i])", f"above = torch.exp({name} - maximum)"
    steps.append(Step("above", formula, why, above, SCORES, code, one_above))
    why = "The sum over the keys, which are the last axis: each query shares out 1 among the keys that it may see."
    formula, code = f"total[i] = Σ_j above[i, j]{of_sink}", f"(above.sum(-1, keepdim=True){code_of_sink})"
    steps.append(Step("total", formula, why, sums.unsqueeze(-1), ROW, f"total = {code}{fill.format('1.0')}", summed))
    rest = " What is missing to 1 is the sink's share." if of_sink else ""
    why = f"The weights of a query: each is between 0 and 1, and together they are 1.{rest}"
    formula, code = "weights[i, j] = above[i, j] / total[i]", "weights = above / total"
    weights, unseen = tiles.softmax(tile, tiles.may_be_empty(rows), sinks), tile == -torch.inf
    if bool((unseen & sums.isnan().unsqueeze(-1)).any()):
        formula += f", and 0 where {name}[i, j] is -∞"
        code = f"weights = (above / total).masked_fill({name} == -inf, 0.0)"

    def share(at: tuple[int, ...]) -> str:
        return number(weights[at]) if unseen[at] else f"{number(above[at])} / {number(sums[at[:3]])}"

    steps.append(Step("weights", formula, why, weights, SCORES, code, share))
    return steps


def wrong_axis(name: str, tile: Tensor) -> list[Step]:
    """What the softmax over the queries would give, where that is another one."""
    if tile.shape[-2] < 2 or bool((tile == -torch.inf).all(-2).any()):
        return []
    wrong = tile.softmax(-2)
    why = (
        "The softmax over the other axis, the queries, makes each column sum to 1, and not each row. The rows sum to "
        f"{_row_sums(wrong)}, so an output would be no average of the values."
    )
    code = f"wrong_axis = {name}.softmax(-2)"
    return [Step("wrong_axis", f"wrong_axis = softmax({name}) over the queries", why, wrong, SCORES, code, aside=True)]


def masked_after(scores: Tensor, keep: Tensor) -> list[Step]:
    """What setting weights to 0 after the softmax would give."""
    late = scores.softmax(-1) * keep
    why = (
        "The weights set to 0 after the softmax: the masked keys have taken their share already, so the rows sum to "
        f"{_row_sums(late)}, and what is masked still changes the output."
    )
    formula, code = "masked_after = softmax(scores) · mask", "masked_after = scores.softmax(-1) * mask"
    return [Step("masked_after", formula, why, late, SCORES, code, aside=True)]


def _row_sums(matrix: Tensor) -> str:
    sums = matrix.detach()[0, 0].sum(-1)
    return ", ".join([number(x) for x in sums[:4]] + ["…"] * (len(sums) > 4))
