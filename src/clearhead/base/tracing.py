"""PyTorch's state: whether code is compiled, traced or transformed, and whether the values of tensors can be read.

Values are hidden, and can be asserted at best, while code is compiled or exported, and inside `torch.func.vmap`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import mul
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling, is_exporting

from clearhead.base import torch_private, torch_state
from clearhead.base.errors import ClearheadError, UnsupportedError
from clearhead.base.mode import get_mode
from clearhead.base.torch_private import data_address, is_zero_tensor
from clearhead.base.torch_state import (
    GRAD,
    JVP,
    VMAP,
    FakeTensor,
    any_autocast,
    batches_of_losses,
    dispatch_modes,
    dual_level,
    get_unwrapped,
    interpreter,
    is_batched,
    is_wrapped,
    jit_state,
    tracing_context,
    transforms,
)

# No module of PyTorch's is named in the functions below that ask `compiling()`: the compiler would compile such a
# function by itself, where code around it could not be, as one that is always being compiled
_NOTHING = nullcontext()
BY_SAMPLE = (  # what errors of masks say
    "Inside vmap a mask that differs by sample is a rule that reads the sample's tensor, such as "
    "MaskFunction(lambda b, h, i, j: j < length) or MaskFunction(lambda b, h, i, j: keep[j]); or it is a float mask of "
    "0 and −∞."
)
some_compiling = is_compiling  # whether any thread compiles: cheaper than `compiling()`, to be asked before it


def compiling() -> bool:
    """Whether this code is being compiled or exported, not run. `torch.compiler.is_compiling` is one flag of the whole
    process: while one thread compiles, it is True in all."""
    # no `torch.` in here: with it the compiler would compile this function by itself, as one that returns True
    return is_compiling() and (is_dynamo_compiling() or tracing_context() is not None)


def exporting() -> bool:
    """Whether this code becomes an exported program, which keeps no object of Python's between its calls."""
    return compiling() and is_exporting()


def ordinary() -> bool:
    """Whether nothing compiles, traces or transforms here: one cheap check before the costlier ones."""
    return not (
        is_compiling() or interpreter() is not None or dispatch_modes() or dual_level() >= 0 or jit_state() is not None
    )


def derived() -> bool:
    """Whether a transform of `torch.func` or forward mode is at work: one cheap check before the costlier ones."""
    return interpreter() is not None or dual_level() >= 0


def transformed() -> bool:
    """Whether a transform of `torch.func` is at work."""
    return interpreter() is not None and not compiling()


def batched(tensor: Tensor) -> bool:
    """Whether `torch.func.vmap` has hidden a dimension of this tensor."""
    while is_wrapped(tensor):
        if is_batched(tensor):
            return True
        tensor = get_unwrapped(tensor)
    return False


def vectorized() -> bool:
    """Whether `torch.func.vmap` is at work."""
    return transformed() and VMAP in transforms()


def batch_level() -> int:
    """How many batches of `torch.autograd`'s own are nested here (`vectorize=True`, `is_grads_batched=True`)."""
    return 0 if get_mode().compiled else batches_of_losses()


Function = TypeVar("Function", bound=Callable[..., Any])


def constant(function: Function) -> Function:
    """As `torch.compiler.assume_constant_result`, which would import the compiler to set this mark."""
    torch_private.mark_constant(function)
    return function


@constant
def followed() -> bool:
    """Whether, in code that is being compiled, `torch.func` or forward mode differentiates: the answer is compiled in.
    The compiler checks the level of both before it uses the code again."""
    kinds = transforms()
    return dual_level() >= 0 or GRAD in kinds or JVP in kinds


@constant
def is_inside_transform() -> bool:
    """Whether, in code that is being compiled, `torch.func` or forward mode is at work: the answer is compiled in."""
    return dual_level() >= 0 or bool(transforms())


def looked_into() -> bool:
    """Whether `torch.func` or forward mode follows PyTorch's operations one by one, and can follow nothing else."""
    return followed() if compiling() else transformed() or forward_mode()


def differentiated_twice(*tensors: Tensor | None) -> bool:
    """Whether a gradient that `torch.func` computes from these tensors is known to be differentiated again: by another
    transform, or by autograd, which follows the tensors outside of `torch.func`."""
    count = transforms().count(GRAD) if transformed() else 0
    return count > 1 or (count == 1 and any(t is not None and unwrapped(t).requires_grad for t in tensors))


def differentiated_forward() -> bool:
    """Whether forward mode is at work where compiled code runs."""
    return dual_level() >= 0


def forward_mode() -> bool:
    """Whether derivatives are being computed in forward mode, by `torch.func.jvp` or `torch.autograd.forward_ad`."""
    if compiling():
        return False
    if dual_level() >= 0:
        return True
    return interpreter() is not None and JVP in transforms()


def forward_alone() -> bool:
    """Whether forward mode differentiates here, once, and no other transform is at work."""
    if compiling() or jit_state() is not None or dispatch_modes():
        return False
    kinds = [] if interpreter() is None else transforms()
    return kinds == [JVP] or (not kinds and dual_level() >= 0)


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor below the transforms of `torch.func` that differentiate: its values can be read."""
    while is_wrapped(tensor) and not is_batched(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def on_host(tensor: Tensor) -> np.ndarray:
    """The values of a tensor that needs no gradient, as they are below transforms of `torch.func`."""
    if interpreter() is None:
        return tensor.cpu().numpy()
    with torch_state.without_transforms():
        return unwrapped(tensor).cpu().numpy()


def empty_of_values(tensor: Tensor) -> bool:
    """Whether the tensor has a shape and no values: it is on the meta device, or one of PyTorch's fake tensors."""
    return tensor.is_meta or (type(tensor) is not Tensor and isinstance(tensor, FakeTensor))


def readable(tensor: Tensor) -> bool:
    """Whether the tensor's values can be read here."""
    mode = get_mode()
    if mode.eager and type(tensor) is Tensor:
        return not tensor.is_meta
    if mode.compiled or mode.traced:
        return False
    return not (mode.transforms and batched(tensor)) and not empty_of_values(tensor)


def on_the_host(tensor: Tensor) -> bool:
    """Whether the tensor is in the host's memory, so that its values are read without waiting for another device."""
    return tensor.is_cpu


def dispatches(tensor: Tensor) -> bool:
    """Whether the tensor is of a subclass that runs operations in a way of its own, such as DTensor."""
    return type(tensor) is not Tensor and type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def distributed(tensor: Any) -> bool:
    """Whether this is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # None: no DTensor can exist
    return module is not None and type(tensor) is not Tensor and isinstance(tensor, module.DTensor)


def plain(*tensors: Tensor | None) -> bool:
    """Whether each tensor is dense numbers in the host's memory, at the address it gives. None counts as one.

    Subclasses that dispatch to other tensors (DTensor, fake tensors), PyTorch's zeros without memory, and tensors
    inside `torch.func` have an address of 0, or none that holds their numbers.
    """
    for tensor in tensors:
        if type(tensor) is Tensor and tensor.is_cpu:
            try:
                if tensor.data_ptr():  # the kinds above give 0 here, or raise: most tensors need no other check
                    continue
            except RuntimeError:
                pass
        if tensor is None:
            continue
        if (
            not tensor.is_cpu
            or tensor.layout is not torch.strided
            or dispatches(tensor)
            or is_zero_tensor(tensor)
            or is_wrapped(tensor)
        ):
            return False
    return True


def address(tensor: Tensor) -> int:
    """The address of the numbers, which `tensor.data = other` changes without a counted write."""
    return data_address(tensor) if plain(tensor) else 0


def in_memory(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the storages of three tensors have an address: a cheap check before `freed`."""
    try:
        return bool(
            query.untyped_storage().data_ptr()
            and key.untyped_storage().data_ptr()
            and value.untyped_storage().data_ptr()
        )
    except RuntimeError:  # of PyTorch's zeros without memory
        return False


def freed(tensor: Tensor) -> bool:
    """Whether the storage of a tensor holds fewer bytes than shape and strides need.

    False where there is no such storage: in compiled code, in transforms, and of a subclass that dispatches; and in
    `torch.jit.trace`, in which sizes are tensors.
    """
    if get_mode().compiled or jit_state() is not None:
        return False
    if tensor.layout is not torch.strided or is_wrapped(tensor) or dispatches(tensor):
        return False
    return not (holds(tensor) or is_zero_tensor(tensor) or tensor.is_meta or not tensor.numel())


def holds(tensor: Tensor) -> bool:
    """Whether the storage of an ordinary tensor holds all bytes that shape and strides need."""
    if tensor.is_contiguous():
        needed = tensor.nbytes
    else:  # up to the last number, at Σ stride · (size - 1)
        strides = tensor.stride()
        needed = tensor.itemsize * (1 + sum(map(mul, strides, tensor.shape)) - sum(strides))
    before = tensor.storage_offset()
    return tensor.untyped_storage().nbytes() >= (needed + tensor.itemsize * before if before else needed)


@constant  # compiled code has no task of its own; PyTorch 2.12 takes the number for a value
def in_backward() -> bool:
    """Whether a backward pass runs in this thread: a call in it, as by a checkpoint, repeats a call of the forward."""
    return torch_state.backward_task() != -1


def refuse_jit(who: str = "attention()") -> None:
    """Raise inside `torch.jit.trace`, which records only PyTorch's operations, and values as constants."""
    if jit_state() is not None and not get_mode().compiled:
        raise UnsupportedError(
            f"torch.jit.trace cannot follow {who}: it keeps sizes, masks and positions as constants, and sees no "
            "kernel. Use torch.export or torch.compile; for ONNX, torch.onnx.export(..., dynamo=True)."
        )


def refuse_script(module: Any) -> NoReturn:
    """Raise in `torch.jit.script`, which calls a module's `__prepare_scriptable__`, and knows a part of Python only."""
    raise UnsupportedError(
        f"torch.jit.script cannot compile {type(module).__name__}: it takes neither optional keywords nor masks. Use "
        "torch.export or torch.compile; for ONNX, torch.onnx.export(..., dynamo=True)."
    )


def as_followed(tensor: Tensor) -> Tensor:
    """The tensor; where PyTorch's fake tensors are at work, a fake tensor like it."""
    mode = torch_state.fake_mode() if get_mode().traced else None
    return tensor if mode is None or isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)


def with_memory(tensor: Tensor) -> Tensor:
    """The tensor; real zeros for PyTorch's zeros without memory, which its own kernels read as if they had memory."""
    if not is_zero_tensor(tensor):
        return tensor
    return tensor + torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def traced() -> bool:
    """Whether PyTorch records each operation (`make_fx`), or computes only shapes (fake tensors)."""
    if compiling() or not dispatch_modes():
        return False
    return any(torch_state.tracing_modes())


def recorded() -> bool:
    """Whether PyTorch records each operation (`make_fx`), of tensors with or without values."""
    if compiling() or not dispatch_modes():
        return False
    return any(torch_state.recording_modes())


def capturing() -> bool:
    """Whether a CUDA graph is captured: memory that is made meanwhile is the graph's, and is kept nowhere else."""
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return started and torch.cuda.is_current_stream_capturing()


def is_writable() -> bool:
    """Whether a tensor that was just made may be written to. A trace (`torch.func.linearize`) may keep it as a
    constant, and each run of the trace would write to the constant again."""
    return not get_mode().traced


def may_be_nan(numbers: Tensor) -> bool:
    """Whether one of the numbers may be NaN: those that cannot be read here, or not without waiting, may be."""
    hidden = not readable(numbers) or not on_the_host(numbers) or get_mode().vectorized or dispatches(numbers)
    return hidden or bool(numbers.isnan().any())


def ensure(good: Tensor, error: Callable[[], ClearheadError], short: str) -> None:
    """Raise the error unless all is true; while compiling, assert it, with a short message."""
    mode = get_mode()
    if mode.compiled:
        torch_private.assert_async(good.all(), short)
    elif mode.traced or empty_of_values(good):
        return
    elif mode.transforms and batched(good):
        raise UnsupportedError(
            f"{short}: it cannot be checked inside torch.func.vmap. Give masks and alignments a batch dimension of "
            f"their own, and call attention() on the whole batch.\n{BY_SAMPLE}"
        )
    elif not bool(good.all()):
        raise error()


def eagerly(function: Function) -> Function:
    """The function, which the compiler leaves out of its code, with all that it calls. This sets the mark of
    `torch.compiler.disable`, which would import the compiler."""

    @functools.wraps(function)
    def apart(*args: Any, **given: Any) -> Any:
        return torch_private.run_eagerly(function, args, given)

    torch_private.mark_eager(apart, "it runs in eager code alone")
    return apart  # type: ignore[return-value]


def compiled_code(function: Any) -> bool:
    """Whether the compiler has code for this function, made for any of its calls."""
    code = getattr(function, "__code__", None)
    return code is not None and bool(torch_private.cached_code(code))


def unobserved() -> AbstractContextManager[object]:
    """A context in which function modes see none of PyTorch's operations."""
    return torch_private.without_functions()


def as_base_tensors() -> AbstractContextManager[object]:
    """A context in which PyTorch's functions do not ask tensor subclasses; their operations still dispatch."""
    return torch_private.without_subclasses()


@contextmanager
def with_autograd() -> Iterator[None]:
    """A context with autograd, for the body of a custom operator, which runs without it."""
    with torch_private.dispatched_with_autograd(), torch.enable_grad():
        yield


def autocasting(device: torch.device) -> bool:
    """Whether `torch.autocast` is at work on this device."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def cast_together(device: torch.device, *dtypes: torch.dtype) -> bool:
    """Whether `torch.autocast` is at work on this device and casts numbers of these dtypes to one: all but float64."""
    return autocasting(device) and torch.float64 not in dtypes


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
