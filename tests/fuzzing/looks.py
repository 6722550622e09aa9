"""What can be seen of the weights, on every engine that shows them, against the truth."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import oracle
import torch

import clearhead as ch
from fuzzing.budget import Measure, Sum, Truth
from fuzzing.build import build
from fuzzing.draw import Spec

ENGINES = ("native", "tiled", "reference")
PROJECTED = ("bilinear", "additive", "cosine")  # which transform the inputs in their own dtype


def check_looks(spec: Spec, names: Sequence[str] = ENGINES) -> Iterator[str]:
    """What is beyond its budget, in words."""
    p, built, r = spec.problem, build(spec), random.Random(spec.number + 2)
    narrow = getattr(torch, spec.dtype)
    wide = narrow if spec.dtype == "float64" else torch.float32
    truth = Truth(p, narrow if p.score[0] in PROJECTED else wide)
    infinite = bool(np.isnan(truth.found.weights).any())
    every = looks(spec, r, infinite)
    low = {"w @ v": Truth(p, narrow)}
    inputs = [x.detach() for x in built.inputs]
    for engine in names:
        try:
            w = ch.weights(*inputs[:2], **built.options, engine=engine)
        except ch.UnsupportedError:
            if engine != "native" or not (p.by_functions or spec.dtype == "float64"):
                yield f"{engine}: refused"
            continue
        found: dict[str, Any] = {}
        for name, (ask, measure, *_) in every.items():
            if isinstance(ask, ch.inspection.reductions.base.Reduction):
                found[name] = ask
            else:
                yield from compare(low.get(name, truth), f"{engine}: {name}", ask(w, inputs[2]), measure)
        alone = r.random() < 0.5  # one after the other, or all in one pass
        reductions = [
            reduction if name != "output" else ch.reductions.Output(inputs[2]) for name, reduction in found.items()
        ]
        alone |= len(reductions) == 1
        results = [w.reduce(one) for one in reductions] if alone else w.reduce(*reductions)
        for name, result in zip(found, results, strict=True):
            yield from compare(truth, f"{engine}: {name}{' alone' * alone}", result, *every[name][1:])


def compare(truth: Truth, name: str, got: Any, measure: Measure, summed: Sum | None = None) -> Iterator[str]:
    """Tensors by their numbers; the largest weights also by the keys that are said to have them."""
    if isinstance(got, tuple):
        values, indices = (t.detach().cpu().numpy() for t in got)
        count = truth.found.weights.shape[-1]
        inside = ((indices >= 0) & (indices < count)).all()
        if not inside or (np.diff(np.sort(indices, axis=-1), axis=-1) == 0).any():
            yield f"{name}: the keys are not distinct, or no keys"
            return
        at = lambda found: np.take_along_axis(found.weights, indices, -1)
        for about, part in ((f"{name}: the weights at its keys", at), (name, measure)):
            wrong = truth.wrong(about, values.astype(float), part, None, lambda f: f.weights)
            yield from [wrong] if wrong else []
        return
    of = (lambda f: f.weights) if " w[" in name else (lambda f: f.raw) if " scores " in name else None
    wrong_here = truth.wrong(name, np.asarray(got.detach().double()), measure, got.dtype, of, " w[" in name, summed)
    if wrong_here:
        yield wrong_here


def looks(spec: Spec, r: random.Random, infinite: bool) -> dict[str, tuple[Any, ...]]:
    """What is asked, by name: a reduction or a function of (weights, value); what of the truth it should be; and what
    it is a sum of, where it is a long one."""
    p = spec.problem
    sizes = oracle.Sizes(*(x.shape for x in p.inputs))
    made: dict[str, tuple[Any, ...]] = {
        "entropy": (ch.reductions.Entropy(), lambda f: f.entropy),
        "output": (ch.reductions.Output(None), lambda f: f.output),
        "logsumexp": (lambda w, v: w.logsumexp(), lambda f: f.logsumexp),
        "log-sum-exp": (ch.reductions.LogSumExp(), lambda f: f.logsumexp),
    }
    if infinite:  # the rest is not specified
        made["received"] = ch.reductions.Received(), lambda f: oracle.received(f.weights)
        for how in ("max", "mean"):
            made[f"pool {how}"] = ch.reductions.Pool((7, 10), how), lambda f, h=how: oracle.pool(f.weights, (7, 10), h)
        made["dense"] = lambda w, v: w.dense(), lambda f: f.weights
        return made
    for how in ("max", "mean"):
        size = tuple(r.choice([1, 2, 7, 10, 64, 500]) for _ in range(2))
        size = size[0] if r.random() < 0.5 else size
        made[f"pool {size} {how}"] = (
            ch.reductions.Pool(size, how),
            lambda f, s=size, h=how: oracle.pool(f.weights, s, h),
        )
    made["received"] = ch.reductions.Received(), lambda f: oracle.received(f.weights)
    made["the sink's share"] = ch.reductions.SinkShare(), lambda f: f.sink
    if sizes.keys:
        made["the largest score"] = ch.reductions.MaxScore(), lambda f: f.scores.max(-1)
    first = r.randint(-sizes.queries, sizes.queries)
    some = slice(first, None, r.choice([1, 1, 2])) if r.random() < 0.5 else slice(None, first)
    made[f"received by {some}"] = ch.reductions.Received(some), lambda f: oracle.received(f.weights[..., some, :])
    times = np.array([r.uniform(-1, 2) for _ in range(sizes.queries)])
    counted = torch.from_numpy(times)
    weighted = lambda f, of=times: oracle.received(f.weights * of[:, None])
    by_size = lambda f: weighted(f, np.abs(times))
    made["received by weights"] = ch.reductions.Received(counted), weighted, Sum(sizes.queries, by_size)
    made["mean of weighted"] = (
        ch.reductions.Pool(3, "mean", counted),
        lambda f: oracle.pool(f.weights * times[:, None], 3, "mean"),
    )
    count = r.choice([1, 3, 17])
    rows = [[r.randrange(count) for _ in range(sizes.keys)] for _ in range(r.choice([1, sizes.batch]))]
    ids = np.array(rows, dtype=np.int64).reshape(len(rows), sizes.keys)
    if ids.size:
        mass = lambda f: oracle.mass(f.weights, ids, sizes)
        made["mass"] = ch.reductions.Mass(ids), mass, Sum(sizes.keys, mass)
    if p.align is not None or sizes.queries == sizes.keys:
        made["distance"] = (
            ch.reductions.MeanDistance(),
            lambda f: oracle.mean_distance(f.shares, p.mask, p.align, sizes),
        )
    for k in {r.randint(1, min(sizes.keys, 20)), r.randint(1, sizes.keys)} if sizes.keys else ():
        made[f"topk {k}"] = ch.reductions.TopK(k), lambda f, k=k: oracle.largest(f.weights, k)
    made["dense"] = lambda w, v: w.dense(), lambda f: f.weights
    for _ in range(2):
        index = one_index(r, (*sizes.lead, sizes.queries, sizes.keys))
        made[f"w[{index}]"] = lambda w, v, i=index: torch.mul(w[i], 1), lambda f, i=index: f.weights[i]  # may be lazy
        made[f"scores {index}"] = lambda w, v, i=index: w.scores(i), lambda f, i=index: f.raw[i]
    made["w @ v"] = lambda w, v: w @ v, lambda f: f.output
    return dict(r.sample(list(made.items()), 8))


def one_index(r: random.Random, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """A basic index: numbers, slices, None and an ellipsis."""
    parts: list[Any] = []
    for size in shape:
        kind = r.choice(["all", "one", "slice", "step", "none"])
        if kind == "one" and size:
            parts.append(r.randrange(-size, size))
        elif kind in ("slice", "step"):
            start, stop = (r.randint(-size - 1, size + 1) for _ in range(2))
            parts.append(slice(start, stop, r.choice([2, 3]) if kind == "step" else None))
        else:
            parts += [None] * (kind == "none") + [slice(None)]
    if r.random() < 0.3 and any(part == slice(None) for part in parts):
        at = max(i for i, part in enumerate(parts) if part == slice(None))
        parts[at] = Ellipsis
    return tuple(parts)
