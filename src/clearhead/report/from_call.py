"""A recorded call as a layer of the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from clearhead.inspection.reductions.entropy import Entropy
from clearhead.inspection.reductions.log_sum_exp import LogSumExp
from clearhead.inspection.reductions.mean_distance import MeanDistance
from clearhead.inspection.reductions.pool import Pool
from clearhead.inspection.reductions.received import Received
from clearhead.inspection.weights import Weights
from clearhead.problem.problem import Problem
from clearhead.report._words import Cells, Shown
from clearhead.report.layer import Array, Layer
from clearhead.report.why import with_steps

THUMBNAIL = 32


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


def layer_from_call(call: CallLike, query_tokens: Sequence[str], key_tokens: Sequence[str], sequence: int = 0) -> Layer:
    """One sequence of a call, padding left out, with the statistics of its weights: one pass over them."""
    weights = call.weights
    problem = weights.problem
    lowered = problem.lowered
    assert lowered is not None and lowered.phi == "mul"
    queries, keys = problem.sizes.queries, problem.sizes.keys
    real = call.padding or (None, None)
    rows, columns = (
        Shown(None if side is None else side[sequence], length, call.name)
        for side, length in zip(real, (queries, keys), strict=True)
    )
    whole = rows.all and columns.all
    thumbnail = Pool(THUMBNAIL) if whole else Cells(sequence, rows, columns, THUMBNAIL)
    wanted: list[Any] = [LogSumExp(), Entropy(), Received(), thumbnail]
    if call.kind == "self":
        wanted.append(MeanDistance())
    logsumexp, entropy, received, cells, *distance = (
        _numpy(result[sequence if len(result) > 1 else 0]) for result in weights.reduce(*wanted)
    )
    start, stop, bias = _allowed(problem, sequence)
    before = columns.before()
    layer = Layer(
        name=call.name,
        kind=call.kind,
        query=rows.of(_numpy(lowered.folded().query[sequence].float()), 1),
        key=columns.of(_numpy(lowered.key[sequence].float()), 1),
        scale=lowered.scale,
        softcap=lowered.softcap,
        start=rows.of(before[start].astype("int32"), 1),
        stop=rows.of(before[stop].astype("int32"), 1),
        bias=None if bias is None else columns.of(rows.of(bias, 1), 2),
        logsumexp=rows.of(logsumexp.astype("float64"), 1),
        entropy=rows.of(entropy, 1),
        received=columns.of(received, 1),
        distance=rows.of(distance[0], 1) if distance else None,
        thumbnail=cells,
        query_tokens=rows.labels(query_tokens),
        key_tokens=columns.labels(key_tokens),
        sinks=None if problem.sinks is None else _numpy(problem.sinks.double()),
    )
    return with_steps(layer)


def _allowed(problem: Problem, sequence: int) -> tuple[Array, Array, Array | None]:
    """Starts and stops, (H or 1, Lq), and the bias (H or 1, Lq, Lk), −∞ in the holes of a span."""
    queries, keys = problem.sizes.queries, problem.sizes.keys
    bias = None
    if problem.bias is not None:
        every = slice(None)
        of = problem.bias.tile(slice(sequence, sequence + 1), every, every, every, problem.sizes)[0]
        bias = of.float().expand(of.shape[0], queries, keys)
    start, stop = (torch.full((1, queries), edge, dtype=torch.int64, device="cpu") for edge in (0, keys))
    spans = problem.spans
    if spans is not None:
        start, stop = (
            edge[sequence if edge.shape[0] > 1 else 0].expand(-1, queries).cpu() for edge in (spans.start, spans.stop)
        )
        if not spans.plain:
            one, every = slice(sequence, sequence + 1), slice(None)
            holes = ~spans.keep(one, every, every, every, keys)[0].expand(-1, queries, keys)
            bias = (torch.zeros_like(holes, dtype=torch.float32) if bias is None else bias).masked_fill(
                holes, -torch.inf
            )
    heads = max(start.shape[0], stop.shape[0])
    first, last = (_numpy(edge.expand(heads, -1)).astype("int32") for edge in (start, stop))
    return first, last, None if bias is None else _numpy(bias)


def _numpy(tensor: Tensor) -> Array:
    array: Array = tensor.detach().cpu().contiguous().numpy()
    return array
