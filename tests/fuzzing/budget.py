"""How far from the truth a result may be: derived from the problem.

Twice the error of plain eager code of the same dtype, and twice what the truth moves by when every input is moved by a
few roundings of that dtype, and so are projections, scores, the log-sum-exp that a backward pass begins with and the
two numbers whose difference the softmax's gradient is. A sum of weights may have the error of its terms added one after
the other. In float64, where the truth rounds too, also that of
`clearhead.testing`. Where eager code overflows, its error is not used, and the moves alone decide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import oracle
import torch
from oracle import Array, Found, Loss, Problem, mapped

from clearhead.testing import EXACT
from fuzzing.plain import plain

ROUNDINGS = 4  # how many roundings each number may be moved by
MOVES = 6

Measure = Callable[[Found], Array]  # what is compared, of what is found


class Sum(NamedTuple):
    """Of how many terms something is a sum, and the sum of their sizes."""

    count: int
    sizes: Measure


class Truth:
    """The truth of a problem computed in one dtype, and how far from it is near enough."""

    def __init__(self, problem: Problem, dtype: torch.dtype, loss: Array | Loss | None = None) -> None:
        self.problem, self.dtype, self.loss = problem, dtype, loss
        self.eps, self.tiny = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
        self.found = oracle.attend(problem, loss)

    @cached_property
    def plain(self) -> Found:
        return plain(self.problem, self.dtype, self.loss)

    @cached_property
    def moved(self) -> list[Found]:
        found = []
        for seed in range(MOVES):
            g = np.random.default_rng(seed)
            step = lambda shape, g=g: g.integers(-ROUNDINGS, ROUNDINGS + 1, shape) * (self.eps / 2)
            loss = None if self.loss is None else _moved_loss(self.loss, step)
            found.append(oracle.attend(moved(self.problem, step), loss, step))
        return found

    @cached_property
    def residue(self) -> float:
        """What is left of a gradient that is 0 because two numbers cancel and are multiplied by what is nearly 0."""
        if self.loss is None:
            return 0.0
        p = self.problem
        arrays = (*p.inputs, *p.score[2].values(), *([] if p.sinks is None else [p.sinks]))
        sizes = [np.abs(x[np.isfinite(x)]).max(initial=0.0) for x in (_sizes(self.loss), self.problem.value, *arrays)]
        return self.eps**2 * sizes[0] * sizes[1] * max(1.0, *sizes)

    def wrong(
        self,
        name: str,
        got: Array,
        measure: Measure,
        dtype: torch.dtype | None = None,
        of: Measure | None = None,
        apart: bool = False,
        summed: Sum | None = None,
    ) -> str | None:
        """What is wrong with a result, in words; None if nothing is. `dtype`: that of the result, if another.

        `of`: what the result is a small part of, whose budget is then taken: one number's may be small by chance.
        `apart`: the scores and their log-sum-exp may have been summed in two orders, as for a part of a row.
        """
        with np.errstate(all="ignore"):
            raw = np.abs(self.found.raw)
            orders = ROUNDINGS * self.eps * raw[np.isfinite(raw)].max(initial=0.0) if apart else 0.0
            if summed is not None:  # each term and the sum after it rounded once (Higham 2002, section 4.2)
                sizes = summed.sizes(self.found)
                orders += (summed.count + 1) * self.eps / 2 * sizes[np.isfinite(sizes)].max(initial=0.0)
            return self._wrong(name, got, measure, dtype or self.dtype, of or measure, orders)

    def _wrong(
        self, name: str, got: Array, measure: Measure, dtype: torch.dtype, of: Measure, orders: float
    ) -> str | None:
        want = measure(self.found)
        if got.shape != want.shape:
            return f"{name} has shape {got.shape}, not {want.shape}"
        if not want.size:
            return None
        number = np.isnan(want)
        if (np.isnan(got) != number).any():
            return f"{name} is NaN {np.isnan(got).sum()} times, and should be {number.sum()} times"
        infinite = np.isinf(want)
        if (got[infinite] != want[infinite]).any():
            return f"{name} is not infinite where it should be"
        some = ~number & (np.abs(want) < torch.finfo(dtype).max * 0.99)
        if not some.any():
            return None
        off = np.abs(got[some] - want[some]).max()
        whole = of(self.found)
        kept = np.abs(whole) < np.inf
        size, away = np.abs(whole[kept]).max(), lambda x: np.abs(x[kept] - whole[kept]).max()
        budget = orders + ROUNDINGS * self.eps * size + torch.finfo(dtype).tiny
        budget += self.residue
        budget += 4 * ROUNDINGS * np.finfo(np.float64).eps  # the truth rounds, too: 1 less what is very small is 1
        budget += EXACT * max(1.0, size) if self.dtype == torch.float64 else torch.finfo(dtype).eps * size
        if off <= budget:
            return None
        terms = self.found.terms.get(name.rpartition(": ")[2])
        budget += 0.0 if terms is None else ROUNDINGS * self.eps * terms.max(initial=0.0)
        near = away(of(self.plain))
        budget += 2 * near if np.isfinite(near) else 0.0
        if off <= budget:
            return None
        budget += 2 * max(away(of(other)) for other in self.moved)
        return None if off <= budget or np.isnan(budget) else f"{name} is off by {off:.3g}, allowed {budget:.3g}"


def _moved_loss(loss: Array | Loss, step: Callable[[tuple[int, ...]], Array]) -> Array | Loss:
    if isinstance(loss, np.ndarray):
        return move(loss, step)
    return replace(loss, **{name: move(x, step) for name, x in loss.arrays.items()})


def _sizes(loss: Array | Loss) -> Array:
    """The numbers of a loss, in a row."""
    return loss if isinstance(loss, np.ndarray) else np.concatenate([np.ravel(x) for x in loss.arrays.values()])


def move(x: Array, step: Callable[[tuple[int, ...]], Array]) -> Array:
    return np.where(np.isfinite(x), x * (1 + step(x.shape)), x)


def moved(p: Problem, step: Callable[[tuple[int, ...]], Array]) -> Problem:
    """The same problem, every number of it moved by some roundings."""
    return mapped(p, lambda x: move(x, step), lambda x: move(x, step))
