"""torch.nn.MultiheadAttention, computed by clearhead."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead._attention import Arguments
from clearhead.base.dropout import check_dropout
from clearhead.base.errors import ClearheadError
from clearhead.base.numbers import check_count, check_flag
from clearhead.base.shapes import Align, Sizes
from clearhead.nn._heads import (
    Projection,
    check_groups,
    check_inputs,
    check_sizes,
    project_output,
    reset_modules,
    split_heads,
)
from clearhead.nn._nested import pack_inputs
from clearhead.nn._record import RecordingModule
from clearhead.nn._torch import check_torch, from_torch_masks, in_full, refuse_keys
from clearhead.problem.padded import pad_arguments


class TorchMultiheadAttention(nn.MultiheadAttention, RecordingModule):
    """`torch.nn.MultiheadAttention`, with its parameters and its call, computed by clearhead, in torch's layers too.

    >>> import torch
    >>> from clearhead.nn import TorchMultiheadAttention
    >>> layer = torch.nn.TransformerEncoderLayer(64, 8, batch_first=True).eval()
    >>> x, padding = torch.rand(2, 10, 64), torch.arange(10) >= torch.tensor([[6], [10]])       # True: may not
    >>> expected = layer(x, src_key_padding_mask=padding)
    >>> layer.self_attn = TorchMultiheadAttention.from_torch(layer.self_attn)
    >>> torch.allclose(layer(x, src_key_padding_mask=padding), expected, atol=1e-5)
    True
    >>> layer.self_attn.attention_weights.shape
    torch.Size([2, 8, 10, 10])
    >>> output, weights = layer.self_attn(x, x, x, key_padding_mask=padding)
    >>> weights.shape                                                                   # the mean over the heads
    torch.Size([2, 10, 10])

    Arguments, and the state dict, are those of `torch.nn.MultiheadAttention`; the call is described at `forward`. It
    works in nn.TransformerEncoderLayer and DecoderLayer, in modules built of them, and in nn.Transformer, in training
    and evaluation. Layers do not take their fused path, which calls no module, so `attention_weights` are the weights
    of the last call, lazy, (B, H, Lq, Lk), detached unless `record_gradients` is True. `record=False` keeps nothing of
    a call, and there are none: see `set_recording`.
    It differs from torch's in this: a query that may see nothing gives out_proj's bias and weights of 0, where torch's
    gives NaN or the same, depending on its path; weights are those before dropout. For a new model `MultiHeadAttention`
    has more, and its masks are True where a query may attend.
    Refused, by an `UnsupportedError`: add_bias_kv and add_zero_attn; by a `ClearheadError`: masks of integers, and
    calls that torch refuses.
    Nested tensors, which nn.TransformerEncoder makes of a padded batch in evaluation, are computed without padding.
    Cost: as `MultiHeadAttention`; `need_weights=True`, torch's default, makes the whole matrix of the weights.
    Source: Vaswani et al. 2017, "Attention Is All You Need".
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        record: bool = True,
        record_gradients: bool = False,
    ) -> None:
        width, heads, _ = check_sizes(embed_dim, num_heads, None)
        own_keys = check_flag(add_bias_kv, "add_bias_kv"), check_flag(add_zero_attn, "add_zero_attn")
        refuse_keys(any(own_keys), "TorchMultiheadAttention")
        super().__init__(
            width,
            heads,
            check_dropout(dropout, "dropout"),
            bias=check_flag(bias, "bias"),
            kdim=None if kdim is None else check_count(kdim, 1, "kdim"),
            vdim=None if vdim is None else check_count(vdim, 1, "vdim"),
            batch_first=check_flag(batch_first, "batch_first"),
            device=device,
            dtype=dtype,
        )
        self._set_record(record, record_gradients)
        self.register_forward_pre_hook(_is_called)

    def reset_parameters(self) -> None:
        """Draw all parameters anew, as torch's module draws them."""
        reset_modules(self.out_proj)
        for name, parameter in self.named_parameters(recurse=False):
            _ = nn.init.zeros_(parameter) if name == "in_proj_bias" else nn.init.xavier_uniform_(parameter)
        if self.out_proj.bias is not None:
            nn.init.zeros_(self.out_proj.bias)

    @classmethod
    def from_torch(
        cls, module: nn.MultiheadAttention, *, record: bool = True, record_gradients: bool = False
    ) -> TorchMultiheadAttention:
        """The same module, with a copy of the weights, of dropout, batch_first, device, dtype and mode.

        Raises an `UnsupportedError` for a module with add_bias_kv or add_zero_attn.
        """
        check_torch(module, cls.__name__)
        ours = cls(
            module.embed_dim,
            module.num_heads,
            module.dropout,
            bias=module.in_proj_bias is not None,
            kdim=module.kdim,
            vdim=module.vdim,
            batch_first=module.batch_first,
            device="meta",  # the weights are replaced: none are made, and no random numbers are drawn
            record=record,
            record_gradients=record_gradients,
        )
        for name, parameter in module.named_parameters():
            owner, _, leaf = name.rpartition(".")
            copied = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            setattr(ours.get_submodule(owner), leaf, copied)
        return ours.train(module.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(output, weights), as `torch.nn.MultiheadAttention` gives them; weights are None without `need_weights`.

        query (B, Lq, E), key (B, Lk, kdim), value (B, Lk, vdim) with `batch_first`, else (Lq, B, E), …; or without B.
        `key_padding_mask`: (B, Lk), or (Lk,) without B. `attn_mask`: (Lq, Lk) or (B·H, Lq, Lk). Each is bool, True
        where a query may *not* attend, or float, added to the scores.
        `is_causal`: a hint that attn_mask, which must be given, is the causal one; as in torch, it replaces attn_mask
        where there is no padding mask and no weights are needed.
        `average_attn_weights`: weights (B, Lq, Lk), else (B, H, Lq, Lk).
        Nested tensors (B, j, E) as all three, as torch's encoder makes them, are computed without padding, and give a
        nested output; masks and weights are those of the padded batch.
        """
        flags = {"need_weights": need_weights, "average_attn_weights": average_attn_weights, "is_causal": is_causal}
        need_weights, average_attn_weights, is_causal = (check_flag(flag, name) for name, flag in flags.items())
        hint = is_causal and key_padding_mask is None and not need_weights
        align: Align = "upper_left" if hint else None
        packed, query, key, value = pack_inputs(query, key, value)
        batch_first = self.batch_first or packed is not None
        q, k, v = self._project(query, key, value, batch_first)
        batched = query.ndim == 3
        if is_causal and attn_mask is None:
            raise ClearheadError(
                "is_causal=True is a hint about attn_mask, which is None. Pass the mask with it, as to torch's module: "
                "torch.nn.Transformer.generate_square_subsequent_mask(length)."
            )
        length_first = batched and not batch_first
        sizes = Sizes(max(q.shape[0], k.shape[0]), q.shape[1], q.shape[2], k.shape[2], q.device)
        if packed is not None:
            sizes = packed.edges.pad_sizes(sizes)
        mask, bias = from_torch_masks(attn_mask, key_padding_mask, sizes, hint, batched)
        if packed is not None:
            mask = packed.make_mask(mask)
        given: dict[str, Any] = {"mask": mask, "bias": bias, "align": align}
        dropout_p = self.dropout if self.training else 0.0
        found = self._attend(q, k, v, **given, dropout_p=dropout_p, fresh=True, cross=key is not query)
        heads = found.output  # (B, H, Lq, E / H)
        heads = (heads.permute(2, 0, 1, 3) if length_first else heads.transpose(1, 2)).flatten(2)
        output = project_output("out_proj", self.out_proj, heads)
        weights = None
        if need_weights:
            weights = in_full(pad_arguments(Arguments(q, k, v, **given)), average_attn_weights)
        if weights is not None and found.ran is not None:
            weights = found.ran.returned(weights)
        if packed is not None:
            return packed.nest("query", output), weights
        if batched:
            return output, weights
        return output[0], None if weights is None else weights[0]

    def _project(self, query: Tensor, key: Tensor, value: Tensor, batch_first: bool) -> list[Tensor]:
        """The heads of query, key and value, each (B, H, L, E / H)."""
        inputs, layers = {"query": query, "key": key, "value": value}, self._projections()
        check_inputs(
            inputs, tuple(Projection(name, weight.shape[-1], weight) for name, weight, _ in layers), batch_first
        )
        heads = []
        for tensor, (name, weight, bias) in zip(inputs.values(), layers, strict=True):
            projected = F.linear(tensor, weight, bias)
            if tensor.ndim == 2:
                projected = projected[None]
            elif not batch_first:
                projected = projected.transpose(0, 1)
            heads.append(split_heads(projected, name, self.head_dim))
        check_groups(heads[0], heads[1], heads[2], self.num_heads, self.num_heads)
        return heads

    def _projections(self) -> list[tuple[str, Tensor, Tensor | None]]:
        """The weight's name, the weight and the bias, of query, key and value."""
        if self.in_proj_weight is not None:
            names, weights = ["in_proj_weight"] * 3, self.in_proj_weight.chunk(3)
        else:
            names = [f"{side}_proj_weight" for side in "qkv"]
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        rows = [weight.shape[0] for weight in weights]
        biases = [None] * 3 if self.in_proj_bias is None else torch.split(self.in_proj_bias, rows)
        return list(zip(names, weights, biases, strict=True))


def _is_called(module: nn.Module, inputs: Any) -> None:
    """A hook that does nothing. Torch's layers do not run their fused path where a module inside has a hook."""
