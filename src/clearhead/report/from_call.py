"""A recorded call as a layer of the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from clearhead.base.positions import query_offset
from clearhead.inspection.weights import Weights
from clearhead.problem.problem import Problem
from clearhead.problem.regions import of_sequence
from clearhead.report._words import Shown
from clearhead.report.afar import pyramid_of, thumbnail_of
from clearhead.report.allowed import bias_of, holes_of, spans_of
from clearhead.report.layer import Layer, LeftOut
from clearhead.report.operands import ERROR, rounded, steps_of
from clearhead.report.statistics import THUMBNAIL as THUMBNAIL
from clearhead.report.statistics import array, lazy, statistics
from clearhead.report.why import with_steps
from clearhead.scores.base import Pairwise

MEASURED = 2**22  # pairs of a call whose weights are compared with those of the page
GIVEN = 1024  # the most queries, and keys, of scores that are written as they are


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
) -> Layer | LeftOut:
    """One sequence of a call, padding left out, with the statistics of its weights: one pass over them, or two.

    `error`: how far a weight may be from the call's, about, by rounding query and key; the statistics are of these.
    """
    problem = of_sequence(call.weights.problem, sequence, None if call.padding is None else call.padding[0])
    queries, keys = problem.sizes.queries, problem.sizes.keys
    if problem.lowered is None and max(queries, keys) > GIVEN:
        score = type(problem.scores.score).__name__  # type: ignore[union-attr]
        return LeftOut(
            call.name,
            f"{score} gives each pair's score by tile() alone, and {queries:,} × {keys:,} scores are more than the "
            f"{GIVEN:,} × {GIVEN:,} that a page holds.",
        )
    real = call.padding or (None, None)
    rows, columns = (
        Shown(None if side is None else side[sequence], length, call.name)
        for side, length in zip(real, (queries, keys), strict=True)
    )
    problem, how = _scores(problem, rows, columns, error)
    offset = _offset(problem) if call.kind == "self" else None
    found = statistics(problem, rows, columns, offset is not None)
    start, stop = spans_of(problem, rows, columns)
    layer = Layer(
        name=call.name,
        kind=call.kind,
        **how,
        start=start,
        stop=stop,
        bias=bias_of(problem, rows, columns),
        holes=holes_of(problem, rows, columns),
        logsumexp=rows.of(found.logsumexp, 1),
        entropy=rows.of(found.entropy, 1),
        received=columns.of(found.received, 1),
        distance=None if found.distance is None else rows.of(found.distance, 1),
        thumbnail=np.zeros((problem.sizes.heads, 1, 1), dtype=np.float32),
        query_tokens=rows.labels(query_tokens),
        key_tokens=columns.labels(key_tokens),
        sinks=None if problem.sinks is None else array(problem.sinks.double()),
        position=None if offset is None else _among(columns, offset + int(rows.places[0])),
        alone=found.alone,
        seen=None if found.seen is None else rows.of(found.seen, 1),
    )
    return with_steps(pyramid_of(thumbnail_of(layer, found.peaks), found.cells))


def _scores(problem: Problem, rows: Shown, columns: Shown, error: float) -> tuple[Problem, dict[str, Any]]:
    """The problem with the query and the key of the page, and how a layer says its scores."""
    lowered = problem.lowered
    if lowered is None:
        made = np.stack([array(lazy(problem).scores((0, h)).float()) for h in range(problem.sizes.heads)])
        none = [np.zeros((len(made), len(side.places), 0), dtype=np.float32) for side in (rows, columns)]
        scores = columns.of(rows.of(made, 1), 2)
        return problem, {"query": none[0], "key": none[1], "scale": 1.0, "softcap": None, "scores": scores}
    folded = lowered.folded()
    query, key = folded.query[0].float(), folded.key[0].float()
    shown = folded._replace(query=folded.query[:, :, rows.places].float(), key=folded.key[:, :, columns.places].float())
    steps, measured = steps_of(shown, error), None
    if steps is not None:
        query, key = rounded(query, steps[0]), rounded(key, steps[1])
        of_page = problem._replace(scores=_of_page(folded, query, key))
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


def _of_page(scores: Pairwise, query: Tensor, key: Tensor) -> Pairwise:
    weight = None if scores.weight is None else scores.weight.float()
    return scores._replace(query=query.unsqueeze(0), key=key.unsqueeze(0), weight=weight)


def _offset(problem: Problem) -> int | None:
    """Where query 0 stands among the keys; None where that is not known."""
    sizes = problem.sizes
    if sizes.align is None and sizes.queries != sizes.keys:
        return None
    offset = query_offset(sizes, "the page")
    return int(offset.reshape(-1)[0]) if isinstance(offset, Tensor) else int(offset)


def _among(columns: Shown, place: int) -> int:
    """A place among all keys, among the shown ones: where these follow each other, distances stay as they are."""
    if columns.even:
        return place - int(columns.places[0])
    return place if not 0 <= place <= columns.length else int(columns.before()[place])


def _largest_error(problem: Problem, of_page: Problem, rows: Shown) -> float:
    """How far the page's weights are from the call's, at most: of all queries, or of some where pairs are many."""
    theirs, mine, sizes = lazy(problem), lazy(of_page), problem.sizes
    some = slice(None, None, -(-sizes.heads * sizes.queries * sizes.keys // MEASURED))
    shown = np.isin(np.arange(problem.sizes.queries)[some], rows.places)
    found = 0.0
    for head in range(problem.sizes.heads):
        difference = (theirs[0, head, some] - mine[0, head, some]).abs().nan_to_num()
        found = max(found, float(array(difference.amax(-1))[shown].max(initial=0.0)))
    return found
