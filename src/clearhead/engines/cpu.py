"""The compiled kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead import _native, _tiles
from clearhead._backward import Operands, operands
from clearhead._differentiable import differentiated_again
from clearhead._native import Forward, Found, Sought
from clearhead._problem import Problem, guard
from clearhead._tiles import Block
from clearhead._values import compiling, transformed
from clearhead.engines.base import Engine

FEW_PAIRS = 2**16  # fewer are computed sooner than the kernels here are called
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Cpu(Engine):
    """Kernels in C++: a tile of scores at a time, in registers and cache, over the spans alone.

    Dot, additive and Gaussian scores in float32, with masks, biases, softcap, sinks, dropout and grouped heads, their
    gradients, and what `Weights.reduce` finds, in one pass. Lower precision is computed in float32 from copies of the
    inputs. Results depend on the number of threads in their last digits, and on nothing else.
    """

    name = "cpu"

    def objections(self, problem: Problem) -> list[str]:
        if not _native.available():
            return ["its compiled part is missing: install clearhead from a wheel, or from source with a C++ compiler"]
        found = []
        lowered, dtype = problem.lowered, problem.query.dtype
        if problem.sizes.device.type != "cpu":
            found.append(f"the inputs are on {problem.sizes.device}")
        if lowered is None:
            found.append(f"{problem.score} has only tile(): the kernels know dot, additive and Gaussian scores")
        if dtype not in KERNEL_DTYPES:
            found.append(f"it computes in float32, and the inputs are {dtype}")
        if transformed():
            found.append("torch.func transforms look into PyTorch's own operations only")
        return found

    def reservations(self, problem: Problem) -> list[str]:
        lowered = problem.lowered
        if lowered is None or lowered.phi != "mul" or problem.value is None:
            return []
        dtype = problem.query.dtype
        if dtype is not torch.float32 and problem.spans is None:
            return [f"PyTorch's own kernel is faster in {dtype} where nothing is masked"]
        # compiled code should do for other sizes too, so it is not asked for its own
        if compiling() or lowered.softcap is not None or not problem.plain:
            return []
        batch, heads, queries, keys = problem.sizes.shape
        if batch * heads * queries * keys < FEW_PAIRS:
            return ["PyTorch's own kernel is called faster, and this is little work"]
        return []

    def run(self, problem: Problem) -> Tensor:
        problem = _weighted(problem)
        if 0 in problem.sizes.shape:
            return _tiles.no_keys(problem, problem.query)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands(problem)):
            out: Tensor = _Fused.apply(problem, *operands(problem))  # type: ignore[no-untyped-call]
            return out
        assert problem.value is not None
        output = _forward(problem, keep_stats=False)[1].output
        return output if problem.value.dtype is torch.float32 else output.to(problem.value.dtype)

    def run_kept(self, problem: Problem) -> tuple[Tensor, Tensor] | None:
        """The output and what `gradients_kept` needs besides it; None where a gradient has to go another way."""
        if not _keeps(problem):
            return None
        kept = _forward(problem, keep_stats=True)[1]
        return kept.output, kept.stats

    def gradients_kept(
        self, problem: Problem, wanted: tuple[bool, ...], grad: Tensor, output: Tensor, stats: Tensor
    ) -> Operands | None:
        """The gradients to the operands (see `_backward`), of a problem that `run_kept` gave this output for."""
        if not _keeps(problem):
            return None
        guarded = problem if problem.spans is None else guard(problem)
        return _native.gradients(guarded, wanted, grad, Forward(output, stats, True))

    def tiles(self, problem: Problem) -> Iterator[tuple[Block, Tensor]]:
        problem = guard(_weighted(problem))
        for block in _tiles.blocks(problem, _tiles.LOOK):
            yield block, self.scores(problem, block)

    def scores(self, problem: Problem, block: Block) -> Tensor:
        batch, heads, queries, keys = (
            slice(*side.indices(size)) for side, size in zip(block.sides, problem.sizes.shape, strict=True)
        )
        sides = (batch, heads, queries, keys)
        regular = all(side.step == 1 and side.stop > side.start for side in sides)
        if not regular or problem.needs_grad:
            return _tiles.scores(problem, block)
        return _native.scores(_weighted(problem), Block(batch, heads, queries, keys, block.masked))

    def look(self, problem: Problem, sought: Sought) -> Found | None:
        if 0 in problem.sizes.shape:
            return None
        return _native.look(guard(_weighted(problem)), sought)

    def pairs(self, problem: Problem) -> int:
        """By tiles of queries, and the hull of what they see."""
        sizes = problem.sizes
        if problem.edges is None:
            return sizes.batch * sizes.heads * sizes.queries * sizes.keys
        start, stop = (np.broadcast_to(edge, (*edge.shape[:2], sizes.queries)) for edge in problem.edges)
        first = np.arange(0, sizes.queries, _native.ROWS)
        if not len(first):
            return 0
        some = stop > start
        low = np.minimum.reduceat(np.where(some, start, sizes.keys), first, -1)
        high = np.maximum.reduceat(stop, first, -1)
        area = (np.maximum(high - low, 0) * np.diff(np.append(first, sizes.queries))).sum()
        copies: int = (sizes.batch // start.shape[0]) * (sizes.heads // start.shape[1])
        return int(area.item()) * copies

    def extra_bytes(self, problem: Problem) -> int:
        return _native.forward_bytes(_weighted(problem))


def _keeps(problem: Problem) -> bool:
    """Whether the output in its own dtype, of the operands as they are, will do for the gradients."""
    lowered, value = problem.lowered, problem.value
    if lowered is None or value is None or value.dtype != torch.float32 or 0 in problem.sizes.shape:
        return False
    return lowered.phi != "mul" or lowered.weight is None  # see `_weighted`


def _weighted(problem: Problem) -> Problem:
    """The same problem with the weight of a dot product in its query."""
    lowered = problem.lowered
    if lowered is None or lowered.phi != "mul" or lowered.weight is None:
        return problem
    return problem._replace(lowered=lowered._replace(query=lowered.query * lowered.weight, weight=None))


def _forward(problem: Problem, keep_stats: bool) -> tuple[Problem, Forward]:
    """The output, and the problem it was computed of: a guarded one where something was not finite."""
    kept = _native.forward(problem, keep_stats)
    if kept.finite or problem.spans is None:
        return problem, kept
    with torch.no_grad():
        guarded = guard(problem)
    return (problem, kept) if guarded is problem else (guarded, _native.forward(guarded, keep_stats))


class _Fused(torch.autograd.Function):
    """Forward and backward by the kernels, as one step for autograd."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, *tensors: Tensor | None) -> Tensor:
        assert problem.value is not None
        ctx.stamp = problem.stamp()
        ctx.problem, kept = _forward(problem, keep_stats=True)
        output = kept.output.to(problem.value.dtype)
        ctx.save_for_backward(*tensors, kept.output, kept.stats)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        problem: Problem = ctx.problem
        problem.check_stamp(ctx.stamp)
        *tensors, output, stats = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():  # the gradient is to be differentiated
            every = list(_tiles.blocks(problem, _tiles.BUDGET))
            return (None, *differentiated_again(problem, every, tuple(tensors), needed, grads[0]))
        return (None, *_native.gradients(problem, needed, grads[0], Forward(output, stats, True)))
