"""The steps of a generation, each with its part of the joined matrix, and the mask and padding of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.base.shapes import Sizes, extent, part
from clearhead.biases.base import Part
from clearhead.masks.base import Spans
from clearhead.models.recordings.attention_call import AttentionCall
from clearhead.models.recordings.cached import Link
from clearhead.problem.problem import Problem
from clearhead.problem.words import ALL_WORDS, Words

EVERY = slice(None)


class Step(NamedTuple):
    """A call of a generation, and its part of the joined matrix.

    `queries`: how many of its first queries are in the matrix; the others were rejected, and later ones have their
    places. `end`: the place where the keys of its sequence end. `rows`: see `Cached.before`.
    """

    call: AttentionCall
    link: Link
    rows: Tensor | None
    queries: int
    end: int

    @property
    def problem(self) -> Problem:
        return self.call.inputs.record.problem

    def only(self, rows: Tensor | None) -> Step:
        """This step with these rows of the last step alone."""
        return self if rows is None else self._replace(rows=rows if self.rows is None else self.rows[rows])

    def of_rows(self, tensor: Tensor) -> Tensor:
        """A tensor (B or 1, …) of this call for the rows that continue it."""
        if self.rows is None:
            return tensor
        return tensor.expand(len(self.rows), *tensor.shape[1:]) if tensor.shape[0] == 1 else tensor[self.rows]

    def of_queries(self, tensor: Tensor) -> Tensor:
        """A tensor (B or 1, H or 1, Lq or 1, …) for its rows and queries that count."""
        some = self.of_rows(tensor)[:, :, : self.queries]
        return some.expand(-1, -1, self.queries, *some.shape[3:])


class Placed(NamedTuple):
    """Numbers of each pair, such as a bias, of several calls: placed at their queries and keys, `outside` elsewhere."""

    steps: list[Step]
    tiles: Sequence[Part | None]  # of each call, for its own batch
    outside: float | bool
    shape: tuple[int, int, int, int]

    def part(self, batch: slice, heads: slice, queries: slice, keys: slice) -> Tensor:
        """The part that these slices name."""
        top, bottom, row_step = extent(queries, self.shape[2])
        left, right, column_step = extent(keys, self.shape[3])
        lead = [len(range(size)[side]) for size, side in zip(self.shape, (batch, heads), strict=False)]
        columns, first, parts = max(right - left, 0), 0, []
        of = self.steps[-1].call.query
        nothing = of.new_full((), self.outside, dtype=torch.bool if self.outside is True else torch.float32)
        for step, tile in zip(self.steps, self.tiles, strict=True):
            low, high = max(top, first), min(bottom, first + step.queries)
            if low < high:
                found = nothing.repeat(*lead, high - low, columns)
                start, stop = max(left, step.link.base), min(right, step.link.base + step.link.length)
                if tile is not None and start < stop:
                    places = slice(start - step.link.base, stop - step.link.base)
                    some = step.of_rows(tile(EVERY, heads, slice(low - first, high - first), places))
                    found[..., start - left : stop - left] = part(some, batch)
                parts.append(found)
            first += step.queries
        whole = torch.cat(parts, 2) if parts else nothing.repeat(*lead, 0, columns)
        return whole[:, :, ::row_step, ::column_step]


def refuse_join(name: str, reason: str, instead: str) -> NoReturn:
    raise ClearheadError(f"joined: the calls of {name} do not form one generation: {reason}.\n{instead}.")


def join_spans(steps: list[Step], sizes: Sizes) -> Spans:
    """The mask of each query, by the places of the keys."""
    starts, stops, lows, highs = (list(edges) for edges in zip(*map(_edges, steps), strict=True))
    start, stop = _together(starts, stops)
    gaps = None
    most = max(edge.shape[-1] for edge in lows)
    if most:  # steps with fewer gaps get empty ones, after all keys
        low, high = ([F.pad(t, (0, most - t.shape[-1]), value=sizes.keys) for t in side] for side in (lows, highs))
        gaps = _together(low, high)
    residual = None
    rests = [None if (spans := step.problem.spans) is None or spans.residual is None else spans.rest for step in steps]
    if any(rest is not None for rest in rests):
        residual = Placed(steps, rests, True, sizes.shape).part
    return Spans(start, stop, residual, gaps=gaps)


def _edges(step: Step) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The start and the stop of the keys that a step's queries saw, (B or 1, H or 1, Lq), and the gaps in between."""
    spans, base, uniform = step.problem.spans, step.link.base, step.call.uniform
    if spans is None:
        first = step.call.query.new_zeros(1, 1, 1, dtype=torch.int64)
        spans = Spans(first, first + step.link.length)
    start, stop = (step.of_queries(edge + base) for edge in (spans.start, spans.stop))
    over = stop > step.end
    if uniform is not None:  # these queries saw the empty slots of a static cache too
        over = over & ~step.of_queries(uniform)[..., 0]
    if bool(over.any()):
        refuse_join(
            step.call.name, "a query saw keys that were replaced, or empty slots", "Look at seen[name][i].weights"
        )
    low, high = (start[..., None][..., :0],) * 2
    if spans.gaps is not None:
        low, high = (step.of_queries(edge + base) for edge in spans.gaps)
    return start, stop.clamp(max=step.end), low, high


def _together(one: list[Tensor], other: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Both lists' tensors (B or 1, H or 1, Lq, …), one after the other, with one number of batches and of heads."""
    batch, heads = (max(tensor.shape[side] for tensor in (*one, *other)) for side in (0, 1))
    first, second = (
        torch.cat([tensor.expand(batch, heads, *tensor.shape[2:]) for tensor in side], 2) for side in (one, other)
    )
    return first, second


def join_padding(steps: list[Step], keys: int) -> Words | None:
    """Which positions are words, by the padding of each step."""
    if all(step.call.padding is None for step in steps):
        return None
    last = steps[-1]
    batch, device = len(last.call.query if last.rows is None else last.rows), last.call.query.device
    of_keys = torch.ones(batch, keys, dtype=torch.bool, device=device)
    of_queries = []
    for step in steps:
        words = step.call.padding or ALL_WORDS
        every = torch.ones(batch, step.queries, dtype=torch.bool, device=device)
        of_queries.append(every if words.queries is None else step.of_rows(words.queries)[:, : step.queries])
        if words.keys is not None:
            base = step.link.base
            known = step.of_rows(words.keys)[:, : step.end - base]
            of_keys[:, base : base + known.shape[1]] = known
    queries = torch.cat(of_queries, 1)
    real = Words(*(None if bool(side.all()) else side for side in (queries, of_keys)))
    return None if real == (None, None) else real
