"""The mask of the valid length of each sequence."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from clearhead.base.arrays import Integers
from clearhead.base.errors import ClearheadError
from clearhead.base.positions import key_positions
from clearhead.base.shapes import Sizes, heads_second, part, placed
from clearhead.base.symbolic.steps import Step, made
from clearhead.base.torch_state.tensor_kind import require_all
from clearhead.masks._read import Known, check_lengths, derived, known, signature_of, wrong_shape
from clearhead.masks.base import PAIRS, Mask, Sides, Spans

NAME = "Lengths: valid_lens"  # the name of the argument in errors


class Lengths(Mask):
    """The first keys of each sequence, as many as its valid length.

    >>> import torch, clearhead as ch
    >>> ch.Lengths([2, 4])
    Lengths([2, 4])
    batch 0
    ■ ■ · ·
    batch 1
    ■ ■ ■ ■

    The mask copies `valid_lens`: later writes to them do not change it. (A `DenseMask`, and a `MaskFunction` that reads
    a tensor, change with the tensor.)

    Args:
        valid_lens: The number of keys of each sequence, integers (B,), or of each query, (B, Lq), as a list, array or
            tensor; each from 0 (no key) to Lk.

    Raises:
        ClearheadError: If a length is negative or no integer. A call raises one if a length is above Lk, or the shape
            does not fit.

    Formula:
        Query i of sequence b attends to the keys j < valid_lens[b], or j < valid_lens[b, i].

    Cost:
        O(B), or O(B·Lq).
    """

    def __init__(self, valid_lens: Integers | int) -> None:
        self.valid_lens = check_lengths(valid_lens, NAME, read=True)
        self._read()  # caches the result in eager code, for compiled code to read

    @classmethod
    def example(cls, sizes: Sizes) -> Mask:
        return cls([(sizes.keys * (2 * b + 1)) // (2 * sizes.batch) for b in range(sizes.batch)])

    def signature(self) -> Hashable | None:
        return signature_of(self)

    def _read(self) -> Known:
        return derived(self, self.valid_lens, partial(known, name=NAME))

    def title(self) -> str:
        known = self._read().values  # cached by the constructor: no second read from the device
        if self.valid_lens.numel() > 8 or not isinstance(known, tuple):
            return f"Lengths(<{'×'.join(map(str, self.valid_lens.shape))} lengths>)"
        return f"Lengths({np.reshape(known[1:], self.valid_lens.shape).tolist()})"  # NumPy is faster than PyTorch here

    def drawn(self) -> Sizes:
        queries = self.valid_lens.shape[1] if self.valid_lens.ndim == 2 else 1
        return Sizes(self.valid_lens.shape[0] if self.valid_lens.ndim else 1, 1, queries, 0)

    def _count_drawn_keys(self) -> int:
        return self._read().longest or 0

    def steps(self, sizes: Sizes, at: Sides, name: str = "mask") -> list[Step]:
        lens = part(self.lower(sizes).stop, *at[:3]).unsqueeze(-1)
        each = "one number a query" if self.valid_lens.ndim == 2 else "one number for all queries of a sequence"
        positions = key_positions(sizes, at, f"{name}_positions")
        why = f"The number of keys that are tokens: {each}. It is a column, (…, 1), to be compared with each position."
        compare = (
            "Each position is compared with the length; the column and the row broadcast to a matrix. The other keys "
            "are padding, which only fills shorter sequences up to the length of the longest."
        )
        of_each = "Lq" if self.valid_lens.ndim == 2 else "1"
        lengths = Step(f"{name}_lengths", why, lens, ("B", "H", of_each, "1"), within=(0, sizes.keys))
        return [lengths, positions, made(name, compare, positions < lengths, PAIRS)]

    def lower(self, sizes: Sizes) -> Spans:
        lens = placed(self.valid_lens, sizes.device, "Lengths: valid_lens")
        shape = tuple(lens.shape)
        takes = (), (1,), (sizes.batch,), (sizes.batch, sizes.queries), (1, sizes.queries)
        if not any(shape == each for each in takes):  # the compiler's `in` does not compare symbols with numbers
            alone = "" if sizes.shown else "\nThe inputs have no batch axis; pass query (B, Lq, E) and key (B, Lk, E)."
            expected = f"(B,) = ({sizes.batch},), or (B, Lq) = ({sizes.batch}, {sizes.queries})"
            raise wrong_shape(NAME, (*shape, "", "")[:4], expected, sizes, alone)
        longest = self._read().longest
        if longest is None and lens.numel():
            require_all(
                lens <= sizes.keys, lambda: _too_long(lens, sizes), "Lengths: a length is above the number of keys"
            )
        elif (longest or 0) > sizes.keys:
            raise _too_long(lens, sizes)
        stop = lens.clone().reshape(shape[0] if shape else 1, 1, shape[1] if len(shape) == 2 else 1)
        return Spans(torch.zeros_like(stop[:1, :, :1]), stop)


def _too_long(lens: Tensor, sizes: Sizes) -> ClearheadError:
    return ClearheadError(
        f"Lengths: valid_lens, shape {tuple(lens.shape)}, holds {int(lens.max())}; expected at most {sizes.keys} keys."
        + heads_second(sizes, int(lens.max()))
        + f"\nIf shorter texts are allowed, pass FirstKeys({int(lens.max())})."
    )
