"""What a tensor is: readable, plain, without values, fake, batched by `vmap`, distributed, freed.

Values are hidden, and can be asserted at best, while code is compiled or exported, and inside `torch.func.vmap`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import mul
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError, UnsupportedError
from clearhead.base.torch_state import active, torch_private
from clearhead.base.torch_state.active import FakeTensor, get_unwrapped, interpreter, is_batched, is_wrapped, jit_state
from clearhead.base.torch_state.mode import get_mode
from clearhead.base.torch_state.torch_private import data_address, is_zero_tensor

MASKS_BY_SAMPLE = (  # what errors of masks say
    "Inside vmap a mask that differs by sample is a rule that reads the sample's tensor, such as "
    "MaskFunction(lambda b, h, i, j: j < length) or MaskFunction(lambda b, h, i, j: keep[j]); or it is a float mask of "
    "0 and −∞."
)


def has_vmap_dimension(tensor: Tensor) -> bool:
    """Whether `torch.func.vmap` has hidden a dimension of this tensor."""
    while is_wrapped(tensor):
        if is_batched(tensor):
            return True
        tensor = get_unwrapped(tensor)
    return False


def unwrap(tensor: Tensor) -> Tensor:
    """The tensor below the transforms of `torch.func` that differentiate: its values can be read."""
    while is_wrapped(tensor) and not is_batched(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def to_host_array(tensor: Tensor) -> np.ndarray:
    """The values of a tensor that needs no gradient, as they are below transforms of `torch.func`."""
    if interpreter() is None:
        return tensor.cpu().numpy()
    with active.without_transforms():
        return unwrap(tensor).cpu().numpy()


def has_no_values(tensor: Tensor) -> bool:
    """Whether the tensor has a shape and no values: it is on the meta device, or one of PyTorch's fake tensors."""
    return tensor.is_meta or (type(tensor) is not Tensor and isinstance(tensor, FakeTensor))


def is_readable(tensor: Tensor) -> bool:
    """Whether the tensor's values can be read here."""
    mode = get_mode()
    if mode.eager and type(tensor) is Tensor:
        return not tensor.is_meta
    if mode.compiled or mode.traced:
        return False
    return not (mode.transforms and has_vmap_dimension(tensor)) and not has_no_values(tensor)


def is_on_host(tensor: Tensor) -> bool:
    """Whether the tensor is in the host's memory, so that its values are read without waiting for another device."""
    return tensor.is_cpu


def has_own_dispatch(tensor: Tensor) -> bool:
    """Whether the tensor is of a subclass that runs operations in a way of its own, such as DTensor."""
    return type(tensor) is not Tensor and type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def is_dtensor(tensor: Any) -> bool:
    """Whether this is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # None: no DTensor can exist
    return module is not None and type(tensor) is not Tensor and isinstance(tensor, module.DTensor)


def is_plain(*tensors: Tensor | None) -> bool:
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
        strided = tensor.is_cpu and tensor.layout is torch.strided
        if not strided or has_own_dispatch(tensor) or is_zero_tensor(tensor) or is_wrapped(tensor):
            return False
    return True


def get_address(tensor: Tensor) -> int:
    """The address of the numbers, which `tensor.data = other` changes without a counted write."""
    return data_address(tensor) if is_plain(tensor) else 0


def is_in_memory(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the storages of three tensors have an address: a cheap check before `is_freed`."""
    try:
        return bool(
            query.untyped_storage().data_ptr()
            and key.untyped_storage().data_ptr()
            and value.untyped_storage().data_ptr()
        )
    except RuntimeError:  # of PyTorch's zeros without memory
        return False


def is_freed(tensor: Tensor) -> bool:
    """Whether the storage of a tensor holds fewer bytes than shape and strides need.

    False where there is no such storage: in compiled code, in transforms, and of a subclass that dispatches; and in
    `torch.jit.trace`, in which sizes are tensors.
    """
    if get_mode().compiled or jit_state() is not None:
        return False
    if tensor.layout is not torch.strided or is_wrapped(tensor) or has_own_dispatch(tensor):
        return False
    return not (holds_all_bytes(tensor) or is_zero_tensor(tensor) or tensor.is_meta or not tensor.numel())


def holds_all_bytes(tensor: Tensor) -> bool:
    """Whether the storage of an ordinary tensor holds all bytes that shape and strides need."""
    if tensor.is_contiguous():
        needed = tensor.nbytes
    else:  # up to the last number, at Σ stride · (size - 1)
        strides = tensor.stride()
        needed = tensor.itemsize * (1 + sum(map(mul, strides, tensor.shape)) - sum(strides))
    before = tensor.storage_offset()
    return tensor.untyped_storage().nbytes() >= (needed + tensor.itemsize * before if before else needed)


def to_fake(tensor: Tensor) -> Tensor:
    """The tensor; where PyTorch's fake tensors are at work, a fake tensor like it."""
    mode = active.tracing_modes()[0] if get_mode().traced else None
    return tensor if mode is None or isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)


def materialize_zeros(tensor: Tensor) -> Tensor:
    """The tensor; real zeros for PyTorch's zeros without memory, which its own kernels read as if they had memory."""
    if not is_zero_tensor(tensor):
        return tensor
    return tensor + torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def is_writable() -> bool:
    """Whether a tensor that was just made may be written to. A trace (`torch.func.linearize`) may keep it as a
    constant, and each run of the trace would write to the constant again."""
    return not get_mode().traced


def may_be_nan(numbers: Tensor) -> bool:
    """Whether one of the numbers may be NaN: those that cannot be read here, or not without waiting, may be."""
    hidden = not is_readable(numbers) or not is_on_host(numbers) or get_mode().vectorized or has_own_dispatch(numbers)
    return hidden or bool(numbers.isnan().any())


def require_all(good: Tensor, error: Callable[[], ClearheadError], short: str) -> None:
    """Raise the error unless all is true; while compiling, assert it, with a short message."""
    mode = get_mode()
    if mode.compiled:
        torch_private.assert_async(good.all(), short)
    elif mode.traced or has_no_values(good):
        return
    elif mode.transforms and has_vmap_dimension(good):
        raise UnsupportedError(
            f"{short}: it cannot be checked inside torch.func.vmap. Give masks and alignments a batch dimension of "
            f"their own, and call attention() on the whole batch.\n{MASKS_BY_SAMPLE}"
        )
    elif not bool(good.all()):
        raise error()
