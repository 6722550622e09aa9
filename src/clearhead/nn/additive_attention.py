"""Additive attention as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from clearhead._attention import attention
from clearhead.base.dropout import check_dropout
from clearhead.base.numbers import check_count
from clearhead.nn._record import RecordingModule
from clearhead.nn.dot_product_attention import lengths_or_mask
from clearhead.scores.additive import Additive
from clearhead.scores.base import Score


class AdditiveAttention(RecordingModule):
    """Bahdanau's attention: a small tanh network scores each pair. Queries and keys may differ in width.

    >>> import torch
    >>> from clearhead.nn import AdditiveAttention
    >>> attend = AdditiveAttention(num_hiddens=8)
    >>> query, key, value = torch.rand(2, 1, 20), torch.rand(2, 10, 2), torch.rand(2, 10, 4)
    >>> attend(query, key, value, valid_lens=[2, 6]).shape
    torch.Size([2, 1, 4])
    >>> {name: tuple(p.shape) for name, p in attend.named_parameters()}    # sizes known since the first call
    {'w_v': (8,), 'W_q.weight': (8, 20), 'W_k.weight': (8, 2)}
    >>> attend.attention_weights.shape
    torch.Size([2, 1, 10])

    Formula: output_i = Σ_j w_ij value_j, with w_i = softmax over the allowed keys j of
    Σ_h w_v[h] · tanh((W_q query_i)[h] + (W_k key_j)[h]).

    `num_hiddens`: the width of the tanh network. The widths of query and key are taken from the first call, or from a
    state dict. An optimizer made before the first call holds the same parameters, as with torch's lazy modules; make
    the first call before torch.compile.
    `dropout`: the probability with which a weight is dropped while training.
    query (..., Lq, Eq), key (..., Lk, Ek), value (..., Lk, Ev); `valid_lens`: integers (B,) or (B, Lq), how many keys
    may be seen; or a `Mask`, or a bool tensor (True: may attend). `align`: as for `clearhead.attention`.
    Returns (..., Lq, Ev) of the value's dtype. Raises a `ClearheadError` for other widths than those of the first call,
    and as `clearhead.attention` does. `attention_weights`: the weights of the last call, lazy; detached,
    unless `record_gradients` is True, which keeps the last call's graph.
    Cost: Lq·Lk·num_hiddens tanh over the allowed pairs; memory O(Lq + Lk).
    Source: Bahdanau et al. 2015, "Neural Machine Translation by Jointly Learning to Align and Translate"; the
    signature: Zhang et al., "Dive into Deep Learning".
    """

    _score: tuple[Additive] | None = None  # in a tuple, its parameters are not counted twice

    def __init__(self, num_hiddens: int, dropout: float = 0.0, *, record_gradients: bool = False) -> None:
        super().__init__(record_gradients)
        self.num_hiddens = check_count(num_hiddens, 1, "num_hiddens")
        self.dropout = check_dropout(dropout, "dropout")
        self.W_q = nn.LazyLinear(self.num_hiddens, bias=False)
        self.W_k = nn.LazyLinear(self.num_hiddens, bias=False)
        bound = self.num_hiddens**-0.5  # as nn.Linear(num_hiddens, 1) has it
        self.w_v = nn.Parameter(torch.empty(self.num_hiddens).uniform_(-bound, bound))

    def forward(self, query: Any, key: Any, value: Any, valid_lens: Any = None, *, align: Any = None) -> Any:
        for layer, array in ((self.W_q, query), (self.W_k, key)):
            if isinstance(layer, LazyModuleMixin):
                _settle(layer, array)
        score = self._on_parameters()
        mask = lengths_or_mask(valid_lens)
        dropout_p = self.dropout if self.training else 0.0
        output = attention(query, key, value, score=score, mask=mask, align=align, dropout_p=dropout_p)
        self._record(query, key, score=score, mask=mask, align=align)
        return output

    def _on_parameters(self) -> Additive:
        """The score that shares the parameters. It projects after attention() has seen to padding that is NaN."""
        tensors: dict[str, Any] = {"W_q": self.W_q.weight, "W_k": self.W_k.weight, "w_v": self.w_v}
        if self._score is not None:
            score = self._score[0]
            if all(score._parameters[name] is tensor for name, tensor in tensors.items()):
                return score
        # What torch.func and parametrizations put in place of a parameter is none, and is taken as it is.
        score = Additive.__new__(Additive)
        Score.__init__(score)
        score._parameters.update(tensors)
        if all(isinstance(tensor, nn.Parameter) for tensor in tensors.values()):
            self._score = (score,)
        return score

    def extra_repr(self) -> str:
        return f"num_hiddens={self.num_hiddens}, dropout={self.dropout:g}"


def _settle(layer: Any, array: Any) -> None:
    """Give a lazy layer the width of this array, unless a state dict gave it one, by a call of no rows."""
    weight = layer.weight
    shape = tuple(getattr(array, "shape", ()))
    if is_lazy(weight) and not shape:
        return  # attention() says what is wrong with it
    width = shape[-1] if is_lazy(weight) else weight.shape[1]
    with torch.no_grad():
        layer(torch.empty(0, width, dtype=weight.dtype, device=weight.device))
