"""The values inside tensors: read in eager code; where they are hidden they can only be asserted, or not known.

They are hidden while code is compiled or exported, and inside `torch.func.vmap`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from clearhead._errors import ClearheadError, UnsupportedError

_functorch = torch._C._functorch
_interpreters = _functorch.peek_interpreter_stack
any_autocast = torch._C._is_any_autocast_enabled  # one question, before those that cost more
_NOTHING = nullcontext()

compiling = torch.compiler.is_compiling  # whether this code is being compiled or exported, not run


def transformed() -> bool:
    """Whether a transform of `torch.func` is at work."""
    return _interpreters() is not None and not compiling()


def batched(tensor: Tensor) -> bool:
    """Whether `torch.func.vmap` has hidden a dimension of this tensor."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_batchedtensor(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return False


def readable(tensor: Tensor) -> bool:
    """Whether the tensor's values can be read here."""
    return not compiling() and not (transformed() and batched(tensor))


def ensure(good: Tensor, error: Callable[[], ClearheadError], short: str) -> None:
    """Raise the error unless all is true; while compiling, assert it, with a short message."""
    if compiling():
        torch._assert_async(good.all(), short)
    elif transformed() and batched(good):
        raise UnsupportedError(
            f"{short}: it cannot be checked inside torch.func.vmap. Give masks and alignments a batch dimension of "
            "their own, and call attention() on the whole batch."
        )
    elif not bool(good.all()):
        raise error()


@contextmanager
def with_autograd() -> Iterator[None]:
    """Where autograd is at work inside an operation of PyTorch's, which runs without it."""
    key = torch._C.DispatchKey
    without = torch._C._dispatch_tls_local_exclude_set()
    without = without.remove(key.AutogradFunctionality).remove(key.ADInplaceOrView)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), without), torch.enable_grad():
        yield


def autocasting(device: torch.device) -> bool:
    """Whether `torch.autocast` is at work on this device."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def autocast(tensor: Tensor) -> Tensor:
    """What `torch.autocast` makes of an input, as of that of a matrix product: all but float64 becomes its dtype."""
    if not autocasting(tensor.device) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Where scores are computed in float32 at least, whatever `torch.autocast` says."""
    if any_autocast() and autocasting(device):
        return torch.autocast(device.type, enabled=False)
    return _NOTHING
