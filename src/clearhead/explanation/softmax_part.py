"""The part of an explanation that turns scores into weights."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.base.steps import Back, Step, number, signed
from clearhead.engines.tiled import tiles
from clearhead.problem.problem import Problem
from clearhead.scores.base import SCORES

FEW = 5  # terms of a sum over keys that are written out
ROW = ("B", "H", "Lq", "1")


def softmax_part(rows: Problem, name: str, tile: Tensor) -> list[Step]:
    """From finished scores, the step `name`, to the step "weights"."""
    sinks = tiles.sinks(rows)
    maximum, above, sums, blind = tiles.exponentials(tile)
    steps = []
    where, said = "", ""
    if rows.visible is not None:  # on a page another mask may leave a query nothing
        where, said = f"({name} == -inf).all(-1, keepdim=True)", f", and {{}} where every {name}[i, j] is -∞"
    if bool(blind.any()):
        where, said = "blind", ", and {} where blind[i]"
        why = f"{int(blind.sum())} of {blind.numel()} queries may see no key at all: their weights and output are 0."
        formula, code = f"blind[i] = every {name}[i, j] is -∞", f"blind = ({name} == -inf).all(-1, keepdim=True)"
        steps.append(Step("blind", formula, why, blind.unsqueeze(-1), ROW, code))
    fill = f".masked_fill({where}, {{}})" if where else ""
    largest, of_sink, code_of_sink = f"{name}.amax(-1, keepdim=True)", "", ""
    if sinks is not None:
        why = "Learnt, one number a head: one more score in the sum below, with a weight and no value."
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
        seen = above.detach()[at[:3]]
        seen = seen[seen != 0]
        largest = seen if len(seen) <= FEW else seen[sorted(seen.nan_to_num().topk(FEW - 1).indices.tolist())]
        terms = [number(x) for x in largest]
        terms += [f"… ({len(seen) - len(largest)} more terms)"] * (len(seen) > len(largest))
        if sinks is not None and not blind[at[:3]]:
            terms.append(f"exp({number(sinks[at[1], 0])} - {signed(maximum[at[:3]])})")
        return " + ".join(terms) if terms else "1, since nothing is seen"

    why = (
        "The largest score of each row, kept as a column, (…, 1), so that it is repeated for each key below. It is "
        "subtracted so that exp does not become too large; exp(-maximum) cancels in the division, so no weight changes."
    )
    formula = f"maximum[i] = max_j {name}[i, j]" + (", or the sink where that is larger" if of_sink else "")
    formula += said.format(0)
    code = f"maximum = {largest}{fill.format('0.0')}"
    steps.append(Step("maximum", formula, why, maximum.unsqueeze(-1), ROW, code))
    why = (
        "The numerator of each weight, from 0 to 1: the larger the score, the larger it is."
        + " exp(-∞) is 0." * bool((tile == -torch.inf).any())
    )
    formula, code = f"numerator[i, j] = exp({name}[i, j] - maximum[i])", f"numerator = torch.exp({name} - maximum)"
    steps.append(Step("numerator", formula, why, above, SCORES, code, one_above))
    why = "The sum over the keys, the last axis: the weights of one query, over all keys, have to sum to 1."
    formula, code = f"total[i] = Σ_j numerator[i, j]{of_sink}", f"(numerator.sum(-1, keepdim=True){code_of_sink})"
    formula += said.format(1)
    steps.append(Step("total", formula, why, sums.unsqueeze(-1), ROW, f"total = {code}{fill.format('1.0')}", summed))
    rest = ", together with the sink's," if of_sink else ""
    why = f"Each weight is from 0 to 1, and those of a row{rest} sum to 1. These four steps are the softmax."
    formula, code = "weights[i, j] = numerator[i, j] / total[i]", "weights = numerator / total"
    weights, unseen = tiles.softmax(tile, tiles.may_be_empty(rows), sinks), tile == -torch.inf
    if bool((unseen & sums.isnan().unsqueeze(-1)).any()):
        formula += f", and 0 where {name}[i, j] is -∞"
        code = f"weights = (numerator / total).masked_fill({name} == -inf, 0.0)"

    def share(at: tuple[int, ...]) -> str:
        return number(weights[at]) if unseen[at] else f"{number(above[at])} / {number(sums[at[:3]])}"

    steps.append(Step("weights", formula, why, weights, SCORES, code, share, back={name: _back(name)}))
    return steps


def _back(name: str) -> Back:
    formula = f"d_{name}[i, j] = weights[i, j] · ({{d}}[i, j] - Σ_k weights[i, k] · {{d}}[i, k])"
    why = (
        "A larger score makes its own weight larger and the others of its row smaller: hence the difference. Where a "
        "weight is 0, as for masked pairs, this is 0."
    )
    return Back(formula, why)


def wrong_axis(name: str, tile: Tensor) -> list[Step]:
    """What the softmax over the queries would give, where that is another one."""
    if tile.shape[-2] < 2 or bool((tile == -torch.inf).all(-2).any()):
        return []
    wrong = tile.softmax(-2)
    why = (
        "A common mistake: a softmax over the queries makes each column sum to 1, and not each row. "
        f"{_row_sums(wrong)}, so the outputs would be no averages of the values."
    )
    formula = f"wrong_axis[i, j] = exp({name}[i, j]) / Σ_k exp({name}[k, j])"
    code = f"wrong_axis = {name}.softmax(-2)"
    return [Step("wrong_axis", formula, why, wrong, SCORES, code, aside=True)]


def masked_after(scores: Tensor, keep: Tensor) -> list[Step]:
    """What setting weights to 0 after the softmax would give, where the mask hides something of what is shown."""
    if bool(keep.all()):
        return []
    late = scores.softmax(-1) * keep
    why = (
        "A common mistake: weights set to 0 after the softmax. The masked keys are still in the totals. "
        f"{_row_sums(late)}, not all to 1, and the masked keys change the output."
    )
    formula, code = (
        "masked_after[i, j] = softmax(scores)[i, j] if mask[i, j] else 0",
        "masked_after = scores.softmax(-1) * mask",
    )
    return [Step("masked_after", formula, why, late, SCORES, code, aside=True)]


def _row_sums(matrix: Tensor) -> str:
    sums = matrix.detach()[0, 0].sum(-1)
    which = " of the first table" if matrix.shape[0] * matrix.shape[1] > 1 else ""
    return f"The rows{which} sum to " + ", ".join([number(x) for x in sums[:4]] + ["…"] * (len(sums) > 4))
