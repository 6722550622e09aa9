"""Scaled dot-product attention as a module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Never

from clearhead.base.arrays import ArrayT, Integers
from clearhead.base.dropout import check_dropout
from clearhead.base.keyword_hints import raise_unknown_keywords
from clearhead.base.shapes import AlignLike
from clearhead.masks.base import MaskLike
from clearhead.nn._nested import pack_inputs
from clearhead.nn._record import RecordingModule
from clearhead.problem.lengths import with_lengths


class DotProductAttention(RecordingModule):
    """Scaled dot-product attention, without parameters.

    >>> import torch, clearhead as ch
    >>> from clearhead.nn import DotProductAttention
    >>> attend = DotProductAttention()
    >>> query, key, value = torch.rand(2, 1, 4), torch.rand(2, 10, 4), torch.rand(2, 10, 6)
    >>> attend(query, key, value, valid_lens=[3, 10]).shape
    torch.Size([2, 1, 6])
    >>> attend.attention_weights[0, 0, 3:].sum()        # beyond the valid length
    tensor(0.)
    >>> attend(query, key, value, mask=ch.SlidingWindow(before=4), align="lower_right").shape
    torch.Size([2, 1, 6])

    Formula: output_i = Σ_j w_ij value_j, with w_i = softmax over the allowed keys j of query_i · key_j / √E.

    `dropout`: the probability with which a weight is dropped while training. `forward` describes the arguments of a
    call.
    `attention_weights`: the weights of the last call, lazy; detached, unless `record_gradients` is True, which
    keeps the last call's graph. `record=False` keeps nothing of a call, and there are none: see `set_recording`.
    Cost: that of `clearhead.attention`.
    Source: Vaswani et al. 2017, "Attention Is All You Need"; the signature: Zhang et al., "Dive into Deep Learning".
    """

    def __init__(self, dropout: float = 0.0, *, record: bool = True, record_gradients: bool = False) -> None:
        super().__init__(record, record_gradients)
        self.dropout = check_dropout(dropout, "dropout")

    def forward(
        self,
        query: ArrayT,
        key: ArrayT,
        value: ArrayT,
        valid_lens: Integers | None = None,
        *,
        mask: MaskLike = None,
        align: AlignLike = None,
        **others: Never,
    ) -> ArrayT:
        """The output (..., Lq, Ev), of the value's dtype.

        query (..., Lq, E), key (..., Lk, E), value (..., Lk, Ev); with four dimensions, dimension -3 is the heads.
        Nested tensors, as all three, are computed without padding: the output is nested like the query, and lengths,
        mask and `align` are those of the padded batch.
        `valid_lens`: integers (B,) or (B, Lq), how many keys may be seen: a list, an array or a tensor.
        `mask`: a `Mask`, a bool tensor (True: may attend), a float tensor (added to the scores), or None. Where both
        are given, both hold. `align`: where query 0 stands, as for `clearhead.attention`. Raises a `ClearheadError` for
        lengths that are no integers, and as `clearhead.attention`.
        """
        if others:
            raise_unknown_keywords("DotProductAttention.forward", self.forward, others)
        mask, bias = with_lengths(mask, valid_lens)
        dropout_p = self.dropout if self.training else 0.0
        packed, query, key, value = pack_inputs(query, key, value)
        if packed is not None:
            mask = packed.make_mask(mask)
        given: dict[str, Any] = {"mask": mask, "bias": bias, "align": align, "dropout_p": dropout_p}
        output: ArrayT = self._attend(query, key, value, **given).output
        return output if packed is None else packed.nest("query", output)

    if TYPE_CHECKING:  # torch declares a call of anything
        __call__ = forward

    def extra_repr(self) -> str:
        return f"dropout={self.dropout:g}"
