"""The four projections of a head, read from the layers that made a recorded call and that wrote its output."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from clearhead.base.errors import ClearheadError, UnsupportedError
from clearhead.base.output.text import brief, outlined
from clearhead.base.selected import numbers_of
from clearhead.explanation.modules.projection import Linear
from clearhead.models.origins.chain import Places
from clearhead.models.origins.find import SIDES, find
from clearhead.models.origins.ran import check_unwritten, is_plain, layer_of
from clearhead.models.recordings.attention_call import AttentionCall
from clearhead.nn.multi_head_attention import MultiHeadAttention


class Projections(NamedTuple):
    """The projections of one head. Each has a `weight` (out, in) and a `bias` (out,), or None, as `nn.Linear` has them.

    `query`, `key`: weight (E, d_model). `value`: (Ev, d_model). `output`: (d_model, Ev), and its bias is the whole
    layer's, which all heads share. Query heads that share a key head have the same `key` and `value`. A number by which
    the model multiplies a projection's result before attention, as OPT its queries, is in the weight and the bias.
    `between`: what the model computes between these layers and the attention scores, such as a rotation: products of
    the weights alone leave it out.
    """

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    between: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return outlined(self)


class Made(NamedTuple):
    """A linear layer and its `rows` (heads, width) that make one side of each head, times a factor."""

    layer: Linear
    rows: Tensor
    factor: float = 1.0
    between: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return outlined(self)


class Sides:
    """The layers of one call of a module: those that make query, key and value, and the one that writes the heads."""

    def __init__(self, call: AttentionCall, module: nn.Module | None) -> None:
        self.call, self.module = call, module
        self.heads, self.key_heads = call.query.shape[1], call.key.shape[1]
        self._known: dict[str, Made | None] = {}

    def made(self, side: str) -> Made:
        """The layer that makes a side of all heads. Raises an `UnsupportedError` where none is found."""
        if side not in self._known:
            self._known[side] = self._declared(side) or self._found(side)
        made = self._known[side]
        if made is None:
            self._check_layers()
            raise UnsupportedError(
                f"{self.call.name}: no linear layer that ran in the module before attention gives its {side}, with a "
                "norm, a rotation and a factor. The module computes something else between, as multi-head latent "
                "attention does, or the tensors of the run are gone."
            )
        return made

    def _check_layers(self) -> None:
        """Raise for a layer before the call whose numbers cannot be read, which may be the one that is looked for."""
        origin = self.call.unedited.origin
        for one in () if origin is None else origin.ran[: origin.before]:
            if one.kind is Linear:
                check_unwritten(one.versions, f"{self.call.name}: the weights or the input of {one.name}")
                _ = one.layer

    def _declared(self, side: str) -> Made | None:
        """The layer of a module of clearhead's or PyTorch's own, whose weights lie as its documentation says."""
        module, count = self.module, self.heads if side == "query" else self.key_heads
        if isinstance(module, MultiHeadAttention):
            own = f"W_{side[0]}"
            ran = () if self.call.origin is None else self.call.origin.ran
            found = next((one.layer for one in ran if one.name == own and one.stands), layer_of(getattr(module, own)))
            turned = _between(module, side)
        elif isinstance(module, nn.MultiheadAttention):
            weight, bias = projection_of(module, side)
            if not is_plain(weight):  # the run had another, which is looked for by its numbers
                return None
            found, turned = Linear(weight.detach(), None if bias is None else bias.detach()), ()
        else:
            return None
        if not isinstance(found, Linear) or found.weight.shape[0] % count:
            return None
        return Made(found, torch.arange(found.weight.shape[0], device="cpu").view(count, -1), between=turned)

    def _found(self, side: str) -> Made | None:
        call = self.call.unedited
        tensor = getattr(call, side)
        if call.origin is None or tensor is None:
            return None
        count = self.heads if side == "query" else self.key_heads
        chain = find(side, tensor, call.origin, Places([0], list(range(count)), []), (self.heads, self.key_heads))
        if chain is None:
            return None
        between = [f"{side}: the norm {chain.norm[0]}"] if chain.norm is not None else []
        between += [f"{side}: a rotation by positions"] if chain.turn is not None else []
        return Made(chain.layer, chain.rows, chain.factor, tuple(between))

    def side(self, name: str, head: int) -> Linear:
        """The rows of a layer that make one side of a head, times the model's factor."""
        made = self.made(name)
        layer = made.layer.rows(made.rows[head if name == "query" else head * self.key_heads // self.heads])
        if made.factor == 1.0:
            return layer
        return Linear(layer.weight * made.factor, None if layer.bias is None else layer.bias * made.factor)

    def output(self, head: int) -> Linear:
        """The columns of the last layer that read a head."""
        layer = self.call.output_projection
        width = layer.weight.shape[1] // self.heads
        return Linear(layer.weight[:, head * width : (head + 1) * width], layer.bias)

    def projections(self, head: int) -> Projections:
        between = (*self.made("query").between, *self.made("key").between)
        query, key, value = (self.side(name, head) for name in ("query", "key", "value"))
        return Projections(query, key, value, self.output(head), between)

    def number(self, head: Any) -> int:
        """A head's number, checked; negative numbers count from the last."""
        found = numbers_of(head, self.heads, "circuits: head", f"{self.call.name} has {self.heads} heads")
        if len(found) > 1:
            raise ClearheadError(f"circuits: head is {brief(head)}, which means {len(found)} heads; pass one of them.")
        return found[0]


def _between(module: MultiHeadAttention, side: str) -> tuple[str, ...]:
    """What a module of clearhead's computes between a projection and the scores."""
    if side == "value":
        return ()
    norm = module.query_norm if side == "query" else module.key_norm
    scaled = side == "query" and (module.scale is not None or module.temperature is not None)
    parts = {
        f"the norm {type(norm).__name__}": norm is not None,
        "a rotation by positions": module.rotary is not None,
        "a scale of its own": scaled,
    }
    return tuple(f"{side}: {said}" for said, there in parts.items() if there)


def projection_of(module: nn.MultiheadAttention, side: str) -> tuple[Tensor, Tensor | None]:
    """The weight (E, in) and the bias of one side of PyTorch's module."""
    number, packed, biases = SIDES.index(side), module.in_proj_weight, module.in_proj_bias
    apart = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    bias = None if biases is None else biases.chunk(3)[number]
    return apart[number] if packed is None else packed.chunk(3)[number], bias
