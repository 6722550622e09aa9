"""A recorded call as a layer of the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from clearhead.inspection.reductions.entropy import Entropy
from clearhead.inspection.reductions.log_sum_exp import LogSumExp
from clearhead.inspection.reductions.mean_distance import MeanDistance
from clearhead.inspection.reductions.pool import Pool
from clearhead.inspection.reductions.received import Received
from clearhead.inspection.source import FromRecord
from clearhead.inspection.weights import Weights
from clearhead.problem.problem import Problem
from clearhead.problem.record import now
from clearhead.problem.region import Region
from clearhead.problem.regions import cut
from clearhead.problem.visible import seen_by
from clearhead.report._words import Cells, Shown
from clearhead.report.layer import Array, Layer
from clearhead.report.operands import ERROR, rounded, steps_of
from clearhead.report.why import with_steps

THUMBNAIL = 32
MEASURED = 64  # queries whose weights are compared with those of the page


class CallLike(Protocol):
    """What the page reads of a recorded call.

    `padding`: which positions are words, (B, Lq) and (B, Lk), each None where all are; None where there is no padding.
    """

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def weights(self) -> Weights: ...

    @property
    def padding(self) -> tuple[Tensor | None, Tensor | None] | None: ...


def layer_from_call(
    call: CallLike, query_tokens: Sequence[str], key_tokens: Sequence[str], sequence: int = 0, error: float = ERROR
) -> Layer:
    """One sequence of a call, padding left out, with the statistics of its weights: one pass over them.

    `error`: how far a weight may be from the call's, about, by rounding query and key; the statistics are of these.
    """
    problem = of_sequence(call, sequence)
    lowered = problem.lowered
    assert lowered is not None and lowered.phi == "mul"
    real = call.padding or (None, None)
    rows, columns = (
        Shown(None if side is None else side[sequence], length, call.name)
        for side, length in zip(real, (problem.sizes.queries, problem.sizes.keys), strict=True)
    )
    folded = lowered.folded()
    query, key = folded.query[0].float(), folded.key[0].float()
    steps = steps_of(query[:, rows.places], key[:, columns.places], folded.scale, error)
    measured = None
    if steps is not None:
        query, key = rounded(query, steps[0]), rounded(key, steps[1])
        of_page = problem._replace(scores=folded._replace(query=query.unsqueeze(0), key=key.unsqueeze(0)))
        measured = _largest_error(problem, of_page, rows)
        problem = of_page
    thumbnail = Pool(THUMBNAIL) if rows.all and columns.all else Cells(rows, columns, THUMBNAIL)
    wanted: list[Any] = [LogSumExp(), Entropy(), Received(), thumbnail]
    if call.kind == "self":
        wanted.append(MeanDistance())
    reduced = lazy(problem).reduce(*wanted)
    logsumexp, entropy, received, cells, *distance = (_numpy(result[0]) for result in reduced)
    start, stop, bias = _allowed(problem)
    before = columns.before()
    layer = Layer(
        name=call.name,
        kind=call.kind,
        query=rows.of(_numpy(query), 1),
        key=columns.of(_numpy(key), 1),
        scale=folded.scale,
        softcap=folded.softcap,
        start=rows.of(before[start].astype("int32"), 1),
        stop=rows.of(before[stop].astype("int32"), 1),
        bias=None if bias is None else columns.of(rows.of(bias, 1), 2),
        logsumexp=rows.of(logsumexp, 1),
        entropy=rows.of(entropy, 1),
        received=columns.of(received, 1),
        distance=rows.of(distance[0], 1) if distance else None,
        thumbnail=cells,
        query_tokens=rows.labels(query_tokens),
        key_tokens=columns.labels(key_tokens),
        sinks=None if problem.sinks is None else _numpy(problem.sinks.double()),
        operand_steps=None if steps is None else (_numpy(steps[0]), _numpy(steps[1])),
        error=measured,
    )
    return with_steps(layer)


def of_sequence(call: CallLike, sequence: int) -> Problem:
    """The problem of one sequence, whose padding queries see nothing."""
    whole = call.weights.problem
    problem = cut(whole, Region(batch=slice(sequence, sequence + 1)))
    align = whole.sizes.align
    if isinstance(align, Tensor) and align.numel() > 1:
        align = align[sequence : sequence + 1]
    problem = problem._replace(sizes=problem.sizes._replace(align=align))
    words = None if call.padding is None else call.padding[0]
    if words is None:
        return problem
    return problem._replace(visible=seen_by(words[sequence : sequence + 1], problem.visible, problem.sizes))


def lazy(problem: Problem) -> Weights:
    """The weights of a problem that nothing writes to."""
    return Weights(FromRecord(now(problem), {}))


def _largest_error(problem: Problem, of_page: Problem, rows: Shown) -> float:
    """How far the page's weights are from the call's, at most: of all queries, or of some where they are many."""
    theirs, mine = lazy(problem), lazy(of_page)
    some = slice(None, None, -(-problem.sizes.queries // MEASURED))
    shown = np.isin(np.arange(problem.sizes.queries)[some], rows.places)
    found = 0.0
    for head in range(problem.sizes.heads):
        difference = (theirs[0, head, some] - mine[0, head, some]).abs().nan_to_num()
        found = max(found, float(_numpy(difference.amax(-1))[shown].max(initial=0.0)))
    return found


def _allowed(problem: Problem) -> tuple[Array, Array, Array | None]:
    """Starts and stops, (H or 1, Lq), and the bias (H or 1, Lq, Lk), −∞ in the holes of a span."""
    queries, keys = problem.sizes.queries, problem.sizes.keys
    bias = None
    if problem.bias is not None:
        every = slice(None)
        of = problem.bias.tile(every, every, every, every, problem.sizes)[0]
        bias = of.float().expand(of.shape[0], queries, keys)
    start, stop = (torch.full((1, queries), edge, dtype=torch.int64, device="cpu") for edge in (0, keys))
    spans = problem.spans
    if spans is not None:
        start, stop = (edge[0].expand(-1, queries).cpu() for edge in (spans.start, spans.stop))
        if not spans.plain:
            every = slice(None)
            holes = ~spans.keep(every, every, every, every, keys)[0].expand(-1, queries, keys)
            bias = (torch.zeros_like(holes, dtype=torch.float32) if bias is None else bias).masked_fill(
                holes, -torch.inf
            )
    heads = max(start.shape[0], stop.shape[0])
    first, last = (_numpy(edge.expand(heads, -1)).astype("int32") for edge in (start, stop))
    return first, last, None if bias is None else _numpy(bias)


def _numpy(tensor: Tensor) -> Array:
    array: Array = tensor.detach().cpu().contiguous().numpy()
    return array
