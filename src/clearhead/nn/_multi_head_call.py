"""One call of a `MultiHeadAttention`, from its inputs to its output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.output.text import brief
from clearhead.base.positions import check_align
from clearhead.base.shapes import Sizes
from clearhead.masks.causal import Causal
from clearhead.nn import _heads, _options
from clearhead.nn._cache_step import CacheStep, extend
from clearhead.nn._nested import pack_inputs
from clearhead.nn._rule_offsets import offset_rules
from clearhead.nn.key_value_cache import KeyValueCache
from clearhead.nn.prepared_keys import PreparedKeys, unpack_prepared_keys
from clearhead.nn.rotary_embedding import RotaryEmbedding
from clearhead.problem.lengths import with_lengths

if TYPE_CHECKING:
    from clearhead.nn.multi_head_attention import MultiHeadAttention
    from clearhead.problem.nested import PackedRows


class MultiHeadCall:
    """A call in stages, one method each, in the order of the methods; `MultiHeadAttention.forward` runs them.

    Attributes:
        query, key, value: The inputs, (B, L, E) or (L, E); nested inputs as packed rows, (1, T, E).
        packed: What packed nested inputs; None for others.
        is_plain: Whether plain tensors meet plain layers that fit them, as in most calls: then no other check of inputs
            and layers can fail.
        past: The number of positions in the cache, or (B,), one for each sequence.
        q, k, v: The heads, (B, H, Lq, head_dim) and (B, Hk, Lk, head_dim); with a cache k and v include its keys.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    rows: Tensor  # the query, (B, L, E)

    def __init__(
        self,
        module: MultiHeadAttention,
        query: Any,
        key: Any,
        value: Any,
        mask: Any,
        bias: Any,
        cache: KeyValueCache | None,
        align: Any,
    ) -> None:
        width, kv_width = module.num_heads * module.head_dim, module.num_kv_heads * module.head_dim
        layers = (module.W_q, width), (module.W_k, kv_width), (module.W_v, kv_width), (module.W_o, module.embed_dim)
        self.module, self.mask, self.bias, self.score, self.cache = module, mask, bias, module.score, cache
        self.is_plain = _heads.fits_plain_layers((query, key, value), layers)
        self.packed: PackedRows | None = None
        if not self.is_plain:
            self.packed, query, key, value = pack_inputs(query, key, value, cache)
            if not isinstance(key, PreparedKeys):
                _heads.check_inputs({"query": query, "key": key, "value": value}, module._projections)
        self.query, self.key, self.value = query, key, value
        self.query_positions: Tensor | None = None
        self.key_positions: Tensor | None = None
        self.scale: float | None = None
        self.step: CacheStep | None = None
        self.past: int | Tensor = 0
        if cache is None:
            self.align = None if align is None else check_align(align)
        elif align is not None:
            raise ClearheadError("align beside a cache: the cache says where the queries stand, after its own keys.")
        elif not isinstance(cache, KeyValueCache):
            raise ClearheadError(f"cache is {brief(cache)}; expected a KeyValueCache().")
        else:
            if cache._parts:
                cache._check_whole()
            if cache._state is not None:
                self.past = cache._state.past
            self.align = self.past

    def locate(self, positions: Any, key_positions: Any) -> None:
        """Validate the positions at which the rotary turns queries and keys."""
        rotary, packed = self.module.rotary, self.packed
        query = self.query if packed is None else packed.make_padded_shape("query")
        self.query_positions = _options.validate_positions(positions, "positions", query, rotary)
        if isinstance(self.key, PreparedKeys):
            if key_positions is not None:
                raise ClearheadError(
                    "key_positions beside prepared keys: give them to prepare(key, value, positions=...)."
                )
            return
        key = self.key if packed is None else packed.make_padded_shape("key")
        self.key_positions = _options.validate_key_positions(positions, key_positions, query, key, rotary)

    def project(self) -> None:
        """Project the inputs to heads, or take the keys and values that were prepared."""
        module, key, value = self.module, self.key, self.value
        if isinstance(key, PreparedKeys):
            self.k, self.v = self._unpack_prepared_keys(key)
        else:
            key, value = (key, value) if key.ndim == 3 else (key[None], value[None])
            self.k = _heads.split_heads(module.W_k(key), "W_k", module.head_dim)
            self.v = _heads.split_heads(module.W_v(value), "W_v", module.head_dim)
        self.rows = self.query if self.query.ndim == 3 else self.query[None]
        self.q = _heads.split_heads(module.W_q(self.rows), "W_q", module.head_dim)
        if not self.is_plain:
            _heads.check_groups(self.q, self.k, self.v, module.num_heads, module.num_kv_heads)
        if self.cache is not None:
            self.cache._check_new(self.k, self.v, module)

    def _unpack_prepared_keys(self, prepared: PreparedKeys) -> tuple[Tensor, Tensor]:
        query = self.query
        k, v = unpack_prepared_keys(prepared, query, self.value, self.module)
        if self.cache is not None:
            raise ClearheadError(
                f"a cache is given beside {prepared!r}: a cache gathers new keys call by call, and prepared keys are "
                "whole. Pass one of the two."
            )
        _heads.check_inputs({"query": query}, self.module._projections[:1])
        if query.ndim != k.ndim - 1 or (query.ndim == 3 and not _heads.has_one_batch(query.shape[0], k.shape[0])):
            raise ShapeError(
                f"query has shape {tuple(query.shape)}, and the keys were prepared as (B, Hk, Lk, head_dim) "
                f"{tuple(k.shape)}: the batch must be the same, or 1, or in neither."
            )
        return (k, v) if query.ndim == 3 else (k[None], v[None])

    def normalize(self) -> None:
        """Apply the norms of queries and keys; `prepare` has applied that of prepared keys."""
        module = self.module
        if not isinstance(self.key, PreparedKeys):
            self.k = _options.apply_norm("key_norm", module.key_norm, self.k)
        self.q = _options.apply_norm("query_norm", module.query_norm, self.q)

    def rotate(self) -> None:
        """Turn queries and new keys by their positions."""
        rotary, past, q, k = self.module.rotary, self.past, self.q, self.k
        at, key_at = self.query_positions, self.key_positions
        if self.packed is not None:
            at, key_at = self.packed.look_up("query", at), self.packed.look_up("key", key_at)
        if isinstance(past, Tensor) and q.shape[0] == 1:  # one query for sequences of unequal lengths
            q = q.expand(k.shape[0], -1, -1, -1)
        is_simple = self.is_plain and at is None and key_at is None and q.shape[2] == k.shape[2]
        if is_simple and type(rotary) is RotaryEmbedding:
            state = None if self.cache is None else self.cache._state
            end = k.shape[2] if state is None else state.length + k.shape[2]
            table = rotary._find_rows(q, past, end)
            if table is not None and k.shape[2] == 1:  # few numbers: one turn takes less time than two
                both = rotary._rotate(torch.cat([q, k], 1), table)
                self.q, self.k = both[:, : q.shape[1]], both[:, q.shape[1] :]
                return
            if table is not None:
                self.q, self.k = rotary._rotate(q, table), rotary._rotate(k, table)
                return
        self.q = _options.apply_rotary(rotary, q, past, at)
        if not isinstance(self.key, PreparedKeys):
            self.k = _options.apply_rotary(rotary, k, past, key_at)

    def scale_query(self) -> None:
        """Multiply the queries by scale and temperature, as far as these are tensors."""
        module = self.module
        self.scale, factor = _options.split_factors(module.score, module.scale, module.temperature, module.head_dim)
        self.q = _options.scale_query(self.q, factor)

    def extend_cache(self, cache: KeyValueCache, new_lens: Any) -> None:
        """Put the keys and values of the cache before the new ones."""
        if self.k.shape[2] == 1 and type(self.mask) is Causal:
            self.mask = None  # the queries stand at the only new key, or after it: they see all keys
        self.step = extend(cache._state, cache._limits, self.k, self.v, new_lens)
        self.k, self.v = self.step.key, self.step.value

    def limit_pairs(self, valid_lens: Any) -> None:
        """Join mask, lengths and biases of the call, the module, the cache and the nested inputs."""
        module, q, k, packed, step = self.module, self.q, self.k, self.packed, self.step
        mask, bias, heads = self.mask, self.bias, q.shape[1]  # a rank, or a pruned layer, has fewer heads
        if module.score_bias is not None:
            bias = _options.add_bias(bias, module.score_bias)
        sizes = Sizes(max(q.shape[0], k.shape[0]), heads, q.shape[2], k.shape[2], q.device, align=self.align)
        if packed is not None:
            sizes = packed.edges.pad_sizes(sizes)
        if mask is not None or valid_lens is not None:
            mask, bias = with_lengths(_heads.resolve_head_mask(mask, sizes.shape, q.dtype), valid_lens, bias)
        if heads != module.num_heads:
            _heads.check_part(mask, bias, sizes, module.num_heads)
            _options.check_shared_parameters(module, heads)
        if step is not None:
            has_rules = mask is not None or bias is not None or self.score.changed_by is not None
            if step.lengths is not None or step.starts is not None:
                mask, bias = step.limit_mask(mask, bias, self.score, sizes)
            if has_rules:
                mask, bias, self.score = offset_rules(mask, bias, self.score, self.past, q.device)
        self.mask, self.bias = mask if packed is None else packed.make_mask(mask), bias

    def attend(self) -> Tensor:
        """Return what each head found, (B, H, Lq, head_dim)."""
        module = self.module
        # whether no part that the module was given, and no hook, may hold the queries and keys
        norms = type(module.query_norm) in _options.NORMS_OR_NONE and type(module.key_norm) in _options.NORMS_OR_NONE
        layers = self.is_plain or (_heads.is_plain_linear(module.W_q) and _heads.is_plain_linear(module.W_k))
        rotary = module.rotary
        is_fresh = norms and layers and (rotary is None or isinstance(rotary, RotaryEmbedding))
        found: Tensor = module._attend(
            self.q, self.k, self.v, score=self.score, mask=self.mask, bias=self.bias, scale=self.scale,
            sinks=module.sinks, align=self.align, dropout_p=module.dropout if module.training else 0.0,
            fresh=is_fresh, cross=self.key is not self.query,
        ).output  # fmt: skip
        return found

    def gate(self, heads: Tensor) -> Tensor:
        """Multiply the heads' outputs by factors that are made of the queries."""
        module = self.module
        assert module.gate is not None and module.W_g is not None
        _heads.check_inputs({"query": self.rows}, (_heads.Projection.by("W_g", module.W_g),))
        return heads * _options.compute_gate(module.gate, module.W_g(self.rows), heads)

    def merge_heads(self, heads: Tensor) -> Tensor:
        """Project the heads side by side, (B, Lq, H·head_dim), to the output, of the query's form."""
        heads, layer = heads.transpose(1, 2).flatten(2), self.module.W_o
        output: Tensor = layer(heads) if self.is_plain else _heads.project_output("W_o", layer, heads)
        if self.packed is not None:
            output = self.packed.nest("query", output)
        return output if self.query.ndim == 3 else output[0]
