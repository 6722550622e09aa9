"""The normal form of a mask: intervals of keys, and their union, intersection and complement."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import and_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clearhead.base.arrays import is_dense, shown
from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.output.text import with_outline
from clearhead.base.shapes import Sizes, broadcasts, extent, part
from clearhead.base.torch_state.mode import get_mode
from clearhead.base.torch_state.tensor_kind import has_vmap_dimension, is_on_host, is_readable, to_host_array
from clearhead.base.user_functions.rules import ByPair, Joined, as_part, entry

MOST = 4  # the most intervals of a query; a mask with more has one hull and a residual

Residual = Callable[[slice, slice, slice, slice], Tensor]
Edges = tuple[Tensor, Tensor]  # starts and stops, int64


@with_outline
class Spans(NamedTuple):
    """The normal form of a mask: an interval of keys for each query, with gaps, and a residual for the rest.

    >>> import torch, clearhead as ch
    >>> class FirstKeys(ch.extend.Mask):
    ...     def lower(self, sizes):
    ...         start = torch.zeros(1, 1, 1, dtype=torch.int64, device=sizes.device)
    ...         return ch.extend.Spans(start, start + min(2, sizes.keys))
    >>> FirstKeys().dense(1, 4)
    tensor([[ True,  True, False, False]])

    The function `of_intervals` and the method `intervals` convert from and to lists of intervals.

    Attributes:
        start: The first key of each query, int64 (B or 1, H or 1, Lq or 1), within [0, Lk].
        stop: One more than the last key, same shape. Where stop ≤ start no key is allowed, and both may have any value.
        residual: A function `residual(batch, heads, queries, keys)` of four slices, which returns this part as a bool
            tensor that broadcasts to it; None where no residual is needed. It is called for the keys from start to stop
            only, and at each call unless the mask has a `signature()` or `depends()`.
        reads: The caller's tensors that the residual reads.
        gaps: The starts and the stops of the intervals that are masked in between, int64 (B or 1, H or 1, Lq or 1, n),
            sorted and disjoint; some may be empty. None where there are no gaps.

    Formula:
        Query i attends to the keys start_i ≤ j < stop_i outside of its gaps at which the residual is True.
    """

    start: Tensor
    stop: Tensor
    residual: Residual | None = None
    reads: tuple[Tensor, ...] = ()
    gaps: Edges | None = None

    @property
    def plain(self) -> bool:
        """Whether the mask is one interval of keys for each query."""
        return self.residual is None and self.gaps is None

    def keep(self, batch: slice, heads: slice, queries: slice, keys: slice, size: int) -> Tensor:
        """Compute the part of the mask at four slices.

        Args:
            batch: The sequences.
            heads: The heads.
            queries: The queries.
            keys: The keys.
            size: Lk.

        Returns:
            A bool tensor of four dimensions that broadcasts to the part.
        """
        start, stop, *gaps = (part(edge, batch, heads, queries) for edge in self.edges())
        positions = torch.arange(*extent(keys, size), device=self.start.device)
        keep = Spans(start, stop, gaps=(gaps[0], gaps[1]) if gaps else None).within(positions)
        return keep if self.residual is None else keep & self.rest(batch, heads, queries, keys)

    def within(self, positions: Tensor) -> Tensor:
        """Compute whether positions of keys are in the intervals of each query, without the residual.

        Args:
            positions: Key indices, int64, (..., keys).

        Returns:
            A bool tensor (B or 1, H or 1, Lq or 1, keys).
        """
        keep = (positions >= self.start.unsqueeze(-1)) & (positions < self.stop.unsqueeze(-1))
        if self.gaps is not None:
            for low, high in zip(*(edge.unbind(-1) for edge in self.gaps), strict=True):
                keep = keep & ~((positions >= low.unsqueeze(-1)) & (positions < high.unsqueeze(-1)))
        return keep

    def pairs(self, size: int) -> Residual:
        """Return `keep` as one function of four slices, which also computes single pairs if the residual does.

        Args:
            size: Lk.

        Returns:
            A function in the form of a residual.
        """
        intervals = self._replace(residual=None)

        def part(*sides: slice) -> Tensor:
            batch, heads, queries, keys = sides
            return intervals.keep(batch, heads, queries, keys, size)

        def at(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            start, stop = (entry(edge, batch, head, query) for edge in (self.start, self.stop))
            keep = (key >= start) & (key < stop)
            for gap in gaps:
                low, high = (entry(edge, batch, head, query) for edge in gap)
                keep = keep & ((key < low) | (key >= high))
            return keep

        gaps = [] if self.gaps is None else list(zip(*(edge.unbind(-1) for edge in self.gaps), strict=True))
        inside = ByPair(part, at)
        return inside if self.residual is None else Joined(and_, inside, self.residual)

    def rest(self, *sides: slice) -> Tensor:
        """Compute the residual of a part, in four dimensions.

        Args:
            sides: Four slices: batch, heads, queries, keys.

        Returns:
            A bool tensor that broadcasts to the part.
        """
        assert self.residual is not None
        keep = self.residual(*sides)
        return keep if keep.ndim == 4 else keep.reshape((1,) * (4 - keep.ndim) + tuple(keep.shape))

    def host(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the starts and stops on the host.

        Returns:
            Two int64 arrays of one shape; both are 0 for a query without an allowed key.
        """
        start, stop = edges_on_host(self.start, self.stop)
        nothing = stop <= start
        if nothing.any():
            return np.where(nothing, 0, start), np.where(nothing, 0, stop)
        if start.shape != stop.shape:
            start, stop = np.broadcast_arrays(start, stop)
        return start, stop

    def intervals(self) -> Edges:
        """Return the intervals of each query as starts and stops, where start₁ ≤ stop₁ ≤ start₂ ≤ ….

        Returns:
            Two int64 tensors (B or 1, H or 1, Lq or 1, n).
        """
        start, stop = self.start.unsqueeze(-1), torch.maximum(self.start, self.stop).unsqueeze(-1)
        if self.gaps is None:
            return start, stop
        # clamp: a gap may reach beyond the hull, or lie outside of it
        low, high = (torch.minimum(torch.maximum(edge, start), stop) for edge in self.gaps)
        start, stop, low, high = _same_rows(start, stop, low, high)
        return torch.cat([start, high], -1), torch.cat([low, stop], -1)

    def edges(self) -> tuple[Tensor, ...]:
        """Return the tensors that hold the starts and stops of intervals and gaps.

        Returns:
            start, stop, and the starts and stops of the gaps if there are gaps.
        """
        return (self.start, self.stop, *(self.gaps or ()))


def map_edges(spans: Spans, change: Callable[[Tensor], Tensor]) -> Spans:
    """Return the spans with `change` applied to each tensor of starts or stops."""
    gaps = None if spans.gaps is None else (change(spans.gaps[0]), change(spans.gaps[1]))
    return spans._replace(start=change(spans.start), stop=change(spans.stop), gaps=gaps)


def all_keys(sizes: Sizes, residual: Residual | None = None, reads: tuple[Tensor, ...] = ()) -> Spans:
    """Return spans of every key for every query, with a residual."""
    start = torch.zeros(1, 1, 1, dtype=torch.int64, device=sizes.device)
    return Spans(start, start + sizes.keys, residual, reads)


def edges_on_host(start: Tensor, stop: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Copy starts and stops to the host; from another device in one copy, because each copy blocks the host."""
    if is_on_host(start) or has_vmap_dimension(start) or has_vmap_dimension(stop):
        return to_host_array(start), to_host_array(stop)
    both = to_host_array(torch.stack(torch.broadcast_tensors(start, stop)))  # type: ignore[no-untyped-call]
    return both[0], both[1]


def of_intervals(start: Tensor, stop: Tensor, keys: int) -> Spans | None:
    """Return the spans of lists of intervals in the form of `Spans.intervals`; None if a query has more than `MOST`."""
    if all(is_readable(edge) and is_on_host(edge) for edge in (start, stop)):
        start, stop = _compact(start, stop, keys)
    count = start.shape[-1]
    if count > MOST:
        return None
    some = stop > start
    first = torch.where(some, start, keys).amin(-1)
    last = torch.where(some, stop, 0).amax(-1)
    first = torch.where(last > 0, first, 0)
    gaps = None if count == 1 else (stop[..., :-1].contiguous(), start[..., 1:].contiguous())
    return Spans(first, last, gaps=gaps)


def _compact(start: Tensor, stop: Tensor, keys: int) -> Edges:
    """Return the same intervals in as few columns as possible, with touching intervals joined."""
    if start.shape[-1] == 1:
        return start, stop
    some = stop > start
    before = torch.where(some, stop, -1).cummax(-1).values.roll(1, -1)
    before[..., 0] = -1
    begins = some & (start > before)
    place = begins.cumsum(-1)  # 0 before the first interval
    count = int(place[..., -1].max()) if place.numel() else 0
    shape = (*start.shape[:-1], count + 1)
    lows = start.new_full(shape, keys).scatter_reduce(-1, place, torch.where(some, start, keys), "amin")
    highs = start.new_zeros(shape).scatter_reduce(-1, place, torch.where(some, stop, 0), "amax")
    lows, highs = lows[..., 1:], highs[..., 1:]
    return (lows, torch.maximum(lows, highs)) if count else (start[..., :1] * 0, start[..., :1] * 0)


def _same_rows(*edges: Tensor) -> list[Tensor]:
    """Expand lists of intervals to the same rows."""
    shape = [max(sizes) if 0 not in sizes else 0 for sizes in zip(*(edge.shape[:-1] for edge in edges), strict=True)]
    return [edge.expand(*shape, edge.shape[-1]) for edge in edges]


def union(one: Edges, two: Edges) -> Edges:
    """Return the union of two lists of n and m intervals: n + m intervals."""
    a, b, c, d = _same_rows(*one, *two)
    start, order = torch.cat([a, c], -1).sort(-1)
    stop = torch.cat([b, d], -1).gather(-1, order)
    reach = stop.cummax(-1).values.roll(1, -1)  # the largest stop of the intervals before this one
    reach = torch.where(torch.arange(reach.shape[-1], device=reach.device) == 0, 0, reach)
    start = torch.maximum(start, reach)
    return start, torch.maximum(start, stop)


def intersection(one: Edges, two: Edges, keys: int) -> Edges:
    """Return the intersection of two lists of n and m intervals: n + m − 1 intervals."""
    a, b, c, d = _same_rows(*one, *two)
    count = a.shape[-1] + c.shape[-1] - 1
    start = torch.maximum(a.unsqueeze(-1), c.unsqueeze(-2)).flatten(-2)
    stop = torch.minimum(b.unsqueeze(-1), d.unsqueeze(-2)).flatten(-2)
    some = stop > start
    start, order = torch.where(some, start, keys).sort(-1)  # sorts empty intervals to the end
    stop = torch.where(some, stop, keys).gather(-1, order)
    return start[..., :count], stop[..., :count]


def complement(start: Tensor, stop: Tensor, keys: int) -> Edges:
    """Return the complement of n intervals in [0, keys): n + 1 intervals."""
    start, stop = _same_rows(start, stop)
    low, high = start.new_zeros(*start.shape[:-1], 1), start.new_full((*start.shape[:-1], 1), keys)
    return torch.cat([low, stop], -1), torch.cat([start, high], -1)


def check_spans(spans: Any, sizes: Sizes, who: str) -> Spans:
    """Return the normal form that a function `who` returned, after checks of its sizes, on which engines rely.

    The results of the residual are checked at each call.
    """
    if not isinstance(spans, Spans):
        raise ClearheadError(f"{who} gave a {type(spans).__name__}; expected Spans(start, stop).")
    gaps = () if spans.gaps is None else tuple(spans.gaps)
    for name, edge in zip(("start", "stop", "gaps", "gaps"), (spans.start, spans.stop, *gaps), strict=False):
        depth = 4 if name == "gaps" else 3
        fits = is_dense(edge) and edge.ndim == depth and broadcasts(edge.shape[:3], sizes.shape[:3])
        if not fits or edge.dtype != torch.int64 or edge.device != sizes.device:
            raise ShapeError(
                f"{who} gave {name} {shown(edge)}; expected int64 on {sizes.device}, (B or 1, H or 1, Lq or 1), "
                f"and one more axis for gaps, where (B, H, Lq) = {sizes.shape[:3]}.\n"
                "Give positions (Lq,) as view(1, 1, -1)."
            )
    if gaps and (len(gaps) != 2 or gaps[0].shape != gaps[1].shape or not _may_be_sorted(*gaps)):
        raise ShapeError(f"{who} gave gaps that are not sorted and disjoint; expected start₁ ≤ stop₁ ≤ start₂ ≤ ….")
    found: Spans = _move_empty_intervals(spans)
    residual = found.residual
    if residual is None or get_mode().compiled or getattr(residual, "func", None) is _checked_residual:
        return found
    return found._replace(residual=partial(_checked_residual, residual, sizes, who))


def _may_be_sorted(start: Tensor, stop: Tensor) -> bool:
    """Return False if the edges of gaps can be read at once, and are not sorted and disjoint."""
    known = is_on_host(start) and is_readable(start)
    return not known or bool((torch.stack((start, stop), -1).flatten(-2).diff() >= 0).all())


def _move_empty_intervals(spans: Spans) -> Spans:
    """Set the edges of empty intervals to 0: code that indexes by an edge must not read outside of the keys.

    The spans stay the same object if their values can be read at once and no such edge exists.
    """
    some = spans.stop > spans.start
    known = is_readable(some) and is_on_host(some)
    if known and not bool((~some & ((spans.start | spans.stop) != 0)).any()):
        return spans
    return spans._replace(start=spans.start * some, stop=spans.stop * some)


def _checked_residual(residual: Residual, sizes: Sizes, who: str, *sides: slice) -> Tensor:
    """Compute the residual of a part, and raise unless it broadcasts to the part."""
    asked = [len(range(size)[side]) for size, side in zip(sizes.shape, sides, strict=True)]
    return as_part(residual(*sides), asked, sizes.device, f"{who}: its residual", boolean=True)
