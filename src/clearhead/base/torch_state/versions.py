"""Whether tensors have been written to since they were read."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.base.arrays import check_memory
from clearhead.base.errors import ClearheadError
from clearhead.base.torch_state.mode import get_mode
from clearhead.base.torch_state.tensor_kind import get_address, holds_all_bytes, is_freed, is_plain
from clearhead.base.torch_state.torch_private import uncounted, version

_KEPT = 2**12  # so many factors are kept: most tensors have fewer rows and columns
_BAND = 2**15  # numbers that are read at a time: 256 KB
SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Versions:
    """The number of writes to each tensor when it was read. Each tensor is given with the name of its reader.

    Tensors made in inference mode do not count their writes: where one of them is read, `known` is False.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        mode = get_mode()
        self._counted = self.known = not (mode.compiled or mode.transforms)
        self._seen: list[tuple[str, Tensor, int, int]] = []
        for name, tensor in tensors if self.known else ():
            if uncounted(tensor):
                self.known = False
            else:
                self._seen.append((name, tensor, version(tensor), get_address(tensor)))

    def __reduce__(self) -> Any:  # a copy has tensors of its own, whose writes are counted anew
        return _again, ([(name, tensor, version(tensor) != before) for name, tensor, before, _ in self._seen],)

    def changed(self, tensors: Iterable[tuple[str, Tensor]]) -> tuple[str, Tensor] | None:
        """The first of these tensors that is another object, was written to since, or was given other memory."""
        if not self._counted:
            return None
        now = [(name, tensor) for name, tensor in tensors if not uncounted(tensor)]
        for (name, other), (_, tensor, before, at) in zip(now, self._seen, strict=False):
            if other is not tensor or version(tensor) != before or get_address(tensor) != at:
                return name, other
        if len(now) == len(self._seen):
            return None
        return now[-1] if now else self._seen[-1][:2]

    def written(self) -> tuple[str, Tensor] | None:
        """The first tensor that has been written to since, or whose memory is freed, with the name of what reads it. A
        wrapper that shares out parameters frees the memory of each after the layer that it belongs to has run."""
        usual = get_mode().eager
        for name, tensor, before, at in self._seen:
            if version(tensor) != before:
                return name, tensor
            # most tensors are found here, at less cost
            there = usual and is_plain(tensor) and tensor.data_ptr() and holds_all_bytes(tensor)
            if not there and ((at and not get_address(tensor)) or is_freed(tensor)):
                return name, tensor
        return None

    def has_replaced_tensor(self, now: Versions) -> bool:
        """Whether a tensor that requires grad has given its place to other numbers. A weight that is computed anew in
        each call, as by weight norm, may have the same."""
        pairs = zip(self._seen, now._seen, strict=False) if len(self._seen) == len(now._seen) else ()
        return any(
            tensor.requires_grad and tensor is not other and not torch.equal(tensor, other)
            for (_, tensor, *_), (_, other, *_) in pairs
        )

    def check(self) -> None:
        """Raise where a backward pass would compute with other numbers than the forward pass."""
        found = self.written()
        if found is not None:
            name, tensor = found
            check_memory(tensor, f"a tensor that {name} of attention() reads")
            raise ClearheadError(
                f"a tensor that {name} of attention() reads, {tensor.dtype}, shape {tuple(tensor.shape)}, was modified "
                "in place after the forward pass, and the backward pass needs it as it was. Pass a copy: "
                "tensor.clone()."
            )


def _again(seen: list[tuple[str, Tensor, bool]]) -> Versions:
    versions = Versions((name, tensor) for name, tensor, _ in seen)
    for i, (name, tensor, written) in enumerate(seen):
        if written:
            versions._seen[i] = (name, tensor, -1, 0)
    return versions


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers: a NaN is equal to itself then."""
    return tensor.view(SAME_SIZE[tensor.element_size()])


def digest(tensor: Tensor) -> int:
    """A number made of the tensor's bits and their places. A write that is not counted, as through `.data`, changes it.

    A plain sum would stay the same where rows, heads or positions only change places, so the sum of each row and of
    each column has a factor of its own; or each number has one, where they are few. Numbers that a stride of 0 repeats
    count once. It takes O(numbers), and waits for the device.
    """
    found = 0
    for number in fingerprint(tensor).tolist():  # read at once
        found = 31 * found + number
    return found


def fingerprint(tensor: Tensor) -> Tensor:
    """The numbers of which `digest` makes one, int64, on the tensor's device, so that nothing waits for it."""
    once = tensor.detach()
    if 0 in tensor.stride():
        once = once[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
    if not once.numel():
        return torch.zeros(0, dtype=torch.int64, device=tensor.device)
    numbers, parts = _wide(once.view(1, 1) if once.ndim == 0 else once.unsqueeze(0)), []
    for sums in _sums(numbers):
        for part, first in zip(sums, (1, 2**40), strict=False):
            parts.append((part * _factors(first, part.numel(), part.device)).sum())
    return torch.stack(parts)


def contents(tensor: Tensor | np.ndarray) -> str:
    """A text that differs where shapes, dtypes or numbers do."""
    held = torch.from_numpy(tensor) if isinstance(tensor, np.ndarray) else tensor
    return f"{tuple(held.shape)} {str(held.dtype).removeprefix('torch.')} {digest(held):x}"


def compute_checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of a text, and of tensors with their names, dtypes and shapes."""
    found = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def without_addresses(text: str) -> str:
    """The repr of objects without the addresses in it, which another process does not have."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _sums(numbers: Tensor) -> Sequence[tuple[Tensor, ...]]:
    """The sum of each row and of each column, of the numbers and, where they have eight bytes, of their upper halves;
    of few numbers the numbers themselves, since fewer operations take less time then.

    In memory of the host a few rows are read at a time, so that they are added up while the CPU's cache holds them.
    """
    # of the highest bit, the sign, a product keeps only whether the factor is odd: so the upper halves are added too
    shifts = (0, 32) if numbers.dtype == torch.int64 else (0,)
    if numbers.numel() <= _KEPT:
        return [((numbers >> shift if shift else numbers).flatten(),) for shift in shifts]
    banded = numbers.is_cpu and numbers.ndim == 2 and numbers.numel() > _BAND
    bands = torch.split(numbers, max(1, _BAND // numbers.shape[-1])) if banded else (numbers,)
    rows: list[list[Tensor]] = [[] for _ in shifts]
    columns: list[list[Tensor]] = [[] for _ in shifts]
    for band in bands:
        for of, shift in enumerate(shifts):
            half = band >> shift if shift else band
            rows[of].append(half.sum(-1).flatten())
            columns[of].append(half.sum(tuple(range(half.ndim - 1))))
    return [(torch.cat(r), torch.stack(c).sum(0)) for r, c in zip(rows, columns, strict=True)]


def _wide(tensor: Tensor) -> Tensor:
    """The tensor's bits, as numbers of eight bytes where they fit, so that fewer numbers are added."""
    bytes_of_row, at = tensor.shape[-1] * tensor.element_size(), tensor.storage_offset() * tensor.element_size()
    fits = tensor.is_contiguous() and bytes_of_row % 8 == 0 and at % 8 == 0
    return tensor.view(-1, tensor.shape[-1]).view(torch.int64) if fits else bits(tensor)


def _factors(first: int, count: int, device: torch.device) -> Tensor:
    """Odd pseudorandom numbers, so that no regular change of keys cancels: Steele et al. 2014, "SplitMix". `first`: the
    start of the sequence, so that the factors of rows differ from those of columns."""
    return _kept_factors(first, device)[:count] if count <= _KEPT else _new_factors(first, count, device)


@functools.cache
def _kept_factors(first: int, device: torch.device) -> Tensor:
    return _new_factors(first, _KEPT, device)


def _new_factors(first: int, count: int, device: torch.device) -> Tensor:
    number = torch.arange(first, first + count, device=device) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        number = (number ^ (number >> shift)) * factor
    return number | 1
