"""A problem as tensors and numbers, which autograd saves and a custom operator takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.base.output.text import with_outline
from clearhead.base.shapes import Sizes, part
from clearhead.base.torch_state.mode import CURRENT
from clearhead.biases.base import Added
from clearhead.masks.base import Spans, check_spans
from clearhead.problem.problem import Problem
from clearhead.problem.visible import visible
from clearhead.scores.base import Pairwise

_NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")  # a placeholder for an operand


@with_outline
class Operands(NamedTuple):
    """The differentiable tensors of a problem; or one gradient for each, and None for a gradient that is not wanted."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    weight: Tensor | None = None
    dense: Tensor | None = None
    relative: Tensor | None = None
    sinks: Tensor | None = None


def operands(problem: Problem) -> Operands:
    """The differentiable tensors of a problem."""
    scores, added = problem.scores, problem.bias or Added()
    weight = scores.weight if isinstance(scores, Pairwise) else None
    return Operands(scores.query, scores.key, problem.value, weight, added.dense, added.relative, problem.sinks)


def with_operands(problem: Problem, tensors: Sequence[Tensor | None]) -> Problem:
    """The same problem over other tensors."""
    query, key, value, weight, dense, relative, sinks = tensors
    assert query is not None and key is not None
    scores: Any = problem.scores
    more = {"weight": weight} if isinstance(scores, Pairwise) else {}
    scores = scores._replace(query=query, key=key, **more)
    bias = None if problem.bias is None else problem.bias._replace(dense=dense, relative=relative)
    return problem._replace(scores=scores, value=value, sinks=sinks, bias=bias)


def without_operands(problem: Problem) -> Problem:
    """The problem without its operands, for a graph to keep: autograd saves and frees the operands themselves."""
    return with_operands(problem._replace(mode=CURRENT), (_NOTHING, _NOTHING, None, None, None, None, None))


def folded(problem: Problem) -> Problem:
    """The same problem with the weight of a dot product in its query, or itself where there is no such weight."""
    scores = problem.scores
    if not isinstance(scores, Pairwise) or scores.weight is None or scores.phi != "mul":
        return problem
    return problem._replace(scores=scores.folded())


def unfolded(gradients: Operands, problem: Problem, weight: bool) -> Operands:
    """Gradients of the problem from those of the folded one. `weight`: whether the weight's gradient is wanted."""
    lowered, of_query = problem.lowered, gradients.query
    assert lowered is not None and lowered.weight is not None and of_query is not None
    of_weight = (of_query * problem.query).sum((0, 1, 2)) if weight else None
    return gradients._replace(query=of_query * lowered.weight, weight=of_weight)


def in_dtypes(gradients: Operands, of: Operands) -> tuple[Tensor | None, ...]:
    """Each gradient in its operand's dtype."""
    pairs = zip(gradients, of, strict=True)
    return tuple(g if g is None or t is None or g.dtype is t.dtype else g.to(t.dtype) for g, t in pairs)


PACKED = "clearhead::attend"  # the source of unpacked problems, as an error names it
# the parts of a packed problem as the arguments of a custom operator; the tensors stand first
SCHEMA = (
    "Tensor query, Tensor key, Tensor value, Tensor? weight, Tensor? dense, Tensor? relative, Tensor? sinks, "
    "Tensor? start, Tensor? stop, Tensor? gap_start, Tensor? gap_stop, Tensor? keep, Tensor? seed, "
    "str phi, float scale, float? softcap, float dropout_p"
)
TENSORS = SCHEMA.count("Tensor")
Tensors = tuple[Tensor | None, ...]  # operands, the spans' start, stop and gaps, the residual, the dropout's seed
Numbers = tuple[str, float, float | None, float]  # φ, scale, softcap, dropout_p


def packed(problem: Problem) -> tuple[Tensors, Numbers]:
    """A lowered problem in parts. A mask's residual and a bias by a function become tensors of the same size."""
    spans, lowered, every = problem.spans, problem.lowered, (slice(None),) * 4
    assert lowered is not None
    keep = None
    if spans is not None and spans.residual is not None:
        keep = spans.rest(*every)
    if problem.bias is not None and problem.by_function:
        problem = problem._replace(bias=Added(problem.bias.tile(*every, problem.sizes)))
    edges = (None, None, None, None) if spans is None else (*spans.edges(), None, None)[:4]
    numbers = lowered.phi, lowered.scale, lowered.softcap, problem.dropout_p
    return (*operands(problem), *edges, keep, problem.seed), numbers


def unpacked(
    tensors: Sequence[Tensor | None], numbers: Numbers, wanted: Sequence[bool], length: int | None = None
) -> Problem:
    """The problem of these parts. Its operands are new leaves, and those of them that are `wanted` need a gradient.
    `length`: the length of the whole sequence, where query and key are a part of it while mask and bias are whole."""
    leaves = [None if t is None else t.detach().requires_grad_(w) for t, w in zip(tensors, wanted, strict=False)]
    start, stop, gap_start, gap_stop, keep, seed = tensors[len(leaves) :]
    query, key, value, weight, dense, relative, sinks = leaves
    phi, scale, softcap, dropout_p = numbers
    assert query is not None and key is not None
    sides = (query.shape[2], key.shape[2]) if length is None else (length, length)
    sizes = Sizes(query.shape[0], query.shape[1], *sides, query.device)
    allowed = None
    if start is not None and stop is not None:
        residual = None if keep is None else lambda *sides: part(keep, *sides)
        gaps = None if gap_start is None or gap_stop is None else (gap_start, gap_stop)
        allowed = visible(check_spans(Spans(start, stop, residual, gaps=gaps), sizes, PACKED), sizes, PACKED)
    bias = Added(dense, relative) if dense is not None or relative is not None else None
    scores = Pairwise(phi, query, key, weight, scale, softcap)  # type: ignore[arg-type]
    return Problem(scores, value, sizes, allowed, bias, sinks, dropout_p, seed)
