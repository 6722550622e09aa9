"""The masks of transformers' FlashAttention backends, which are no matrices."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from clearhead.masks.causal import Causal
from clearhead.masks.sliding_window import SlidingWindow
from clearhead.models._masks import MaskStore, Recorded
from clearhead.models._packed import documents, restarting

VARLEN = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")  # all of them, or none is read


def masks(
    store: MaskStore, shape: tuple[int, int, int, int], mask: Tensor | None, is_causal: bool, kwargs: dict[str, Any]
) -> Recorded:
    """`shape`: (B, H, Lq, Lk). `mask` (B, Lk): 1 where there is a token. The last query stands at the last key."""
    batch, _, queries, keys = shape
    found = Recorded()
    if mask is not None:  # FlashAttention then ignores packed sequences
        tokens = mask.bool()
        keep = tokens[:, None, None, :]
        if queries > 1:  # the queries are the last tokens; where there is none, nothing is computed
            keep = keep & tokens[:, None, -queries:, None]
        found = store.convert(keep)
    elif all(kwargs.get(name) is not None for name in VARLEN):
        found = Recorded(documents(kwargs, batch, queries, keys))
    elif batch == 1 and kwargs.get("position_ids") is not None:
        found = Recorded(restarting(kwargs["position_ids"], queries, keys))
    if is_causal and queries > 1:
        found = found.plus(Recorded(Causal(), align="lower_right"))
    window = kwargs.get("sliding_window")
    if window is not None and keys > window:
        after = 0 if is_causal else window - 1
        found = found.plus(Recorded(SlidingWindow(before=window - 1, after=after), align="lower_right"))
    return found
