"""The mask of prefix language models."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial

import torch

from clearhead.base.arrays import Integers
from clearhead.base.positions import positions, query_offset
from clearhead.base.shapes import Sizes, one_or, part, placed
from clearhead.base.symbolic.steps import Step, made
from clearhead.base.torch_state.tensor_kind import is_readable
from clearhead.masks._draw import LARGEST
from clearhead.masks._read import Known, check_lengths, derived, known, signature_of, wrong_shape
from clearhead.masks.base import PAIRS, Mask, Sides, Spans

NAME = "PrefixLM: lengths"  # the name of the argument in errors


class PrefixLM(Mask):
    """Causal mask with a prefix to which every query attends.

    >>> import clearhead as ch
    >>> ch.PrefixLM(3)
    PrefixLM(3)
    ■ ■ ■ · · ·
    ■ ■ ■ · · ·
    ■ ■ ■ · · ·
    ■ ■ ■ ■ · ·
    ■ ■ ■ ■ ■ ·
    ■ ■ ■ ■ ■ ■

    The mask copies `lengths`: later writes to them do not change it. Where Lq ≠ Lk a call needs `align=`, as for
    `Causal`.

    Args:
        lengths: The length of the prefix of each sequence: an integer, or integers (B,), 0 or more. A length above Lk
            counts as Lk.

    Raises:
        ClearheadError: If `lengths` has another dtype, or a negative value. A call raises one if the shape does not
            fit.

    Formula:
        Query i attends to the keys j < max(i + p + 1, lengths[b]), where p is the position of query 0.

    Cost:
        O(B·Lq).

    Source:
        Liu et al. 2018, "Generating Wikipedia by Summarizing Long Sequences"; Raffel et al. 2020.
    """

    positional = True

    def __init__(self, lengths: Integers | int) -> None:
        self.lengths = check_lengths(lengths, NAME, read=True)
        self._read()  # caches the result in eager code, for compiled code to read

    @classmethod
    def example(cls, sizes: Sizes) -> Mask:
        return cls([(sizes.keys * b) // sizes.batch for b in range(sizes.batch)])

    def title(self) -> str:
        few = self.lengths.numel() <= 8 and is_readable(self.lengths)
        lengths = self.lengths.tolist() if few else f"<{self.lengths.numel()} lengths>"
        return f"PrefixLM({lengths})"

    def signature(self) -> Hashable | None:
        return signature_of(self)

    def _read(self) -> Known:
        return derived(self, self.lengths, partial(known, name=NAME))

    def drawn(self) -> Sizes:
        return Sizes(max(1, self.lengths.numel()), 1, 0, 0)

    def _count_drawn_keys(self) -> int:
        return max(super()._count_drawn_keys(), min(2 * (self._read().longest or 0), 2 * LARGEST))

    def steps(self, sizes: Sizes, at: Sides, name: str = "mask") -> list[Step]:
        rows, columns = positions(sizes, at, name, "PrefixLM")
        of_prefix = placed(self.lengths, sizes.device, "PrefixLM: lengths").view(-1, 1, 1)
        each = part(of_prefix, *at[:3]).unsqueeze(-1)
        of_each, most = "The length of each sequence's prefix.", max(sizes.keys, int(each.max()))
        lengths = Step(f"{name}_lengths", of_each, each, (*PAIRS[:2], "1", "1"), within=(0, most))
        why = "A query may attend to the keys up to its own position, and to all keys of the prefix, even after it."
        return [rows, columns, lengths, made(name, why, (columns <= rows) | (columns < lengths), PAIRS)]

    def lower(self, sizes: Sizes) -> Spans:
        if self.lengths.ndim > 1 or not one_or(self.lengths.numel(), sizes.batch):
            raise wrong_shape(NAME, (*self.lengths.shape, "", ""), f"(B,) = ({sizes.batch},)", sizes)
        own = torch.arange(1, sizes.queries + 1, device=sizes.device).view(1, 1, -1)
        own = own + query_offset(sizes, "PrefixLM")
        prefix = placed(self.lengths, sizes.device, "PrefixLM: lengths").view(-1, 1, 1)
        stop = torch.maximum(own, prefix).clamp(0, sizes.keys)
        return Spans(torch.zeros_like(stop[:1, :, :1]), stop)
