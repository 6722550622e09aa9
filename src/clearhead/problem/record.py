"""Records: problems that outlive their calls, for lazy weights."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from clearhead.base.arrays import check_memories
from clearhead.base.errors import ClearheadError
from clearhead.base.output.text import with_outline
from clearhead.base.shapes import part
from clearhead.base.torch_state.mode import CURRENT
from clearhead.base.torch_state.modules import Change, Module, with_parameters
from clearhead.base.torch_state.torch_private import uncounted, whole_of
from clearhead.base.torch_state.versions import Versions
from clearhead.biases.base import Added
from clearhead.masks.base import Residual, Spans
from clearhead.problem.checked import checked
from clearhead.problem.problem import Problem
from clearhead.problem.reads import tensors_in
from clearhead.problem.visible import Later, Visible
from clearhead.scores.base import ByTile, Pairwise

EVERY = (slice(None),) * 4


@with_outline
class Record(NamedTuple):
    """A detached problem without its value, and the tensors that it reads and a user may still write to."""

    problem: Problem
    reads: Versions
    copied: bool  # True: all tensors are copies, except those in `reads`, which the problem's functions read

    def check(self) -> None:
        """Raise if a tensor has been written to, or its memory freed, since the call."""
        check_reads(self.reads, _by_functions(self.problem) if self.copied else tensors_of(self.problem))
        if self.copied:
            check_memories((f"the {name} of the recorded call", tensor) for name, tensor in tensors_of(self.problem))

    def __reduce__(self) -> Any:  # replaces a residual, which may be a function that pickle rejects
        problem, visible = self.problem, self.problem.visible
        if visible is not None:
            spans = _written_out(visible.spans)
            problem = problem._replace(visible=visible._replace(spans=spans))
        return _again, (problem, self.reads, self.copied)


def _again(problem: Problem, reads: Versions, copied: bool) -> Record:
    """Unpickle a record. Writes to its tensors count from now on, unless one was written to before the pickling."""
    if reads.written() is None:
        reads = Versions(_by_functions(problem) if copied else tensors_of(problem))
    return Record(checked(problem, "a record that was unpickled"), reads, copied)


def check_reads(reads: Versions, now: Iterable[tuple[str, Tensor]]) -> None:
    """Raise if a tensor that a recorded call reads has been written to, or replaced, since the call."""
    found = reads.changed(now)
    if found is not None:
        name, tensor = found
        raise ClearheadError(
            f"the {name} of the recorded call, shape {tuple(tensor.shape)}, was modified in place after the call, so "
            "its attention weights are lost.\nRead attention_weights before, or pass a copy to the module: "
            "tensor.clone()."
        )


def record(problem: Problem, *, copy: bool = False, fresh: bool = False) -> Record:
    """Store a problem.

    Args:
        problem: The problem.
        copy: Whether to copy every tensor, because PyTorch does not count writes to it, or writes are expected.
            Otherwise only tensors are copied that an optimizer writes to, and tensors of inference mode, which count no
            writes.
        fresh: Whether only the caller holds query and key, so that they need no copy.
    """
    change: Change = copied if copy else _detached
    scores = problem.scores
    query, key = scores.query, scores.key
    if copy or (not fresh and (query.is_inference() or key.is_inference())):
        query, key = copied(query), copied(key)
    else:
        query, key = query.detach(), key.detach()
    if isinstance(scores, ByTile):
        scores = scores._replace(score=frozen(scores.score, change), query=query, key=key)
    else:
        weight = None if scores.weight is None else change(scores.weight)
        scores = Pairwise(scores.phi, query, key, weight, scores.scale, scores.softcap)  # faster than _replace
    bias, visible, sinks = problem.bias, problem.visible, problem.sinks
    if bias is not None:
        dense = None if bias.dense is None else change(bias.dense)
        relative = None if bias.relative is None else change(bias.relative)
        bias = Added(dense, relative, bias.function, bias.reads)
    if visible is not None:
        spans, edges = visible.spans, visible.known
        if copy and spans.reads:
            spans = _written_out(spans)
        if copy and edges is not None and not isinstance(edges, Later):  # the edges may share the spans' memory
            edges = edges[0].copy(), edges[1].copy()
        gaps = None if spans.gaps is None else (change(spans.gaps[0]), change(spans.gaps[1]))
        spans = Spans(change(spans.start), change(spans.stop), spans.residual, spans.reads, gaps)
        visible = Visible(spans, edges, visible.unseen, visible.memo)
    sinks = None if sinks is None else change(sinks)
    kept = problem._replace(
        scores=scores, value=None, visible=visible, bias=bias, sinks=sinks, dropout_p=0.0, seed=None, mode=CURRENT
    )
    return Record(kept, Versions(_by_functions(kept) if copy else tensors_of(kept)), copy)


def now(problem: Problem) -> Record:
    """Return a record that is read before anything can be written to."""
    return Record(problem, Versions(_by_functions(problem)), copied=True)


def copied(tensor: Tensor) -> Tensor:
    """Return a detached copy, which is no inference tensor even in inference mode."""
    with torch.inference_mode(False):  # autograd rejects inference tensors
        return tensor.detach().clone()


def frozen(module: Module, change: Change = copied) -> Module:
    """Return a copy of a score or a bias without trainable parameters, in the same mode (training or evaluation)."""
    return with_parameters(module, lambda p: nn.Parameter(copied(p), requires_grad=False), change, every=True)


def _written_out(spans: Spans) -> Spans:
    """Return the spans with a residual whose values are read now."""
    if spans.residual is None:
        return spans
    return spans._replace(residual=at_once(copied(spans.rest(*EVERY))), reads=())


def at_once(keep: Tensor) -> Residual:
    """Return a residual over a matrix that exists already."""
    return partial(part, keep)


def _detached(tensor: Tensor) -> Tensor:
    """Return the tensor detached; a copy if an optimizer step or an uncounted write may change it."""
    base = whole_of(tensor)
    trained = isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad)
    return copied(tensor) if trained or uncounted(tensor) else tensor.detach()


def tensors_of(problem: Problem) -> list[tuple[str, Tensor]]:
    """Return every tensor of a problem, with the name of its part of the problem."""
    scores = problem.scores
    found = [("query", scores.query), ("key", scores.key)]
    if isinstance(scores, Pairwise) and scores.weight is not None:
        found.append(("score", scores.weight))
    if problem.visible is not None:
        found.extend(zip(repeat("mask"), problem.visible.spans.edges()))
    if problem.bias is not None:
        found.extend(zip(repeat("bias, or float mask,"), problem.bias.tensors))
    if problem.sinks is not None:
        found.append(("sinks", problem.sinks))
    return found + _by_functions(problem)


def _by_functions(problem: Problem) -> list[tuple[str, Tensor]]:
    """Return the tensors that the problem's functions read, which a copy of the problem does not hold."""
    found: list[tuple[str, Tensor]] = []
    if isinstance(problem.scores, ByTile):
        found.extend(zip(repeat("score"), tensors_in(problem.scores.score)))
    if problem.visible is not None:
        found.extend(zip(repeat("mask"), problem.visible.spans.reads))
    if problem.bias is not None:
        found.extend(zip(repeat("bias"), problem.bias.reads))
    return found
