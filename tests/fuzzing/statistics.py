"""The gradients of what can be seen of the weights, on every engine that shows them, against the truth."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import oracle
import torch
from oracle import Array, Found, Loss
from torch import Tensor

import clearhead as ch
from fuzzing.attend import array
from fuzzing.budget import Truth
from fuzzing.build import build, placed
from fuzzing.draw import Spec

ENGINES = ("native", "tiled", "reference")


class Asked:
    """Reductions, the loss that gives each result a random gradient, and what that loss is by the oracle's names."""

    def __init__(self, spec: Spec, found: Found, value: Any) -> None:
        self.r, self.g = random.Random(spec.number + 3), np.random.default_rng(spec.number + 3)
        self.spec, self.found, self.loss = spec, found, Loss()
        self.sizes = oracle.Sizes(*(x.shape for x in spec.problem.inputs))
        self.pairs = []  # (a reduction, the gradient of its result)
        makers = [self.output, self.entropy, self.rows, self.best, self.share, self.received, self.mean, self.mass]
        makers += [self.top, self.distance]
        for make in self.r.sample(makers, self.r.randint(1, 5)):
            made = make(value)
            if made is not None:
                self.pairs.append(made)

    def normal(self, *shape: int) -> Array:
        return self.g.standard_normal((*self.sizes.lead, *shape))

    def add(self, name: str, gradient: Array) -> None:
        now = getattr(self.loss, name)
        setattr(self.loss, name, gradient if now is None else now + gradient)

    @property
    def seen(self) -> Array:
        return np.isfinite(self.found.logsumexp)

    def output(self, value: Any) -> Any:
        self.add("output", g := self.normal(self.sizes.queries, self.spec.problem.value.shape[-1]))
        return ch.reductions.Output(value), g

    def entropy(self, value: Any) -> Any:
        self.add("entropy", g := self.normal(self.sizes.queries))
        return ch.reductions.Entropy(), g

    def rows(self, value: Any) -> Any:
        self.add("logsumexp", g := self.normal(self.sizes.queries) * self.seen)
        return ch.reductions.LogSumExp(), g

    def share(self, value: Any) -> Any:
        self.add("sink", g := self.normal(self.sizes.queries))
        return ch.reductions.SinkShare(), g

    def best(self, value: Any) -> Any:
        """Where the two largest are too near to tell, and not equal, rounding decides which is larger: no gradient."""
        if not self.sizes.keys:
            return None
        scores = np.sort(np.nan_to_num(self.found.scores, neginf=-1e30), axis=-1)
        gap = scores[..., -1] - scores[..., -2] if self.sizes.keys > 1 else np.full(self.seen.shape, np.inf)
        self.add("best", g := self.normal(self.sizes.queries) * (self.seen & (gap > 0.05 * np.abs(scores[..., -1]))))
        return ch.reductions.MaxScore(), g

    def received(self, value: Any) -> Any:
        g, u = self.normal(self.sizes.keys), np.ones(self.sizes.queries)
        queries: Any = None
        if self.r.random() < 0.5:
            u = self.g.standard_normal(self.sizes.queries)
            queries = placed(u)
        elif self.r.random() < 0.5:
            queries = slice(self.r.randint(0, self.sizes.queries), None, self.r.choice([1, 2]))
            u = np.zeros(self.sizes.queries)
            u[queries] = 1.0
        self.add("weights", u[:, None] * g[..., None, :])
        return ch.reductions.Received(queries), g

    def mean(self, value: Any) -> Any:
        rows, columns = (self.r.choice([1, 3, 7]) for _ in range(2))
        if not self.sizes.queries or not self.sizes.keys:
            return None
        tall, wide = -(-self.sizes.queries // rows), -(-self.sizes.keys // columns)
        g = self.normal(-(-self.sizes.queries // tall), -(-self.sizes.keys // wide))
        i, j = np.arange(self.sizes.queries) // tall, np.arange(self.sizes.keys) // wide
        count = np.bincount(i)[i][:, None] * np.bincount(j)[j]
        self.add("weights", g[..., i[:, None], j] / count)
        return ch.reductions.Pool((rows, columns), "mean"), g

    def mass(self, value: Any) -> Any:
        if not self.sizes.keys:
            return None
        ids = self.g.integers(0, 4, (1, self.sizes.keys))
        g = self.normal(self.sizes.queries, ids.max() + 1)
        self.add("weights", g[..., ids[0]])
        return ch.reductions.Mass(ids), g

    def top(self, value: Any) -> Any:
        """Weights that are too near to tell are told by their gradient alone: all of a row's have the same."""
        if not self.sizes.keys:
            return None
        g = np.broadcast_to(self.normal(self.sizes.queries)[..., None], (*self.seen.shape, self.sizes.keys))
        self.add("weights", g)
        return ch.reductions.TopK(self.sizes.keys), g

    def distance(self, value: Any) -> Any:
        p = self.spec.problem
        if p.align is None and self.sizes.queries != self.sizes.keys:
            return None
        far = np.abs(oracle.positions_in(p.mask, p.align, self.sizes) - np.arange(self.sizes.keys))
        far = self.sizes.restore(np.broadcast_to(far, self.sizes.shape))
        self.add("shares", (g := self.normal(self.sizes.queries))[..., None] * far)
        return ch.reductions.MeanDistance(), g


def check_statistics(spec: Spec, names: Sequence[str] = ENGINES) -> Iterator[str]:
    """What is beyond its budget, in words."""
    p = spec.problem
    found = oracle.attend(p)
    if np.isnan(found.weights).any():
        return
    truth = None
    for engine in names:
        built = build(spec)
        asked = Asked(spec, found, built.inputs[2])
        if not asked.pairs:
            return
        try:
            w = ch.weights(*built.inputs[:2], **built.options, engine=engine)
        except ch.UnsupportedError:
            continue  # `looks` finds refusals without a reason
        results = w.reduce(*(reduction for reduction, _ in asked.pairs))
        results = results if len(asked.pairs) > 1 else (results,)
        pairs = [(r[0] if isinstance(r, tuple) else r, g) for r, (_, g) in zip(results, asked.pairs, strict=True)]
        gradients = torch.autograd.grad(total(pairs), list(built.leaves.values()), allow_unused=True)
        truth = truth or Truth(p, getattr(torch, spec.dtype), asked.loss)
        for (name, leaf), gradient in zip(built.leaves.items(), gradients, strict=True):
            got = array(torch.zeros_like(leaf) if gradient is None else gradient)
            wrong = truth.wrong(f"statistics: {name}", got, lambda f, name=name: f.gradients[name], leaf.dtype)
            if wrong:
                yield f"{engine}: {wrong} ({', '.join(type(r).__name__ for r, _ in asked.pairs)})"


def total(pairs: list[tuple[Tensor, Array]]) -> Tensor:
    """The loss."""
    found = torch.zeros((), dtype=torch.float64, requires_grad=True)
    for result, g in pairs:
        grad = placed(g)
        found = found + (result.double().masked_fill(grad == 0, 0.0) * grad).sum()
    return found
