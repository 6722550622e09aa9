"""What the backends of a model compute, found without clearhead: each call's weights, by the backend's own function.

The function that a model calls for its attention is called once more with the identity matrix as values: what it gives
back are its weights, whatever its masks, scales and flags mean to it. Of many keys only some have their column, and one
column of ones gives the sum of each row.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

COLUMNS = 256
SOFTMAXES = {F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax}


class Call(NamedTuple):
    """One call, as its backend computed it. `weights` (B, H, Lq, n): of the keys `columns`, then the sum over all.

    `keys`: how many there are. `module`: the innermost running one that has weights.
    """

    backend: str
    weights: Tensor
    keys: int
    module: nn.Module | None

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.weights.shape[:3], self.keys)

    def off(self, recorded: Tensor) -> float:
        """The largest difference to recorded weights (B, H, Lq, Lk), and to the sums of their rows."""
        some = torch.cat([recorded[..., columns(self.keys)], recorded.sum(-1, keepdim=True)], -1)
        return float((some - self.weights).abs().max())


class Found(NamedTuple):
    """`calls`: in their order. `own`: the classes of modules that computed a softmax of their own in an attention."""

    calls: list[Call]
    own: set[str]


@contextmanager
def captured() -> Iterator[Found]:
    """Every attention call inside the `with`, through transformers' interface or a function of PyTorch's."""
    from transformers.modeling_utils import AttentionInterface

    found, mode = Found([], set()), None
    original = AttentionInterface.get_interface

    def get_interface(self: Any, name: str, default: Any) -> Any:
        function = original(self, name, default)

        def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            assert mode is not None
            with mode.inside():
                output = function(module, query, key, value, *args, **kwargs)
                weights = function(module, query, key, _probe(key), *args, **kwargs)[0].transpose(1, 2)
            found.calls.append(Call("eager" if function is default else name, weights, key.shape[2], _module()))
            return output

        return attention

    AttentionInterface.get_interface = get_interface
    try:
        with _Mode(found) as mode:
            yield found
    finally:
        AttentionInterface.get_interface = original


class _Mode(TorchFunctionMode):
    def __init__(self, found: Found) -> None:
        super().__init__()
        self.found, self.depth = found, 0

    @contextmanager
    def inside(self) -> Iterator[None]:
        """While a call runs: calls inside it are parts of it."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.depth:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            with self.inside():
                return self._sdpa(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self.inside():
                return self._multi_head(func, args, kwargs)
        if func in SOFTMAXES:
            name = type(_module(with_weights=False)).__name__
            if "att" in name.lower():
                self.found.own.add(name)
        return func(*args, **kwargs)

    def _sdpa(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        weights = F.scaled_dot_product_attention(query, key, _probe(key), *args, **kwargs)
        batch, heads = (weights.shape[:-3], weights.shape[-3]) if weights.ndim > 3 else (weights.shape[:-2], 1)
        self.found.calls.append(
            Call("sdpa", weights.reshape(batch.numel(), heads, *weights.shape[-2:]), key.shape[-2], _module())
        )
        return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)

    def _multi_head(self, func: Any, args: Any, kwargs: Any) -> Any:
        weights = func(*args, **{**kwargs, "need_weights": True, "average_attn_weights": False})[1]
        weights = weights.reshape(-1, *weights.shape[-3:])
        probed = torch.cat([weights[..., columns(weights.shape[-1])], weights.sum(-1, keepdim=True)], -1)
        self.found.calls.append(Call("multi_head_attention_forward", probed, weights.shape[-1], _module()))
        return func(*args, **kwargs)


def columns(keys: int) -> Tensor:
    """The keys whose weights are looked at: all, or some that are drawn."""
    if keys <= COLUMNS:
        return torch.arange(keys)
    return torch.randperm(keys, generator=torch.Generator().manual_seed(keys))[:COLUMNS].sort().values


def _probe(key: Tensor) -> Tensor:
    """Values of which attention makes its weights, and their sum."""
    keys = key.shape[-2]
    probe = torch.cat([torch.eye(keys, dtype=key.dtype)[:, columns(keys)], torch.ones(keys, 1, dtype=key.dtype)], -1)
    return probe.expand(*key.shape[:-1], probe.shape[-1])


def _module(with_weights: bool = True) -> nn.Module | None:
    """The module whose code is running; `with_weights`: one that has matrices, and so no part of torch.nn."""
    frame = sys._getframe(2)
    while frame is not None:
        for name in ("self", "module"):
            module = frame.f_locals.get(name)
            if not isinstance(module, nn.Module) or type(module).__module__.startswith("torch."):
                continue
            if not with_weights or any(weight.ndim > 1 for weight in module.parameters()):
                return module
        frame = frame.f_back
    return None
