"""Statistics of the weights of one sequence of a call: for each query and key, and for cells of the map."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from clearhead.inspection.measures.allowed import among, uniform
from clearhead.inspection.reductions.by_query import Entropy, LogSumExp, MeanDistance, over_keys
from clearhead.inspection.reductions.over_queries import Pool, Received
from clearhead.inspection.source import FromRecord
from clearhead.inspection.weights import Weights
from clearhead.problem.problem import Problem
from clearhead.problem.record import now
from clearhead.problem.region import Region
from clearhead.problem.regions import cut
from clearhead.report._words import Cells, Shown
from clearhead.report.layer import Array

THUMBNAIL = 32
LONG = 1024  # a call with a longer side has a map of cells
NEAR, FAR, FARTHER = 512, 1024, 16384  # cells of a side: NEAR, or FAR for sides longer than FARTHER
LEAST = 8  # positions in a cell


def lazy(problem: Problem) -> Weights:
    """The weights of a problem to whose tensors nothing writes."""
    return Weights(FromRecord(now(problem), {}))


def statistics(
    problem: Problem, rows: Shown, columns: Shown, placed: bool
) -> tuple[dict[str, Any], Array, tuple[Array, Array] | None]:
    """The fields of a `Layer` that are statistics over all queries and keys, and what its maps are made of.

    It takes one pass over the weights, and a second one for a long head, or where some positions are not shown.
    Entropy, received and distance are of the weights of the keys: with sinks, the model's weights divided by their sum.
    Log-sum-exp and maps are of the model's own weights. `placed`: whether distances have a meaning.
    The maps are made of the largest weight of each shown query in each column of cells, (H, Lq, ≤ 32); and for a long
    head of the largest and the mean of each cell, (H, rows, columns).
    """
    keys_alone = over_keys(problem)
    every = rows.all and columns.all
    wanted: list[Any] = [LogSumExp(), Entropy(), Received()]
    if placed:
        wanted.append(MeanDistance())
    if every:
        wanted.append(Pool((problem.sizes.queries, THUMBNAIL)))
    lse, entropy, received, *more = (array(found[0]) for found in lazy(keys_alone).reduce(*wanted))
    logsumexp = lse
    if problem.sinks is not None:
        sinks = array(problem.sinks.double())[:, None]
        logsumexp = np.where(lse == -np.inf, lse, np.logaddexp(lse.astype(np.float64), sinks))
    if every:
        peaks, alone = more[-1] * _share(lse, logsumexp), True
    else:
        peaks, alone = _peaks(problem, rows, columns, logsumexp)
    fields = {
        "logsumexp": rows.of(logsumexp, 1),
        "entropy": rows.of(entropy, 1),
        "received": columns.of(received, 1),
        "distance": rows.of(more[0], 1) if placed else None,
        "alone": alone,
        "seen": None if alone else rows.of(_seen(problem), 1),
    }
    return fields, peaks, _cells(problem, rows, columns) if alone else None


def _seen(problem: Problem) -> Array:
    """The number of keys that each query may see, from the log-sum-exp of as many zeros."""
    nats = lazy(uniform(among(problem, None))).reduce(LogSumExp())
    return np.rint(np.exp(array(nats[0]).astype(np.float64))).astype(np.int32)


def cells_of(queries: int, keys: int) -> tuple[int, int] | None:
    """The numbers of queries and keys in a cell of the map; None for a short head."""
    if max(queries, keys) <= LONG:
        return None
    most = NEAR if max(queries, keys) <= FARTHER else FAR
    per_row, per_column = (-(-n // -(-n // max(LEAST, -(-n // most)))) for n in (queries, keys))
    return per_row, per_column


def _shown(problem: Problem, rows: Shown, columns: Shown) -> Problem:
    """The problem of the shown positions alone, which are consecutive."""
    queries, keys = (slice(int(side.places[0]), int(side.places[-1]) + 1) for side in (rows, columns))
    return cut(problem, Region(queries=queries, keys=keys))


def _peaks(problem: Problem, rows: Shown, columns: Shown, logsumexp: Array) -> tuple[Array, bool]:
    """The largest weight of each shown query in each column of cells, where some positions are not shown.

    The second result is whether the shown part has the call's log-sum-exps, so that no word sees padding. The weights
    of a part are the call's times exp(the call's log-sum-exp − its own).
    """
    count = len(rows.places)
    if not (rows.even and columns.even):
        return array(lazy(problem).reduce(Cells(rows, columns, (count, THUMBNAIL)))[0]), False
    found = lazy(_shown(problem, rows, columns)).reduce(LogSumExp(), Pool((count, THUMBNAIL)))
    own, peaks = (array(each[0]) for each in found)
    whole = rows.of(logsumexp, 1)
    return peaks * _share(own, whole), bool(np.allclose(own, whole, rtol=1e-6, atol=1e-5, equal_nan=True))


def _cells(problem: Problem, rows: Shown, columns: Shown) -> tuple[Array, Array] | None:
    """The largest and the mean weight of each cell of a long head, where no shown query sees hidden keys."""
    queries, keys = len(rows.places), len(columns.places)
    cell = cells_of(queries, keys)
    if cell is None:
        return None
    part = problem if rows.all and columns.all else _shown(problem, rows, columns)
    size = -(-queries // cell[0]), -(-keys // cell[1])
    largest, mean = (array(found[0]) for found in lazy(part).reduce(Pool(size), Pool(size, "mean")))
    return largest, mean


def _share(own: Array, whole: Array) -> Array:
    """exp(own − whole) of each query, (H, Lq, 1) float32, 0 where nothing is seen."""
    with np.errstate(invalid="ignore"):
        share = np.exp(own.astype(np.float64) - whole)
    return np.where(own == -np.inf, 0.0, share).astype(np.float32)[..., None]


def array(tensor: Tensor) -> Array:
    found: Array = tensor.detach().cpu().contiguous().numpy()
    return found
