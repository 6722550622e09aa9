"""Statistics of a sharded sequence, beside the same in one process: what every rank runs."""

from __future__ import annotations

import random
import resource
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from ranks.cases import EXACT, LENGTH, layouts
from torch import Tensor

import clearhead as ch
from clearhead import testing
from clearhead.base.shapes import Sizes
from clearhead.distributed import needs
from clearhead.inspection.reductions.base import Reduction
from clearhead.inspection.reductions.over_queries import of_queries
from clearhead.problem.summary import Summary

D = ch.distributed


def _reductions(whole: Tensor) -> list[tuple[Reduction, str]]:
    """Every reduction of the library, and whether it is of queries, of keys, or a map."""
    generator = torch.Generator().manual_seed(3)
    factors = torch.rand(3, 2, LENGTH, dtype=torch.float64, generator=generator)
    groups = torch.arange(LENGTH) % 3
    found: list[tuple[Any, str]] = [
        (one, "queries")
        for one in (
            ch.reductions.Entropy(),
            ch.reductions.LogSumExp(),
            ch.reductions.MaxScore(),
            ch.reductions.MeanDistance(),
            ch.reductions.SinkShare(),
            ch.reductions.TopK(1),
        )
    ]
    found += [
        (ch.reductions.TopK(5), "queries"),
        (ch.reductions.Mass(groups), "queries"),
        (ch.reductions.Mass((groups == 1)[None]), "queries"),
    ]
    found += [
        (ch.reductions.Output(whole), "queries"),
        (ch.reductions.Received(), "keys"),
        (ch.reductions.Received(factors), "keys"),
    ]
    found += [(ch.reductions.Received(slice(20, 30)), "keys")]
    found += [
        (ch.reductions.Pool(7, how, queries), "map") for how in ("mean", "max") for queries in (None, slice(11, 33))
    ]
    return [*found, (ch.reductions.Pool((5, 9), "mean", factors), "map")]


def cases(ranks: int) -> Iterator[dict[str, Any]]:
    """Every score and every mask, with biases, sinks, layouts and sizes of a message at their own pace."""
    sizes = Sizes(3, 2, LENGTH, LENGTH)
    torch.manual_seed(0)  # the same on every rank
    masks = [None, *(cls.example(sizes) for cls in testing.masks()), ch.Lengths([30, 0, 5]) & ch.Causal()]
    biases = [None, *(cls.example(sizes) for cls in testing.biases())]
    scores = [cls.example() for cls in testing.scores()]
    for at in range(max(len(masks), len(scores), len(biases))):
        every = layouts(ranks, masks[at % len(masks)])
        yield {
            "score": scores[at % len(scores)],
            "mask": masks[at % len(masks)],
            "bias": biases[at % len(biases)],
            "sinks": torch.tensor([0.3, -1.0], dtype=torch.float64) if at % 2 else None,
            "layout": every[at % len(every)],
            "piece": 5 if at % 3 else 4096,
        }


def exact(rank: int, every: int) -> dict[str, Any]:
    """Every reduction, all of them in one call, of one of `every` cases."""
    torch.set_default_dtype(torch.float64)
    wrong, count = [], 0
    for number, case in enumerate(cases(dist.get_world_size())):
        if number % every:
            continue
        layout, needs.PIECE = case.pop("layout"), case.pop("piece")
        drawn = testing.Inputs.draw(case["score"], (LENGTH, LENGTH), torch.float64)
        case["score"] = case["score"][0]
        query, key, value = (t.detach() for t in drawn)
        whole = _reductions(value)
        try:
            expected = ch.weights(query, key, **case).reduce(*(one for one, _ in whole))
        except ch.UnsupportedError:
            continue
        mine = [
            ch.reductions.Output(layout.shard(value, 2)) if isinstance(one, ch.reductions.Output) else one
            for one, _ in whole
        ]
        own = (layout.shard(t, 2) for t in (query, key))
        results = D.weights(*own, layout=layout, **case).reduce(*mine)
        for (one, of), found, true in zip(whole, results, expected, strict=True):
            count += 1
            wrong += [f"case {number} on {rank}, {one!r:.60}: {said}" for said in _unlike(layout, of, found, true)]
    return {"count": count, "wrong": wrong}


def _unlike(layout: Any, of: str, found: Any, true: Any) -> Iterator[str]:
    if isinstance(found, tuple):
        (found, keys), (true, true_keys) = found, true
        there = layout.shard(true, 2) > 0
        if not torch.equal(keys[there], layout.shard(true_keys, 2)[there]):
            yield "keys differ"
        for row in keys.flatten(0, -2).tolist():
            if len(set(row)) < len(row) or not all(0 <= at < LENGTH for at in row):
                yield f"keys {row}"
    if of == "map":
        every = [torch.empty_like(found) for _ in range(dist.get_world_size())]
        dist.all_gather(every, found.contiguous())
        if not all(torch.equal(found, one) for one in every):
            yield "the map differs between ranks"
    else:
        true = layout.shard(true, 2)
    if found.shape != true.shape or found.dtype != true.dtype:
        yield f"{tuple(found.shape)} {found.dtype}, not {tuple(true.shape)} {true.dtype}"
    elif not torch.allclose(found, true, rtol=EXACT, atol=EXACT):
        yield f"{float((found - true).abs().max()):.2g} apart"


def low_precision(rank: int, count: int) -> list[str]:
    """MeanDistance of random calls in bfloat16, beside float64 in one process.

    Its error is three times that of one process in bfloat16 at most: more would come from the ranks.
    """
    wrong = []
    for number in range(count):
        found, true, alone = _mean_distances(number)
        error, budget = (found - true).abs().max(), 3 * (alone - true).abs().max() + 1e-5 * LENGTH
        if not error <= budget:
            wrong.append(f"{number} on {rank}: {error:.2g} of {budget:.2g}")
    return wrong


def _mean_distances(number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Those of this rank's queries: over ranks in bfloat16; in one process in float64, and in bfloat16."""
    draw = random.Random(number)
    torch.manual_seed(number)
    length, width, heads = draw.choice([7, 33, 64]), draw.choice([8, 16]), draw.choice([2, 4])
    query, key = torch.randn(2, heads, length, width).bfloat16(), torch.randn(2, 2, length, width).bfloat16()
    score = draw.choice([None, ch.Bilinear(width, width).bfloat16(), ch.Additive(width, width, 8).bfloat16()])
    sinks = draw.choice([None, torch.randn(heads).bfloat16()])
    mask = draw.choice([None, ch.Causal(), ch.Causal() & ch.SlidingWindow(before=9)])
    shared = {"mask": mask, "bias": draw.choice([None, ch.ALiBi(heads)])}
    layout, distance = draw.choice([D.ZigZag, D.Contiguous])(length), ch.reductions.MeanDistance()
    own = (layout.shard(t, 2) for t in (query, key))
    with torch.no_grad():
        over_ranks = D.weights(*own, layout=layout, score=score, sinks=sinks, **shared).reduce(distance)
        alone = ch.weights(query, key, score=score, sinks=sinks, **shared).reduce(distance)
        score, sinks = (None if x is None else x.double() for x in (score, sinks))
        true = ch.weights(query.double(), key.double(), score=score, sinks=sinks, **shared).reduce(distance)
    places = layout.positions()
    return over_ranks.double(), true[..., places], alone.double()[..., places]


def ties(rank: int) -> bool:
    """Equal weights: the first keys, as in one process; of queries that see few, distinct others."""
    layout = D.ZigZag(LENGTH)
    same = torch.zeros(1, 2, LENGTH, 4)
    own = layout.shard(same, 2)
    values, keys = D.weights(own, own, layout=layout, mask=ch.Causal()).reduce(ch.reductions.TopK(5))
    true, true_keys = ch.weights(same, same, mask=ch.Causal()).topk(5)
    there = layout.shard(true, 2) > 0
    return torch.allclose(values, layout.shard(true, 2)) and torch.equal(keys[there], layout.shard(true_keys, 2)[there])


def large(rank: int) -> list[str]:
    """float32, by the kernels, of scores up to 1e4, which one process has in other units."""
    layout = D.Contiguous(600)
    generator = torch.Generator().manual_seed(0)
    query, key = (100 * torch.randn(1, 4, 600, 16, generator=generator) for _ in range(2))
    reductions = [
        ch.reductions.Entropy(),
        ch.reductions.MaxScore(),
        ch.reductions.TopK(3),
        ch.reductions.Received(),
        ch.reductions.Pool(20),
        ch.reductions.Pool(20, "mean"),
    ]
    expected = ch.weights(query, key, mask=ch.Causal()).reduce(*reductions)
    found = D.weights(*(layout.shard(t, 2) for t in (query, key)), layout=layout, mask=ch.Causal()).reduce(*reductions)
    wrong = []
    for one, mine, true in zip(reductions, found, expected, strict=True):
        mine, true = (each[0] if isinstance(each, tuple) else each for each in (mine, true))
        true = true if isinstance(one, ch.reductions.Pool) else layout.shard(true, 2)
        if not torch.allclose(mine, true, rtol=1e-4, atol=1e-5):
            wrong.append(f"{one!r} is {float((mine - true).abs().max()):.2g} apart")
    return wrong


def not_finite(rank: int) -> list[bool]:
    """Keys that no query sees are NaN, in inputs of three dimensions, in float16 under autocast."""
    layout = D.ZigZag(LENGTH)
    query, key = torch.randn(2, 2, LENGTH, 4, generator=torch.Generator().manual_seed(0)).half()
    key[:, 5] = torch.nan
    given = {"mask": ch.Padding(torch.arange(LENGTH).expand(2, LENGTH) != 5)}
    with torch.autocast("cpu", torch.bfloat16):
        true = ch.weights(query, key, **given).reduce(ch.reductions.Entropy(), ch.reductions.Received())
        own = (layout.shard(t, 1) for t in (query, key))
        mine = D.weights(*own, layout=layout, **given).reduce(ch.reductions.Entropy(), ch.reductions.Received())
    return [torch.allclose(a, layout.shard(b, 1), atol=1e-5) for a, b in zip(mine, true, strict=True)]


def every_key(rank: int) -> float:
    """How many MB of memory the k largest weights took more, of queries that see fewer than k keys."""
    own = torch.zeros(1, 1, 384, 4)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    layout = D.Contiguous([384] * dist.get_world_size())
    D.weights(own, own, layout=layout, mask=ch.SlidingWindow(before=9)).reduce(ch.reductions.TopK(768))
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


class Looks(Reduction):
    """One that looks at blocks itself."""


class Maps(Reduction):
    """Two maps in one pass, and the largest scores; `factors` are of the mean alone. Of other sinks."""

    def of(self, problem: Any) -> Any:
        return problem._replace(sinks=torch.tensor([2.0, -1.0], dtype=torch.float64))

    def summary(self, problem: Any) -> Summary:
        factors = torch.arange(LENGTH, dtype=torch.float64).view(1, 1, -1)
        return Summary(mean=(3, 5), peak=(3, 5), factors=factors, top=2, scores=True, rows=True)

    def found(self, found: Any, problem: Any) -> Any:
        return found.mean, found.peak, found.scores, found.maximum + found.log_sum


class OfSome(Reduction):
    """Entropies of some queries."""

    def of(self, problem: Any) -> Any:
        return of_queries(problem, slice(3, 9), "Some")

    def summary(self, problem: Any) -> Summary:
        return Summary(entropy=True)


class Unmasked(OfSome):
    """Of another problem."""

    def of(self, problem: Any) -> Any:
        return problem._replace(visible=None)


def own_reductions(rank: int) -> list[bool]:
    """Reductions of one's own that have a summary."""
    layout, given = D.ZigZag(LENGTH), {"mask": ch.Causal(), "sinks": torch.zeros(2, dtype=torch.float64)}
    query, key = torch.randn(2, 1, 2, LENGTH, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mean, peak, *rows = ch.weights(query, key, **given).reduce(Maps())
    true = [mean, peak, *(layout.shard(t, 2) for t in rows)]
    mine = D.weights(*(layout.shard(t, 2) for t in (query, key)), layout=layout, **given).reduce(Maps())
    return [torch.allclose(a, b) for a, b in zip(mine, true, strict=True)]


def refused(rank: int) -> dict[str, str]:
    layout, said = D.ZigZag(LENGTH), {}
    own = torch.zeros(1, 2, layout.count(), 4)
    weights = D.weights(own, own, layout=layout, mask=ch.Causal())
    for name, given in {
        "some": [OfSome()], "unmasked": [Unmasked()],
        "blocks": [Looks()], "no reduction": [3], "step": [ch.reductions.Received(slice(0, 30, 2))],
        "k": [ch.reductions.TopK(99)],
        "two outputs": [ch.reductions.Output(own), ch.reductions.Output(own)], "unlike": [ch.reductions.TopK(1 + rank)],
        "groups": [ch.reductions.Mass(torch.arange(LENGTH) % (2 + rank))],
    }.items():  # fmt: skip
        try:
            said[name] = str(weights.reduce(*given))
        except ch.ClearheadError as error:
            said[name] = str(error)
    try:
        D.weights(own, own, layout=D.ZigZag(LENGTH, 2)).reduce(ch.reductions.Entropy())
    except ch.ClearheadError as error:
        said["no processes"] = str(error)
    return said


def everything(rank: int, every: int) -> dict[str, Any]:
    return {
        "exact": exact(rank, every),
        **{f.__name__: f(rank) for f in (ties, large, not_finite, every_key, own_reductions, refused)},
    }
