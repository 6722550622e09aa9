"""The steps from the raw scores of a block to its weights, compiled to one loop where functions take part in them.

A function is compiled once for its code, by PyTorch's compiler, when it has been asked for so many pairs that compiling
takes less time than it has cost already. It must be known from its code that it computes with its arguments and with
values alone (`base/function_reads.py`), because compiled code runs it at other times and in other orders. The first
block is computed in both ways. Where anything is in the way (no compiler, a function that the compiler cannot take,
another result), the operations of `tiles.py` go on alone. Both ways give the same numbers, but for rounding.
"""

from __future__ import annotations

import os
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clearhead.base.function_reads import FunctionReads
from clearhead.base.rules import by_pair, indices_of
from clearhead.base.tracing import compiling, looked_into, on_the_host, traced
from clearhead.engines.tiled import tiles
from clearhead.problem.partial import Partial
from clearhead.problem.problem import Problem
from clearhead.problem.region import EVERY, Region, host_part
from clearhead.problem.regions import cut
from clearhead.scores.base import ByTile, Pairwise, capped, checked_tile
from clearhead.scores.dot import Dot

AFTER = 2**28  # pairs for which a function was asked: about ten seconds of one core
FAR = {dim: (dim + 1) * 2**40 for dim in (0, 1, 3)}
COMPILE = torch.compile
MOST = 32  # kinds of functions that are compiled: each takes seconds
_asked: dict[Any, int] = {}  # how many pairs, by the functions' code
_compiled: dict[Any, Callable[..., Any] | None] = {}  # None: it cannot be compiled, or gave other numbers
_lock = threading.Lock()  # one thread compiles at a time
_in_a_fork: list[bool] = []


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _in_a_fork.append(True))


def fused(problem: Problem) -> Callable[[Region], Partial] | None:
    """A function that gives the result of `tiles.partial` for a region of a guarded problem; None where it is left to
    `tiles.partial`. Without autograd."""
    functions = _functions(problem)
    if not functions or problem.needs_grad or compiling() or traced() or looked_into():
        return None
    plain = problem.poison is None and problem.seed is None and on_the_host(problem.query)
    codes = tuple(getattr(function, "__code__", None) for function in functions)
    if not plain or None in codes:
        return None
    kind = (codes, problem.query.dtype, torch.get_num_threads())
    pairs = torch.Size(problem.sizes.shape).numel()
    if _asked.get(kind, 0) < AFTER:
        if len(_asked) > 2**10:
            _asked.clear()
        _asked[kind] = _asked.get(kind, 0) + pairs
        return None
    return (lambda region: _partial(problem, region, kind)) if _known(functions) else None


def shown(problem: Problem) -> bool:
    """Whether the code of the functions in the scores shows all that they read."""
    functions = _functions(problem)
    return bool(functions) and _known(functions)


def _known(functions: tuple[Any, ...]) -> bool:
    return all(FunctionReads(function).unknown is None for function in functions)


def _functions(problem: Problem) -> tuple[Any, ...]:
    """The caller's functions of score and bias, and those of the mask that go with them; none where one of them is
    known in parts alone, or reads rows."""
    scores = problem.scores
    found: list[Callable[..., Any]] = []
    if isinstance(scores, ByTile) and scores.score.changed_by is not None:
        if scores.score._by_rows is not False:
            return ()
        found.append(scores.score.changed_by)
    if problem.by_function:
        assert problem.bias is not None
        rule = by_pair(problem.bias.function)
        if rule is None:
            return ()
        found += rule.of
    rule = None if problem.spans is None or not found else by_pair(problem.spans.residual)
    return (*found, *(() if rule is None else rule.of))


def _partial(problem: Problem, region: Region, kind: Any) -> Partial:
    spans = problem.spans
    plain = spans is None or spans.residual is None or by_pair(spans.residual) is not None
    # a rule of single pairs is taken from the whole problem
    masked = region.masked and not (plain and _covers(problem, region))
    part = cut(problem, region._replace(masked=masked))
    if part.value is None or 0 in part.sizes.shape:
        return tiles.partial(cut(problem, region))
    weights = _weights_of(kind, _given(problem, part, region))
    if weights is None:
        return tiles.partial(cut(problem, region))
    chosen, maximum, log_sum = weights
    return Partial(tiles.grouped_product(chosen, part.value.to(chosen.dtype)), maximum, log_sum)


def _covers(problem: Problem, region: Region) -> bool:
    """Whether the hull of every query of a region is known to hold all of its keys, without gaps."""
    visible = problem.visible
    if visible is None:
        return True
    if visible.edges is None or visible.spans.gaps is not None:
        return False
    first, last = (host_part(edge, region) for edge in visible.edges)
    start, stop, _ = region.keys.indices(problem.sizes.keys)
    return bool((first <= start).all() and (last >= stop).all())


def _given(problem: Problem, part: Problem, region: Region) -> tuple[Any, ...]:
    """The arguments of `_weights` for a part of a problem, which has no spans where `_covers` holds."""
    scores, spans, bias = part.scores, part.spans, part.bias
    change = scores.score.changed_by if isinstance(scores, ByTile) else None
    if isinstance(scores, Pairwise):
        raw = tiles.pairwise(scores._replace(softcap=None), scores.query, scores.key)
    elif type(scores.score) is Dot:
        raw = tiles.pairwise(Pairwise("mul", *scores[1:3], None, scores.scale), scores.query, scores.key)
    else:
        raw = checked_tile(scores.score, scores.query, scores.key.repeat_interleave(part.groups, dim=1)) * scores.scale
    places = scores.places if isinstance(scores, ByTile) else None
    firsts = [0 if side.start is None else side.start for side in region.sides]
    own = firsts if places is None else [place.start for place in places]
    rule = added = edges = keep = residual = None
    if bias is not None:
        rule = by_pair(problem.bias.function) if problem.bias is not None else None
        numbers = bias._replace(function=None) if rule is not None else bias
        if numbers.tensors or numbers.function is not None:
            added = numbers.tile(EVERY, EVERY, EVERY, EVERY, part.sizes).to(raw.dtype)
    if problem.spans is not None and region.masked:
        residual = by_pair(problem.spans.residual)
    if spans is not None:
        edges = None if _covers(part, Region()) else tuple(spans.edges())
        if spans.residual is not None and residual is None:
            keep = spans.rest(EVERY, EVERY, EVERY, EVERY)
    at = (None if found is None else found.at for found in (rule, residual))
    of_change = None if change is None or own == firsts else _place(own, raw)
    return (raw, scores.softcap, change, *at, added, keep, edges, of_change, _place(firsts, raw))


def _place(firsts: list[int], tile: Tensor) -> list[Tensor]:
    """The place of a block: the indices of its queries, and its other three starts as the sizes of tensors without
    memory. The compiler makes one code for all sizes, knows that none is negative, and takes two equal sizes for one,
    which the numbers in FAR prevent. It computes with numbers that it has read, such as the queries' indices, by
    vectors, and with all that follows from loops, such as |i - j| of two starts, one at a time."""
    queries = torch.arange(firsts[2], firsts[2] + tile.shape[2], device=tile.device)
    counted = (tile.new_empty(()).expand(firsts[dim] + far) for dim, far in FAR.items())
    return [queries, *counted]


def _weights(
    score: Tensor,
    softcap: float | None,
    change: Any,
    bias: Any,
    residual: Any,
    added: Tensor | None,
    keep: Tensor | None,
    edges: tuple[Tensor, ...] | None,
    own: list[Tensor] | None,
    firsts: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of a block without sinks, and the maximum and log_sum of each query. See `tiles.partial`.

    `own`, `firsts`: where the block stands, for the change and for all else, as `_place` gives it; `own` is None where
    they are one. Indices of keys are made here, so that the compiler knows them to be consecutive.
    """
    dtype = score.dtype
    score = capped(score, softcap)
    indices = _indices(firsts, score)
    if change is not None:
        score = change(score, *(indices if own is None else _indices(own, score))).to(dtype).expand_as(score)
    if bias is not None:
        added = bias(*indices).to(dtype) if added is None else bias(*indices).to(dtype) + added
    if added is not None:
        score = score + added
    if edges is not None:
        column = torch.arange(score.shape[-1], device=score.device)
        inside = (column >= edges[0].unsqueeze(-1)) & (column < edges[1].unsqueeze(-1))
        if len(edges) > 2:
            for i in range(edges[2].shape[-1]):
                inside = inside & ((column < edges[2][..., i : i + 1]) | (column >= edges[3][..., i : i + 1]))
        score = torch.where(inside, score, -torch.inf)
    for kept in (keep, None if residual is None else residual(*indices)):
        if kept is not None:
            score = torch.where(kept, score, -torch.inf)
    maximum = score.amax(-1)
    blind = maximum == -torch.inf
    maximum = torch.where(blind, 0.0, maximum)
    above = torch.where(score == -torch.inf, 0.0, (score - maximum.unsqueeze(-1)).exp())
    total = torch.where(blind, 1.0, above.sum(-1))
    return above / total.unsqueeze(-1), maximum, torch.where(blind, torch.inf, total.log())


def _indices(place: list[Tensor], score: Tensor) -> list[Tensor]:
    queries, *counted = place
    extents = []
    for size, (dim, far) in zip(counted, FAR.items(), strict=True):
        if size.shape[0] < far:  # never; it is how the compiler knows
            raise ValueError
        extents.append((size.shape[0] - far, size.shape[0] - far + score.shape[dim], 1))
    batch, head, _, key = indices_of((*extents[:2], (0, 1, 1), extents[2]), score.device)
    return [batch, head, queries.view(1, 1, -1, 1), key]


def _weights_of(kind: Any, given: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor] | None:
    """`_weights`, compiled; None where it is not compiled."""
    kind = (kind, *((t is None) for t in given[2:9]), None if given[7] is None else len(given[7]))
    if kind not in _compiled:
        if _in_a_fork or len(_compiled) >= MOST or not _lock.acquire(blocking=False):
            return None
        try:
            _compiled[kind] = _made(given)
        finally:
            _lock.release()
    compiled = _compiled[kind]
    if compiled is None:
        return None
    try:
        found: tuple[Tensor, Tensor, Tensor] = compiled(*given)
    except Exception:  # of the compiler, of any kind, such as too many forms of one function
        _compiled[kind] = None
        return None
    return found


def _made(given: tuple[Any, ...]) -> Callable[..., Any] | None:
    """The compiled function, if it gives the numbers of the plain one."""
    # a function of its own: PyTorch counts how often it has compiled a function, and gives up
    own = types.FunctionType(_weights.__code__.replace(co_name="weights_of_one_kind"), _weights.__globals__)
    try:
        compiled: Callable[..., Any] = COMPILE(own, dynamic=True, fullgraph=True)
        both = zip(compiled(*given), _weights(*given), strict=True)
        same = all(torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True) for a, b in both)
    except Exception:  # of the compiler, of any kind
        return None
    return compiled if same else None
