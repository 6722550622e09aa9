"""A problem as tensors and numbers, for autograd and custom operators."""

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
    """The differentiable tensors of a problem, or a gradient for each; None for a gradient that is not wanted."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    weight: Tensor | None = None
    dense: Tensor | None = None
    relative: Tensor | None = None
    sinks: Tensor | None = None


def operands(problem: Problem) -> Operands:
    """Return the differentiable tensors of a problem."""
    scores, added = problem.scores, problem.bias or Added()
    weight = scores.weight if isinstance(scores, Pairwise) else None
    return Operands(scores.query, scores.key, problem.value, weight, added.dense, added.relative, problem.sinks)


def with_operands(problem: Problem, tensors: Sequence[Tensor | None]) -> Problem:
    """Return the problem with other tensors in place of its operands."""
    query, key, value, weight, dense, relative, sinks = tensors
    assert query is not None and key is not None
    scores: Any = problem.scores
    more = {"weight": weight} if isinstance(scores, Pairwise) else {}
    scores = scores._replace(query=query, key=key, **more)
    bias = None if problem.bias is None else problem.bias._replace(dense=dense, relative=relative)
    return problem._replace(scores=scores, value=value, sinks=sinks, bias=bias)


def without_operands(problem: Problem) -> Problem:
    """Return the problem without its operands, for a graph to store: autograd saves and frees the operands."""
    return with_operands(problem._replace(mode=CURRENT), (_NOTHING, _NOTHING, None, None, None, None, None))


def folded(problem: Problem) -> Problem:
    """Return the problem with the weight of a dot product multiplied into its query."""
    scores = problem.scores
    if not isinstance(scores, Pairwise) or scores.weight is None or scores.phi != "mul":
        return problem
    return problem._replace(scores=scores.folded())


def unfolded(gradients: Operands, problem: Problem, weight: bool) -> Operands:
    """Convert gradients of the folded problem to those of the problem.

    `weight`: whether to compute the gradient of the weight.
    """
    lowered, of_query = problem.lowered, gradients.query
    assert lowered is not None and lowered.weight is not None and of_query is not None
    of_weight = (of_query * problem.query).sum((0, 1, 2)) if weight else None
    return gradients._replace(query=of_query * lowered.weight, weight=of_weight)


def in_dtypes(gradients: Operands, of: Operands) -> tuple[Tensor | None, ...]:
    """Convert each gradient to the dtype of its operand."""
    pairs = zip(gradients, of, strict=True)
    return tuple(g if g is None or t is None or g.dtype is t.dtype else g.to(t.dtype) for g, t in pairs)


PACKED = "clearhead::attend"  # the name of the source of unpacked problems, for errors
# The parts of a packed problem as the arguments of a custom operator, the tensors first.
SCHEMA = (
    "Tensor query, Tensor key, Tensor value, Tensor? weight, Tensor? dense, Tensor? relative, Tensor? sinks, "
    "Tensor? start, Tensor? stop, Tensor? gap_start, Tensor? gap_stop, Tensor? keep, Tensor? seed, "
    "str phi, float scale, float? softcap, float dropout_p"
)
TENSORS = SCHEMA.count("Tensor")
Tensors = tuple[Tensor | None, ...]  # operands; start, stop and gaps of the spans; residual; seed of the dropout
Numbers = tuple[str, float, float | None, float]  # φ, scale, softcap, dropout_p


def packed(problem: Problem) -> tuple[Tensors, Numbers]:
    """Return the parts of a lowered problem; a residual and a bias by a function become tensors of the full size."""
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
    """Return the problem of these parts.

    Args:
        tensors: The operands, the edges of the spans, the residual, and the seed.
        numbers: φ, scale, softcap and dropout_p.
        wanted: For each operand, whether it requires grad. The operands become new leaves.
        length: The length of the whole sequence if query and key are a part of it, while mask and bias are whole.
    """
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
