"""Norms of vectors, such as those of queries and keys."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from clearhead.base.steps import Step, made


class Norm(NamedTuple):
    """A layer norm of each vector, or an RMS norm where `centred` is False. weight, bias: (width,)."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    centred: bool

    def to(self, like: Tensor) -> Norm:
        """The norm with its parameters in the dtype of `like`."""
        weight, bias = (None if t is None else t.to(like) for t in (self.weight, self.bias))
        return self._replace(weight=weight, bias=bias)


def norm_steps(norm: Norm, before: Step, name: str, result: str) -> list[Step]:
    """The steps to `result`: each vector of `before`, without its mean where the norm is centred, divided by its size,
    then times the weight and plus the bias."""
    x, steps, width = before, [], before.value.shape[-1]
    if norm.centred:
        mean = before.sum(-1, keepdim=True) / width
        x = made(f"centred_{name}", "Each vector without its mean.", before - mean)
        steps.append(x)
    root = (x.square().sum(-1, keepdim=True) / width + norm.eps).sqrt()
    size = made(f"size_{name}", "The size of each vector's numbers: √ of their mean square.", root)
    steps.append(size)
    value = x / size
    if norm.weight is not None:
        weight = Step(f"norm_{name}", "The factor of each number, learnt.", norm.weight, ("E",))
        steps.append(weight)
        value = value * weight
    if norm.bias is not None:
        bias = Step(f"shift_{name}", "Learnt: added to each number.", norm.bias, ("E",))
        steps.append(bias)
        value = value + bias
    why = f"The module's norm of each {name}: no vector is large because its input is."
    return [*steps, made(result, why, value, before.axes)]
