"""The output and the gradients of a problem, on every engine, against the truth."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import oracle
import torch
from oracle import Array, Found, Problem

import clearhead as ch
from clearhead.engines.choose import ENGINES
from fuzzing.budget import Measure, Truth, move, moved
from fuzzing.build import Built, build, placed
from fuzzing.draw import Spec, rounded
from fuzzing.surroundings import RUNS, tangents
from fuzzing.table import SURROUNDINGS

NAMES = tuple(engine.name for engine in ENGINES)
STENCIL = {1: 45 / 60, 2: -9 / 60, 3: 1 / 60}  # of a derivative, to the sixth order
STEP = 2e-3


def computed_in(spec: Spec) -> str:
    """The dtype that the results are computed in."""
    return "bfloat16" if spec.surroundings == "autocast" and spec.dtype != "float64" else spec.dtype


def engines(spec: Spec) -> list[str | None]:
    """All of them in ordinary surroundings; in others the one that clearhead chooses, and one more."""
    r = random.Random(spec.number + 1)
    if spec.surroundings in ("nothing", "unseen garbage"):
        return [*NAMES, *([None] if r.random() < 0.3 else [])]
    return [None, r.choice(NAMES)]


def may_refuse(spec: Spec, engine: str | None, refusal: Exception) -> bool:
    about = SURROUNDINGS[spec.surroundings]
    if engine in about.refusals or (about.dropout and spec.problem.dropout_p):
        return True
    if not isinstance(refusal, ch.UnsupportedError):
        return False
    # an engine asked for by name, that is not for such scores or dtypes
    own = spec.problem.score[0] in ("smooth", "sines")
    elsewhere = torch.get_default_device().type != "cpu"
    return engine == "sdpa" or (engine == "native" and (own or elsewhere or computed_in(spec) == "float64"))


def loss_of(spec: Spec) -> Array:
    p = spec.problem
    sizes = oracle.Sizes(*(x.shape for x in p.inputs))
    shape = (*sizes.lead, sizes.queries, p.value.shape[-1])
    if spec.surroundings == "zero gradient":
        return np.zeros(shape)
    return rounded(np.random.default_rng(spec.number + 1).standard_normal(shape), computed_in(spec))


def check_attend(spec: Spec) -> Iterator[str]:
    """What is beyond its budget, or refused without a reason, in words."""
    loss, truths = loss_of(spec), {}
    for engine in engines(spec):
        built = build(spec)
        given = placed(loss).to(getattr(torch, computed_in(spec)))
        try:
            results = RUNS[spec.surroundings](built, engine, given)
        except ch.ClearheadError as refusal:
            if not may_refuse(spec, engine, refusal):
                yield f"{engine}: refused: {type(refusal).__name__}: {str(refusal).splitlines()[0]}"
            continue
        for name, got in results.items():
            kind = name.partition(": ")[0] if ": " in name else ""
            if kind not in truths:
                truths[kind] = TRUTHS[kind](spec, loss, built)
            wrong = truths[kind].wrong(name, array(got), measure(name, built), dtype_of(name, spec))
            if wrong:
                yield f"{engine}: {wrong}"


def array(t: torch.Tensor) -> Array:
    return np.asarray(t.detach().resolve_neg().double().cpu())


def dtype_of(name: str, spec: Spec) -> torch.dtype:
    name = name.rpartition(": ")[2]
    return getattr(torch, spec.bias_dtype if name.startswith("bias") or name == "sinks" else computed_in(spec))


def measure(name: str, built: Built) -> Measure:
    short = name.rpartition(": ")[2]
    if short == "output":
        return lambda found: found.output
    if short == "tangent":
        along = dict(zip(("query", "key", "value"), map(array, tangents(built)), strict=True))
        return lambda found: np.asarray(sum((t * found.gradients[n]).sum() for n, t in along.items()))
    return lambda found: found.gradients[short]


def first(spec: Spec, loss: Array, built: Built) -> Truth:
    return Truth(spec.problem, getattr(torch, computed_in(spec)), loss)


def half(spec: Spec, loss: Array, built: Built) -> Truth:
    p = spec.problem
    return Truth(replace(p, query=p.query / 2, key=p.key / 2, value=p.value / 2), getattr(torch, spec.dtype), loss)


class Second(Truth):
    """The derivative of the gradients along some tangents, by differences of the truth's gradients."""

    def __init__(self, problem: Problem, dtype: torch.dtype, loss: Array, tangents: list[Array]) -> None:
        super().__init__(problem, dtype, loss)
        self.tangents = tangents
        self.found = self.derivative(problem, loss)
        finer = self.derivative(problem, loss, STEP / 2).gradients
        differences = (np.abs(finer[n] - x).max(initial=0.0) for n, x in self.found.gradients.items())
        self.uncertain = 2 * float(np.nan_to_num(max(differences)))  # of the differences themselves

    @cached_property
    def residue(self) -> float:
        return super().residue + self.eps * self.uncertain

    def derivative(self, p: Problem, loss: Array, width: float = STEP) -> Found:
        found = oracle.attend(p, loss)
        at = lambda h: replace(p, **{n: x + h * t for n, x, t in self.named(p)})
        sums: dict[str, Any] = dict.fromkeys(("query", "key", "value"), 0.0)
        for steps, weight in STENCIL.items():
            ahead, back = (oracle.attend(at(sign * steps * width), loss).gradients for sign in (1, -1))
            sums = {n: total + weight / width * (ahead[n] - back[n]) for n, total in sums.items()}
        found.gradients = sums
        return found

    def named(self, p: Problem) -> Iterator[tuple[str, Array, Array]]:
        return zip(("query", "key", "value"), p.inputs, self.tangents, strict=True)

    @property
    def plain(self) -> Found:  # type: ignore[override]
        return self.moved[0]

    @property
    def moved(self) -> list[Found]:  # type: ignore[override]
        found = []
        for seed in range(6):
            g = np.random.default_rng(seed)
            step = lambda shape, g=g: g.integers(-8, 9, shape) * (self.eps / 2)
            found.append(self.derivative(moved(self.problem, step), move(self.loss, step)))
        return found


def second(spec: Spec, loss: Array, built: Built) -> Truth:
    return Second(spec.problem, getattr(torch, spec.dtype), loss, [array(t) for t in tangents(built)])


TRUTHS: dict[str, Callable[[Spec, Array, Built], Truth]] = {
    "": first,
    "second row": first,
    "half": half,
    "second": second,
}
