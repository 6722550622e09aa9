"""The masks of transformers' FlashAttention backends, which are no matrices."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from clearhead._errors import UnsupportedError
from clearhead.masks.causal import Causal
from clearhead.masks.sliding_window import SlidingWindow
from clearhead.models._masks import Recorded
from clearhead.models.recorder import Recorder


def masks(
    recorder: Recorder, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, kwargs: dict[str, Any]
) -> Recorded:
    """`mask` (B, Lk): 1 where there is a token. The last query stands at the last key."""
    positions = kwargs.get("position_ids")
    packed = mask is None and positions is not None and query.shape[0] == 1 and bool((positions.diff() != 1).any())
    if packed or kwargs.get("cu_seq_lens_q") is not None:
        raise UnsupportedError(
            "a FlashAttention backend was given several sequences packed into one, which watch() cannot record. "
            "Pass them as a padded batch, or load the model with attn_implementation='sdpa'."
        )
    found = Recorded()
    if mask is not None:
        tokens = mask.bool()
        keep = tokens[:, None, None, :]
        if query.shape[2] > 1:  # the queries are the last tokens; where there is none, nothing is computed
            keep = keep & tokens[:, None, -query.shape[2] :, None]
        found = recorder.masks.convert(keep)
    if is_causal and query.shape[2] > 1:
        found = found.plus(Recorded(Causal(align="lower_right")))
    window = kwargs.get("sliding_window")
    if window is not None and key.shape[2] > window:
        after = 0 if is_causal else window - 1
        found = found.plus(Recorded(SlidingWindow(before=window - 1, after=after, align="lower_right")))
    return found
