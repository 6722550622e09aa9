"""Tensors that end where a protected page begins, or begin where one ends: a step outside of them ends the process."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE
PROTECTED, READ, WRITE = 0, mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE
FACTORIES = ("empty", "empty_strided", "empty_like", "zeros", "zeros_like", "full", "ones")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Guard:
    """Makes guarded copies, with a protected page "after" the last number, or "before" the first."""

    def __init__(self, side: str) -> None:
        self.side = side
        self.maps: list[tuple[int, int]] = []
        self.copies: dict[tuple[Any, ...], Tensor] = {}

    def copy(self, tensor: Tensor, access: int = WRITE) -> Tensor:
        """The same numbers and strides between protected pages."""
        span = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        if not tensor.numel():
            return tensor
        size = span * tensor.element_size()
        inner = -(-size // PAGE) * PAGE
        base = _libc.mmap(None, inner + 2 * PAGE, PROTECTED, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        assert base not in (None, ctypes.c_void_p(-1).value), "no memory could be mapped"
        self.maps.append((base, inner + 2 * PAGE))
        self.protect(base + PAGE, inner, WRITE)
        start = base + PAGE + (inner - size if self.side == "after" else 0)
        flat = torch.frombuffer((ctypes.c_char * size).from_address(start), dtype=tensor.dtype)
        flat.copy_(tensor.detach().as_strided((span,), (1,), tensor.storage_offset()))
        if access != WRITE:
            self.protect(base + PAGE, inner, access)
        return flat.as_strided(tensor.shape, tensor.stride())

    def protect(self, start: int, size: int, access: int) -> None:
        assert _libc.mprotect(start, size, access) == 0, "memory could not be protected"

    def holds(self, address: int) -> bool:
        return any(base <= address < base + size for base, size in self.maps)

    def free(self) -> None:
        """Give the memory back; the tensors over it must be gone."""
        self.copies.clear()
        for base, size in self.maps:
            _libc.munmap(base, size)
        self.maps.clear()


class Torch:
    """The torch module, but for what makes new tensors: those are guarded, and empty ones hold NaN."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard

    def __getattr__(self, name: str) -> Any:
        plain = getattr(torch, name)
        if name not in FACTORIES:
            return plain

        def make(*args: Any, **options: Any) -> Tensor:
            made = plain(*args, **options)
            if name.startswith("empty") and made.is_floating_point():
                made.fill_(torch.nan)
            return self.guard.copy(made)

        return make


@contextmanager
def guarding(side: str, *modules: Any) -> Iterator[Guard]:
    """While it lasts, these modules make guarded tensors, and a pointer to any other tensor is one to a guarded copy.

    The copies can be read alone: a kernel writes only to memory that one of these modules has made.
    """
    guard, plain = Guard(side), torch.Tensor.data_ptr

    def data_ptr(tensor: Tensor) -> int:
        address = plain(tensor)
        if not tensor.numel() or guard.holds(address):
            return address
        copy = guard.copy(tensor, READ)
        guard.copies[address, tensor.shape, tensor.stride(), len(guard.copies)] = copy
        return plain(copy)

    torch.Tensor.data_ptr = data_ptr
    before = [module.torch for module in modules]
    for module in modules:
        module.torch = Torch(guard)
    try:
        yield guard
    finally:
        torch.Tensor.data_ptr = plain
        for module, was in zip(modules, before, strict=True):
            module.torch = was
