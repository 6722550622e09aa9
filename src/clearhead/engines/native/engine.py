"""The engine of the compiled kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.base.products import has_matrix_instructions
from clearhead.base.torch_state.tensor_kind import is_plain
from clearhead.engines.base import Cost, Engine
from clearhead.engines.native import bindings
from clearhead.engines.native.blocks import EVERY, ROWS, blocks_of
from clearhead.engines.tiled import tiles
from clearhead.problem.guard import guard
from clearhead.problem.packing import Operands, folded, unfolded
from clearhead.problem.partial import Partial, Rows
from clearhead.problem.problem import Problem
from clearhead.problem.region import Region
from clearhead.problem.regions import cut
from clearhead.problem.summary import Found, Sent, Summary, parted, with_groups
from clearhead.problem.unseen import finite
from clearhead.scores.base import Pairwise

FEW_QUERIES = 4  # up to this many queries, packing the keys costs more than it saves
FEW_PAIRS = 2**16  # below this many pairs, PyTorch's kernel is faster in float32
FEW_UNPACKED = 2**13  # the same bound in float32 without packed keys
FEW_IN_LOW = 2**11  # the same bound in a lower precision
FEW_LARGEST = 64  # the kernel holds the largest weights in a sorted list; a tournament finds more of them
TAME = 1e28  # sums of values up to this size over 2³² keys do not overflow


def _below(tensor: Tensor, limit: float) -> bool:
    """Return whether the absolute value of every number is below the limit; False if one is not finite."""
    if not tensor.numel():
        return True
    low, high = torch.aminmax(tensor.detach())
    return -limit <= float(low) and float(high) <= limit


def _begins_later(origin: tuple[range, ...]) -> bool:
    """Return whether a part of a problem does not begin at the first sequence, head and key."""
    batch, heads, queries, keys = origin
    return any(side.start or side.step != 1 for side in (batch, heads, keys)) or queries.step != 1


class Native(Engine):
    """Engine of kernels in C++, which compute a tile of scores at a time, in registers and cache, over the spans only.

    They compute scores in normal form in float32, with masks, biases, softcap, sinks, dropout and grouped heads; their
    gradients; and reductions of `Weights.reduce` in one pass. They read inputs in bfloat16 and float16 in place; on a
    CPU with AVX512_BF16 they multiply bfloat16 directly. The last digits depend on the number of threads, not on
    timing.
    """

    name = "native"

    def objections(self, problem: Problem) -> list[str]:
        if not bindings.available():
            return ["its kernels are missing: install clearhead from a wheel, or from source with a C++ compiler"]
        found = []
        query = problem.scores.query
        dtype = query.dtype
        if not query.is_cpu:
            found.append(f"the inputs are on {problem.sizes.device}")
        if not isinstance(problem.scores, Pairwise):
            found.append(f"{problem.tile_alone}: the kernels take scores in normal form (extend.Pairwise)")
        if problem.bias is not None and problem.bias.function is not None:
            found.append("the bias is a function: the kernels take numbers for each pair or each distance")
        if dtype not in bindings.READ:
            found.append(f"it computes in float32, and the inputs are {dtype}")
        if problem.seed is not None and problem.origin is not None and _begins_later(problem.origin):
            found.append("its dropout counts keys, heads and sequences from 0, and this part begins later")
        mode = problem.mode
        if mode.operations_only:
            found.append("torch.func and forward mode follow only PyTorch's own operations")
        # in compiled code the custom operator checks its inputs
        elif not mode.compiled and (mode.traced or not _is_in_host_memory(problem)):
            found.append("the kernels read memory, and an input is not a plain tensor in the host's memory")
        return found

    def reservations(self, problem: Problem) -> list[str]:
        scores = problem.scores
        if not isinstance(scores, Pairwise) or scores.phi != "mul" or problem.value is None:
            return []
        if scores.softcap is not None or problem.visible is not None or not problem.plain:
            return []  # PyTorch's kernel cannot compute it, or is slower
        dtype = scores.query.dtype
        if dtype is not torch.float32 and has_matrix_instructions(dtype):
            return [f"PyTorch's own kernel is faster in {dtype} on this CPU where nothing is masked"]
        # compiled code runs for every size, so the size at tracing must not decide
        if problem.mode.compiled:
            return []
        pairs = math.prod(problem.sizes[:4])
        if dtype is not torch.float32:
            few = pairs < FEW_IN_LOW
        else:
            few = pairs < FEW_UNPACKED or (pairs < FEW_PAIRS and not _unpacked(problem))
        return ["PyTorch's own kernel has less overhead, and there are few pairs"] if few else []

    def forward(self, problem: Problem, rows: bool = False) -> Partial:
        problem = folded(problem)
        # decoding sums scores in another order, so a backward pass would compute slightly different weights
        few = not rows and _few(problem)
        found = bindings.forward(problem, rows, few)
        if found.finite:
            return found
        guarded = guard(problem)
        if guarded is not problem:
            found = bindings.forward(guarded, rows, few)
        if not found.finite:
            fill_overflow(found.output, guarded, lambda given: bindings.forward(given, rows=False, few=few).output)
        return found._replace(finite=False)

    def merge(self, problem: Problem, into: Partial) -> None:
        given = folded(problem)
        assert given.value is not None
        float32 = all(t is None or t.dtype is torch.float32 for t in into[:3])
        # the kernel cannot undo a merge: every number must be finite, and no sum of values may overflow
        tame = finite(given.query) and finite(given.key) and _below(given.value, TAME)
        if given.sinks is not None or 0 in given.sizes.shape or not float32 or not tame:
            super().merge(problem, into)
        else:
            bindings.merge(given, into)

    def add_gradients(self, problem: Problem, rows: Rows, grad: Tensor, sums: Operands) -> None:
        if folded(problem) is problem and all(t is None or t.dtype is torch.float32 for t in sums):
            bindings.write_gradients(problem, sums, rows, grad, None, adds=True)
        else:
            super().add_gradients(problem, rows, grad, sums)

    def backward(
        self, problem: Problem, rows: Rows, grad: Tensor | None, wanted: tuple[bool, ...], sent: Sent | None = None
    ) -> Operands:
        if sent is not None and problem.value is not None:
            # statistics send gradients back in float32: kernels may round them to the type of the value
            problem = problem._replace(value=problem.value.float())
        given = folded(problem)
        if given is problem:
            return bindings.gradients(problem, rows, grad, wanted, sent)
        return unfolded(bindings.gradients(given, rows, grad, (True, *wanted[1:]), sent), problem, wanted[3])

    def scores(self, problem: Problem) -> Tensor:
        if 0 in problem.sizes.shape or problem.needs_grad or problem.mode.compiled:
            return tiles.scores(problem)
        return bindings.scores(folded(problem))

    def fuses(self, problem: Problem, summary: Summary) -> bool:
        if problem.mode.compiled or 0 in problem.sizes.shape:  # torch.export has no values
            return False
        return summary.top <= FEW_LARGEST and bindings.one_pass(problem)

    def summarise(self, problem: Problem, summary: Summary) -> Found:
        if not self.fuses(problem, summary):
            return super().summarise(problem, summary)
        given = folded(problem)
        value = given.value if summary.output else None
        if summary.groups is not None and value is not None and value.dtype is torch.bfloat16:
            # kernels may round the weights that they multiply by the groups' columns to bfloat16
            alone = self.summarise(given, Summary(groups=summary.groups))
            return self.summarise(given, summary._replace(groups=None))._replace(groups=alone.groups)
        found = self._summarised(given, summary)
        if not found.finite:  # the kernel checks all numbers that it reads, so no pass before it is needed
            guarded = guard(given)
            if guarded is not given:
                found = self._summarised(guarded, summary)._replace(finite=False)
        return found if summary.groups is None else parted(found, value)

    def _summarised(self, problem: Problem, summary: Summary) -> Found:
        """Compute the statistics of a problem, guarded or not; the kernel finds whether it needs a guard."""
        if summary.groups is not None:  # compute the weight on each group as one more column of the output
            value = problem.value if summary.output else None
            problem = problem._replace(value=with_groups(value, summary.groups, problem))
            summary = summary._replace(output=True, groups=None)
        found = bindings.summarise(problem, summary)
        if found.finite or found.output is None:
            return found
        fill_overflow(found.output, problem, lambda given: bindings.summarise(given, Summary(output=True)).output)
        return found

    def contributions(
        self, problem: Problem, rows: Rows, grad: Tensor | None, sent: Sent | None, by_key: bool, positive: bool = False
    ) -> Tensor:
        if not self.fuses(problem, Summary()):
            return super().contributions(problem, rows, grad, sent, by_key, positive)
        return bindings.contributions(folded(problem), rows, grad, sent, by_key, positive)

    def cost(self, problem: Problem) -> Cost:
        return Cost(_pairs(problem), bindings.forward_bytes(folded(problem), _unpacked(problem)))


def _unpacked(problem: Problem) -> bool:
    """Return whether a forward pass does not pack the keys: there are few queries, and no backward pass follows."""
    return not problem.needs_grad and _few(problem)


def _few(problem: Problem) -> bool:
    """Return whether the keys are not packed: there are few queries, and one tile holds all that share a key head."""
    sizes = problem.sizes
    return sizes.queries <= FEW_QUERIES and sizes.heads * sizes.queries <= ROWS * problem.scores.key.shape[1]


def _pairs(problem: Problem) -> int:
    """Count the computed pairs: tiles of queries times the panels, or the hull, of their allowed keys."""
    sizes = problem.sizes
    if problem.edges is None or 0 in sizes.shape:
        return math.prod(sizes.shape)
    if problem.spans is not None and not problem.spans.plain:
        parts = (problem if band == EVERY else cut(problem, Region(queries=band)) for band in bindings.bands(problem))
        maps = (blocks_of(part, bindings.kernels()) for part in parts)
        return sum(m.pairs * (sizes.batch // m.batch) * (sizes.heads // m.heads) for m in maps)
    start, stop = (np.broadcast_to(edge, (*edge.shape[:2], sizes.queries)) for edge in problem.edges)
    first = np.arange(0, sizes.queries, ROWS)
    some = stop > start
    low = np.minimum.reduceat(np.where(some, start, sizes.keys), first, -1)
    high = np.maximum.reduceat(stop, first, -1)
    area = (np.maximum(high - low, 0) * np.diff(np.append(first, sizes.queries))).sum()
    copies: int = (sizes.batch // start.shape[0]) * (sizes.heads // start.shape[1])
    return int(area.item()) * copies


def _is_in_host_memory(problem: Problem) -> bool:
    """Return whether the kernels can read the memory of all tensors; a residual is checked where it is read."""
    scores, visible, bias = problem.scores, problem.visible, problem.bias
    weight = scores.weight if isinstance(scores, Pairwise) else None
    dense, relative = (None, None) if bias is None else (bias.dense, bias.relative)
    edges = () if visible is None else (visible.spans.start, visible.spans.stop, *(visible.spans.gaps or ()))
    return is_plain(scores.query, scores.key, weight, problem.value, problem.sinks, dense, relative, *edges)


def fill_overflow(output: Tensor, problem: Problem, compute: Callable[[Problem], Any]) -> None:
    """Compute entries of the output again that overflowed although the values are finite.

    There the sum before its division was too large. The values are divided by a power of two above the ratio of this
    sum to the largest value, and the result multiplied by it.
    """
    if problem.value is not None and finite(problem.value):
        power = 2.0 ** math.ceil(math.log2(2 * problem.sizes.keys / (1 - problem.dropout_p)))
        small = compute(problem._replace(value=problem.value.float() / power))
        torch.where(output.isfinite(), output, small * power, out=output)
