"""The keys that a model's indexer chose, where they reach the backend beside the mask and not in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.base.errors import UnsupportedError


def selected(
    module: nn.Module, keywords: Mapping[str, Any], shape: tuple[int, int, int, int], masked: bool
) -> Tensor | None:
    """The chosen keys, bool (B, H or 1, Lq, Lk); None where every key was.

    `indices` (B, Lq, n): keys (DeepSeek 3.2, for one). `block_indices` (B, groups of heads, Lq, n): blocks of keys,
    −1 for none (MiniMax M3). On "eager" and "sdpa" these models put them into the mask.
    `shape`: (B, H, Lq, Lk). `masked`: there is a mask beside; without one, MiniMax is causal by its position ids.
    """
    _, heads, queries, keys = shape
    indices, blocks = keywords.get("indices"), keywords.get("block_indices")
    keep: Tensor | None = None
    if indices is not None:
        keep = _scattered(indices, keys).unsqueeze(1)
    if blocks is not None:
        size = getattr(getattr(module, "indexer", None), "block_size", None)
        if size is None:
            raise UnsupportedError(
                f"{type(module).__name__} passed block_indices to its attention backend and has no indexer.block_size "
                "that tells how many keys a block has. Load the model with attn_implementation='sdpa' or 'eager'."
            )
        count = -(-keys // size)
        chosen = _scattered(blocks.masked_fill(blocks < 0, count), count + 1)[..., :count]  # the last is dropped
        chosen = chosen.repeat_interleave(size, -1)[..., :keys].repeat_interleave(heads // blocks.shape[1], 1)
        if not masked:
            own = keywords.get("position_ids")
            own = torch.arange(keys - queries, keys, device=chosen.device) if own is None else own
            chosen = chosen & (torch.arange(keys, device=chosen.device) <= own.view(-1, 1, queries, 1))
        keep = chosen if keep is None else keep & chosen
    return keep


def _scattered(indices: Tensor, size: int) -> Tensor:
    none = torch.zeros(*indices.shape[:-1], size, dtype=torch.bool, device=indices.device)
    return none.scatter(-1, indices.long(), True)
