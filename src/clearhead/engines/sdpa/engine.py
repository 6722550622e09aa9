"""Dot products by PyTorch's fused kernel, in the pieces of the mask on which the kernel is fastest."""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from clearhead.base.shapes import copy_shared_rows
from clearhead.base.torch_state.active import GRAD
from clearhead.base.torch_state.tensor_kind import (
    has_no_values,
    has_own_dispatch,
    has_vmap_dimension,
    is_readable,
    unwrap,
)
from clearhead.base.torch_state.versions import Versions
from clearhead.engines.base import Cost, Engine
from clearhead.engines.sdpa.fused import fused
from clearhead.engines.sdpa.pieces import Piece, pieces
from clearhead.engines.tiled import tiles
from clearhead.problem import regions
from clearhead.problem.guard import zero_unseen
from clearhead.problem.packing import without_operands
from clearhead.problem.partial import Partial
from clearhead.problem.problem import Problem
from clearhead.scores.base import Pairwise


class Sdpa(Engine):
    """Engine by `torch.nn.functional.scaled_dot_product_attention`, called once for each regular piece of the mask.

    Without a mask it is one plain call. A mask is split into pieces: sequences are sliced to their keys, causal squares
    use the kernel's own flag, and a window becomes one call over overlapping views of the keys. Only the other pieces
    get a mask tile. Grouped heads fold into the query axis if the mask allows it.

    If the sum of a row's values over its keys exceeds the largest float32, it overflows, as in PyTorch's kernel.

    A NaN or infinite key that only some queries may attend to leaks into the others: the fused kernel multiplies its
    value by a weight of 0. Keys that no query may attend to are safe. The engines `tiled` and `reference` guard both.
    """

    name = "sdpa"

    def objections(self, problem: Problem) -> list[str]:
        if problem.value is None:
            return ["the fused kernel gives neither weights nor their log-sum-exp"]
        lowered = problem.scores
        if not isinstance(lowered, Pairwise):
            return [f"{problem.tile_alone}: it is no dot product"]
        found = []
        if lowered.phi != "mul":
            found.append(f"the score is no dot product (φ is {lowered.phi})")
        if lowered.softcap is not None:
            found.append("the fused kernel has no softcap")
        query, key, value = lowered.query, lowered.key, problem.value
        mode, usual = problem.mode, type(query) is type(key) is type(value) is Tensor
        if not usual and _dispatches_values(query, key, value) and not mode.compiled:
            found.append("an input is a tensor subclass with operations of its own, which may have no such kernel")
        if not problem.plain:
            found += _against_the_rest(problem)
        if not mode.eager:
            found += _against_mode(problem)
        return found

    def notes(self, problem: Problem) -> list[str]:
        if problem.plain:
            return ["a NaN in a query or key may give 0, as PyTorch's kernel does (tiled gives NaN)"]
        return ["a NaN or infinite key that is masked for some queries leaks into them (tiled guards it)"]

    def transparent(self, problem: Problem) -> bool:
        # the pieces depend on values, which are unknown in compiled code
        return problem.plain or not problem.mode.compiled

    def forward(self, problem: Problem, rows: bool = False) -> Partial:
        lowered, value = problem.scores, problem.value
        assert isinstance(lowered, Pairwise) and value is not None
        if lowered.weight is not None:
            lowered = lowered.folded()
        query, key, value = copy_shared_rows(lowered.query, lowered.key, value)
        if problem.plain and 0 not in problem.sizes[:4]:
            return Partial(full(query, key, value, lowered.scale))
        problem = problem._replace(scores=lowered._replace(query=query, key=key), value=value)
        if problem.visible is not None and problem.visible.unseen == "inside":  # else the pieces skip unused keys
            problem = zero_unseen(problem)
        assert problem.value is not None
        again = problem.needs_grad and not problem.mode.transforms
        batches = []
        for batch, parts in pieces(problem):
            query, key, value = (_part(t, 0, batch) for t in (problem.query, problem.key, problem.value))
            outputs = [_run_piece(problem, piece, batch, query, key, value, again) for piece in parts]
            batches.append(regions.join(outputs, 2))
        return Partial(regions.join(batches, 0) if batches else tiles.no_keys(problem, problem.query))

    def cost(self, problem: Problem) -> Cost:
        if problem.plain:
            return Cost(math.prod(problem.sizes.shape), 0)
        starts = () if problem.spans is None else (problem.spans.start,)
        shapes = [t.shape for t in (*problem.added, *starts)] + [problem.sizes.shape] * problem.by_function
        batch_heads = max(shape[0] for shape in shapes) * max(shape[1] for shape in shapes)
        pairs = cells = 0
        for batch, parts in pieces(problem):
            for piece in parts:
                pairs += (batch.stop - batch.start) * problem.sizes.heads * piece.area
                cells = max(cells, piece.mask_cells(batch_heads))
        return Cost(pairs, problem.query.element_size() * cells)


def _dispatches_values(*tensors: Tensor) -> bool:
    """Return whether a tensor has a dispatch of its own; a fake tensor of another device stands for a plain one."""
    return any(has_own_dispatch(t) and (t.is_cpu or not has_no_values(t)) for t in tensors)


def _against_the_rest(problem: Problem) -> list[str]:
    """Return the objections to a mask, a bias, sinks and dropout."""
    found = []
    if problem.sinks is not None:
        found.append("the fused kernel has no sinks")
    if problem.dropout_p:
        found.append("the fused kernel draws its own dropout, which no other engine can repeat")
    # a transform of torch.func wraps a tensor, and the wrapper's requires_grad may differ from the tensor's
    mode = problem.mode
    learnt = any(t.requires_grad or (mode.transforms and unwrap(t).requires_grad) for t in problem.added)
    if learnt and (torch.is_grad_enabled() or mode.transforms):
        found.append("the bias requires grad, for which SDPA would compute the whole matrix")
    if problem.bias is not None and problem.needs_grad and any(_far_below_zero(t) for t in problem.added):
        found.append("a query's bias is below −100,000 for every key, for which SDPA's backward loses digits")
    if problem.spans is not None and problem.edges is None and not mode.compiled:
        found.append("the mask's values cannot be read, and they determine its pieces")
    if problem.by_function and torch.is_grad_enabled():
        found.append("the bias is a function, which may read a tensor that requires grad")
    other = problem.by_function or any(t.dtype != problem.query.dtype for t in problem.added)
    if other and problem.query.element_size() < 4:
        found.append(f"it would round the bias to {problem.query.dtype}")
    return found


def _against_mode(problem: Problem) -> list[str]:
    """Return the objections to transforms and forward mode."""
    mode, found = problem.mode, []
    if mode.forward:
        found.append("PyTorch's fused kernel has no derivatives in forward mode")
    elif mode.compiled and mode.operations_only:
        found.append("torch.func and forward mode inside compiled code follow operations one by one")
    inputs = problem.query, problem.key, problem.value
    levels = mode.transforms.count(GRAD)  # autograd outside of one transform may differentiate its gradient again
    if levels > 1 or (levels and any(t is not None and unwrap(t).requires_grad for t in inputs)):
        found.append("PyTorch's fused kernel has no second derivatives")
    if mode.transforms and any(t is not None and has_vmap_dimension(t) for t in (*inputs, *problem.added)):
        found.append("PyTorch has no batching rule for its fused kernel under torch.func.vmap")
    return found


def _far_below_zero(bias: Tensor) -> bool:
    """Return whether some row's largest bias is finite and very low, as in a row that a mask of finfo.min fully masks.

    The kernel's backward pass takes exp(score − log-sum-exp), and beside such numbers float32 rounds the log-sum-exp.
    """
    if not bias.shape[-1]:
        return False
    top = bias.detach().amax(-1)
    if not is_readable(top):
        return False
    return bool(((top < -1e5) & (top > -torch.inf)).any())


def full(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Call the fused kernel once, with inputs for which it does not fall back to the whole matrix."""
    shape, (_, key_heads, _, width) = query.shape, value.shape
    if scale <= 0:  # in low precision the kernel scales masked scores: −∞ would become +∞, or NaN
        query, scale = (-query, -scale) if scale else (query * 0, 1.0)  # exact, without rounding
    if shape[-1] != width:  # the kernel requires equal widths; zeros change no score
        wide = max(query.shape[-1], width)
        query, key, value = (
            F.pad(t, (0, wide - t.shape[-1])) if t.shape[-1] < wide else t for t in (query, key, value)
        )
    groups = shape[1] // key_heads
    if groups > 1 and mask is None and not causal:
        # without a mask a group folds into the query axis, so the kernel reads the keys once
        query = query.reshape(shape[0], key_heads, groups * shape[2], query.shape[3])
        out = fused(query, key, value, scale).reshape(*shape[:3], -1)
    else:
        out = fused(query, key, value, scale, mask, causal, grouped=groups > 1)
    return out if shape[-1] <= width else out[..., :width]


def _run_piece(
    problem: Problem, piece: Piece, batch: slice, query: Tensor, key: Tensor, value: Tensor, again: bool
) -> Tensor:
    assert problem.lowered is not None
    scale = problem.lowered.scale
    query = _part(query, 2, piece.queries)
    if piece.keys.stop <= piece.keys.start:
        return tiles.no_keys(problem, query)
    key, value = _part(key, 2, piece.keys), _part(value, 2, piece.keys)
    if piece.kind in ("full", "causal"):
        return full(query, key, value, scale, causal=piece.kind == "causal")
    if piece.kind == "band":
        return _band(query, key, value, scale, piece)

    # remove the operands from the closure: only the checkpoint should hold them
    rest = without_operands(problem)._replace(bias=problem.bias)
    # the backward pass computes the mask tiles again from these tensors
    of_mask = [] if problem.spans is None else [("the mask", tensor) for tensor in problem.spans.reads]
    reads = Versions([*of_mask, *(("the bias", tensor) for tensor in problem.added)])

    def masked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        reads.check()
        return full(query, key, value, scale, mask=_mask_tile(rest, batch, piece, query.dtype))

    if again:  # without a checkpoint the graph would hold the mask tile of every piece
        draws = problem.calls_functions  # functions may draw random numbers
        return cast(Tensor, checkpoint(masked, query, key, value, use_reentrant=False, preserve_rng_state=draws))
    return masked(query, key, value)


def _part(tensor: Tensor, dim: int, some: slice) -> Tensor:
    """Return a slice along one dimension; the tensor itself if the slice covers it."""
    size = some.stop - some.start
    return tensor if size == tensor.shape[dim] else tensor.narrow(dim, some.start, size)


def _mask_tile(problem: Problem, batch: slice, piece: Piece, dtype: torch.dtype) -> Tensor:
    """Return the mask that the kernel takes: bool, or the bias with −∞ at masked pairs."""
    sides = (batch, slice(None), piece.queries, piece.keys)
    keep = None if problem.spans is None else problem.spans.keep(*sides, problem.sizes.keys)
    if problem.bias is None:
        assert keep is not None
        return keep
    bias = problem.bias.tile(*sides, problem.sizes)
    bias = bias if keep is None else bias.masked_fill(~keep, -torch.inf)
    return bias.to(dtype).expand(-1, -1, *piece.shape)


def _band(query: Tensor, key: Tensor, value: Tensor, scale: float, piece: Piece) -> Tensor:
    """Compute a diagonal band in one call: tiles of queries with overlapping views of the keys.

    All tiles share one mask.
    """
    b, heads, rows, width = query.shape
    key_heads, tile = key.shape[1], piece.tile
    reach = tile + piece.width - 1  # the number of keys of a tile of queries
    groups = heads // key_heads
    tiles = rows // tile
    index = torch.arange(reach, device=query.device) - torch.arange(tile, device=query.device)[:, None]
    mask = torch.zeros(tile, reach, dtype=query.dtype, device=query.device)
    mask = mask.masked_fill((index < 0) | (index >= piece.width), -torch.inf)
    query = query.reshape(b, key_heads, groups, tiles, tile, width)
    # (b, hk, tiles, reach, E): overlapping views of the same memory
    keys, values = (t.unfold(2, reach, tile).transpose(-1, -2) for t in (key, value))
    outputs = [
        full(query[i, :, g], keys[i], values[i], scale, mask=mask) for i in range(b) for g in range(groups)
    ]  # each (hk, tiles, tile, Ev)
    out = torch.stack(outputs) if len(outputs) > 1 else outputs[0][None]
    out = out.reshape(b, groups, key_heads, rows, -1).transpose(1, 2)
    return out.reshape(b, heads, rows, -1)
