"""Attention of transformers' models by hand, in eager PyTorch, whose every part a test reads, changes or derives.

`with by_hand(model, change) as calls:` the model's attention is this module's. `calls`: an `Attention` for each call,
in their order. `change(number, attention)`: another `Attention` for the call, and the heads and queries that have its
output, bool (H, Lq), or None where the call stays as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

PARTS = ("query", "key", "value", "weights", "output")


@dataclass(frozen=True)
class Attention:
    """A call. Heads are repeated. `given`: weights or an output in place of what is computed."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    softcap: float | None = None
    keep: Tensor | None = None
    bias: Tensor | float = 0.0
    sinks: Tensor | None = None
    given: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    zeros: dict[str, Tensor] = field(default_factory=dict)  # added to the parts, for gradients by them
    parts: dict[str, Tensor] = field(default_factory=dict)  # as they were computed

    def _part(self, name: str, computed: Tensor) -> Tensor:
        found = self.given[name](computed) if name in self.given else computed
        if name in self.zeros:
            found = found + self.zeros[name]
        self.parts[name] = found
        return found

    def weights(self) -> Tensor:
        query, key = (self._part(name, part) for name, part in (("query", self.query), ("key", self.key)))
        scores = query @ key.mT * self.scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores + self.bias
        if self.keep is not None:
            scores = scores.masked_fill(~self.keep, -torch.inf)
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        weights = scores.softmax(-1).nan_to_num(0.0)
        return self._part("weights", weights if self.sinks is None else weights[..., :-1])

    def output(self) -> Tensor:
        weights = self.weights()
        return self._part("output", weights @ self._part("value", self.value))

    def followed(self) -> Attention:
        """The same, with zeros that have a gradient in every part."""
        lengths = self.query.shape[2], self.key.shape[2]
        shapes = {"query": self.query.shape, "key": self.key.shape, "value": self.value.shape}
        shapes["weights"] = self.query.shape[:2] + lengths
        shapes["output"] = (*self.query.shape[:3], self.value.shape[3])
        zeros = {name: self.query.new_zeros(shape).requires_grad_() for name, shape in shapes.items()}
        return replace(self, zeros=zeros, parts={}, given=dict(self.given))


Changed = tuple[Attention, Tensor] | None
Change = Callable[[int, Attention], Changed]


class AllInFloat64(TorchFunctionMode):
    """Models cast to float32 here and there, as in norms; in this mode a float64 tensor stays what it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        single = (torch.float32, torch.float)
        wide = bool(args) and isinstance(args[0], Tensor) and args[0].dtype == torch.float64
        if wide and func is Tensor.float:
            return args[0]
        if wide and func in (Tensor.to, Tensor.type, F.softmax, Tensor.softmax, torch.softmax):
            args = tuple(torch.float64 if isinstance(one, torch.dtype) and one in single else one for one in args)
            kwargs = {
                name: torch.float64 if isinstance(one, torch.dtype) and one in single else one
                for name, one in (kwargs or {}).items()
            }
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def by_hand(model: Any, change: Change | None = None, gradients: bool = False) -> Iterator[list[Attention]]:
    from transformers.modeling_utils import AttentionInterface

    calls: list[Attention] = []

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
        scaling: float | None = None, softcap: float | None = None, position_bias: Tensor | None = None, **_: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        groups = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
        keep, bias = None, 0.0 if position_bias is None else position_bias
        if attention_mask is not None:
            mask = attention_mask[..., : key.shape[2]]
            keep = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        own = Attention(query, key, value, scale, softcap, keep, bias, getattr(module, "sinks", None))
        own = own.followed() if gradients else own
        number = len(calls)
        calls.append(own)
        output = own.output()
        new = None if change is None else change(number, own)
        if new is not None:
            output = torch.where(new[1][None, :, :, None], new[0].output(), output)
        own.parts["result"] = output
        return output.transpose(1, 2).contiguous(), own.parts["weights"]

    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}.values()
    before, original = [config._attn_implementation for config in configs], AttentionInterface.get_interface
    model.set_attn_implementation("eager")
    AttentionInterface.get_interface = lambda *_: attend  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        AttentionInterface.get_interface = original  # type: ignore[method-assign]
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name
