"""The explanation of a problem: an instrumented run of the functions that the engine `tiled` is made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead._attention import Arguments
from clearhead.base.arrays import accumulated
from clearhead.base.dropout import factors
from clearhead.base.steps import Step, made
from clearhead.explanation.explanation import Explanation, Part
from clearhead.explanation.inputs import letters
from clearhead.explanation.scores_part import bias_part, mask_part, scores_part
from clearhead.explanation.shown import Shown, choose, settle
from clearhead.explanation.softmax_part import masked_after, softmax_part, wrong_axis
from clearhead.masks.base import Mask
from clearhead.problem.guard import guard
from clearhead.problem.problem import ABSENT, Problem
from clearhead.problem.regions import cut
from clearhead.scores.base import SCORES


def explain_problem(problem: Problem, mask: Any, at: Any, *, drawn: str, title: str) -> Explanation:
    """The steps of a problem whose score computes tiles (`ByTile`), for the part that `at` names.

    `mask`: the mask as the caller gave it. `drawn`: the text above the inputs.
    """
    shown = choose(at, problem.sizes)
    inputs = input_steps(problem, shown)
    parts, weights, keep = attention_parts(problem, mask, shown, inputs)
    return Explanation(title, (Part("Inputs", tuple(inputs), drawn), *parts), settle(shown, weights, keep))


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
    last, mask, otherwise = steps[-1], None, []
    if rows.visible is not None:
        masked = mask_part(given, problem.sizes, shown, last)
        parts.append(Part("Mask: who may see whom", tuple(masked)))
        mask = masked[-2]
        otherwise = masked_after(last, mask) if rows.sinks is None else []
        last = masked[-1]
    softmax = softmax_part(rows, last)
    if rows.sinks is None:
        otherwise = wrong_axis(last) + otherwise
    parts.append(Part("Softmax: from scores to weights", (*softmax, *otherwise)))
    if value is not None:
        output = output_part(rows, softmax[-1], value, shown, mask)
        parts.append(Part("Output: a weighted mixture of the values", tuple(output)))
    return parts, softmax[-1].value, None if mask is None else mask.value


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
        "query": "One vector for each query. Each query gets one output: a weighted sum of the values.",
        "key": "One vector for each key. The better key j fits a query, the larger the weight of value j.",
        "value": "One vector for each key: value j belongs to key j.",
    }
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


def output_part(rows: Problem, weights: Step, value: Step, shown: Shown, mask: Step | None = None) -> list[Step]:
    """From the step "weights" and the step "value" to the step "output"."""
    steps = []
    if rows.seed is not None:
        p = rows.dropout_p
        why = f"Dropout: each weight is multiplied by 0 with probability {p:g}, else by 1 / {1 - p:g}."
        factor = factors(rows.seed, p, rows.sizes, rows.origin, weights.value.dtype)
        kept = Step("kept", why, factor, SCORES)
        why = "The weights after dropout. A row sums to 1 on average only."
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


def explain_softmax(scores: Tensor, mask: Mask | None, at: Any = None) -> Explanation:
    """The masked softmax of scores (..., Lq, Lk), over the keys."""
    keys = torch.eye(scores.shape[-1], dtype=scores.dtype, device=scores.device)  # so that query · key is the score
    keys = keys.expand(*scores.shape[:-2], *keys.shape)
    problem = Arguments(scores, keys, ABSENT, scale=1.0, mask=mask).problem()
    shown = choose(at, problem.sizes)
    why = "One number for each query and key: the better they fit, the larger it is."
    given = Step("scores", why, problem.query, SCORES)
    lead = [axis for axis in ("B", "H") if axis not in shown.absent]
    parts, last, otherwise, keep = [Part("Scores", (given,), letters(lead))], given, [], None
    if mask is not None:
        masked = mask_part(mask, problem.sizes, shown, given)
        parts.append(Part("Mask: who may see whom", tuple(masked)))
        last, otherwise, keep = masked[-1], masked_after(given, masked[-2]), masked[-2].value
    steps = softmax_part(problem, last)
    parts.append(Part("Softmax: from scores to weights", (*steps, *wrong_axis(last), *otherwise)))
    return Explanation("Softmax over the keys, step by step", tuple(parts), settle(shown, steps[-1].value, keep))
