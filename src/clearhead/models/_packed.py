"""Sequences packed into one, as FlashAttention's keywords describe them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from clearhead.base.errors import UnsupportedError
from clearhead.masks.documents import Documents


def documents(keywords: Mapping[str, Any], batch: int, queries: int, keys: int) -> Documents | None:
    """The mask of `cu_seq_lens_q`, (documents + 1,): where each document begins, and where the last one ends.

    They count through the whole batch. None where they are not given.
    """
    starts, of_keys = keywords.get("cu_seq_lens_q"), keywords.get("cu_seq_lens_k")
    if starts is None:
        return None
    starts = starts.detach().long()
    one = of_keys is None or of_keys is keywords["cu_seq_lens_q"] or torch.equal(of_keys.long(), starts)
    rows = range(0, batch * queries + 1, max(queries, 1))
    if not one or queries != keys or not {0, batch * queries} <= set(rows) & set(starts.tolist()):
        raise UnsupportedError(
            f"a backend was given cu_seq_lens_q {starts.tolist()} for {batch} × {queries} queries and {keys} keys; "
            "expected documents that fill the whole sequence, the same for queries and keys, without a cache.\n"
            "Pass a padded batch and an attention mask, or run the packed batch at once, with use_cache=False."
        )
    if not set(rows) <= set(starts.tolist()):
        raise UnsupportedError(
            f"a backend was given cu_seq_lens_q {starts.tolist()} for {batch} sequences of {queries} tokens: a "
            "document reaches from one sequence into the next. Pass all documents as one sequence, (1, L)."
        )
    return _of(torch.searchsorted(starts, torch.arange(batch * queries, device=starts.device), right=True), batch)


def restarting(positions: Tensor, queries: int, keys: int) -> Documents | None:
    """The documents of one sequence whose position ids begin again from 0; None where they count through."""
    positions = positions.reshape(-1)
    if positions.numel() != queries or queries < 2 or bool((positions.diff() == 1).all()):
        return None
    if queries != keys or int(positions[0]) != 0:
        raise UnsupportedError(
            "a FlashAttention backend was given several sequences packed into one, by position ids that begin again, "
            f"with a cache: {queries} queries, {keys} keys. Run the packed sequence at once, with use_cache=False."
        )
    return _of((positions == 0).cumsum(0), 1)


def _of(ids: Tensor, batch: int) -> Documents:
    ids = ids.view(batch, -1)
    return Documents(ids[0] if batch == 1 else ids)
