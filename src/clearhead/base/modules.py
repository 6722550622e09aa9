"""What modules of PyTorch's need: the type of their call, and the values that their parameters were given.

PyTorch declares a call of any module as one of anything that gives anything. The values are for `reset_parameters`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.base.tracing import dispatches, distributed, readable

Forward = TypeVar("Forward", bound=Callable[..., object])
Values = tuple[float, ...]


def as_forward(forward: Forward) -> Callable[[object], Forward]:
    """For type checkers alone: a decorator that gives a method the type of `forward`.

    It loses what a `forward` of tensors or of arrays gives for each: there the call is declared in full.
    """
    raise NotImplementedError


def values_of(tensor: Tensor) -> Values | None:
    """Its numbers, in order; None where they can't be read."""
    known = readable(tensor) and not dispatches(tensor)
    return tuple(tensor.detach().flatten().tolist()) if known else None


def set_again(name: str, tensor: Tensor, values: Values | None) -> None:
    """Write the numbers of `values_of` to a tensor of as many numbers."""
    if values is None or len(values) != tensor.numel():
        was = "without values (meta)" if values is None else f"with {len(values)} numbers"
        raise ClearheadError(
            f"reset_parameters: {name}, shape {tuple(tensor.shape)}, was given {was}, so nothing says what it is "
            f"to be.\nLoad a state dict in place of it, or pass a {name} that was made outside of torch.device('meta')."
        )
    numbers = torch.tensor(values, dtype=tensor.dtype, device=tensor.device).reshape(tensor.shape)
    if distributed(tensor):
        from torch.distributed.tensor import distribute_tensor

        numbers = distribute_tensor(numbers, tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]
    with torch.no_grad():
        tensor.copy_(numbers)
