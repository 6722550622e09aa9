"""An interpreter of Triton's kernels as strict as a GPU: what Triton's own forgives is an error, or other numbers.

Triton's interpreter runs the programs of a kernel one after the other over NumPy. `install()` makes it refuse:

    races       two programs write one number, or one reads what another one writes
    barriers    a program reads what it has written itself, with no barrier in between
    bounds      an address outside of the tensors that the kernel was given
    grids       a second or third size above 65,535

and makes it compute as a GPU does:

    NaN         minima and maxima, of two numbers and of many, drop it
    tf32        a product of float32 reads the 11 leading bits of each number
    undefined   a masked load without `other` gives NaN, or a number far off, where the mask is False

What is not modelled: the order of the warps of one program between two barriers, shared memory, and time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from triton import language
from triton.runtime import interpreter

NOWHERE = 0x7B7B7B7B  # an undefined integer


class RaceError(AssertionError):
    """What one program, or one lane, writes depends on when another one runs."""


class BoundsError(AssertionError):
    """A kernel reads or writes where it was given nothing."""


class Run:
    """What the kernel that runs now has read and written, by program, and where its tensors lie."""

    def __init__(self, spans: list[tuple[int, int]]) -> None:
        self.first, self.last = (np.array(edges, np.uint64) for edges in zip(*sorted(spans), strict=True))
        self.reads: list[tuple[int, np.ndarray]] = []
        self.writes: list[tuple[int, np.ndarray]] = []
        self.fresh: list[np.ndarray] = []  # written by this program since its last barrier
        self.program = -1
        self.patched: set[str] = set()  # modules of the language whose names are the interpreter's

    def check(self, places: np.ndarray, size: int) -> None:
        at = np.searchsorted(self.first, places, side="right").astype(np.int64) - 1
        outside = at < 0
        # tensors may overlap, as views of one do: any that begins before may hold the place
        ends = np.maximum.accumulate(self.last)
        outside |= places + np.uint64(size) > ends[np.maximum(at, 0)]
        if outside.any():
            raise BoundsError(f"{int(outside.sum())} of {places.size} addresses lie outside of the tensors")

    def races(self) -> None:
        """Raise where programs meet in a number that one of them writes."""
        if not self.writes:
            return
        places = np.concatenate([places for _, places in self.writes])
        owners = np.concatenate([np.full(places.size, program) for program, places in self.writes])
        order = np.lexsort((owners, places))
        places, owners = places[order], owners[order]
        same = places[1:] == places[:-1]
        if (same & (owners[1:] != owners[:-1])).any():
            raise RaceError("two programs write one number")
        for program, read in self.reads:
            at = np.minimum(np.searchsorted(places, read), places.size - 1)
            if ((places[at] == read) & (owners[at] != program)).any():
                raise RaceError("a program reads what another one writes")


running: list[Run] = []
launches = 0


def install() -> None:
    """Make Triton's interpreter strict, for the rest of the process."""
    np.seterr(all="ignore")  # a number that overflows is infinite there, without a word
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, dot, index = (
        builder.create_masked_load,
        builder.create_masked_store,
        builder.create_dot,
        builder.set_grid_idx,
    )
    binary = builder.binary_op
    call, arguments, patch = executor.__call__, executor._init_args_hst, interpreter._patch_lang

    def strict_load(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
        places, run = _places(pointers, mask), running[-1]
        if places.size:
            size = np.dtype(interpreter._get_np_dtype(pointers.get_element_ty())).itemsize
            run.check(places, size)
            run.reads.append((run.program, np.unique(places)))
            if any(np.isin(run.reads[-1][1], own).any() for own in run.fresh):
                raise RaceError("a program reads what it has written, with no barrier in between")
        found = load(self, pointers, mask, other, *rest)
        if other is None and not np.all(mask.data):
            floats = np.issubdtype(found.data.dtype, np.floating)
            odd = np.nan if floats else np.array(NOWHERE).astype(found.data.dtype)
            found.data = np.where(mask.data, found.data, odd).astype(found.data.dtype)
        return found

    def strict_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        places, run = _places(pointers, mask), running[-1]
        if places.size:
            run.check(places, value.data.dtype.itemsize)
            unique = np.unique(places)
            if unique.size != places.size:
                raise RaceError("a program writes one number twice in one store")
            run.writes.append((run.program, unique))
            run.fresh.append(unique)
        return store(self, pointers, value, mask, *rest)

    def strict_dot(self: Any, x: Any, y: Any, acc: Any, precision: Any, *rest: Any) -> Any:
        name = str(precision).rsplit(".", 1)[-1].lower()
        if x.data.dtype == np.float32 and name.startswith("tf32") and "x3" not in name:
            x, y = (interpreter.TensorHandle(_high(side.data), side.dtype) for side in (x, y))
        return dot(self, x, y, acc, precision, *rest)

    def typed_binary(self: Any, x: Any, y: Any, operation: Any) -> Any:
        """Triton 3.9 gives a comparison the type of its operands, by which it then spreads a number as int32."""
        found = binary(self, x, y, operation)
        if found.data.dtype == np.bool_:
            found.dtype = language.int1
        return found

    def barrier(self: Any) -> None:
        running[-1].fresh = []

    def strict_index(self: Any, x: int, y: int, z: int) -> Any:
        running[-1].program += 1
        running[-1].fresh = []
        return index(self, x, y, z)

    def strict_arguments(self: Any, given: Any, keywords: Any) -> Any:
        found = arguments(self, given, keywords)
        running.append(Run(list(_extents([*found[0], *found[1].values()]))))
        return found

    def strict_call(self: Any, *given: Any, **keywords: Any) -> None:
        global launches
        launches += 1
        if any(size > 65535 for size in self.grid[1:]):
            raise BoundsError(f"a grid of {self.grid}: its second and third sizes are at most 65535")
        before = len(running)
        try:
            call(self, *given, **keywords)
            running[-1].races()
        finally:
            del running[before:]

    def patch_once(function: Any) -> Any:
        """Triton looks for what to patch in each call of a helper, which took half of the time of a kernel."""
        found = {one.__name__ for one in function.__globals__.values() if one is language or one is language.core}
        if found <= running[-1].patched:
            return None
        running[-1].patched |= found
        return patch(function)

    interpreter._patch_lang = patch_once
    builder.create_masked_load, builder.create_masked_store = strict_load, strict_store
    builder.create_dot, builder.create_barrier, builder.set_grid_idx = strict_dot, barrier, strict_index
    builder.binary_op = typed_binary
    builder.create_minnumf = lambda self, x, y: self.binary_op(x, y, np.fmin)
    builder.create_maxnumf = lambda self, x, y: self.binary_op(x, y, np.fmax)
    executor._init_args_hst, executor.__call__ = strict_arguments, strict_call


def _places(pointers: Any, mask: Any) -> np.ndarray:
    """The addresses that are touched."""
    places = np.atleast_1d(pointers.data)
    kept = np.broadcast_to(np.atleast_1d(mask.data), places.shape).astype(bool)
    return places[kept].astype(np.uint64).ravel()


def _high(numbers: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(numbers).view(np.uint32) & np.uint32(0xFFFFE000)
    return bits.view(np.float32)


def _extents(given: Any) -> Any:
    """Where the tensors begin and end in memory, those in tuples too."""
    for one in given:
        if isinstance(one, torch.Tensor):
            if one.numel():
                reach = sum((size - 1) * stride for size, stride in zip(one.shape, one.stride(), strict=True))
                yield one.data_ptr(), one.data_ptr() + (reach + 1) * one.element_size()
        elif isinstance(one, tuple):
            yield from _extents(one)
