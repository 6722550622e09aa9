"""Scaled dot-product attention as a module."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead._attention import attention
from clearhead.base.dropout import check_dropout
from clearhead.masks.base import Mask
from clearhead.masks.lengths import Lengths
from clearhead.nn._record import RecordingModule


class DotProductAttention(RecordingModule):
    """Scaled dot-product attention, without parameters.

    >>> import torch
    >>> from clearhead.nn import DotProductAttention
    >>> attend = DotProductAttention()
    >>> query, key, value = torch.rand(2, 1, 4), torch.rand(2, 10, 4), torch.rand(2, 10, 6)
    >>> attend(query, key, value, valid_lens=[3, 10]).shape
    torch.Size([2, 1, 6])
    >>> attend.attention_weights[0, 0, 3:].sum()        # beyond the valid length
    tensor(0.)

    Formula: output_i = Σ_j w_ij value_j, with w_i = softmax over the allowed keys j of query_i · key_j / √E.

    `dropout`: the probability with which a weight is dropped while training.
    query (..., Lq, E), key (..., Lk, E), value (..., Lk, Ev); with four dimensions, dimension -3 is the heads.
    `valid_lens`: integers (B,) or (B, Lq), how many keys may be seen; or a `Mask`, or a bool tensor (True: may attend).
    `align`: where query 0 stands, as for `clearhead.attention`.
    Returns (..., Lq, Ev) of the value's dtype. Raises a `ClearheadError` as `clearhead.attention` does.
    `attention_weights`: the weights of the last call, lazy; detached, unless `record_gradients` is True.
    Cost: that of `clearhead.attention`.
    Source: Vaswani et al. 2017, "Attention Is All You Need"; the signature: Zhang et al., "Dive into Deep Learning".
    """

    def __init__(self, dropout: float = 0.0, *, record_gradients: bool = False) -> None:
        super().__init__(record_gradients)
        self.dropout = check_dropout(dropout, "dropout")

    def forward(self, query: Any, key: Any, value: Any, valid_lens: Any = None, *, align: Any = None) -> Any:
        mask = lengths_or_mask(valid_lens)
        dropout_p = self.dropout if self.training else 0.0
        output = attention(query, key, value, mask=mask, align=align, dropout_p=dropout_p)
        self._record(query, key, mask=mask, align=align)
        return output

    def extra_repr(self) -> str:
        return f"dropout={self.dropout:g}"


def lengths_or_mask(valid_lens: Any) -> Any:
    """Integers are lengths; a mask, or a bool tensor, is what it is."""
    if valid_lens is None or isinstance(valid_lens, Mask):
        return valid_lens
    if isinstance(valid_lens, Tensor | np.ndarray) and valid_lens.dtype in (torch.bool, np.bool_):
        return valid_lens
    return Lengths(valid_lens)
