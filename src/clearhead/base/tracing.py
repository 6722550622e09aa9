"""PyTorch's state: whether code is compiled, traced or transformed, and whether the values of tensors can be read.

Values are hidden, and can be asserted at best, while code is compiled or exported, and inside `torch.func.vmap`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling, is_dynamo_compiling

from clearhead.base.errors import ClearheadError, UnsupportedError

_functorch = torch._C._functorch
_interpreters = _functorch.peek_interpreter_stack
any_autocast = torch._C._is_any_autocast_enabled
# what compiles the frames that this thread runs next; None in eager code. A function of C's, which the compiler cannot
# enter
compiler_here = torch._C._dynamo.eval_frame.get_eval_frame_callback
_compile_with = torch._C._dynamo.eval_frame.set_eval_frame
_dispatch_modes, _jit_state = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state
# No module of PyTorch's is named in the functions below that ask `compiling()`: the compiler would compile such a
# function by itself, where code around it could not be, as one that is always being compiled
_level: Callable[[], int] = partial(getattr, forward_ad, "_current_level")
_stack = _functorch.get_interpreter_stack
_NOTHING = nullcontext()
_GRAD, _JVP, _VMAP = (getattr(_functorch.TransformType, name) for name in ("Grad", "Jvp", "Vmap"))
_KEYS = torch._C._TorchDispatchModeKey
_TRACERS = (_KEYS.FAKE, _KEYS.PROXY, _KEYS.FUNCTIONAL)


some_compiling = is_compiling  # whether any thread compiles: a look before the closer one, which is a function more


def compiling() -> bool:
    """Whether this code is being compiled or exported, not run.

    `torch.compiler.is_compiling` is one flag of the whole process: while one thread compiles, it is True in all.
    """
    # no `torch.` in here: with it the compiler would compile this function by itself, as one that returns True
    return is_compiling() and (is_dynamo_compiling() or TracingContext.try_get() is not None)


def ordinary() -> bool:
    """Whether nothing compiles, traces, transforms or casts here: one cheap check before the costlier ones."""
    return not (
        is_compiling()
        or any_autocast()
        or _interpreters() is not None
        or _dispatch_modes()
        or _level() >= 0
        or _jit_state() is not None
    )


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


def vectorized() -> bool:
    """Whether `torch.func.vmap` is at work."""
    return transformed() and any(i.key() == _VMAP for i in _stack())


Function = TypeVar("Function", bound=Callable[..., Any])


def constant(function: Function) -> Function:
    """As `torch.compiler.assume_constant_result`, which would import the compiler to set this mark."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant
def followed() -> bool:
    """Whether, in code that is being compiled, `torch.func` or forward mode differentiates: the answer is compiled in.

    The compiler checks the level of both before it uses the code again.
    """
    keys = [i.key() for i in _stack() or ()]
    return _level() >= 0 or _GRAD in keys or _JVP in keys


def looked_into() -> bool:
    """Whether `torch.func` or forward mode follows PyTorch's operations one by one, and can follow nothing else."""
    return followed() if compiling() else transformed() or forward_mode()


def differentiated_twice(*tensors: Tensor | None) -> bool:
    """Whether a gradient that `torch.func` finds with these tensors will be differentiated again, as far as is known:
    by another of its transforms, or since autograd follows them outside of it."""
    count = [i.key() for i in _stack()].count(_GRAD) if transformed() else 0
    return count > 1 or (count == 1 and any(t is not None and unwrapped(t).requires_grad for t in tensors))


def differentiated_forward() -> bool:
    """Whether forward mode is at work where compiled code runs."""
    return _level() >= 0


def forward_mode() -> bool:
    """Whether derivatives are being computed in forward mode, by `torch.func.jvp` or `torch.autograd.forward_ad`."""
    if compiling():
        return False
    if _level() >= 0:
        return True
    return _interpreters() is not None and any(i.key() == _JVP for i in _stack())


def forward_alone() -> bool:
    """Whether forward mode differentiates here, once, and no other transform is at work."""
    if compiling() or _jit_state() is not None or _dispatch_modes():
        return False
    keys = [] if _interpreters() is None else [i.key() for i in _stack()]
    return keys == [_JVP] or (not keys and _level() >= 0)


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor below the transforms of `torch.func` that differentiate: its values can be read."""
    while _functorch.is_functorch_wrapped_tensor(tensor) and not _functorch.is_batchedtensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def on_host(tensor: Tensor) -> np.ndarray:
    """The values of a tensor that needs no gradient, as they are below transforms of `torch.func`."""
    if _interpreters() is None:
        return tensor.cpu().numpy()
    with torch._C._DisableFuncTorch():
        return unwrapped(tensor).cpu().numpy()


def empty_of_values(tensor: Tensor) -> bool:
    """Whether the tensor has a shape and no values: it is on the meta device, or one of PyTorch's fake tensors."""
    return tensor.is_meta or (type(tensor) is not Tensor and isinstance(tensor, FakeTensor))


def readable(tensor: Tensor) -> bool:
    """Whether the tensor's values can be read here."""
    if compiling() or traced():
        return False
    return not (transformed() and batched(tensor)) and not empty_of_values(tensor)


def on_the_host(tensor: Tensor) -> bool:
    """Whether the tensor is in the host's memory, where a look at its values waits for no other device."""
    return tensor.is_cpu


def dispatches(tensor: Tensor) -> bool:
    """Whether the tensor is of a subclass that runs operations in a way of its own, such as DTensor."""
    return type(tensor) is not Tensor and type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def distributed(tensor: Any) -> bool:
    """Whether this is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # None: no DTensor can exist
    return module is not None and type(tensor) is not Tensor and isinstance(tensor, module.DTensor)


def plain(tensor: Tensor) -> bool:
    """Whether the tensor is dense numbers in the host's memory, at the address it gives.

    Subclasses that dispatch to other tensors (DTensor, fake tensors), PyTorch's zeros without memory, and tensors
    inside `torch.func` have an address of 0, or none that holds their numbers.
    """
    return (
        not dispatches(tensor)
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor._is_zerotensor()
        and not _functorch.is_functorch_wrapped_tensor(tensor)
    )


def address(tensor: Tensor) -> int:
    """The address of the numbers, which `tensor.data = other` changes without a counted write."""
    return torch._C._data_address(tensor) if plain(tensor) else 0  # type: ignore[attr-defined]


@constant  # compiled code has no task of its own; PyTorch 2.12 takes the number for a value
def in_backward() -> bool:
    """Whether a backward pass runs in this thread: a call in it, as by a checkpoint, repeats a call of the forward."""
    return torch._C._current_graph_task_id() != -1


def refuse_jit() -> None:
    """Raise inside `torch.jit.trace`, which records only PyTorch's operations, and values as constants."""
    if not compiling() and _jit_state() is not None:
        raise UnsupportedError(
            "torch.jit.trace cannot follow attention(): it keeps sizes and masks as constants, and sees no kernel. Use "
            "torch.export or torch.compile; for ONNX, torch.onnx.export(..., dynamo=True)."
        )


def as_followed(tensor: Tensor) -> Tensor:
    """A tensor made outside; under PyTorch's fake tensors, as one of them."""
    mode = torch._C._get_dispatch_mode(_KEYS.FAKE) if traced() else None
    return tensor if mode is None or isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)


def with_memory(tensor: Tensor) -> Tensor:
    """The tensor; PyTorch's zeros without memory, which its own kernels read as if they had some, as real zeros."""
    if not tensor._is_zerotensor():
        return tensor
    return tensor + torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def traced() -> bool:
    """Whether PyTorch records each operation (`make_fx`), or computes only shapes (fake tensors)."""
    if compiling() or not _dispatch_modes():
        return False
    return any(torch._C._get_dispatch_mode(key) for key in _TRACERS)


def in_place() -> bool:
    """Whether a tensor that was just made may be written to. A trace (`torch.func.linearize`) may keep it as a
    constant, and each run of the trace would write to the constant again."""
    return not traced()


def ensure(good: Tensor, error: Callable[[], ClearheadError], short: str) -> None:
    """Raise the error unless all is true; while compiling, assert it, with a short message."""
    if compiling():
        torch._assert_async(good.all(), short)
    elif traced() or empty_of_values(good):
        return
    elif transformed() and batched(good):
        raise UnsupportedError(
            f"{short}: it cannot be checked inside torch.func.vmap. Give masks and alignments a batch dimension of "
            "their own, and call attention() on the whole batch."
        )
    elif not bool(good.all()):
        raise error()


def eagerly(function: Function) -> Function:
    """The function, which the compiler leaves out of its code, with all that it calls.

    This sets the mark of `torch.compiler.disable`, which would import the compiler.
    """

    @functools.wraps(function)
    def apart(*args: Any, **given: Any) -> Any:
        before = _compile_with(None)
        try:
            return function(*args, **given)
        finally:
            _compile_with(before)

    apart._torchdynamo_disable = True  # type: ignore[attr-defined]
    apart._torchdynamo_disable_msg = "it runs in eager code alone"  # type: ignore[attr-defined]
    return apart  # type: ignore[return-value]


def compiled_code(function: Any) -> bool:
    """Whether the compiler has code for this function, made for any of its calls."""
    code = getattr(function, "__code__", None)
    return code is not None and bool(torch._C._dynamo.eval_frame._debug_get_cache_entry_list(code))


# torch's own function: its name in torch.nn.functional may be a wrapper of another's
OWN_SDPA = torch._C._nn.scaled_dot_product_attention


def unobserved() -> AbstractContextManager[object]:
    """A context in which function modes see none of PyTorch's operations."""
    return torch._C.DisableTorchFunction()


def as_base_tensors() -> AbstractContextManager[object]:
    """A context in which PyTorch's functions do not ask tensor subclasses; their operations still dispatch."""
    return torch._C.DisableTorchFunctionSubclass()


@contextmanager
def with_autograd() -> Iterator[None]:
    """A context with autograd, for the body of a custom operator, which runs without it."""
    key = torch._C.DispatchKey
    without = torch._C._dispatch_tls_local_exclude_set()
    without = without.remove(key.AutogradFunctionality).remove(key.ADInplaceOrView)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), without), torch.enable_grad():
        yield


def autocasting(device: torch.device) -> bool:
    """Whether `torch.autocast` is at work on this device."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def autocast(tensor: Tensor) -> Tensor:
    """An input as `torch.autocast` casts those of a matrix product: all but float64 to its dtype."""
    if not autocasting(tensor.device) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def autocast_of_now(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """A function that makes a context with the present autocast."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind):
        return nullcontext
    return partial(torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context in which scores are computed in float32 at least, `torch.autocast` or not."""
    if any_autocast() and autocasting(device):
        return torch.autocast(device.type, enabled=False)
    return _NOTHING
