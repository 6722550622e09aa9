"""A recorded call as a layer of the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from clearhead.base.positions import query_offset
from clearhead.problem.problem import Problem
from clearhead.problem.regions import of_sequence
from clearhead.problem.words import ALL_WORDS
from clearhead.report._blocks import map_codes
from clearhead.report._words import Shown, list_shown
from clearhead.report.allowed import bias_of, holes_of, spans_of
from clearhead.report.layer import ROWS, Array, Layer, LeftOut, Pyramid, masked_heads, of_head, seen_keys
from clearhead.report.operands import ERROR, rounded, steps_of
from clearhead.report.statistics import THUMBNAIL, array, cells_of, lazy, statistics
from clearhead.report.why import with_steps

MEASURED = 2**22  # pairs of a call whose weights are compared with those of the page
GIVEN = 1024  # the most queries, and keys, of scores that are written as they are


def layer_from_call(
    call: Any, query_tokens: Sequence[str], key_tokens: Sequence[str], sequence: int = 0, error: float = ERROR
) -> Layer | LeftOut:
    """One sequence of a recorded call without padding, and with the statistics of its weights, in one or two passes.

    `error`: about how far rounding of query and key may move a weight. The statistics are those of the rounded tensors.
    """
    problem = of_sequence(call.weights.problem, sequence, (call.padding or ALL_WORDS).queries)
    queries, keys = problem.sizes.queries, problem.sizes.keys
    if not problem.sizes.heads or not problem.query.shape[-1]:
        return LeftOut(call.name, f"its query has shape {tuple(problem.query.shape)}, which holds no number.")
    if problem.lowered is None and max(queries, keys) > GIVEN:
        score = type(problem.scores.score).__name__  # type: ignore[union-attr]
        return LeftOut(
            call.name,
            f"{score} gives each pair's score by tile() alone, and {queries:,} × {keys:,} scores are more than the "
            f"{GIVEN:,} × {GIVEN:,} that a page holds.",
        )
    rows, columns = list_shown(call, sequence)
    problem, how = _scores(problem, rows, columns, error)
    offset = _offset(problem) if call.kind == "self" else None
    fields, peaks, cells = statistics(problem, rows, columns, offset is not None)
    start, stop = spans_of(problem, rows, columns)
    layer = Layer(
        name=call.name,
        kind=call.kind,
        **how,
        **fields,
        start=start,
        stop=stop,
        bias=bias_of(problem, rows, columns),
        holes=holes_of(problem, rows, columns),
        thumbnail=np.zeros((problem.sizes.heads, 1, 1), dtype=np.float32),
        query_tokens=rows.labels(query_tokens),
        key_tokens=columns.labels(key_tokens),
        sinks=None if problem.sinks is None else array(problem.sinks.double()),
        position=None if offset is None else _among(columns, offset + int(rows.places[0])),
    )
    return with_steps(_pyramid_of(_thumbnail_of(layer, peaks), cells))


def _scores(problem: Problem, rows: Shown, columns: Shown, error: float) -> tuple[Problem, dict[str, Any]]:
    """The problem with the query and the key of the page, and the fields of `Layer` that describe its scores."""
    lowered = problem.lowered
    if lowered is None:
        made = np.stack([array(lazy(problem).scores((0, h)).float()) for h in range(problem.sizes.heads)])
        none = [np.zeros((len(made), len(side.places), 0), dtype=np.float32) for side in (rows, columns)]
        given = columns.of(rows.of(made, 1), 2)
        return problem, {"query": none[0], "key": none[1], "scale": 1.0, "softcap": None, "scores": given}
    folded = lowered.folded()
    query, key = folded.query[0].float(), folded.key[0].float()
    shown = folded._replace(query=folded.query[:, :, rows.places].float(), key=folded.key[:, :, columns.places].float())
    steps, measured = steps_of(shown, error), None
    if steps is not None:
        query, key = rounded(query, steps[0]), rounded(key, steps[1])
        weight = None if folded.weight is None else folded.weight.float()
        scores = folded._replace(query=query.unsqueeze(0), key=key.unsqueeze(0), weight=weight)
        of_page = problem._replace(scores=scores)
        measured = _largest_error(problem, of_page, rows)
        problem = of_page
    return problem, {
        "query": rows.of(array(query), 1),
        "key": columns.of(array(key), 1),
        "scale": float(folded.scale),
        "softcap": folded.softcap,
        "phi": folded.phi,
        "weight": None if folded.weight is None else array(folded.weight.double()),
        "operand_steps": None if steps is None else (array(steps[0]), array(steps[1])),
        "error": measured,
    }


def _offset(problem: Problem) -> int | None:
    """The position of query 0 among the keys; None where it is not known."""
    sizes = problem.sizes
    if not problem.has_positions or (problem.documents is not None and not problem.documents.same):
        return None
    offset = query_offset(sizes, "the page")
    return int(offset.reshape(-1)[0]) if isinstance(offset, Tensor) else int(offset)


def _among(columns: Shown, place: int) -> int:
    """The place among the shown keys of a place among all keys. Where they are consecutive, distances stay the same."""
    if columns.even:
        return place - int(columns.places[0])
    return place if not 0 <= place <= columns.length else int(columns.before()[place])


def _largest_error(problem: Problem, of_page: Problem, rows: Shown) -> float:
    """The largest difference of the page's weights from the call's, over all queries, or over some of many."""
    theirs, mine, sizes = lazy(problem), lazy(of_page), problem.sizes
    some = slice(None, None, -(-sizes.heads * sizes.queries * sizes.keys // MEASURED))
    shown = np.isin(np.arange(problem.sizes.queries)[some], rows.places)
    found = 0.0
    for head in range(problem.sizes.heads):
        difference = (theirs[0, head, some] - mine[0, head, some]).abs().nan_to_num()
        found = max(found, float(array(difference.amax(-1))[shown].max(initial=0.0)))
    return found


def _thumbnail_of(layer: Layer, peaks: Array) -> Layer:
    """The layer with its thumbnail: the largest w_ij · n_i of each cell, where n_i keys may be seen by query i.

    `peaks`: (H, Lq, columns), the largest weight of each query in each column of cells.
    """
    per_row, per_column = (-(-length // THUMBNAIL) for length in layer.shape)
    counts, _ = seen_keys(layer)
    times = np.maximum.reduceat(peaks * counts[..., None], np.arange(0, layer.shape[0], per_row), 1)
    seen = np.stack([_cells_seen(layer, head, per_row, per_column) for head in range(masked_heads(layer))])
    return replace(layer, thumbnail=np.where(seen, times, -1.0).astype(np.float32))


def _pyramid_of(layer: Layer, cells: tuple[Array, Array] | None) -> Layer:
    """The layer with its pyramid: the largest and the mean weight of each cell, as codes, where `cells` has them."""
    if cells is None:
        return layer
    per_row, per_column = cells_of(*layer.shape) or (1, 1)
    masks = [_cells_seen(layer, head, per_row, per_column) for head in range(masked_heads(layer))]
    seen = masks * layer.heads if len(masks) == 1 else masks
    largest, mean = (np.stack([map_codes(m, s) for m, s in zip(each, seen, strict=True)]) for each in cells)
    return replace(layer, pyramid=Pyramid(largest, mean, per_row, per_column))


def _cells_seen(layer: Layer, head: int, per_row: int, per_column: int) -> Array:
    """Whether some pair of each cell is allowed, bool (rows, columns)."""
    queries, keys = layer.shape
    if layer.bias is None and not layer.holes:
        return _of_spans(layer, head, per_row, per_column)
    band = per_row * max(1, ROWS // per_row)
    columns = np.arange(0, keys, per_column)
    found = []
    for first in range(0, queries, band):
        seen = np.logical_or.reduceat(layer.allowed(head, first, min(first + band, queries)), columns, 1)
        found.append(np.logical_or.reduceat(seen, np.arange(0, len(seen), per_row), 0))
    return np.concatenate(found)


def _of_spans(layer: Layer, head: int, per_row: int, per_column: int) -> Array:
    """The same for spans alone, in O(Lq + cells): a cell is seen where an interval has begun and has not ended."""
    queries, keys = layer.shape
    start, stop = (np.clip(of_head(edge, head), 0, keys) for edge in (layer.start, layer.stop))
    some = stop > start
    row = np.arange(queries)[some] // per_row
    change = np.zeros((-(-queries // per_row), -(-keys // per_column) + 1), dtype=np.int64)
    np.add.at(change, (row, start[some] // per_column), 1)
    np.add.at(change, (row, -(-stop[some] // per_column)), -1)
    seen: Array = change[:, :-1].cumsum(1) > 0
    return seen
