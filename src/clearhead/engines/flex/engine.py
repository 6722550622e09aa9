"""Dot products on CUDA by FlexAttention, PyTorch's fused kernel for masks and biases of any kind."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.base.shapes import copy_shared_rows
from clearhead.base.torch_state.active import functions_hidden
from clearhead.base.torch_state.tensor_kind import has_no_values, has_own_dispatch, is_readable
from clearhead.base.user_functions.rules import by_pair
from clearhead.engines import proof
from clearhead.engines.base import Cost, Engine
from clearhead.engines.flex import kernel, rules
from clearhead.engines.flex.blocks import BLOCK, blocks_of, residual_rule
from clearhead.engines.flex.rules import Traced
from clearhead.engines.sdpa.pieces import pieces
from clearhead.engines.tiled import tiles
from clearhead.engines.triton.engine import has_triton
from clearhead.problem.guard import zero_unseen
from clearhead.problem.partial import Partial
from clearhead.problem.problem import Problem
from clearhead.problem.summary import Found, Summary
from clearhead.scores.base import ByTile, Pairwise
from clearhead.scores.dot import Dot

MASK_BYTES = 2**30  # a residual of more bytes in full is left to an engine that computes it in parts
# The lengths of the proof: more than one block of either side, and the last blocks are not full.
LENGTH, KEYS = BLOCK + 20, 2 * BLOCK + 9


class Flex(Engine):
    """Engine by `torch.nn.attention.flex_attention`, compiled once for each kind of call.

    A mask's spans become blocks of 128 × 128 pairs, computed on the device: the kernel skips blocks without an allowed
    pair, and tests pairs only in blocks with masked pairs. Softcap, biases, and rules of masks and biases go into the
    kernel as functions of one pair (`rules.py`); a rule that has no such form is computed for all pairs before. Sinks
    are applied after the kernel, by its log-sum-exp. No value blocks the host.

    A NaN or infinite key that only some queries may attend to leaks into the others: the kernel multiplies its value by
    a weight of 0. Keys that no query may attend to are safe.
    """

    name = "flex"

    def objections(self, problem: Problem) -> list[str]:
        if problem.value is None:
            return ["FlexAttention gives neither weights nor their statistics"]
        lowered, device = _lowered(problem), problem.sizes.device
        if lowered is None:
            return [f"{problem.tile_alone}: it is no dot product"]
        found = []
        if lowered.phi != "mul":
            found.append(f"the score is no dot product (φ is {lowered.phi})")
        if device.type not in ("cuda", "cpu"):
            found.append(f"its kernels are for CUDA, and the inputs are on {device}")
        elif kernel.for_a_gpu(device) and not has_triton():
            found.append("FlexAttention is compiled by Triton, which is not installed: pip install triton")
        if problem.query.dtype is torch.float64:
            found.append("FlexAttention has no float64")
        if problem.dropout_p:
            found.append("FlexAttention has no dropout")
        rule = _bias_rule(problem)
        if isinstance(rule, str) and torch.is_grad_enabled():
            found.append(f"the bias is a function that may read a tensor which requires grad: {rule}")
        elif isinstance(rule, Traced) and rule.needs_grad:
            found.append("the bias is a function that reads a tensor which requires grad")
        change = _change_rule(problem)
        if isinstance(change, str):
            found.append(f"a function changes the scores, and the kernel has no form of it: {change}")
        elif change is not None and change.needs_grad:
            found.append("a function changes the scores, and reads a tensor which requires grad")
        if device.type == "cpu" and problem.needs_grad and kernel.BACKEND == "inductor":
            found.append("FlexAttention has no gradients on a CPU")
        if any(map(has_own_dispatch, (lowered.query, lowered.key, problem.value))) and not _shapes_alone(problem):
            found.append("an input is a tensor subclass with operations of its own, which may have no such kernel")
        if functions_hidden():
            found.append("it needs a function mode, and these are off here, as where an edit computes a part again")
        mode = problem.mode
        if mode.operations_only:
            found.append("torch.func and forward mode follow only PyTorch's own operations")
        elif mode.recorded if _shapes_alone(problem) else mode.traced:
            found.append("a trace records PyTorch's own operations, and this one is compiled")
        elif kernel.for_a_gpu(device) and not (found or mode.compiled or _shapes_alone(problem)):
            row = _row_of(problem)
            about = f"rows up to {row}", partial(problems, row)
            found += proof.objections(self, device, problem.query.dtype, *about)
        return found

    def reservations(self, problem: Problem) -> list[str]:
        if problem.sizes.device.type != "cuda":
            return self.costs(problem)
        low = problem.lowered  # None if a function changes the scores
        if low is not None and low.softcap is None and problem.bias is None and problem.sinks is None:
            if problem.visible is None:
                return ["PyTorch's other kernels, such as FlashAttention, are faster where nothing is masked"]
            if _one_piece(problem):
                return ["PyTorch's other kernels, such as FlashAttention, have a causal form"]
        return self.costs(problem)

    def costs(self, problem: Problem) -> list[str]:
        """Return the reservations that hold even where PyTorch's other kernels cannot run the call."""
        if problem.sizes.device.type == "cpu":
            return ["on a CPU other engines are faster"]
        size = _in_full(problem)
        return [f"a part of the mask would be computed in full, {size:,} bytes"] if size > MASK_BYTES else []

    def notes(self, problem: Problem) -> list[str]:
        found = [
            "a NaN or infinite key that is masked for some queries leaks into them (tiled guards it)",
            "PyTorch compiles FlexAttention once for each kind of call, which takes seconds",
        ]
        if size := _in_full(problem):
            found.append(f"a part of the mask is computed in full, {size:,} bytes: {_mask_rule(problem)}")
        if isinstance(rule := _bias_rule(problem), str):
            size = 4 * math.prod(problem.sizes.shape)
            found.append(f"the bias is computed in full, up to {size:,} bytes: {rule}")
        return found

    def transparent(self, problem: Problem) -> bool:
        return not problem.mode.compiled  # in compiled code the custom operator runs this engine as eager code does

    def forward(self, problem: Problem, rows: bool = False) -> Partial:
        if _shapes_alone(problem) or 0 in problem.sizes.shape:
            lead = problem.query.new_zeros(problem.sizes.shape[:3], dtype=accumulated(problem.query.dtype))
            return Partial(tiles.no_keys(problem, problem.query), lead, torch.full_like(lead, math.inf))
        problem = zero_unseen(problem)
        lowered, value, visible, sizes = _lowered(problem), problem.value, problem.visible, problem.sizes
        assert lowered is not None and value is not None
        lowered, parts, width = lowered.folded(), _parts(problem), value.shape[-1]
        query, key, value = map(_wide, copy_shared_rows(lowered.query, lowered.key, value))
        blocks = None if visible is None else blocks_of(visible, sizes, problem.mode)
        sinks = tiles.sinks(problem)
        numbers = kernel.Numbers(lowered.scale, lowered.softcap, rows or sinks is not None)
        output, log_sum_exp = kernel.attend(query, key, value, blocks, parts, numbers)
        output = output[..., :width]
        if log_sum_exp is None:
            return Partial(output)
        blind = log_sum_exp.detach() == -math.inf
        maximum = log_sum_exp.detach().masked_fill(blind, 0.0)
        log_sum = (log_sum_exp.masked_fill(blind, 0.0) - maximum).masked_fill(blind, math.inf)
        if parts.top is not None:
            maximum = (maximum + parts.top).masked_fill(blind, 0.0)
        found = Partial(output.to(log_sum.dtype), maximum, log_sum)
        return found if sinks is None else found.with_sinks(sinks)

    def summarise(self, problem: Problem, summary: Summary) -> Found:
        if problem.value is None or summary != Summary(output=True, rows=True):
            return super().summarise(problem, summary)
        found = self.forward(problem, rows=True)
        return Found(output=found.output, maximum=found.maximum, log_sum=found.log_sum)

    def cost(self, problem: Problem) -> Cost:
        pairs, visible = math.prod(problem.sizes.shape), problem.visible
        if visible is None or _shapes_alone(problem) or not is_readable(visible.spans.start) or not pairs:
            return Cost(pairs, 0)
        blocks = blocks_of(visible, problem.sizes, problem.mode)
        listed = [*blocks.partial, *blocks.full, *blocks.partial_by_key, *blocks.full_by_key]
        kept = [*listed, *blocks.edges, *(() if blocks.keep is None else (blocks.keep,))]
        count = int((blocks.partial[0].sum() + blocks.full[0].sum()).item())
        copies = pairs // (math.prod(blocks.partial[0].shape[:2]) * math.prod(problem.sizes.shape[2:]))
        return Cost(min(pairs, count * BLOCK**2 * copies), sum(t.nbytes for t in kept))


def _lowered(problem: Problem) -> Pairwise | None:
    """Return the scores in normal form, before a function changes them."""
    scores = problem.scores
    if isinstance(scores, ByTile) and scores.score.changed_by is not None and type(scores.score) is Dot:
        return Pairwise("mul", scores.query, scores.key, None, scores.scale, scores.softcap)
    return problem.lowered


def _change_rule(problem: Problem) -> Traced | str | None:
    """Return the function that changes the scores as a rule of single pairs, or why it has no such form."""
    scores = problem.scores
    if not isinstance(scores, ByTile) or scores.score.changed_by is None:
        return None
    if problem.mode.compiled or problem.mode.traced:
        return "it is known only in parts"
    if scores.places is not None and any(place.start or place.step != 1 for place in scores.places):
        return "the kernel counts from 0, and this part begins later"
    return rules.traced_change(scores, problem.sizes.device)


def _mask_rule(problem: Problem) -> Traced | str | None:
    return None if problem.spans is None else residual_rule(problem.spans, problem.sizes, problem.mode)


def _in_full(problem: Problem) -> int:
    """Return the bytes of the part of the mask that is computed in full; 0 without such a part."""
    spans = problem.spans
    if spans is None or problem.mode.compiled or not isinstance(_mask_rule(problem), str):
        return 0
    # assume that a rule depends on sequence and head only if its spans do
    return math.prod(problem.sizes.shape[2:]) * spans.start.shape[0] * spans.start.shape[1]


def _bias_rule(problem: Problem) -> Traced | str | None:
    """Return the bias by a function as a rule of single pairs, or why it is computed in full."""
    if problem.bias is None or problem.bias.function is None:
        return None
    found = by_pair(problem.bias.function)
    if found is None or problem.mode.compiled or problem.mode.traced:
        return "it is known only in parts"
    return rules.traced(found, problem.sizes.device, floating=True)


def _shapes_alone(problem: Problem) -> bool:
    return has_no_values(problem.query)


def _one_piece(problem: Problem) -> bool:
    """Return whether the mask is known to be one causal square, or a rectangle, for all sequences and heads."""
    visible = problem.visible
    if visible is None or not visible.read:
        return False
    kinds = visible.memo.derive("kinds", lambda: [[piece.kind for piece in own] for _, own in pieces(problem)])
    return kinds in ([["full"]], [["causal"]])


def _wide(tensor: Tensor) -> Tensor:
    """Pad rows with zeros, which change no score, to the least width of the kernel's products."""
    missing = kernel.NARROWEST - tensor.shape[-1]
    return F.pad(tensor, (0, missing)) if missing > 0 else tensor


def _parts(problem: Problem) -> kernel.Parts:
    """Return the bias in the form that the kernel takes.

    The largest bias of each row is subtracted from the row: if all are as low as those of a mask of finfo.min, the
    log-sum-exp would have no digits left for the weights of the backward pass.
    """
    bias, change = problem.bias, _change_rule(problem)
    assert not isinstance(change, str)
    if bias is None:
        return kernel.Parts(change=change)
    dense, rule = bias.dense, _bias_rule(problem)
    if isinstance(rule, str):
        dense = bias._replace(relative=None).tile(*(slice(None),) * 4, problem.sizes)
    top = None if dense is None else dense.detach().amax(-1)
    top = None if top is None else top.masked_fill(top.isinf(), 0.0)
    rule = rule if isinstance(rule, Traced) else None
    return kernel.Parts(_no_view(dense), top, _no_view(bias.relative), rule, change)


def _no_view(tensor: Tensor | None) -> Tensor | None:
    """Return the tensor; a copy if it requires grad, because FlexAttention drops the gradient of a view."""
    return tensor.clone() if tensor is not None and tensor.requires_grad else tensor


def _row_of(problem: Problem) -> int:
    """Return the widest row of queries and values, as a power of two, by which PyTorch chooses the kernel's blocks."""
    assert problem.value is not None
    widest = max(problem.query.shape[-1], problem.value.shape[-1])
    return max(64, 1 << (widest - 1).bit_length())


def problems(row: int, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Problem]]:
    """Yield a problem with all that the kernel may take, one with only a mask, and one query; rows are `row` wide.

    Each is compiled separately, so there are few.
    """
    for kind, queries in (("everything", LENGTH), ("a mask", LENGTH), ("one query", 1)):
        query, key, value = proof.draw_operands(queries, KEYS, row, row, device, dtype)
        scores = Pairwise("mul", query, key, None, row**-0.5)
        yield f"{row} wide, {kind}", proof.make_example(scores, value, kind == "everything")
