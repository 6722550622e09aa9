"""Packed rows as the padded batch of their sequences, for code that reads weights, such as edits and records."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from clearhead.base.document_edges import DocumentEdges, Part
from clearhead.base.shapes import Sizes, extent
from clearhead.biases.base import Added
from clearhead.masks.base import Mask, map_edges
from clearhead.masks.combined import with_leaves
from clearhead.masks.lengths import Lengths
from clearhead.masks.mask_in_documents import MaskInDocuments
from clearhead.problem.problem import Problem
from clearhead.problem.visible import visible
from clearhead.scores.base import ByTile
from clearhead.scores.change_in_documents import count_in_row


def get_nested_edges(mask: Any) -> DocumentEdges | None:
    """Return the edges of the sequences if this is the mask of nested tensors."""
    edges = mask._document_edges if isinstance(mask, Mask) else None
    return edges if edges is not None and edges.nested else None


def pad_arguments(call: Any) -> Any:
    """Return the arguments of `attention` for the padded batch; the same object for a call without nested tensors."""
    edges = get_nested_edges(call.mask)
    if edges is None:
        return call
    query, key, value = edges.queries.pad(call.query), edges.keys.pad(call.key), edges.keys.pad(call.value)
    lengths = Lengths(edges.count_keys(query.device))

    def pad_mask(leaf: Mask) -> Mask:
        return leaf.mask if isinstance(leaf, MaskInDocuments) else lengths

    align = edges.align_each(call.align)
    return call._replace(query=query, key=key, value=value, mask=with_leaves(call.mask, pad_mask), align=align)


def pad_problem(problem: Problem, edges: DocumentEdges) -> Problem:
    """Return the problem of the padded batch, without a value, from the problem of the packed rows."""
    row = problem.sizes
    sizes = edges.pad_sizes(row)
    scores = problem.scores._replace(query=edges.queries.pad(problem.query), key=edges.keys.pad(problem.key))
    if isinstance(scores, ByTile):
        scores = scores._replace(score=count_in_row(scores.score))
    spans, bias = problem.spans, problem.bias
    assert spans is not None  # a packed row has a mask
    first, count = (t.to(sizes.device).view(-1, 1, 1, 1) for t in (edges.keys.sums[:-1], edges.keys.lengths))

    def pad_edge(edge: Tensor) -> Tensor:
        own = edges.queries.pad(edge if edge.ndim == 4 else edge[..., None]) - first
        own = own.clamp(min=0).minimum(count)
        return own if edge.ndim == 4 else own[..., 0]

    residual = None if spans.residual is None else _pad_part(spans.rest, edges, sizes)
    padded = map_edges(spans, pad_edge)._replace(residual=residual)
    if bias is not None and bias.relative is not None:
        room = row.queries - sizes.queries
        bias = Added(relative=pad(bias.relative, (-room, -room)))
    elif bias is not None and bias.function is not None:
        bias = Added(function=_pad_part(bias.function, edges, sizes), reads=bias.reads)
    found = problem._replace(scores=scores, value=None, sizes=sizes, visible=visible(padded, sizes), bias=bias)
    return found._replace(documents=None)


def _pad_part(part: Part, edges: DocumentEdges, sizes: Sizes) -> Part:
    """Convert a function of parts of the row to one of parts of the padded batch; pairs of no sequence get 0."""

    def fill_batch(batch: slice, heads: slice, *sides: slice) -> Tensor:
        asked = [range(*extent(side, size)) for side, size in zip(sides, sizes[2:4], strict=True)]
        every = []
        for number in range(*extent(batch, sizes.batch)):
            own = []
            for side, sums in zip(asked, edges.numbers, strict=True):
                start, stop = sums[number : number + 2]
                own.append(range(min(start + side.start, stop), min(start + side.stop, stop), side.step))
            tile = part(slice(0, 1), heads, *(slice(r.start, max(r.stop, r.start), r.step) for r in own))
            count = [len(r) for r in own]
            room = [len(side) - n for side, n in zip(asked, count, strict=True)]
            every.append(pad(tile.expand(*tile.shape[:2], *count), (0, room[1], 0, room[0])))
        if every:
            return torch.cat(every)
        return part(slice(0, 1), heads, slice(0, 0), slice(0, 0)).new_zeros(0, 1, 1, 1)

    return fill_batch
