"""Multi-head attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from clearhead._attention import ScoreLike
from clearhead.base.dropout import check_dropout
from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.numbers import check_count, check_flag
from clearhead.base.positions import check_align
from clearhead.base.shapes import Sizes
from clearhead.base.text import brief
from clearhead.nn import _torch
from clearhead.nn._heads import (
    Projection,
    check_groups,
    check_inputs,
    check_output,
    check_part,
    check_sizes,
    joined,
    one_batch,
    plain_linear,
    split_heads,
)
from clearhead.nn._masks import head_mask
from clearhead.nn._record import RecordingModule
from clearhead.nn.key_value_cache import KeyValueCache
from clearhead.nn.prepared_keys import PreparedKeys, check_value_given, taken
from clearhead.nn.rotary_embedding import RotaryEmbedding
from clearhead.problem.lengths import with_lengths
from clearhead.problem.problem import as_score
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

    The batch comes first, a bool mask is True where a query may attend, and the output is no tuple. `forward` describes
    the arguments and the result of a call.

    Formula: output = W_o [head_1; …; head_H], with head_h = attention(W_q^h query, W_k^h key, W_v^h value).

    `embed_dim`: E, the width of the query and of the output. `num_heads`: H. A call has the heads that the layers make,
    vectors of width head_dim; the number of query heads to a key head is the one that the module was built with. So a
    rank of tensor parallelism (`parallelize_module`: W_q, W_k, W_v by ColwiseParallel, W_o by RowwiseParallel, over
    ranks whose number divides num_kv_heads) computes its own heads, and takes masks and biases that differ between
    heads for these heads alone.
    `dropout`: the probability with which a weight is dropped while training.
    `bias`: whether the four projections, `W_q`, `W_k`, `W_v` and `W_o`, have one.
    `head_dim`: the width of a head, any; None is embed_dim / num_heads.
    `num_kv_heads`: how many heads keys and values have, which divides num_heads (grouped queries); None is num_heads.
    `kdim`, `vdim`: the widths of key and value; None is embed_dim.
    `score`: a `Score` or a function on (B, H, L, head_dim); None is `Dot()`.
    `rotary`: a `RotaryEmbedding` that turns the projected queries and keys.
    `record_gradients`: whether `attention_weights` have gradients; the graph of the last call is kept for it.
    `attention_weights`: the weights of the last call, (B, H, Lq, Lk), B = 1 where the inputs had no batch; lazy and
    detached.
    Cost: that of the four projections, 4·L·E² multiplications a sequence by default, and of `clearhead.attention`.
    Sources: Vaswani et al. 2017, "Attention Is All You Need"; grouped queries: Ainslie et al. 2023, "GQA".
    """

    projects_inputs = True  # its inputs are projected to query, key and value inside: see models/tap/modules.py

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
        rotary: RotaryEmbedding | None = None,
        record_gradients: bool = False,
    ) -> None:
        super().__init__(record_gradients)
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
        if rotary is not None and not isinstance(rotary, RotaryEmbedding):
            raise ClearheadError(f"rotary is {brief(rotary)}; expected RotaryEmbedding(dim={self.head_dim}).")
        if rotary is not None and rotary.dim > self.head_dim:
            raise ClearheadError(f"rotary turns {rotary.dim} entries, and a head has head_dim = {self.head_dim}.")
        self.rotary = rotary
        bias = check_flag(bias, "bias")
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.W_q = nn.Linear(self.embed_dim, width, bias)
        self.W_k = nn.Linear(self.kdim, kv_width, bias)
        self.W_v = nn.Linear(self.vdim, kv_width, bias)
        self.W_o = nn.Linear(width, self.embed_dim, bias)

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
        in torch it is True where a query may not; `TorchMultiheadAttention` keeps to torch's call. Raises
        `UnsupportedError` for a module with add_bias_kv or add_zero_attn.
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
        mask: Any = None,
        *,
        valid_lens: Any = None,
        bias: Any = None,
        cache: KeyValueCache | None = None,
        new_lens: Any = None,
        align: Any = None,
        **of_torch: Any,
    ) -> Tensor:
        """The output (B, Lq, E), or (Lq, E), of the projections' dtype.

        query (B, Lq, E), key (B, Lk, kdim), value (B, Lk, vdim), or each without B; or, in place of key and
        value, the `PreparedKeys` of `prepare`.
        `mask`: a `Mask`; a bool tensor (True: may attend), or a float tensor (added to the scores), (Lq, Lk),
        (B, Lq, Lk) or (B, H, Lq, Lk), where 1 stands for any size; or None. Padding (B, Lk) is `Padding(keep)`.
        `valid_lens`: integers (B,) or (B, Lq), how many keys may be seen. Where both are given, both hold.
        `bias`: added to the scores, as for `clearhead.attention`.
        `cache`: a `KeyValueCache`; key and value are then the new positions alone. The queries stand after the keys of
        the cache and attend to these too; masks and lengths count them. The cache keeps the new keys.
        `new_lens`: integers (B,), how many of each sequence's new keys the cache keeps, from the first on: for prompts
        of unequal lengths, and sequences that rest (0). The new keys of a sequence follow its old keys. The outputs of
        queries that belong to keys not kept are undefined.
        `align`: where query 0 stands, as for `clearhead.attention`; with a cache it is an error.
        A query that may see nothing gives W_o's bias. Padding that is NaN reaches no output, but it reaches the
        gradients of W_k and W_v, which project it: fill it with 0 first.
        Raises a `ClearheadError`, or a `ShapeError`, also for torch's keywords (`of_torch`), with what to pass instead;
        a refused call leaves the cache as it was.
        """
        if of_torch:
            _torch.refuse_keywords(of_torch)
        if cache is not None and align is not None:
            raise ClearheadError("align beside a cache: the cache says where the queries stand, after its own keys.")
        past = self._past(cache, new_lens)
        if isinstance(key, PreparedKeys):
            k, v = self._taken(query, key, value, cache)
        else:
            check_value_given(value)
            check_inputs({"query": query, "key": key, "value": value}, self._projections)
            if cache is not None and isinstance(past, Tensor):
                cache._check_batch(key)
            k, v = self._project(key, value, past)
        batched = query.ndim == 3
        q = split_heads(self.W_q(query if batched else query[None]), "W_q", self.head_dim)
        check_groups(q, k, v, self.num_heads, self.num_kv_heads)
        check_output("W_o", self.W_o, q.shape[1], v)
        if self.rotary is not None:
            each = isinstance(past, Tensor) and q.shape[0] == 1  # one query for sequences that stand at unequal places
            q = self.rotary(q.expand(k.shape[0], -1, -1, -1) if each else q, past)
        state = None
        if cache is not None:
            state = cache._extended(k, v, new_lens, self)
            k, v = state.key, state.value
        heads = q.shape[1]  # may be fewer than num_heads, on a rank or after pruning
        align = align if cache is None else past
        sizes = Sizes(max(q.shape[0], k.shape[0]), heads, q.shape[2], k.shape[2], q.device)
        mask, bias = with_lengths(head_mask(mask, sizes.shape, q.dtype), valid_lens, bias)
        if heads != self.num_heads:
            check_part(mask, bias, sizes._replace(align=check_align(align)), self.num_heads)
        if state is not None:
            mask, bias = state.seen(mask, bias, sizes)
        attended = self._attend(
            q,
            k,
            v,
            score=self.score,
            mask=mask,
            bias=bias,
            align=align,
            dropout_p=self.dropout if self.training else 0.0,
            fresh=plain_linear(self.W_q) and plain_linear(self.W_k),
        )
        output = joined("W_o", self.W_o, attended.transpose(1, 2).flatten(2))  # (B, Lq, H·head_dim) → (B, Lq, E)
        if cache is not None and state is not None:  # only now: a refused call leaves it as it was
            cache._hold(state, self)
        return output if batched else output[0]

    def prepare(self, key: Tensor, value: Tensor) -> PreparedKeys:
        """Key and value with their projections done, for calls `attend(query, prepared)`: see `PreparedKeys`.

        key (B, Lk, kdim), value (B, Lk, vdim), or each without B. Raises a `ClearheadError` for other widths or dtypes
        than the module's. Cost: that of W_k and W_v.
        """
        check_inputs({"key": key, "value": value}, self._projections[1:])
        k, v = self._project(key, value, 0)
        return PreparedKeys(*((k, v) if key.ndim == 3 else (k[0], v[0])), self)

    @property
    def _projections(self) -> tuple[Projection, ...]:
        return Projection.by("W_q", self.W_q), Projection.by("W_k", self.W_k), Projection.by("W_v", self.W_v)

    def _project(self, key: Any, value: Any, past: int | Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the heads, the keys turned from the position `past` on."""
        key, value = (key, value) if key.ndim == 3 else (key[None], value[None])
        k, v = split_heads(self.W_k(key), "W_k", self.head_dim), split_heads(self.W_v(value), "W_v", self.head_dim)
        return k if self.rotary is None else self.rotary(k, past), v

    def _taken(self, query: Any, prepared: PreparedKeys, value: Any, cache: Any) -> tuple[Tensor, Tensor]:
        """The heads' keys and values that were prepared, for this query."""
        k, v = taken(prepared, query, value, self)
        if cache is not None:
            raise ClearheadError(
                f"a cache is given beside {prepared!r}: a cache gathers new keys call by call, and prepared keys are "
                "whole. Pass one of the two."
            )
        check_inputs({"query": query}, self._projections[:1])
        if query.ndim != k.ndim - 1 or (query.ndim == 3 and not one_batch(query.shape[0], k.shape[0])):
            raise ShapeError(
                f"query has shape {tuple(query.shape)}, and the keys were prepared as (B, Hk, Lk, head_dim) "
                f"{tuple(k.shape)}: the batch must be the same, or 1, or in neither."
            )
        return (k, v) if query.ndim == 3 else (k[None], v[None])

    def _past(self, cache: Any, new_lens: Any) -> int | Tensor:
        """The number of positions in the cache; (B,), of each sequence, where they differ."""
        if cache is not None and not isinstance(cache, KeyValueCache):
            raise ClearheadError(f"cache is {brief(cache)}; expected a KeyValueCache().")
        if cache is None and new_lens is not None:
            raise ClearheadError(
                "new_lens says how many new keys a cache keeps, and there is no cache. For how many keys may be seen "
                "pass valid_lens."
            )
        if cache is None:
            return 0
        cache._check_whole()
        return 0 if cache._state is None else cache._state.past

    def extra_repr(self) -> str:
        text = f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, head_dim={self.head_dim}"
        others = (("num_kv_heads", self.num_heads), ("kdim", self.embed_dim), ("vdim", self.embed_dim))
        text += "".join(f", {name}={getattr(self, name)}" for name, usual in others if getattr(self, name) != usual)
        return f"{text}, dropout={self.dropout:g}"
