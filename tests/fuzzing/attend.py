"""The output and the gradients of a problem, on every engine, against the truth."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import oracle
import torch
from oracle import Array, Found, Problem

import clearhead as ch
from clearhead.testing import engines as compared
from fuzzing.budget import MOVES, ROUNDINGS, Measure, Truth, move, moved
from fuzzing.build import Built, build, placed
from fuzzing.draw import Spec, rounded
from fuzzing.surroundings import RUNS, tangents
from fuzzing.table import SURROUNDINGS

NAMES = (*compared(), "reference")
NAMED = ("query", "key", "value")
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
    own = spec.problem.by_functions
    elsewhere = torch.get_default_device().type != "cpu"
    return engine in ("sdpa", "flex") or (engine == "native" and (own or elsewhere or computed_in(spec) == "float64"))


def loss_of(spec: Spec) -> Array:
    p = spec.problem
    sizes = oracle.Sizes(*(x.shape for x in p.inputs))
    shape = (*sizes.lead, sizes.queries, p.value.shape[-1])
    if spec.surroundings == "zero gradient":
        return np.zeros(shape)
    return rounded(np.random.default_rng(spec.number + 1).standard_normal(shape), computed_in(spec))


def check_attend(spec: Spec, names: Sequence[str | None] | None = None) -> Iterator[str]:
    """What is beyond its budget, or refused without a reason, in words. `names`: of other engines than `engines`."""
    loss, truths = loss_of(spec), {}
    for engine in names or engines(spec):
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
        along = dict(zip(NAMED, map(array, tangents(built)), strict=True))
        return lambda found: np.asarray(sum((t * found.gradients[n]).sum() for n, t in along.items()))
    return lambda found: found.gradients[short]


def first(spec: Spec, loss: Array, built: Built) -> Truth:
    return Truth(spec.problem, getattr(torch, computed_in(spec)), loss)


def half(spec: Spec, loss: Array, built: Built) -> Truth:
    p = spec.problem
    return Truth(replace(p, query=p.query / 2, key=p.key / 2, value=p.value / 2), getattr(torch, spec.dtype), loss)


class Second(Truth):
    """The derivative of the gradients along some tangents, by differences of the truth's gradients.

    With a tilde for the derivative along the tangents, σ = s̃ − Σ P s̃ that of log P, and sums over a row's keys:

        Ṡ = P (Ṗ − δ),  Ṡ~ = P [(Ṗ − δ) σ + Ṗ~ − δ~],  δ~ = Σ P (σ Ṗ + Ṗ~),  V̇~ = (P σ)ᵀ Ȯ,  Q̇~ = J~ᵀ Ṡ + Jᵀ Ṡ~

    with J = ∂s/∂q. Where one key has nearly all the weight, σ and Ṗ − δ are differences of nearly equal numbers. Their
    errors are roundings of the terms, which are of the sizes |s̃| + Σ P |s̃| and A = |Ȯ| |V|ᵀ. So the error of Ṡ~ is some
    roundings of P [A (|s̃| + Σ P |s̃|) + Ã], with Ã = |Ȯ| |Ṽ|ᵀ, and of its sum over the row. A gradient has this error
    times J: for a dot product two slopes, s̃ and J, which are both as large as the keys, however small Ṡ~ is. The error
    of J~ᵀ Ṡ follows from that of Ṡ, which `oracle.attend` moves by the same roundings at every point of a difference.
    """

    def __init__(self, problem: Problem, dtype: torch.dtype, loss: Array, tangents: list[Array]) -> None:
        super().__init__(problem, dtype, loss)
        self.tangents = tangents
        self.found = self.derivative(problem, loss)
        finer = self.derivative(problem, loss, width=STEP / 2).gradients
        differences = (np.abs(finer[n] - x).max(initial=0.0) for n, x in self.found.gradients.items())
        self.uncertain = 2 * float(np.nan_to_num(max(differences)))  # of the differences themselves

    @cached_property
    def residue(self) -> float:
        return super().residue + self.uncertain

    def derivative(self, p: Problem, loss: Array, seed: int | None = None, width: float = STEP) -> Found:
        """With a seed, of gradients that are moved by some roundings, the same ones wherever they are computed."""
        steps = lambda: None if seed is None else self.steps(seed)
        found = oracle.attend(p, loss, steps())
        at = lambda h: replace(p, **{n: x + h * t for n, x, t in self.named(p)})
        sums: dict[str, Any] = dict.fromkeys(NAMED, 0.0)
        for place, weight in STENCIL.items():
            ahead, back = (oracle.attend(at(sign * place * width), loss, steps()) for sign in (1, -1))
            sums = {n: total + weight / width * (ahead.gradients[n] - back.gradients[n]) for n, total in sums.items()}
        if seed is not None:
            rounded = self.rounded(p, loss, found, self.steps(seed + MOVES))
            sums = {n: total + rounded[n] for n, total in sums.items()}
        found.gradients = sums
        return found

    def rounded(self, p: Problem, loss: Array, found: Found, step: Any) -> dict[str, Array]:
        """What the roundings of Ṡ~ and of V̇~ add to the gradients."""
        sizes = oracle.Sizes(*(x.shape for x in p.inputs))
        q, k, v = (sizes.fold(np.nan_to_num(x)) for x in p.inputs)
        w, g = (x.reshape(*sizes.shape[:3], x.shape[-1]) for x in (found.weights, np.abs(loss)))
        factors = oracle.dropout(p.dropout_p, p.seed, sizes.shape) if p.dropout_p else 1.0
        along = [sizes.fold(np.abs(t)) for t in self.tangents]
        slope = slopes(p, q, k, *along[:2])
        slope = slope + (w * slope).sum(-1, keepdims=True)
        terms = factors * ((g @ np.abs(v).swapaxes(-1, -2)) * slope + g @ along[2].swapaxes(-1, -2))
        total = (w * terms).sum(-1, keepdims=True)
        ds = w * (step(w.shape) * terms + step(total.shape) * total)
        dq, dk, _ = oracle.scored(p, q, k)[1](ds)
        dv = (w * factors * slope * step(w.shape)).swapaxes(-1, -2) @ g
        every = zip(NAMED, (dq, dk, dv), p.inputs, strict=True)
        return {n: sizes.unfold(x, given.shape) for n, x, given in every}

    def steps(self, seed: int) -> Any:
        g = np.random.default_rng(seed)
        return lambda shape: g.integers(-ROUNDINGS, ROUNDINGS + 1, shape) * (self.eps / 2)

    def named(self, p: Problem) -> Iterator[tuple[str, Array, Array]]:
        return zip(NAMED, p.inputs, self.tangents, strict=True)

    @property
    def plain(self) -> Found:  # type: ignore[override]
        return self.moved[0]

    @cached_property
    def moved(self) -> list[Found]:  # type: ignore[override]
        found = []
        for seed in range(MOVES):
            step = self.steps(seed)
            found.append(self.derivative(moved(self.problem, step), move(self.loss, step), seed))
        return found


def slopes(p: Problem, q: Array, k: Array, to_q: Array, to_k: Array) -> Array:
    """The sizes of the terms that the derivative of each score is a sum of, along tangents of these sizes.

    A slope 1 − tanh² is rounded as its 1 is, so that of a softcap and of the additive score counts as 1. That of a
    cosine is what is left of a tangent without its part along the vector.
    """
    kind, settings, learnt = p.score
    q, k = np.abs(q), np.abs(k)
    t = lambda x: x.swapaxes(-1, -2)
    each = lambda a, b: a[..., :, None, :] + b[..., None, :, :]
    learnt = {name: np.abs(x) for name, x in learnt.items()}
    own = settings.get("scale") if kind == "dot" else None
    scale = own if p.scale is None else p.scale
    if kind == "dot":
        found = to_q @ t(k) + q @ t(to_k)
        scale = max(q.shape[-1], 1) ** -0.5 if scale is None else scale
    elif kind == "bilinear":
        found = (to_q @ learnt["W"]) @ t(k) + (q @ learnt["W"]) @ t(to_k)
    elif kind == "cosine":
        size = lambda x: np.linalg.norm(x, axis=-1, keepdims=True)
        part = lambda x, along: 2 * size(along) / np.where(size(x) > 0, size(x), 1.0)
        found = each(part(q, to_q), part(k, to_k))[..., 0] / settings["temperature"]
    elif kind == "additive":
        sides = ((to_q, learnt.get("W_q")), (to_k, learnt.get("W_k")))
        found = each(*(x if w is None else x @ w.T for x, w in sides)) @ learnt["w_v"]
    elif kind == "gaussian":
        found = (each(q, k) * each(to_q, to_k)).sum(-1) / settings["bandwidth"] ** 2
    else:
        found = each(to_q, to_k) @ learnt.get("w", np.ones(q.shape[-1]))
    return found if scale is None else found * abs(scale)


def second(spec: Spec, loss: Array, built: Built) -> Truth:
    return Second(spec.problem, getattr(torch, spec.dtype), loss, [array(t) for t in tangents(built)])


TRUTHS: dict[str, Callable[[Spec, Array, Built], Truth]] = {
    "": first,
    "second row": first,
    "half": half,
    "second": second,
}
