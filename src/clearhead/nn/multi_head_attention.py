"""Multi-head attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Never

import torch
from torch import Tensor, nn

from clearhead._attention import ScoreLike
from clearhead.base.arrays import Integers
from clearhead.base.dropout import check_dropout
from clearhead.base.errors import ClearheadError
from clearhead.base.keyword_hints import raise_unknown_keywords
from clearhead.base.numbers import check_count, check_flag
from clearhead.base.output.text import brief
from clearhead.base.shapes import AlignLike
from clearhead.base.torch_state.modules import Values, set_again, values_of
from clearhead.biases.base import Bias, BiasLike
from clearhead.masks.base import MaskLike
from clearhead.nn import _torch
from clearhead.nn._heads import Projection, check_inputs, check_sizes, reset_modules, split_heads
from clearhead.nn._multi_head_call import MultiHeadCall
from clearhead.nn._nested import pack_inputs
from clearhead.nn._options import (
    Gate,
    Rotary,
    apply_norm,
    apply_rotary,
    check_gate,
    check_norm,
    check_rotary,
    validate_factor,
    validate_positions,
)
from clearhead.nn._record import RecordingModule
from clearhead.nn.key_value_cache import KeyValueCache
from clearhead.nn.prepared_keys import PreparedKeys
from clearhead.problem.arguments import as_score
from clearhead.scores.dot import Dot


class MultiHeadAttention(RecordingModule):
    """Attention in several heads, each on its own projection of queries, keys and values.

    >>> import torch, clearhead as ch
    >>> from clearhead.nn import MultiHeadAttention
    >>> attend = MultiHeadAttention(embed_dim=64, num_heads=8)
    >>> x, memory = torch.rand(2, 10, 64), torch.rand(2, 20, 64)
    >>> attend(x, x, x, mask=ch.Causal()).shape                             # self-attention
    torch.Size([2, 10, 64])
    >>> attend(x, memory, memory, valid_lens=[15, 20]).shape                # cross-attention
    torch.Size([2, 10, 64])
    >>> attend.attention_weights.shape
    torch.Size([2, 8, 10, 20])
    >>> prepared = attend.prepare(memory, memory)                           # for many calls: projected once
    >>> attend(x[:, :1], prepared, valid_lens=[15, 20]).shape
    torch.Size([2, 1, 64])
    >>> MultiHeadAttention(64, 8, num_kv_heads=2, score=ch.Cosine())(x, x, x).shape
    torch.Size([2, 10, 64])
    >>> scaling = ch.nn.RotaryScaling.llama3(factor=8, original_length=8192)
    >>> today = MultiHeadAttention(                                         # a block as today's language models have it
    ...     64, 8, bias=False, num_kv_heads=2, rotary=ch.nn.RotaryEmbedding(8, base=5e5, scaling=scaling),
    ...     query_norm=torch.nn.RMSNorm(8), key_norm=torch.nn.RMSNorm(8), sinks=True, gate="headwise",
    ... )
    >>> today(x, x, x, ch.Causal()).shape
    torch.Size([2, 10, 64])

    The batch comes first, a bool mask is True where a query may attend, and the output is no tuple. `forward` describes
    the arguments and the result of a call.

    Formula: output = W_o [g_1 head_1; …; g_H head_H], with head_h = attention(q_h, k_h, W_v^h value), q_h = scale_h ·
    rotary(query_norm(W_q^h query)) and k_h = rotary(key_norm(W_k^h key)). A part that is not asked for changes nothing.

    `embed_dim`: E, the width of the query and of the output. `num_heads`: H. A call has the heads that the layers make,
    vectors of width head_dim; the number of query heads to a key head is the one that the module was built with. So a
    rank of tensor parallelism (`parallelize_module`: W_q, W_k, W_v by ColwiseParallel, W_o by RowwiseParallel, over
    ranks whose number divides num_kv_heads) computes its own heads, and takes masks and biases that differ between
    heads for these heads alone. W_g is shared out as W_q, norms by SequenceParallel(sequence_dim=1,
    use_local_output=True), and sinks, scale and temperature are cut as the heads are; parameters that all heads share
    are refused where they would be trained.
    `dropout`: the probability with which a weight is dropped while training.
    `bias`: whether the four projections, `W_q`, `W_k`, `W_v` and `W_o`, have one.
    `head_dim`: the width of a head, any; None is embed_dim / num_heads.
    `num_kv_heads`: how many heads keys and values have, which divides num_heads (grouped queries); None is num_heads.
    `kdim`, `vdim`: the widths of key and value; None is embed_dim.
    `score`: a `Score` or a function on (B, H, L, head_dim); None is `Dot()`.
    `rotary`: turns the projected queries and keys by their positions: a `RotaryEmbedding`, or a module or a function
    f(x, positions=...) on x (B, H, L, head_dim) and integers (B, L), which gives x's shape.
    `query_norm`, `key_norm`: modules on the projected queries and keys, (B, H, L, head_dim), before rotary, such as
    `torch.nn.RMSNorm(head_dim)`. Each computes in the dtype of its parameters.
    `scale`: multiplies the scores; None is the score's own, 1/√head_dim for `Dot()`. `temperature`: divides them. Each
    is a number, or a tensor with one number or one a head, (H,): an `nn.Parameter` is learnt, another tensor is a
    buffer. A tensor multiplies the queries, in their dtype, and so needs `Dot` or `Bilinear`.
    `sinks`: whether each head has a learnt logit, `sinks` (H,), 0 at first: one term more in the softmax's denominator.
    `score_bias`: a `Bias`, such as `RelativeBias(num_heads)`, added to the scores in each call, and learnt with the
    module where it has parameters; `bias=` of a call is added to it.
    `gate`: factors σ(W_g query), from 0 to 1, of the heads' outputs before W_o: "elementwise", one for each number of
    each head, as the authors recommend, or "headwise", one for each head; None is none.
    `device`, `dtype`: those of the parameters that the module makes; modules that it is given keep theirs.
    `record`: whether queries and keys of the last call are kept for `attention_weights`. False keeps nothing of a call;
    `set_recording` switches it for a whole model.
    `record_gradients`: whether `attention_weights` have gradients; the graph of the last call is kept for it.
    `attention_weights`: the weights of the last call, (B, H, Lq, Lk), B = 1 where the inputs had no batch; lazy and
    detached. Of nested inputs they are those of the padded batch.
    Cost: that of the four projections, 4·L·E² multiplications a sequence by default, and of `clearhead.attention`.
    Sources: Vaswani et al. 2017, "Attention Is All You Need"; grouped queries: Ainslie et al. 2023, "GQA"; norms:
    Henry et al. 2020, "Query-Key Normalization for Transformers"; sinks: OpenAI 2025, gpt-oss; gate: Qiu et al. 2025,
    "Gated Attention for Large Language Models".
    """

    scale: float | Tensor | None
    temperature: float | Tensor | None
    sinks: Tensor | None
    _given: dict[str, Values | None]  # the numbers of scale and temperature at first, where they are tensors
    projects_inputs = (
        True  # its inputs are projected to query, key and value inside: see models/interception/modules.py
    )

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        score: ScoreLike = None,
        rotary: Rotary | None = None,
        query_norm: nn.Module | None = None,
        key_norm: nn.Module | None = None,
        scale: float | Tensor | None = None,
        temperature: float | Tensor | None = None,
        sinks: bool = False,
        score_bias: Bias | None = None,
        gate: Gate | None = None,
        record: bool = True,
        record_gradients: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(record, record_gradients)
        self.embed_dim, self.num_heads, self.head_dim = check_sizes(embed_dim, num_heads, head_dim)
        self.num_kv_heads = check_count(self.num_heads if num_kv_heads is None else num_kv_heads, 1, "num_kv_heads")
        if self.num_heads % self.num_kv_heads:
            raise ClearheadError(
                f"num_kv_heads is {num_kv_heads} and num_heads {num_heads}: each key head serves a group of query "
                "heads of one size, so it must divide num_heads."
            )
        self.kdim, self.vdim = (
            self.embed_dim if width is None else check_count(width, 1, name)
            for width, name in ((kdim, "kdim"), (vdim, "vdim"))
        )
        self.dropout = check_dropout(dropout, "dropout")
        self.score = Dot() if score is None else as_score(score)
        self.rotary = check_rotary(rotary, self.head_dim)
        self.query_norm = check_norm("query_norm", query_norm, self.head_dim)
        self.key_norm = check_norm("key_norm", key_norm, self.head_dim)
        if score_bias is not None and not isinstance(score_bias, Bias):
            raise ClearheadError(
                f"score_bias is {brief(score_bias)}; expected a Bias, such as RelativeBias(num_heads)."
            )
        self.score_bias, self.gate = score_bias, check_gate(gate)
        bias, sinks = check_flag(bias, "bias"), check_flag(sinks, "sinks")
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        made: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.W_q = nn.Linear(self.embed_dim, width, **made)
        self.W_k = nn.Linear(self.kdim, kv_width, **made)
        self.W_v = nn.Linear(self.vdim, kv_width, **made)
        self.W_o = nn.Linear(width, self.embed_dim, **made)
        gates = {"elementwise": width, "headwise": self.num_heads}
        self.W_g = None if self.gate is None else nn.Linear(self.embed_dim, gates[self.gate], **made)
        logits = torch.zeros(self.num_heads, device=device, dtype=dtype or self.W_q.weight.dtype) if sinks else None
        self.register_parameter("sinks", None if logits is None else nn.Parameter(logits))
        self.register_load_state_dict_pre_hook(_torch.take_names)  # type: ignore[no-untyped-call]
        self._given = {}
        for name, factor in (("scale", scale), ("temperature", temperature)):
            found = validate_factor(name, factor, self.num_heads, self.score)
            if isinstance(found, Tensor):
                self._given[name] = values_of(found)
            if isinstance(found, Tensor) and not isinstance(found, nn.Parameter):
                self.register_buffer(name, found.detach().clone())
            else:
                setattr(self, name, found)

    def reset_parameters(self) -> None:
        """Give all parameters their first values anew: those of the layers and parts by their own `reset_parameters`,
        sinks 0, and scale and temperature the numbers that were given."""
        reset_modules(*self.children())
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)
        for name, values in self._given.items():
            set_again(name, getattr(self, name), values)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> MultiHeadAttention:
        """The same attention as an `nn.MultiheadAttention`: a copy of its weights, dropout, device, dtype and mode.

        >>> import torch
        >>> from clearhead.nn import MultiHeadAttention
        >>> theirs = torch.nn.MultiheadAttention(64, 8, batch_first=True)
        >>> x = torch.rand(2, 10, 64)
        >>> torch.allclose(MultiHeadAttention.from_torch(theirs)(x, x, x), theirs(x, x, x)[0], atol=1e-6)
        True

        Here the batch comes first, whatever `batch_first` was, and a bool mask is True where a query may attend, while
        in torch it is True where a query may not; `TorchMultiheadAttention` keeps to torch's call. For a file of
        weights no module is needed: `load_state_dict` takes the names of torch's module too. Raises `UnsupportedError`
        for a module with add_bias_kv or add_zero_attn.
        """
        return _torch.from_torch(cls, module)

    def to_torch(self) -> nn.MultiheadAttention:
        """The same attention as an `nn.MultiheadAttention(batch_first=True)`, with copies of the weights.

        Raises `UnsupportedError` where torch's module can't do the same: another score than `Dot()`, grouped heads, a
        head_dim that is not embed_dim / num_heads, rotary. Its bool masks are True where a query may not attend.
        """
        return _torch.to_torch(self)

    def forward(
        self,
        query: Tensor,
        key: Tensor | PreparedKeys,
        value: Tensor | None = None,
        mask: MaskLike = None,
        *,
        valid_lens: Integers | None = None,
        bias: BiasLike = None,
        positions: Integers | None = None,
        key_positions: Integers | None = None,
        cache: KeyValueCache | None = None,
        new_lens: Integers | None = None,
        align: AlignLike = None,
        **others: Never,
    ) -> Tensor:
        """The output (B, Lq, E), or (Lq, E), of the projections' dtype.

        query (B, Lq, E), key (B, Lk, kdim), value (B, Lk, vdim), or each without B; or, in place of key and
        value, the `PreparedKeys` of `prepare`.
        Nested tensors (B, j, E), as all three, are computed without padding, and the output is nested like the query.
        Masks, lengths, biases, positions and `align` beside them are those of the padded batch; positions count in each
        sequence. They take no cache and no float mask.
        `mask`: a `Mask`; a bool tensor (True: may attend), or a float tensor (added to the scores), (Lq, Lk),
        (B, Lq, Lk) or (B, H, Lq, Lk), where 1 stands for any size; or None. Padding (B, Lk) is `Padding(keep)`.
        `valid_lens`: integers (B,) or (B, Lq), how many keys may be seen. Where both are given, both hold.
        `bias`: added to the scores, as for `clearhead.attention`.
        `positions`: where `rotary` is to take the queries to stand, and the keys too unless `key_positions` says it:
        integers (L,) or (B, L), 0 or more, in any order. None counts from 0, or from the end of the cache. Masks and
        biases count places in the call, whatever the positions are.
        `cache`: a `KeyValueCache`; key and value are then the new positions alone. The queries stand after the keys of
        the cache and attend to these too; masks, lengths and rules (`MaskFunction`, `BiasFunction`, `Score.then`) count
        them. The cache keeps the new keys.
        `new_lens`: integers (B,), how many of each sequence's new keys the cache keeps, from the first on: for prompts
        of unequal lengths, and sequences that rest (0). The new keys of a sequence follow its old keys. The outputs of
        queries that belong to keys not kept are undefined.
        `align`: where query 0 stands, as for `clearhead.attention`; with a cache it is an error.
        A query that may see nothing gives W_o's bias. Padding that is NaN reaches no output, but it reaches the
        gradients of W_k and W_v, which project it: fill it with 0 first.
        Raises a `ClearheadError`, or a `ShapeError`, also for keywords of other libraries (`others`), with what to pass
        instead; a refused call leaves the cache as it was.
        """
        if others:
            raise_unknown_keywords("MultiHeadAttention.forward", self.forward, others)
        if cache is None and new_lens is not None:
            raise ClearheadError(
                "new_lens says how many new keys a cache keeps, and there is no cache. For how many keys may be seen "
                "pass valid_lens."
            )
        call = MultiHeadCall(self, query, key, value, mask, bias, cache, align)
        if positions is not None or key_positions is not None:
            call.locate(positions, key_positions)
        call.project()
        if self.query_norm is not None or self.key_norm is not None:
            call.normalize()
        if self.rotary is not None:
            call.rotate()
        if self.scale is not None or self.temperature is not None:
            call.scale_query()
        if cache is not None:
            call.extend_cache(cache, new_lens)
        call.limit_pairs(valid_lens)
        heads = call.attend()
        if self.gate is not None:
            heads = call.gate(heads)
        output = call.merge_heads(heads)
        if cache is not None and call.step is not None:  # only now: a call that raises leaves the cache as it was
            cache._commit(call.step, self)
        return output

    if TYPE_CHECKING:  # torch declares a call of anything
        __call__ = forward

    def prepare(self, key: Tensor, value: Tensor, *, positions: Integers | None = None) -> PreparedKeys:
        """Key and value with their projections done, for calls `attend(query, prepared)`: see `PreparedKeys`.

        key (B, Lk, kdim), value (B, Lk, vdim), or each without B. `positions`: where `rotary` takes the keys to stand,
        integers (Lk,) or (B, Lk); None counts from 0. Raises a `ClearheadError` for other widths or dtypes
        than the module's. Cost: that of W_k and W_v.
        """
        packed, _, key, value = pack_inputs(key, key, value)
        check_inputs({"key": key, "value": value}, self._projections[1:])
        of_key = key if packed is None else packed.make_padded_shape("key")
        at = validate_positions(positions, "positions", of_key, self.rotary)
        if packed is not None and self.rotary is not None:
            at = packed.look_up("key", at)
        is_batched = key.ndim == 3
        key, value = (key, value) if is_batched else (key[None], value[None])
        k, v = split_heads(self.W_k(key), "W_k", self.head_dim), split_heads(self.W_v(value), "W_v", self.head_dim)
        k = apply_rotary(self.rotary, apply_norm("key_norm", self.key_norm, k), 0, at)
        if packed is not None:
            return PreparedKeys(packed.nest("key", k), packed.nest("key", v), self)
        return PreparedKeys(*((k, v) if is_batched else (k[0], v[0])), self)

    @property
    def _projections(self) -> tuple[Projection, ...]:
        q, k, v = (("W_q", self.W_q), ("W_k", self.W_k), ("W_v", self.W_v))
        return Projection.by(*q, self.head_dim), Projection.by(*k, self.head_dim), Projection.by(*v, self.head_dim)

    def extra_repr(self) -> str:
        text = f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, head_dim={self.head_dim}"
        others = (("num_kv_heads", self.num_heads), ("kdim", self.embed_dim), ("vdim", self.embed_dim))
        text += "".join(f", {name}={getattr(self, name)}" for name, usual in others if getattr(self, name) != usual)
        for name in ("scale", "temperature"):
            factor = getattr(self, name)
            if factor is not None:
                text += f", {name}={tuple(factor.shape) if isinstance(factor, Tensor) else factor}"
        text += ", sinks=True" if self.sinks is not None else ""
        text += "" if self.gate is None else f", gate={self.gate!r}"
        return f"{text}, dropout={self.dropout:g}"
