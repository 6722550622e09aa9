"""Additive attention as a module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Never

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from clearhead.base.arrays import Array, ArrayT, Integers, check_float, is_numpy, to_tensor_float
from clearhead.base.dropout import check_dropout
from clearhead.base.errors import ShapeError, UnsupportedError, columns
from clearhead.base.keyword_hints import raise_unknown_keywords
from clearhead.base.numbers import check_count
from clearhead.base.products import multiply
from clearhead.base.shapes import AlignLike
from clearhead.base.torch_state.torch_private import has_hooks, put_parts
from clearhead.masks.base import MaskLike
from clearhead.nn._heads import check_dtype, reset_modules
from clearhead.nn._nested import pack_inputs
from clearhead.nn._record import RecordingModule
from clearhead.nn.prepared_keys import PreparedKeys, unpack_prepared_keys
from clearhead.problem.lengths import with_lengths
from clearhead.scores.additive import Additive
from clearhead.scores.base import Score, draw_linear

OUTSIDE = "clearhead.attention(W_q(query), W_k(key), value, score=Additive.from_weights(None, None, w_v))"


class AdditiveAttention(RecordingModule):
    """Bahdanau's attention: a small tanh network scores each pair. Queries and keys may differ in width.

    >>> import torch
    >>> from clearhead.nn import AdditiveAttention
    >>> attend = AdditiveAttention(hidden_dim=8)
    >>> query, key, value = torch.rand(2, 1, 20), torch.rand(2, 10, 2), torch.rand(2, 10, 4)
    >>> attend(query, key, value, valid_lens=[2, 6]).shape
    torch.Size([2, 1, 4])
    >>> {name: tuple(p.shape) for name, p in attend.named_parameters()}    # sizes known since the first call
    {'w_v': (8,), 'W_q.weight': (8, 20), 'W_k.weight': (8, 2)}
    >>> AdditiveAttention(hidden_dim=8, query_dim=20, key_dim=2)(query, key, value).shape      # sizes known at once
    torch.Size([2, 1, 4])
    >>> attend.attention_weights.shape
    torch.Size([2, 1, 10])
    >>> prepared = attend.prepare(key, value)           # for a decoder: the keys are projected once
    >>> [attend(step, prepared, valid_lens=[2, 6]).shape for step in torch.rand(3, 2, 1, 20)]
    [torch.Size([2, 1, 4]), torch.Size([2, 1, 4]), torch.Size([2, 1, 4])]

    Formula: output_i = Σ_j w_ij value_j, with w_i = softmax over the allowed keys j of
    Σ_h w_v[h] · tanh((W_q query_i)[h] + (W_k key_j)[h]).

    `hidden_dim`: the width of the tanh network. `query_dim`, `key_dim`: the widths of query and key; None takes a width
    from the first call, or from a state dict. An optimizer made before the first call holds the same parameters, as
    with torch's lazy modules; make the first call before torch.compile.
    `dropout`: the probability with which a weight is dropped while training. `device`, `dtype`: those of the
    parameters; None is the default of PyTorch. `forward` describes the arguments of a call.
    `attention_weights`: the weights of the last call, lazy; detached, unless `record_gradients` is True, which
    keeps the last call's graph. `record=False` keeps nothing of a call, and there are none: see `set_recording`.
    Cost: Lq·Lk·hidden_dim tanh over the allowed pairs; memory O(Lq + Lk).
    Source: Bahdanau et al. 2015, "Neural Machine Translation by Jointly Learning to Align and Translate"; the
    signature: Zhang et al., "Dive into Deep Learning".
    """

    def __init__(
        self,
        hidden_dim: int,
        dropout: float = 0.0,
        *,
        query_dim: int | None = None,
        key_dim: int | None = None,
        record: bool = True,
        record_gradients: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(record, record_gradients)
        self.hidden_dim = check_count(hidden_dim, 1, "hidden_dim")
        self.dropout = check_dropout(dropout, "dropout")
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.W_q = _matrix(query_dim, "query_dim", self.hidden_dim, made)
        self.W_k = _matrix(key_dim, "key_dim", self.hidden_dim, made)
        self.w_v = nn.Parameter(torch.empty(self.hidden_dim, **made))
        draw_linear(self.w_v)

    def reset_parameters(self) -> None:
        """Draw all parameters anew, as `torch.nn.Linear` draws its own."""
        reset_modules(self.W_q, self.W_k)
        draw_linear(self.w_v)

    def forward(
        self,
        query: ArrayT,
        key: ArrayT | PreparedKeys,
        value: ArrayT | None = None,
        valid_lens: Integers | None = None,
        *,
        mask: MaskLike = None,
        align: AlignLike = None,
        **others: Never,
    ) -> ArrayT:
        """The output (..., Lq, Ev), of the value's dtype.

        query (..., Lq, Eq), key (..., Lk, Ek), value (..., Lk, Ev); or, in place of key and value, `PreparedKeys`.
        Nested tensors, as all three, are computed without padding: the output is nested like the query, and lengths,
        mask and `align` are those of the padded batch.
        `valid_lens`: integers (B,) or (B, Lq), how many keys may be seen: a list, an array or a tensor.
        `mask`: a `Mask`, a bool tensor (True: may attend), a float tensor (added to the scores), or None. Where both
        are given, both hold. `align`: as for `clearhead.attention`. Raises a `ClearheadError` for other widths than
        those of the first call, and as `clearhead.attention` does.
        """
        if others:
            raise_unknown_keywords("AdditiveAttention.forward", self.forward, others)
        packed, query, key, value = pack_inputs(query, key, value)
        _settle(self.W_q, query)
        prepared = isinstance(key, PreparedKeys)
        if isinstance(key, PreparedKeys):
            key, value = unpack_prepared_keys(key, query, value, self)
        else:
            _settle(self.W_k, key)
        self._check_layers()
        mask, bias = with_lengths(mask, valid_lens)
        if packed is not None:
            mask = packed.make_mask(mask)
        given: dict[str, Any] = {"mask": mask, "bias": bias, "align": align, "score": self._make_score(prepared)}
        dropout_p = self.dropout if self.training else 0.0
        output: ArrayT = self._attend(query, key, value, **given, dropout_p=dropout_p).output
        return output if packed is None else packed.nest("query", output)

    if TYPE_CHECKING:  # torch declares a call of anything
        __call__ = forward

    def prepare(self, key: Array, value: Array) -> PreparedKeys:
        """Key and value with W_k's projection done, for calls `attend(query, prepared)`: see `PreparedKeys`.

        key (..., Lk, Ek), value (..., Lk, Ev). Where W_k is trained, padding must be finite: it is projected
        here, before any mask is known.
        Raises a `ClearheadError` for other widths or dtypes than the module's. Cost: Lk·Ek·hidden_dim multiplications.
        """
        packed, _, key, value = pack_inputs(key, key, value)
        if packed is not None:
            row = self.prepare(key, value)
            return row.over(packed.nest("key", row._key), packed.nest("key", value))
        numpy = is_numpy(key=key, value=value)
        tensors = {"key": to_tensor_float(key, "key"), "value": to_tensor_float(value, "value")}
        for name, tensor in tensors.items():
            check_float(tensor, name)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if len(shapes["key"]) < 2 or shapes["key"][-2:-1] != shapes["value"][-2:-1]:
            raise ShapeError(
                "key and value disagree: each key needs its value, (..., Lk, Ek) and (..., Lk, Ev).\n" + columns(shapes)
            )
        _settle(self.W_k, tensors["key"])
        self._check_layers()
        width = self.W_k.weight.shape[1]
        if shapes["key"][-1] != width:
            raise ShapeError(f"key has shape {shapes['key']}; the module's W_k takes keys of width {width}.")
        check_dtype("key", tensors["key"], self.W_k.weight, "W_k.weight")
        projected = multiply(tensors["key"], self.W_k.weight.T)
        return PreparedKeys(projected.detach().numpy() if numpy else projected, value, self)

    def _check_layers(self) -> None:
        """Check that W_q and W_k are plain matrices: the score reads their weights, and calls no layer."""
        for name, layer in (("W_q", self.W_q), ("W_k", self.W_k)):
            if isinstance(layer, nn.LazyLinear):  # its first call comes later
                continue
            if type(layer).forward is not nn.Linear.forward or has_hooks(layer) or layer.bias is not None:
                raise UnsupportedError(
                    f"AdditiveAttention reads {name}.weight and does not call {name}, a {type(layer).__name__} that "
                    f"has a bias, hooks or another forward.\nMerge it into the weight, or project outside: {OUTSIDE}."
                )

    def _make_score(self, prepared: bool) -> Additive:
        """The score over the module's parameters. It projects after attention() has replaced padding that is NaN."""
        score = Additive.__new__(Additive)  # which copies no parameter, nor asks that a tensor is one
        Score.__init__(score)
        W_k = None if prepared else self.W_k.weight
        put_parts(score, ({"W_q": self.W_q.weight, "W_k": W_k, "w_v": self.w_v}, {}, {}))
        return score

    def extra_repr(self) -> str:
        return f"hidden_dim={self.hidden_dim}, dropout={self.dropout:g}"


def _matrix(width: int | None, name: str, hidden_dim: int, made: dict[str, Any]) -> nn.Linear:
    """A projection of vectors of this width; None: of the width that its first call has."""
    if width is None:
        return nn.LazyLinear(hidden_dim, bias=False, **made)
    return nn.Linear(check_count(width, 1, name), hidden_dim, bias=False, **made)


def _settle(layer: nn.Module, array: Any) -> None:
    """Give a lazy layer the width of this array, unless a state dict gave it one, by a call with no rows."""
    if not isinstance(layer, nn.LazyLinear):
        return
    weight, shape = layer.weight, tuple(getattr(array, "shape", ()))
    if shape or not is_lazy(weight):  # without a shape attention() raises
        width = shape[-1] if is_lazy(weight) else weight.shape[1]
        with torch.no_grad():
            layer(torch.empty(0, width, dtype=weight.dtype, device=weight.device))
