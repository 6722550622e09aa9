"""The problem of a padded batch, of that of its sequences in one packed row: for looks at the weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from clearhead.base.ragged import Sequences, padded
from clearhead.base.shapes import Sizes, extent
from clearhead.biases.base import Added
from clearhead.masks.base import Spans
from clearhead.problem.problem import Problem
from clearhead.problem.visible import visible
from clearhead.scores import ragged
from clearhead.scores.base import ByTile

Part = Callable[[slice, slice, slice, slice], Tensor]


def unpacked(problem: Problem, of: Sequences) -> Problem:
    """The same attention as a padded batch: a query beyond its sequence sees no key. It has no value."""
    sizes = of.padded(problem.sizes)._replace(align=None)
    queries, keys = (edges.to(sizes.device) for edges in (of.queries, of.keys))
    scores = problem.scores._replace(
        query=padded(problem.query, queries, sizes.queries), key=padded(problem.key, keys, sizes.keys)
    )
    if isinstance(scores, ByTile):
        scores = scores._replace(score=ragged.unpacked(scores.score))
    spans, bias = problem.spans, problem.bias
    assert spans is not None  # a packed row has a mask

    def moved(edge: Tensor) -> Tensor:
        rows = edge if edge.ndim == 4 else edge[..., None]  # (1, H or 1, T, n)
        own = padded(rows, queries, sizes.queries) - keys[:-1].view(-1, 1, 1, 1)
        own = own.clamp(min=0).minimum(keys.diff().view(-1, 1, 1, 1))
        return own if edge.ndim == 4 else own[..., 0]

    gaps = None if spans.gaps is None else (moved(spans.gaps[0]), moved(spans.gaps[1]))
    rest = None if spans.residual is None else _by_sequence(spans.rest, of, sizes)
    return problem._replace(
        scores=scores,
        value=None,
        sizes=sizes,
        visible=visible(Spans(moved(spans.start), moved(spans.stop), rest, spans.reads, gaps), sizes),
        bias=None if bias is None else _bias(bias, problem.sizes, sizes, of),
    )


def _bias(bias: Added, row: Sizes, sizes: Sizes, of: Sequences) -> Added:
    if bias.relative is not None:
        room = row.queries - sizes.queries
        return Added(relative=pad(bias.relative, (-room, -room)))
    assert bias.function is not None
    return Added(function=_by_sequence(bias.function, of, sizes), reads=bias.reads)


def _by_sequence(part: Part, of: Sequences, sizes: Sizes) -> Part:
    """A function of parts of the packed row as one of parts of the padded batch, with 0 for pairs of no sequence."""

    def found(batch: slice, heads: slice, queries: slice, keys: slice) -> Tensor:
        sides = [range(*extent(side, size)) for side, size in zip((queries, keys), sizes[2:4], strict=True)]
        every = []
        for number in range(*extent(batch, sizes.batch)):
            edges = of.query_edges[number], of.key_edges[number]
            inside = [_inside(side, *edge) for side, edge in zip(sides, edges, strict=True)]
            numbers = part(slice(0, 1), heads, *(slice(r.start, max(r.stop, r.start), r.step) for r in inside))
            count = [len(r) for r in inside]
            numbers = numbers.expand(*numbers.shape[:2], *count)
            every.append(pad(numbers, (0, len(sides[1]) - count[1], 0, len(sides[0]) - count[0])))
        if every:
            return torch.cat(every)
        return part(slice(0, 1), heads, slice(0, 0), slice(0, 0)).new_zeros(0, 1, 1, 1)

    return found


def _inside(side: range, start: int, stop: int) -> range:
    """The places in the packed row of those of these places of a sequence that it has."""
    return range(min(start + side.start, stop), min(start + side.stop, stop), side.step)
