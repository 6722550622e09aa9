"""A problem that outlives its call: what is kept of it to look at its weights later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor, nn

from clearhead.base.errors import ClearheadError
from clearhead.base.shapes import part
from clearhead.base.versions import Versions
from clearhead.biases.base import Added
from clearhead.masks.base import Spans
from clearhead.problem.problem import Problem
from clearhead.problem.reads import tensors_in
from clearhead.scores.base import ByTile, Score, with_parameters

EVERY = (slice(None),) * 4
Change = Callable[[Tensor], Tensor]


class Record(NamedTuple):
    """A detached problem without its value, and what it reads that somebody may still write to."""

    problem: Problem
    reads: Versions

    def check(self) -> None:
        """Raise where something has been written to since the call."""
        check_reads(self.reads)


def check_reads(reads: Versions) -> None:
    """Raise where something that a recorded call reads, by its name, has been written to since the call."""
    found = reads.written()
    if found is not None:
        name, tensor = found
        raise ClearheadError(
            f"the {name} of the recorded call, shape {tuple(tensor.shape)}, was modified in place after it: its "
            "attention weights can't be computed any more.\nRead what you need of attention_weights before, or pass a "
            "copy of it to the module: tensor.clone()."
        )


def record(problem: Problem, *, copy: bool = False, fresh: bool = False) -> Record:
    """Keep a problem. `copy`: of every number, for what writes cannot be noticed, or are to be expected.

    Else only what an optimizer writes to is copied, and what counts no writes: tensors of inference mode, unless they
    are `fresh`, the query and key of nobody but the caller.
    """
    change: Change = _copy if copy else _detach
    scores = problem.scores
    of_inputs: Change = _copy if copy or (not fresh and scores.query.is_inference()) else Tensor.detach
    scores = scores._replace(query=of_inputs(scores.query), key=of_inputs(scores.key))
    if isinstance(scores, ByTile):
        scores = scores._replace(score=frozen(scores.score, change))
    elif scores.weight is not None:
        scores = scores._replace(weight=change(scores.weight))
    bias, visible, sinks = problem.bias, problem.visible, problem.sinks
    if bias is not None:
        dense, relative = (None if t is None else change(t) for t in (bias.dense, bias.relative))
        bias = Added(dense, relative, bias.function, bias.reads)
    if visible is not None:
        edges = visible.edges
        if copy and edges is not None:  # which may share the spans' memory
            edges = edges[0].copy(), edges[1].copy()
        visible = visible._replace(spans=_spans(visible.spans, change, copy), edges=edges)
    kept = problem._replace(
        scores=scores,
        value=None,
        visible=visible,
        bias=bias,
        sinks=None if sinks is None else change(sinks),
        dropout_p=0.0,
        seed=None,
    )
    return Record(kept, Versions(_by_functions(kept) if copy else _all(kept)))


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def frozen(score: Score, change: Change = _copy) -> Score:
    """A copy of a score that nothing trains."""
    return with_parameters(score, lambda p: nn.Parameter(p.detach().clone(), requires_grad=False), change)


def _spans(spans: Spans, change: Change, copy: bool) -> Spans:
    residual, reads = spans.residual, spans.reads
    if residual is not None and copy and reads:
        keep, reads = spans.rest(*EVERY).clone(), ()
        residual = lambda *sides: part(keep, *sides)  # noqa: E731
    return Spans(change(spans.start), change(spans.stop), residual, reads)


def _detach(tensor: Tensor) -> Tensor:
    """Detached; a copy of what a later optimizer step, or an unseen write, changes."""
    base = tensor if tensor._base is None else tensor._base
    trained = isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad)
    return _copy(tensor) if trained or tensor.is_inference() else tensor.detach()


def _all(problem: Problem) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a problem, with the name of what it is a part of."""
    yield "query", problem.query
    yield "key", problem.key
    if problem.lowered is not None and problem.lowered.weight is not None:
        yield "score", problem.lowered.weight
    if problem.spans is not None:
        yield from (("mask", edge) for edge in problem.spans[:2])
    yield from (("bias, or float mask,", tensor) for tensor in problem.added)
    if problem.sinks is not None:
        yield "sinks", problem.sinks
    yield from _by_functions(problem)


def _by_functions(problem: Problem) -> Iterator[tuple[str, Tensor]]:
    """The tensors that the problem's functions read, which no copy of the problem holds."""
    if isinstance(problem.scores, ByTile):
        yield from (("score", tensor) for tensor in tensors_in(problem.scores.score))
    if problem.spans is not None:
        yield from (("mask", tensor) for tensor in problem.spans.reads)
    if problem.bias is not None:
        yield from (("bias", tensor) for tensor in problem.bias.reads)
