"""A recorded call as a layer of the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from clearhead._problem import Problem
from clearhead.inspection.distance import Distance
from clearhead.inspection.entropy import Entropy
from clearhead.inspection.logsumexp import LogSumExp
from clearhead.inspection.pool import Pool
from clearhead.inspection.received import Received
from clearhead.inspection.weights import Weights
from clearhead.report.layer import Array, Layer

THUMBNAIL = 32


class CallLike(Protocol):
    """What the page takes of a recorded call."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def weights(self) -> Weights: ...


def layer_from_call(call: CallLike, query_tokens: Sequence[str], key_tokens: Sequence[str], sequence: int = 0) -> Layer:
    """One sequence of a call, with the statistics of its weights: one pass over them."""
    weights = call.weights
    problem = weights.problem
    lowered = problem.lowered
    assert lowered is not None and lowered.phi == "mul"
    queries, keys = problem.sizes.queries, problem.sizes.keys
    wanted: list[Any] = [LogSumExp(), Entropy(), Received(), Pool(THUMBNAIL)]
    if call.kind == "self":
        # with a key/value cache the last query stands at the last key
        wanted.append(Distance(align="lower_right"))
    logsumexp, entropy, received, thumbnail, *distance = (
        _numpy(result[sequence]) for result in weights.reduce(*wanted)
    )
    start, stop, bias = _allowed(problem, sequence)
    return Layer(
        name=call.name,
        kind=call.kind,
        query=_numpy(lowered.query[sequence].float()),
        key=_numpy(lowered.key[sequence].float()),
        scale=lowered.scale,
        softcap=lowered.softcap,
        start=start,
        stop=stop,
        bias=bias,
        logsumexp=logsumexp.astype("float64"),
        entropy=entropy,
        received=received,
        distance=distance[0] if distance else None,
        thumbnail=thumbnail,
        query_tokens=list(query_tokens) if len(query_tokens) == queries else [str(i) for i in range(queries)],
        key_tokens=list(key_tokens) if len(key_tokens) == keys else [str(j) for j in range(keys)],
    )


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
        if spans.residual is not None:
            one, every = slice(sequence, sequence + 1), slice(None)
            holes = ~spans.keep(one, every, every, every, keys)[0]
            bias = (torch.zeros_like(holes, dtype=torch.float32) if bias is None else bias).masked_fill(
                holes, -torch.inf
            )
    heads = max(start.shape[0], stop.shape[0])
    first, last = (_numpy(edge.expand(heads, -1)).astype("int32") for edge in (start, stop))
    return first, last, None if bias is None else _numpy(bias)


def _numpy(tensor: Tensor) -> Array:
    array: Array = tensor.detach().cpu().contiguous().numpy()
    return array
