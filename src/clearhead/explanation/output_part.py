"""The part of an explanation that mixes the values."""

from __future__ import annotations

from torch import Tensor

from clearhead.base.dropout import factors
from clearhead.base.steps import Step, made
from clearhead.explanation.shown import Shown
from clearhead.problem.problem import Problem
from clearhead.scores.base import SCORES


def output_part(rows: Problem, weights: Step, value: Step, shown: Shown, mask: Step | None = None) -> list[Step]:
    """From the step "weights" and the step "value" to the step "output"."""
    steps = []
    if rows.seed is not None:
        p = rows.dropout_p
        why = f"Dropout: each weight is multiplied by 0 with probability {p:g}, else by 1 / {1 - p:g}."
        factor = factors(rows.seed, p, rows.sizes, rows.origin, weights.value.dtype)
        kept = Step("kept", why, factor, SCORES)
        why = "The weights after dropout. A row sums to 1 on average, and no longer each time."
        weights = made("dropped", why, weights * kept)
        steps += [kept, weights]
    first = ", in the first table" * (weights.value.shape[0] * weights.value.shape[1] > 1)
    why = f"Each output is the sum of the values, each times its weight{first}: {_shares(weights.value, shown)}."
    steps.append(made("output", why, weights @ value))
    unseen = None if mask is None else ~mask.any(-2).unsqueeze(-1)
    if unseen is not None and bool(unseen.value.any()):
        why = "A check: with 100 in place of the values of the keys that no query may see, the output is the same."
        steps.append(made("other_padding", why, weights @ value.masked_fill(unseen, 100.0), aside=True))
    return steps


def _shares(weights: Tensor, shown: Shown) -> str:
    """The largest weights of the first few rows, in words."""
    found = []
    for i, row in zip(shown.queries, weights.detach()[0, 0].nan_to_num()[:3], strict=False):
        best = [j for j in row.topk(min(2, len(row))).indices.tolist() if row[j] >= 0.005]
        shares = " and ".join(f"{float(row[j]):.0%} of the value of {shown.name('Lk', j)}" for j in best)
        found.append(f"{shown.name('Lq', i)} takes {shares or 'nothing'}")
    return "; ".join(found + ["…"] * (weights.shape[2] > len(found)))
