"""The four projections of a head, read from the layers that made a recorded call and that wrote its output."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from clearhead.base.errors import UnsupportedError
from clearhead.base.selected import numbers_of
from clearhead.explanation.modules.origin.chain import Chain, Places
from clearhead.explanation.modules.origin.find import find
from clearhead.explanation.modules.projection import Linear
from clearhead.models.attention_call import AttentionCall
from clearhead.models.causes.written import Writer


class Projections(NamedTuple):
    """The projections of one head. Each has a `weight` (out, in) and a `bias` (out,), or None, as `nn.Linear` has them.

    `query`, `key`: weight (E, d_model). `value`: (Ev, d_model). `output`: (d_model, Ev), and its bias is the whole
    layer's, which all heads share. Query heads that share a key head have the same `key` and `value`. `between`: what
    the model computes between these layers and the attention scores, such as a rotation: products of the weights alone
    leave it out.
    """

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    between: tuple[str, ...] = ()


class Sides:
    """The layers of one call: `chains` of query, key and value, with all heads, and the layer that writes the heads."""

    def __init__(self, call: AttentionCall, writer: Writer | None) -> None:
        self.call, self.writer = call, writer
        self.heads, self.key_heads = call.query.shape[1], call.key.shape[1]
        self.chains: dict[str, Chain | None] = {}

    def chain(self, side: str) -> Chain:
        """The layer that makes a side of all heads. Raises an `UnsupportedError` where none is found."""
        if side not in self.chains:
            self.chains[side] = self._found(side)
        chain = self.chains[side]
        if chain is None:
            raise UnsupportedError(
                f"{self.call.name}: no linear layer that ran in the module before attention gives its {side}, with a "
                "norm, a rotation and a factor. The module computes something else between, as multi-head latent "
                "attention does, or the tensors of the run are gone."
            )
        return chain

    def _found(self, side: str) -> Chain | None:
        call = self.call
        tensor = getattr(call, side)
        if call.origin is None or tensor is None:
            return None
        count = self.heads if side == "query" else self.key_heads
        return find(side, tensor, call.origin, Places([0], list(range(count)), []), (self.heads, self.key_heads))

    def written(self) -> Writer:
        """The layer that writes the heads. Raises an `UnsupportedError` where none is found."""
        if self.writer is None:
            raise UnsupportedError(
                f"{self.call.name}: no linear layer was given the outputs of its heads side by side. The model "
                "computes something between, such as a gate, or a function that holds the layer's weights ran it."
            )
        return self.writer

    def side(self, name: str, head: int) -> Linear:
        """The rows of a layer that make one side of a head, times the model's factor."""
        chain = self.chain(name)
        row = head if name == "query" else head * self.key_heads // self.heads
        layer = chain.layer.rows(chain.rows[row])
        if chain.factor == 1.0:
            return layer
        bias = None if layer.bias is None else layer.bias * chain.factor
        return Linear(layer.weight * chain.factor, bias)

    def output(self, head: int) -> Linear:
        """The columns of the last layer that read a head."""
        layer = self.written().layer
        width = layer.weight.shape[1] // self.heads
        return Linear(layer.weight[:, head * width : (head + 1) * width], layer.bias)

    def projections(self, head: int) -> Projections:
        between = []
        for name in ("query", "key"):
            chain = self.chain(name)
            if chain.norm is not None:
                between.append(f"{name}: the norm {chain.norm[0]}")
            if chain.turn is not None:
                between.append(f"{name}: a rotation by positions")
        query, key, value = (self.side(name, head) for name in ("query", "key", "value"))
        return Projections(query, key, value, self.output(head), tuple(between))

    def number(self, head: int) -> int:
        """A head's number, checked; negative numbers count from the last."""
        (found,) = numbers_of(head, self.heads, "circuits: head", f"{self.call.name} has {self.heads} heads")
        return found

