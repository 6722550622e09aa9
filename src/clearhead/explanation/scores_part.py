"""The part of an explanation that leads from query and key to the scores."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from clearhead.base.steps import Back, Step, number, signed
from clearhead.problem.problem import Problem
from clearhead.scores.base import SCORES, ByTile, capped, with_parameters
from clearhead.scores.dot import Dot


def scores_part(rows: Problem, query: Tensor, key: Tensor, bias: list[Step]) -> list[Step]:
    """The score's own steps, then scale, softcap and the steps of the bias; the last step is called "scores"."""
    scores = rows.scores
    assert isinstance(scores, ByTile)
    steps = with_parameters(scores.score, lambda p: p.to(query.dtype)).explained(query, key)
    if scores.scale != 1.0:
        before = _renamed(steps, "products" if isinstance(scores.score, Dot) else "unscaled")
        steps.append(_scaled(before, scores.scale, query.shape[-1], scores.score))
    if scores.softcap is not None:
        steps.append(_softcapped(_renamed(steps, "uncapped"), scores.softcap))
    if bias:
        why = "The bias is added to the score: where it is below 0 the key gets less weight, where it is above 0 more."
        added = _added(_renamed(steps, "unbiased"), bias[-1], why)
        steps += [*bias, added]
    if rows.poison is not None:
        of_query, of_key = rows.poison
        poison = (of_query + of_key.repeat_interleave(rows.sizes.heads // of_key.shape[1], 1)).to(query.dtype)
        why = "Inputs hold NaN or ∞. They stand above as 0, and NaN is put here for each pair that they are a part of."
        given = Step("not_finite", "", why, poison, SCORES)
        why = "So what is not finite reaches the queries that may see it, and no others."
        steps += [given, _added(_renamed(steps, "of_finite"), given, why)]
    return steps


def _renamed(steps: list[Step], name: str) -> Step:
    """Give the last step another name than "scores": more is done before it is that."""
    last = steps[-1]
    formula, code = (name + text.removeprefix("scores") for text in (last.formula, last.code or "scores"))
    steps[-1] = replace(last, name=name, formula=formula, code=code if last.code else "")
    return steps[-1]


def _scaled(before: Step, scale: float, width: int, score: object) -> Step:
    value = before.value * scale
    finite = before.value[before.value.isfinite()]
    spread = ""
    if finite.numel() > 1:
        variance = float(finite.detach().var(correction=0))
        spread = (
            f" The variance of the scores is {number(variance)} before and {number(variance * scale * scale)} after."
        )
    if isinstance(score, Dot) and width and math.isclose(scale, width**-0.5, rel_tol=1e-6):
        why = (
            f"{number(scale)} is 1/√{width}. Sums of {width} products lie about √{width} times as far apart as single "
            "products, and the scale undoes that: scores far apart would give one key nearly all the weight, and "
            "gradients near 0."
        )
    else:
        why = "The larger the scale, the more of the weight goes to the keys with the largest scores."
    formula, code = f"scores[i, j] = {before.name}[i, j] · {number(scale)}", f"scores = {before.name} * {scale!r}"
    return Step(
        "scores", formula, why + spread, value, SCORES, code,
        lambda at: f"{signed(before.value[at])}·{signed(scale)}",
        back={before.name: Back(f"d_{before.name}[i, j] = {{d}}[i, j] · {number(scale)}")},
    )  # fmt: skip


def _softcapped(before: Step, cap: float) -> Step:
    why = f"The softcap bounds every score between -{cap:g} and {cap:g}, smoothly."
    value, code = capped(before.value, cap), f"scores = {cap!r} * torch.tanh({before.name} / {cap!r})"
    return Step(
        "scores", f"scores[i, j] = {cap:g} · tanh({before.name}[i, j] / {cap:g})", why, value, SCORES, code,
        lambda at: f"{number(cap)} · tanh({number(before.value[at])} / {number(cap)})",
    )  # fmt: skip


def _added(before: Step, given: Step, why: str) -> Step:
    value = before.value + given.value
    formula = f"scores[i, j] = {before.name}[i, j] + {given.name}[i, j]"
    every = given.value.expand(value.shape)
    whole = [step for step in (before, given) if step.value.shape == value.shape]  # one that is repeated gets a sum
    return Step(
        "scores", formula, why, value, SCORES, f"scores = {before.name} + {given.name}",
        lambda at: f"{number(before.value[at])} + {signed(every[at])}",
        back={step.name: Back(f"d_{step.name}[i, j] = {{d}}[i, j]") for step in whole},
    )  # fmt: skip
