"""One call of FlexAttention, compiled: PyTorch's kernel with rules for the scores and for the mask.

PyTorch compiles one kernel for each kind of call: its dtype, widths, heads, scale, and which parts it has. The numbers
of sequences, queries and keys are dynamic from the second number on.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from clearhead.base.user_functions.rules import entry
from clearhead.engines.flex.blocks import BLOCK, Blocks
from clearhead.engines.flex.rules import Traced

BACKEND = "inductor"  # the backend of torch.compile
NARROWEST = 16  # the least width of a row in the kernel's matrix products

# PyTorch's blocks for rows of up to 64 numbers of 16 bits, 128 × 128 in three stages, need 248 KB of shared memory
# together with a bias, and an H100 has 232 KB. These blocks need 82 KB.
BESIDE_A_BIAS = {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_stages": 2, "fwd_num_warps": 8}

_compiled: dict[Any, Callable[..., Any]] = {}


def for_a_gpu(device: torch.device) -> bool:
    """Return whether the call is compiled to GPU kernels; tests on CUDA also run it uncompiled."""
    return device.type == "cuda" and BACKEND == "inductor"


class Parts(NamedTuple):
    """What is added to the scores, and the function that changes them before.

    Attributes:
        dense: One number for each pair, (B or 1, H or 1, Lq or 1, Lk or 1).
        top: The number to subtract from each row of `dense`, (B or 1, H or 1, Lq or 1).
        relative: One number for each distance, (B or 1, H or 1, Lq + Lk − 1): see `Added`.
        rule: A function of one pair.
        change: A function of the score of one pair, applied before anything is added.
    """

    dense: Tensor | None = None
    top: Tensor | None = None
    relative: Tensor | None = None
    rule: Traced | None = None
    change: Traced | None = None


class Numbers(NamedTuple):
    """Constants that are compiled into the kernel; `rows`: whether it returns the log-sum-exp."""

    scale: float
    softcap: float | None
    rows: bool


def attend(
    query: Tensor, key: Tensor, value: Tensor, blocks: Blocks | None, parts: Parts, numbers: Numbers
) -> tuple[Tensor, Tensor | None]:
    """Compute the output and, if requested, each query's log-sum-exp.

    The output is (B, H, Lq, Ev), in the dtype of the query; the log-sum-exp is (B, H, Lq).
    """
    # on a CPU the compiled kernel has neither log-sum-exp nor gradients: run PyTorch's operator uncompiled
    plain = query.is_cpu and (numbers.rows or torch.is_grad_enabled())
    backend = "aot_eager" if plain else BACKEND
    asked = None if blocks is None or blocks.rule is None else blocks.rule.kind
    added = [None if rule is None else rule.kind for rule in (parts.rule, parts.change)]
    present = blocks is not None and (len(blocks.edges), blocks.keep is not None, asked)
    kind = (
        (query.dtype, query.device, query.shape[1], query.shape[-1], key.shape[1], value.shape[-1]),
        (present, *added, *(part is not None for part in parts), numbers, backend, torch.is_grad_enabled()),
    )
    if kind not in _compiled:
        # a new function for each kind: PyTorch stops compiling a function after a number of recompilations
        own = types.FunctionType(_call.__code__.replace(co_name="flex_attention_of_one_kind"), _call.__globals__)
        _compiled[kind] = torch.compile(own, backend=backend, fullgraph=True)
    return cast("tuple[Tensor, Tensor | None]", _compiled[kind](numbers, query, key, value, blocks, parts))


def _call(
    numbers: Numbers, query: Tensor, key: Tensor, value: Tensor, blocks: Blocks | None, parts: Parts
) -> tuple[Tensor, Tensor | None]:
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

    scale, softcap, rows = numbers
    dense, top, relative, rule, change = parts
    last = query.shape[2] - 1

    def finished(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        """Return a score with its softcap, its change and its bias."""
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if change is not None:
            score = change.changed(score, batch, head, row, column)
        if dense is not None and top is not None:  # subtract first: beside -1e9 the score would lose its digits
            score = score + (entry(dense, batch, head, row, column) - entry(top, batch, head, row))
        if relative is not None:
            score = score + entry(relative, batch, head, column - row + last)
        if rule is not None:
            score = score + rule.at(batch, head, row, column).to(score.dtype)
        return score

    mask = None
    if blocks is not None:
        partial, full, partial_by_key, full_by_key, edges, keep, residual = blocks

        def allowed(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            """Return whether a pair is allowed: inside the hull, outside of the gaps, and True in the residual."""
            inside = (column >= entry(edges[0], batch, head, row)) & (column < entry(edges[1], batch, head, row))
            if len(edges) > 2:
                for i in range(edges[2].shape[-1]):
                    low, high = (entry(edge[..., i], batch, head, row) for edge in edges[2:])
                    inside = inside & ((column < low) | (column >= high))
            if residual is not None:
                inside = inside & residual.at(batch, head, row, column)
            return inside if keep is None else inside & entry(keep, batch, head, row, column)

        mask = BlockMask(
            seq_lengths=(query.shape[2], key.shape[2]),
            kv_num_blocks=partial[0],
            kv_indices=partial[1],
            full_kv_num_blocks=full[0],
            full_kv_indices=full[1],
            q_num_blocks=partial_by_key[0],
            q_indices=partial_by_key[1],
            full_q_num_blocks=full_by_key[0],
            full_q_indices=full_by_key[1],
            BLOCK_SIZE=(BLOCK, BLOCK),
            mask_mod=allowed,
        )
    options: dict[str, Any] = {}
    with_parts = any(part is not None for part in parts)
    if query.element_size() == 2 and query.shape[-1] <= 64 and with_parts:
        options |= BESIDE_A_BIAS
    groups = query.shape[1] // key.shape[1]
    if groups & (groups - 1):  # the kernel for few queries requires a power of two
        options["BACKEND"] = "TRITON"
    found: Any = flex_attention(
        query,
        key,
        value,
        score_mod=finished if with_parts or softcap is not None else None,
        block_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        kernel_options=options if options and query.is_cuda else None,  # type: ignore[arg-type]
        return_aux=AuxRequest(lse=True) if rows else None,  # type: ignore[arg-type]
    )
    return (found[0], found[1].lse) if rows else (found, None)
