"""The layers of multi-head attention, in one form for every kind of module."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from clearhead.base.errors import UnsupportedError
from clearhead.base.torch_private import has_hooks
from clearhead.explanation.modules.projection import Linear
from clearhead.nn.multi_head_attention import MultiHeadAttention
from clearhead.nn.rotary_embedding import RotaryEmbedding
from clearhead.nn.torch_multihead_attention import TorchMultiheadAttention


class Layers(NamedTuple):
    """The four projections, the heads, and the rotation of queries and keys."""

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: RotaryEmbedding | None = None
    length_first: bool = False  # whether its inputs are (L, B, E)


def as_ours(module: nn.MultiheadAttention) -> TorchMultiheadAttention:
    """A module of torch's as one with a record: it has torch's meanings, and a copy of the weights."""
    if isinstance(module, TorchMultiheadAttention):
        return module
    _check_forward(module, nn.MultiheadAttention)
    return TorchMultiheadAttention.from_torch(module)


def layers_of(module: MultiHeadAttention | TorchMultiheadAttention) -> Layers:
    """The layers of a module of clearhead's, or of torch's, whose three projections may be the parts of one matrix."""
    _check_forward(module, MultiHeadAttention, TorchMultiheadAttention)
    if isinstance(module, MultiHeadAttention):
        every = (module.W_q, module.W_k, module.W_v, module.W_o)
        query, key, value, output = map(_plain, every)
        rotary, length_first = module.rotary, False
    else:
        query, key, value = (Linear(weight, bias) for _, weight, bias in module._projections())
        output = Linear(module.out_proj.weight, module.out_proj.bias)
        rotary, length_first = None, not module.batch_first
    width = module.head_dim
    heads, kv_heads = query.weight.shape[0] // width, key.weight.shape[0] // width  # as many as the layers make
    return Layers(query, key, value, output, heads, kv_heads, width, rotary, length_first)


def _plain(layer: nn.Module) -> Linear:
    """The weights of a plain linear layer. Raises for a layer with a forward() or hooks of its own."""
    _check_forward(layer, nn.Linear)
    if has_hooks(layer):
        raise _changed(layer)
    assert isinstance(layer, nn.Linear)
    return Linear(layer.weight, layer.bias)


def _check_forward(module: nn.Module, *known: type[nn.Module]) -> None:
    """Raise where a module's forward() is not that of one of these classes."""
    if "forward" in vars(module) or type(module).forward not in [kind.forward for kind in known]:
        raise _changed(module)


def _changed(module: nn.Module) -> UnsupportedError:
    return UnsupportedError(
        f"explain() shows multi-head attention from its layers' weights, and this {type(module).__name__} computes "
        "something else: it has a forward() or hooks of its own. Explain one recorded call instead: ch.watch(module)."
    )
