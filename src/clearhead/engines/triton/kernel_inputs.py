"""Conversions of a problem for the kernels, and of their results, without a launch."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.language import constexpr

from clearhead.engines.triton.given import Back, Dropout, Shape, Spans, View, view, viewed
from clearhead.problem import partial as of_queries
from clearhead.problem.problem import Problem
from clearhead.problem.summary import Sent
from clearhead.scores.base import Pairwise
from clearhead.scores.pair_functions import PHIS

COUNTS = tuple(map(constexpr, range(5)))  # the numbers of gaps


@cache
def make_shape(*constants: int) -> Shape:
    """Return one object for the same constants: Triton compares each with those of the calls before."""
    return Shape(*map(constexpr, constants))


def read_spans(problem: Problem) -> Spans | None:
    """Return the spans of the mask as the kernels read them."""
    spans, rows = problem.spans, problem.sizes.shape[:3]
    if spans is None:
        return None
    count = 0 if spans.gaps is None else spans.gaps[0].shape[-1]
    low, high = (view(edge, *rows, count) for edge in spans.gaps or (None, None))
    return Spans(viewed(spans.start, *rows), viewed(spans.stop, *rows), low, high, COUNTS[count])


def read_dropout(problem: Problem) -> Dropout | None:
    """Return the dropout as the kernels read it."""
    if problem.seed is None:
        return None
    first = (0, 0, 0, 0) if problem.origin is None else tuple(side.start for side in problem.origin)
    limit = round(problem.dropout_p * 2**32) - 2**31
    return Dropout(problem.seed, limit, 1 / (1 - problem.dropout_p), *first)


def read_sinks(problem: Problem) -> dict[str, Any]:
    """Return the sinks as the kernels read them."""
    sinks = problem.sinks
    return {"sinks": sinks, "sinks_apart": 0 if sinks is None else sinks.stride(0)}


def read_sent(sent: Sent | None, rows: of_queries.Rows, lead: tuple[int, int, int]) -> Back | None:
    """Return the gradients of statistics and the rows as the kernels read them; None if there are no such gradients."""
    if sent is None or all(t is None for t in sent if not isinstance(t, tuple)):
        return None
    every = sent._asdict() | rows._asdict()

    def columns(dtype: torch.dtype, *names: str) -> tuple[View | None, dict[str, Any]]:
        some = [name for name in names if every[name] is not None]
        each = [every[name].to(dtype).expand(lead) for name in some]
        places = {name: constexpr(some.index(name)) if name in some else None for name in names}
        return viewed(torch.stack(each, -1)) if each else None, places

    numbers, one = columns(torch.float32, *rows._fields, "log_weight", "distance", "best", "factors")
    places, other = columns(torch.int32, "position", "best_key")
    return Back(
        numbers,  # type: ignore[arg-type]
        places,
        **one,
        **other,
        weights=None if sent.values is None else viewed(sent.values.float()),
        indices=view(sent.indices),
        received=None if sent.received is None else viewed(sent.received.float()),
        mean=None if sent.mean is None else viewed(sent.mean.float()),
        tall=sent.cell[0],
        wide=sent.cell[1],
        number=0 if sent.indices is None else sent.indices.shape[-1],
    )


def apply_factors(to: Tensor, tensor: Tensor, lowered: Pairwise) -> Tensor:
    """Return the gradient of a side in its shape, from the sums by dimension; that of a dot product is complete."""
    if lowered.phi == "mul":
        return to
    batch, heads, length, width = tensor.shape
    factor = lowered.scale * PHIS[lowered.phi].triton.factor
    own: Tensor = to[:, :width, :length].transpose(1, 2).reshape(batch, heads, length, width)
    return own * factor if lowered.weight is None else own * (lowered.weight.float() * factor)


def fill_up_keys(indices: Tensor, keys: int) -> Tensor:
    """Replace each −1 among the keys of the largest weights by the first key that does not occur yet."""
    count = indices.shape[-1]
    candidates = torch.arange(min(keys, 2 * count), device=indices.device)
    taken = (indices.unsqueeze(-1) == candidates).any(-2)
    free = torch.where(taken, keys, candidates).sort(-1).values  # the keys that do not occur, in order
    missing = indices < 0
    place = (missing.cumsum(-1) - 1).clamp(min=0)
    return torch.where(missing, free.gather(-1, place.clamp(max=free.shape[-1] - 1)).clamp(max=keys - 1), indices)
