"""The part of an explanation that mixes the values."""

from __future__ import annotations

from torch import Tensor

from clearhead.base.dropout import factors
from clearhead.base.steps import Back, Step, number, signed, total
from clearhead.engines.tiled import tiles
from clearhead.explanation.shown import Shown
from clearhead.problem.problem import Problem
from clearhead.scores.base import SCORES

MOST = 5  # terms of a mixture that are written out: those with the largest weights


def output_part(rows: Problem, weights: Tensor, value: Tensor, shown: Shown, keep: Tensor | None = None) -> list[Step]:
    """From the step "weights" and the step "value" to the step "output". `keep`: the step "mask", if there is one."""
    steps, name = [], "weights"
    if rows.seed is not None:
        kept = factors(rows.seed, rows.dropout_p, rows.sizes, rows.origin, weights.dtype)
        p = rows.dropout_p
        why = f"Dropout: each weight is multiplied by 0 with probability {p:g}, else by 1 / {1 - p:g}."
        steps.append(Step("kept", "", why, kept, SCORES))
        weights, name = tiles.dropped(rows, weights), "dropped"
        why = "The weights after dropout. A row sums to 1 on average, and no longer each time."
        steps.append(
            Step(
                "dropped",
                "dropped[i, j] = weights[i, j] · kept[i, j]",
                why,
                weights,
                SCORES,
                "dropped = weights * kept",
                back={"weights": Back("d_weights[i, j] = {d}[i, j] · kept[i, j]")},
            )
        )

    def mixed(at: tuple[int, ...]) -> str:
        row, column = weights.detach()[at[:3]], value.detach()[at[0], at[1], :, at[3]]
        most = MOST if len(row) <= MOST else MOST - 1  # so that all stand in the table, beside the chosen key
        best = sorted(row.abs().nan_to_num().topk(min(len(row), most)).indices.tolist())
        terms = [f"{number(row[j])}·{signed(column[j])}" for j in best]
        return total(terms) + ("" if len(row) == len(best) else f" + … ({len(row) - len(best)} more terms)")

    first = ", in the first table" * (weights.shape[0] * weights.shape[1] > 1)
    why = f"Each output is the sum of the values, each times its weight{first}: {_shares(weights, shown)}."
    formula, code = f"output[i, e] = Σ_j {name}[i, j] · value[j, e]", f"output = {name} @ value"
    output = tiles.grouped_product(weights, value)
    made = f"Output i is made of value j times {name}[i, j]"
    back = {
        name: Back(
            f"d_{name}[i, j] = Σ_e {{d}}[i, e] · value[j, e]", f"{made}: so this weight gets d_output times value j."
        ),
        "value": Back(
            f"d_value[j, e] = Σ_i {name}[i, j] · {{d}}[i, e]",
            f"{made}, so value j gets d_output of each i, times that weight.",
        ),
    }
    steps.append(Step("output", formula, why, output, ("B", "H", "Lq", "Ev"), code, mixed, back=back))
    return steps if keep is None else steps + _other_padding(weights, value, keep, name)


def _other_padding(weights: Tensor, value: Tensor, keep: Tensor, name: str) -> list[Step]:
    """The same output where keys that none of the queries sees hold other values."""
    unseen = ~keep.any(-2)
    if not bool(unseen.any()):
        return []
    other = value.masked_fill(unseen.unsqueeze(-1), 100.0)
    why = "A check: with 100 in place of the values of the keys that no query may see, the output is the same."
    code = f"other_padding = {name} @ value.masked_fill(~mask.any(-2).unsqueeze(-1), 100.0)"
    formula = f"other_padding[i, e] = Σ_j {name}[i, j] · (value[j, e], or 100 if no query sees key j)"
    axes = ("B", "H", "Lq", "Ev")
    return [Step("other_padding", formula, why, tiles.grouped_product(weights, other), axes, code, aside=True)]


def _shares(weights: Tensor, shown: Shown) -> str:
    """The largest weights of the first few rows, in words."""
    found = []
    for i, row in zip(shown.queries, weights.detach()[0, 0].nan_to_num()[:3], strict=False):
        best = [j for j in row.topk(min(2, len(row))).indices.tolist() if row[j] >= 0.005]
        shares = " and ".join(f"{float(row[j]):.0%} of the value of {shown.name('Lk', j)}" for j in best)
        found.append(f"{shown.name('Lq', i)} takes {shares or 'nothing'}")
    return "; ".join(found + ["…"] * (weights.shape[2] > len(found)))
