"""Multi-head attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from clearhead._attention import ScoreLike, attention
from clearhead.base.arrays import check_float
from clearhead.base.dropout import check_dropout
from clearhead.base.errors import ClearheadError, ShapeError, columns
from clearhead.base.numbers import check_count, check_flag
from clearhead.base.shapes import unflatten
from clearhead.nn import _torch_module
from clearhead.nn._head_mask import head_mask
from clearhead.nn._record import RecordingModule
from clearhead.nn.key_value_cache import KeyValueCache
from clearhead.nn.rotary_embedding import RotaryEmbedding
from clearhead.problem.problem import as_score
from clearhead.scores.dot import Dot


class MultiHeadAttention(RecordingModule):
    """Attention in several heads, each on its own projection of queries, keys and values.

    >>> import torch, clearhead as ch
    >>> from clearhead.nn import MultiHeadAttention
    >>> attend = MultiHeadAttention(num_heads=8, emb_dim=64)
    >>> x, memory = torch.rand(2, 10, 64), torch.rand(2, 20, 64)
    >>> attend(x, x, x, mask=ch.Causal()).shape                             # self-attention
    torch.Size([2, 10, 64])
    >>> attend(x, memory, memory, mask=ch.Lengths([15, 20])).shape          # cross-attention
    torch.Size([2, 10, 64])
    >>> attend.attention_weights.shape
    torch.Size([2, 8, 10, 20])
    >>> MultiHeadAttention(8, 64, num_key_heads=2, score=ch.Cosine())(x, x, x).shape
    torch.Size([2, 10, 64])

    Formula: output = W_o [head_1; …; head_H], with head_h = attention(W_q^h query, W_k^h key, W_v^h value).

    `num_heads`: H; note the order, the heads first. `emb_dim`: E, the width of the inputs and of the output.
    `dim_k`: the width of a head; None is emb_dim / num_heads. `dropout`: the probability with which a weight is dropped
    while training. `score`: a `Score` or a function on (B, H, L, dim_k); None is `Dot()`.
    `num_key_heads`: how many heads keys and values have, which divides num_heads (grouped queries); None is num_heads.
    `bias`: whether the four projections, `W_q`, `W_k`, `W_v` and `W_o`, have one.
    `rotary`: a `RotaryEmbedding` that turns the projected queries and keys.
    `record_gradients`: whether `attention_weights` have gradients; the graph of the last call is kept for it.

    query (B, Lq, E), key (B, Lk, E), value (B, Lk, E), or each without B; the batch always comes first.
    `mask`: a `Mask`; a bool tensor (True: may attend), or a float one (added to the scores), (Lq, Lk), (B, Lq, Lk) or
    (B, H, Lq, Lk), where 1 stands for any size but in two dimensions; or None. Padding (B, Lk) is `Padding(keep)`.
    `bias`: what `clearhead.attention` adds to the scores. `cache`: a `KeyValueCache`; key and value are then the new
    ones alone, attended to together with those in the cache, and it keeps them; queries then stand after its keys.
    `align`: where query 0 stands, as for `clearhead.attention`; with a cache it is an error.
    Returns (B, Lq, E), or (Lq, E), of the projections' dtype, and never a tuple: `attention_weights` has the weights of
    the last call, lazy and detached, (B, H, Lq, Lk) with B = 1 where there was none. A query that may see nothing gives
    W_o's bias.
    Padding that is NaN reaches no output, but the gradients of W_k and W_v, which project it too: fill it with 0 first.
    Raises a `ClearheadError`, or a `ShapeError`; a refused call leaves the cache as it was.
    Cost: 4·L·E·H·dim_k multiplications for the projections, and that of `clearhead.attention`.
    Sources: Vaswani et al. 2017, "Attention Is All You Need"; grouped queries: Ainslie et al. 2023, "GQA".
    """

    def __init__(
        self,
        num_heads: int,
        emb_dim: int,
        dim_k: int | None = None,
        dropout: float = 0.1,
        *,
        score: ScoreLike = None,
        num_key_heads: int | None = None,
        bias: bool = True,
        rotary: RotaryEmbedding | None = None,
        record_gradients: bool = False,
    ) -> None:
        super().__init__(record_gradients)
        self.num_heads, self.emb_dim, self.dim_k = _check_sizes(num_heads, emb_dim, dim_k)
        self.num_key_heads = check_count(self.num_heads if num_key_heads is None else num_key_heads, 1, "num_key_heads")
        if self.num_heads % self.num_key_heads:
            raise ClearheadError(
                f"num_key_heads is {num_key_heads} and num_heads {num_heads}: each key head serves a group of query "
                "heads of one size, so it must divide num_heads."
            )
        self.dropout = check_dropout(dropout, "dropout")
        self.score = Dot() if score is None else as_score(score)
        if rotary is not None and not isinstance(rotary, RotaryEmbedding):
            raise ClearheadError(f"rotary is {rotary!r:.60}; expected RotaryEmbedding(dim={self.dim_k}).")
        if rotary is not None and rotary.dim > self.dim_k:
            raise ClearheadError(f"rotary turns {rotary.dim} entries, and a head has dim_k = {self.dim_k}.")
        self.rotary = rotary
        bias = check_flag(bias, "bias")
        width, key_width = self.num_heads * self.dim_k, self.num_key_heads * self.dim_k
        self.W_q = nn.Linear(self.emb_dim, width, bias)
        self.W_k = nn.Linear(self.emb_dim, key_width, bias)
        self.W_v = nn.Linear(self.emb_dim, key_width, bias)
        self.W_o = nn.Linear(width, self.emb_dim, bias)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> MultiHeadAttention:
        """The same attention as an `nn.MultiheadAttention`: a copy of its weights, dropout, device, dtype and mode.

        >>> import torch
        >>> from clearhead.nn import MultiHeadAttention
        >>> theirs = torch.nn.MultiheadAttention(64, 8, batch_first=True)
        >>> x = torch.rand(2, 10, 64)
        >>> torch.allclose(MultiHeadAttention.from_torch(theirs)(x, x, x), theirs(x, x, x)[0], atol=1e-6)
        True

        Here the batch comes first, whatever `batch_first` was; a bool mask is True where a query may attend, there
        where it may not; and `kdim` and `vdim` are the widths that W_k and W_v take.
        Raises `UnsupportedError` for a module with add_bias_kv or add_zero_attn.
        """
        return _torch_module.from_torch(cls, module)

    def to_torch(self) -> nn.MultiheadAttention:
        """The same attention as an `nn.MultiheadAttention(batch_first=True)`, with copies of the weights.

        Raises `UnsupportedError` where torch's module can't do the same: another score than `Dot()`, grouped heads, a
        dim_k that is not emb_dim / num_heads, rotary. Its bool masks are True where a query may not attend.
        """
        return _torch_module.to_torch(self)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any = None,
        *,
        bias: Any = None,
        cache: KeyValueCache | None = None,
        align: Any = None,
    ) -> Tensor:
        self._check(query, key, value, cache)
        if cache is not None and align is not None:
            raise ClearheadError("align beside a cache: the cache says where the queries stand, after its own keys.")
        batched = query.ndim == 3
        if not batched:
            query, key, value = query[None], key[None], value[None]
        q = unflatten(self.W_q(query), -1, self.num_heads, -1).transpose(1, 2)  # (B, H, Lq, dim_k)
        k = unflatten(self.W_k(key), -1, self.num_key_heads, -1).transpose(1, 2)  # (B, Hk, Lk, dim_k)
        v = unflatten(self.W_v(value), -1, self.num_key_heads, -1).transpose(1, 2)
        past = 0 if cache is None else len(cache)
        if self.rotary is not None:
            q, k = self.rotary(q, past), self.rotary(k, past)
        sizes = (max(q.shape[0], k.shape[0]), self.num_heads, q.shape[2], past + k.shape[2])
        mask = head_mask(mask, sizes, q.dtype)
        state = None
        if cache is not None:
            state = cache._extended(k, v)
            k, v = state.key, state.value
        given = {"score": self.score, "mask": mask, "bias": bias, "align": align if cache is None else past}
        heads = attention(q, k, v, **given, dropout_p=self.dropout if self.training else 0.0)
        if cache is not None:  # only now: a refused call leaves it as it was
            cache._state = state
        fresh = isinstance(self.W_q, nn.Linear) and isinstance(self.W_k, nn.Linear)
        self._record(q, k, fresh=fresh, **given)
        output: Tensor = self.W_o(heads.transpose(1, 2).flatten(2))  # (B, Lq, H·dim_k) → (B, Lq, E)
        return output if batched else output[0]

    def _check(self, query: Any, key: Any, value: Any, cache: Any) -> None:
        inputs = {"query": query, "key": key, "value": value}
        layers = (self.W_q, self.W_k, self.W_v)
        for (name, tensor), layer in zip(inputs.items(), layers, strict=True):
            if not isinstance(tensor, Tensor):
                raise ClearheadError(
                    f"{name} is a {type(tensor).__name__}; MultiHeadAttention takes tensors: torch.as_tensor({name})."
                )
            check_float(tensor, name)
            # another layer in its place checks for itself
            width = getattr(layer, "in_features", tensor.shape[-1] if tensor.ndim else 0)
            if tensor.ndim not in (2, 3) or tensor.ndim != query.ndim or tensor.shape[-1] != width:
                _refuse_shape(name, inputs, width)
            _check_dtype(name, tensor, layer)
        if key.shape[:-1] != value.shape[:-1]:
            raise ShapeError(
                "key and value disagree in batch or length: each key needs its value.\n"
                + columns({name: tuple(t.shape) for name, t in inputs.items()})
            )
        if query.ndim == 3 and query.shape[0] != key.shape[0] and 1 not in (query.shape[0], key.shape[0]):
            raise ShapeError(
                "query and key disagree in the batch, which comes first: (B, L, E).\n"
                + columns({name: tuple(t.shape) for name, t in inputs.items()}, -3)
                + "\nFor inputs (L, B, E), the default of torch's modules, pass tensor.transpose(0, 1)."
            )
        if cache is not None and not isinstance(cache, KeyValueCache):
            raise ClearheadError(f"cache is {cache!r:.60}; expected a KeyValueCache().")

    def extra_repr(self) -> str:
        text = f"num_heads={self.num_heads}, emb_dim={self.emb_dim}, dim_k={self.dim_k}, dropout={self.dropout:g}"
        return text + (f", num_key_heads={self.num_key_heads}" if self.num_key_heads != self.num_heads else "")


def _check_sizes(num_heads: Any, emb_dim: Any, dim_k: Any) -> tuple[int, int, int]:
    heads, width = check_count(num_heads, 1, "num_heads"), check_count(emb_dim, 1, "emb_dim")
    if heads > width:
        raise ClearheadError(
            f"num_heads is {heads}, and emb_dim {width}, which is less: the heads come first here, unlike in "
            f"torch.nn.MultiheadAttention.\nPass MultiHeadAttention({width}, {heads}), or "
            f"MultiHeadAttention(num_heads={width}, emb_dim={heads})."
        )
    if dim_k is None and width % heads:
        raise ClearheadError(
            f"emb_dim is {width}, which {heads} heads do not divide.\nPass dim_k, the width of a head, which is free: "
            f"MultiHeadAttention({heads}, {width}, dim_k={-(-width // heads)})."
        )
    return heads, width, width // heads if dim_k is None else check_count(dim_k, 1, "dim_k")


def _refuse_shape(name: str, inputs: dict[str, Tensor], width: int) -> None:
    raise ShapeError(
        f"{name} has shape {tuple(inputs[name].shape)}; expected (B, L, {width}), or (L, {width}) as all three.\n"
        + columns({n: tuple(t.shape) for n, t in inputs.items() if isinstance(t, Tensor)})
        + f"\nThe module makes the heads by itself, of a {name} of width {width}; it was built for that emb_dim."
    )


def _check_dtype(name: str, tensor: Tensor, layer: nn.Module) -> None:
    weight = getattr(layer, "weight", None)
    if type(layer) is not nn.Linear or not isinstance(weight, Tensor):
        return
    other_dtype = tensor.dtype != weight.dtype and not torch.is_autocast_enabled(tensor.device.type)
    if other_dtype or tensor.device != weight.device:
        raise ClearheadError(
            f"{name}, shape {tuple(tensor.shape)}, is {tensor.dtype} on {tensor.device}, and the module's weights are "
            f"{weight.dtype} on {weight.device}.\nPass module.to({name}) once, or {name}.to(module.W_q.weight)."
        )
