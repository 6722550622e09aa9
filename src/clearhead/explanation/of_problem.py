"""The explanation of a problem: an instrumented run of the functions that the engine `tiled` is made of."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.base.steps import Step
from clearhead.explanation.explanation import Explanation, Part
from clearhead.explanation.mask_part import mask_part
from clearhead.explanation.output_part import output_part
from clearhead.explanation.scores_part import scores_part
from clearhead.explanation.shown import Shown, choose, settle
from clearhead.explanation.softmax_part import masked_after, softmax_part, wrong_axis
from clearhead.problem.problem import Problem, guard
from clearhead.problem.regions import cut


def explain_problem(problem: Problem, mask: Any, at: Any, *, drawn: str, title: str) -> Explanation:
    """The steps of a problem whose score is by its tile, for the part that `at` names.

    `mask`: the argument that the problem's mask came from. `drawn`: what stands above the inputs.
    """
    shown = choose(at, problem.sizes)
    parts, weights, keep = attention_parts(problem, mask, shown, drawn)
    return Explanation(title, tuple(parts), settle(shown, weights, keep))


def attention_parts(problem: Problem, mask: Any, shown: Shown, drawn: str) -> tuple[list[Part], Tensor, Tensor | None]:
    """The parts from the inputs to the output, the weights, and the mask (None: every query sees every key)."""
    rows = cut(problem, shown.region)
    assert rows.value is not None
    if not all(bool(t.isfinite().all()) for t in (rows.query, rows.key, rows.value)):
        rows = guard(rows)
    inputs = _inputs(rows)
    query, key, value = (step.value for step in inputs)
    scores = scores_part(rows, query, key)
    parts = [Part("Inputs", tuple(inputs), drawn), Part("Scores: how well each query fits each key", tuple(scores))]
    last, keep, otherwise = scores[-1], None, []
    if rows.visible is not None:
        masked = mask_part(mask, problem.sizes, shown, last.value)
        parts.append(Part("Mask: who may see whom", tuple(masked)))
        keep = masked[-2].value
        otherwise = masked_after(last.value, keep) if rows.sinks is None else []
        last = masked[-1]
    softmax = softmax_part(rows, last.name, last.value)
    weights = softmax[-1].value
    if rows.sinks is None:
        otherwise = wrong_axis(last.name, last.value) + otherwise
    parts.append(Part("Softmax: from scores to weights", (*softmax, *otherwise)))
    parts.append(Part("Output: a weighted mixture of the values", tuple(output_part(rows, weights, value, shown))))
    return parts, weights, keep


def _inputs(rows: Problem) -> list[Step]:
    """Query, key and value in the dtype of the scores, a row of keys for each head."""
    assert rows.value is not None
    dtype, heads = accumulated(rows.query.dtype), rows.sizes.heads
    why = {
        "query": "What is asked: one vector a query.",
        "key": "What each place is found by: one vector a key.",
        "value": "What each place gives: one vector a key.",
    }
    steps = []
    for name, given, length, width in (
        ("query", rows.query, "Lq", "E"), ("key", rows.key, "Lk", "E"), ("value", rows.value, "Lk", "Ev"),
    ):  # fmt: skip
        group = heads // given.shape[1]
        tensor = given.to(dtype) if group == 1 else given.to(dtype).repeat_interleave(group, 1)
        shared = "" if group == 1 else " Heads that share a key head have the same rows."
        copies = tuple(n if stride == 0 else 1 for n, stride in zip(given.shape[:2], given.stride()[:2], strict=True))
        axes = ("B", "H", length, width)
        steps.append(Step(name, "", why[name] + shared, tensor, axes, copies=(copies[0], copies[1] * group)))
    return steps
