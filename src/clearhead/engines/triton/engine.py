"""The engine of Triton kernels, for devices of NVIDIA and AMD."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import cast

import torch
from torch import Tensor

from clearhead.base.torch_state.mode import assume_constant
from clearhead.base.torch_state.tensor_kind import has_no_values, has_own_dispatch
from clearhead.base.torch_state.torch_private import is_zero_tensor
from clearhead.engines import proof
from clearhead.engines.base import Cost, Engine
from clearhead.engines.triton import blocks
from clearhead.problem import regions
from clearhead.problem.guard import guard
from clearhead.problem.packing import Operands, folded, operands, unfolded
from clearhead.problem.partial import Partial, Rows
from clearhead.problem.problem import Problem
from clearhead.problem.summary import Found, Sent, Summary, parted, with_groups
from clearhead.scores.base import Pairwise
from clearhead.scores.pair_functions import PHIS, Phi

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST = 16  # the most largest weights that a program holds in registers
LENGTH, KEYS = 70, 75  # the lengths of the proof: more than one block of either side, and no full last block
TRITON = importlib.util.find_spec("triton") is not None


@assume_constant
def has_triton() -> bool:
    """Return whether Triton, the compiler of the kernels, is installed; compiled code treats it as a constant."""
    return TRITON


@assume_constant
def interpreted() -> bool:
    """Return whether Triton interprets kernels on the CPU: TRITON_INTERPRET=1 before its import."""
    import os

    return os.environ.get("TRITON_INTERPRET") == "1"


def _launch() -> ModuleType:
    """Import the module of the calls, which imports Triton."""
    from clearhead.engines.triton import launch

    return launch


class Triton(Engine):
    """Engine of kernels that compute a tile of scores at a time, in registers, over the spans only.

    They compute scores in normal form in float32, bfloat16 and float16, with masks of intervals, biases, softcap,
    sinks, dropout and grouped heads; their gradients; and statistics with their gradients. Every sum is in float32, in
    one order. For few queries several programs share the keys. The host reads no value on the way, except once for each
    device and dtype, in the proof.
    """

    name = "triton"

    def objections(self, problem: Problem) -> list[str]:
        sizes, found = problem.sizes, []
        if sizes.device.type != "cuda" and not (sizes.device.type == "cpu" and has_triton() and interpreted()):
            return [f"the inputs are on {sizes.device}: its kernels are for cuda"]
        if not has_triton():
            return ["Triton is missing: pip install 'clearhead[cuda]', on Linux"]
        lowered, value, dtype = problem.lowered, problem.value, problem.query.dtype
        if lowered is None:
            found.append(f"{problem.tile_alone}: the kernels take scores in normal form (extend.Pairwise)")
        elif lowered.phi == "mul" and lowered.query.shape[-1] > blocks.WIDEST:
            found.append(f"queries are {lowered.query.shape[-1]} wide: a dot product has up to {blocks.WIDEST}")
        if value is not None and not 0 < value.shape[-1] <= blocks.WIDEST:
            found.append(f"values are {value.shape[-1]} wide: it takes 1 to {blocks.WIDEST}")
        if problem.by_function:
            found.append("the bias is a function: the kernels take numbers for each pair or each distance")
        if problem.spans is not None and problem.spans.residual is not None:
            found.append("the mask does not consist of intervals: the kernels take up to four for each query")
        if dtype not in DTYPES:
            found.append(f"it computes in float32, and the inputs are {dtype}")
        if problem.origin is not None and problem.seed is not None and any(s.step != 1 for s in problem.origin):
            found.append("its dropout counts one by one, and this part leaves some out")
        if 0 in sizes.shape or (lowered is not None and not lowered.query.shape[-1]):
            found.append("there is nothing to compute")
        mode = problem.mode
        if mode.operations_only:
            found.append("torch.func and forward mode follow only PyTorch's own operations")
        elif has_no_values(problem.query):
            if mode.recorded:
                found.append("a trace records PyTorch's own operations, and the kernels are not among them")
        elif mode.traced or not (mode.compiled or all(map(_dense, operands(problem)))):
            found.append("the kernels read memory, and an input is not a plain tensor on the device")
        elif not found and sizes.device.type == "cuda" and not mode.compiled:
            found += _proved(self, problem)
        return found

    def guarded(self, problem: Problem) -> Problem:
        return problem  # a kernel finds rows that are not finite, and the other kernels read them as zeros

    def forward(self, problem: Problem, rows: bool = False) -> Partial:
        with torch.no_grad():
            return cast(Partial, _launch().output(folded(problem), rows))

    def backward(
        self, problem: Problem, rows: Rows, grad: Tensor | None, wanted: tuple[bool, ...], sent: Sent | None = None
    ) -> Operands:
        if folded(problem) is problem:
            return cast(Operands, _launch().gradients(problem, rows, grad, wanted, sent))
        problem = guard(problem)  # the gradient of the weight is a product with the query, which must be finite
        found = _launch().gradients(folded(problem), rows, grad, (True, *wanted[1:]), sent)
        return unfolded(found, problem, wanted[3])

    def fuses(self, problem: Problem, summary: Summary) -> bool:
        cell = summary.mean or summary.peak
        wide = summary.groups is not None and _columns(problem, summary) > blocks.WIDEST
        # a tile of scores belongs to one cell, so small cells would compute most of a tile for nothing
        return not wide and summary.top <= min(LARGEST, problem.sizes.keys) and (cell is None or min(cell) >= 8)

    def summarise(self, problem: Problem, summary: Summary) -> Found:
        if not self.fuses(problem, summary):
            return super().summarise(problem, summary)
        with torch.no_grad():
            problem = folded(problem)
            # convert to float32: a product with a low-precision value would round the weights before the sum
            value = problem.value.float() if summary.output and problem.value is not None else None
            both = value if summary.groups is None else with_groups(value, summary.groups, problem)
            found: Found = _launch().statistics(problem._replace(value=both), summary)
        return found if summary.groups is None else parted(found, value)

    def contributions(
        self, problem: Problem, rows: Rows, grad: Tensor | None, sent: Sent | None, by_key: bool, positive: bool = False
    ) -> Tensor:
        return super().contributions(guard(problem), rows, grad, sent, by_key, positive)

    def cost(self, problem: Problem) -> Cost:
        low, sizes = problem.lowered, problem.sizes
        areas = (
            part.area
            for region in regions.walk(problem, regions.BUDGET)
            for part in regions.parts_seen(problem, region)
        )
        count = 0
        if low is not None and low.phi != "mul":  # the operands in the layout by dimension
            count = low.query.shape[-1] * sizes.batch * (sizes.heads * sizes.queries + low.key.shape[1] * sizes.keys)
        return Cost(sum(areas), 4 * count)


def _proved(engine: Triton, problem: Problem) -> list[str]:
    """Return what the proof of the kernels of this φ and these widths has found."""
    lowered, value = problem.lowered, problem.value
    assert lowered is not None
    row = blocks.widest(lowered.phi, lowered.query.shape[-1], 0 if value is None else value.shape[-1])
    kind, about = f"{lowered.phi}, rows up to {row}", partial(problems, lowered.phi, row)
    return proof.objections(engine, problem.sizes.device, problem.query.dtype, kind, about)


def problems(phi: Phi, row: int, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Problem]]:
    """Yield a problem with every feature of the kernels of this φ, one with few features, and one with one query.

    `row`: see `blocks.widest`. Queries and keys are as wide as values; for a φ whose program holds no rows of them, up
    to 58.
    """
    values = row - 6
    width = values if phi == "mul" else min(values, 58)
    for kind, queries, keys in (("everything", LENGTH, KEYS), ("statistics", LENGTH, KEYS), ("one query", 1, 1200)):
        query, key, value = proof.draw_operands(queries, keys, width, values, device, dtype)
        weight = None if phi == "mul" else proof.numbers((width,), device, 3).abs().to(dtype)
        scores = Pairwise(phi, query, key, weight, PHIS[phi].triton.scale(width), None)
        problem = proof.make_example(scores, value, kind == "everything")
        if kind == "everything":
            seed = torch.tensor(1234567, dtype=torch.int64, device=device)
            problem = problem._replace(dropout_p=0.25, seed=seed)
        yield f"{phi} {width} wide, {kind}", problem


def _columns(problem: Problem, summary: Summary) -> int:
    value = problem.value.shape[-1] if summary.output and problem.value is not None else 0
    return value + (0 if summary.groups is None else summary.groups.shape[-1])


def _dense(tensor: Tensor | None) -> bool:
    """Return whether the tensor is dense numbers at its data pointer."""
    return tensor is None or not (
        has_own_dispatch(tensor)
        or tensor.layout is not torch.strided
        or is_zero_tensor(tensor)
        or tensor.is_neg()
        or has_no_values(tensor)
    )
