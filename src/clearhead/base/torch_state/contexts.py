"""Contexts around code, code that the compiler leaves out, and the error where `torch.jit` traces."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from clearhead.base.errors import UnsupportedError
from clearhead.base.torch_state import torch_private
from clearhead.base.torch_state.active import any_autocast, jit_state
from clearhead.base.torch_state.mode import get_mode

Function = TypeVar("Function", bound=Callable[..., Any])
_NOTHING = nullcontext()


def disable_compiler(function: Function) -> Function:
    """The function, which the compiler leaves out of its code, with all that it calls. This sets the mark of
    `torch.compiler.disable`, which would import the compiler."""

    @functools.wraps(function)
    def apart(*args: Any, **given: Any) -> Any:
        return torch_private.run_eagerly(function, args, given)

    torch_private.mark_eager(apart, "it runs in eager code alone")
    return apart  # type: ignore[return-value]


def has_compiled_code(function: Any) -> bool:
    """Whether the compiler has code for this function, made for any of its calls."""
    code = getattr(function, "__code__", None)
    return code is not None and bool(torch_private.cached_code(code))


# a context in which function modes see none of PyTorch's operations
without_function_modes = torch_private.without_functions
# a context in which PyTorch's functions do not ask tensor subclasses; their operations still dispatch
without_tensor_subclasses = torch_private.without_subclasses


@contextmanager
def with_autograd() -> Iterator[None]:
    """A context with autograd, for the body of a custom operator, which runs without it."""
    with torch_private.dispatched_with_autograd(), torch.enable_grad():
        yield


def is_autocasting(device: torch.device) -> bool:
    """Whether `torch.autocast` is at work on this device."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def is_cast_together(device: torch.device, *dtypes: torch.dtype) -> bool:
    """Whether `torch.autocast` is at work on this device and casts numbers of these dtypes to one: all but float64."""
    return is_autocasting(device) and torch.float64 not in dtypes


def cast_input(tensor: Tensor) -> Tensor:
    """An input as `torch.autocast` casts those of a matrix product: all but float64 to its dtype."""
    if not is_autocasting(tensor.device) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def capture_autocast(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """A function that makes a context with the present autocast."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind):
        return nullcontext
    return partial(torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context in which scores are computed in float32 at least, `torch.autocast` or not."""
    if any_autocast() and is_autocasting(device):
        return torch.autocast(device.type, enabled=False)
    return _NOTHING


def raise_in_jit_trace(who: str = "attention()") -> None:
    """Raise inside `torch.jit.trace`, which records only PyTorch's operations, and values as constants."""
    if jit_state() is not None and not get_mode().compiled:
        raise UnsupportedError(
            f"torch.jit.trace cannot follow {who}: it keeps sizes, masks and positions as constants, and sees no "
            "kernel. Use torch.export or torch.compile; for ONNX, torch.onnx.export(..., dynamo=True)."
        )
