"""The mask of padding, as tokenizers return it."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.base.arrays import Array, refuse_additive, to_tensor
from clearhead.base.errors import ClearheadError
from clearhead.base.shapes import Sizes, heads_second, one_or, part, placed
from clearhead.base.symbolic.steps import Step
from clearhead.base.torch_state.tensor_kind import require_all
from clearhead.base.user_functions.rules import ByPair, entry
from clearhead.masks._read import derived, intervals, own, wrong_shape
from clearhead.masks.base import PAIRS, Mask, Sides, Spans


class Padding(Mask):
    """The keys that are tokens: a tokenizer's `attention_mask`, padded on the right, on the left, or with holes.

    >>> import torch, clearhead as ch
    >>> ch.Padding(torch.tensor([[1, 1, 0], [0, 1, 1]]))
    Padding(<2×3>)
    batch 0
    ■ ■ ·
    batch 1
    · ■ ■

    The mask copies `keep`: later writes to it do not change the mask. (A `DenseMask`, and a `MaskFunction` that reads a
    tensor, change with the tensor.)

    Args:
        keep: Which keys are tokens, (B, Lk): bool, True = token, or integers of at least 0, 0 = padding, such as the
            document numbers of packed texts.

    Raises:
        ClearheadError: If `keep` has another dtype or shape, or a negative number. A call raises one if the shape does
            not fit.

    Formula:
        Every query of sequence b attends to the keys j with keep[b, j] ≠ 0.

    Cost:
        O(B·Lk).
    """

    def __init__(self, keep: Array) -> None:
        given, keep = keep, to_tensor(keep, "keep")

        def wrong() -> ClearheadError:
            refuse_additive(given, "Padding: keep")
            cast = "keep.bool()" if isinstance(given, Tensor) else "keep.astype(bool)"
            return ClearheadError(
                f"Padding: keep has dtype {given.dtype}, shape {tuple(keep.shape)}; expected (B, Lk), bool or integers "
                f"where 0 is padding, such as {cast}.\nIf it holds lengths, pass Lengths(valid_lens)."
            )

        if keep.ndim != 2 or keep.is_floating_point() or keep.is_complex():
            raise wrong()
        if keep.dtype != torch.bool:
            require_all(keep >= 0, wrong, "Padding: keep holds negative numbers")
        self.keep = own(keep.detach().bool())
        self._read()  # caches the result in eager code, for compiled code to read

    @classmethod
    def example(cls, sizes: Sizes) -> Mask:
        keep = torch.arange(sizes.keys)[None] + torch.arange(sizes.batch)[:, None]
        return cls((keep % 4 != 1).to(sizes.device))  # has holes, the hardest case

    def title(self) -> str:
        return f"Padding(<{self.keep.shape[0]}×{self.keep.shape[1]}>)"

    def drawn(self) -> Sizes:
        return Sizes(self.keep.shape[0], 1, 1, self.keep.shape[1])

    def steps(self, sizes: Sizes, at: Sides, name: str = "mask") -> list[Step]:
        why = "The keys that are tokens, one row for each sequence, whose queries may attend to these keys alone."
        return [Step(name, why, self._compute_part(sizes, at), PAIRS)]

    def lower(self, sizes: Sizes) -> Spans:
        if self.keep.shape[1] != sizes.keys or not one_or(self.keep.shape[0], sizes.batch):
            hint = "\nIn cross attention pass the mask of the source, whose tokens are the keys."
            hint += heads_second(sizes, self.keep.shape[1])
            expected = f"(B, Lk) = ({sizes.batch}, {sizes.keys})"
            raise wrong_shape("Padding: keep", tuple(self.keep.shape), expected, sizes, hint)
        *hull, whole = self._read()
        keep, start, stop = (placed(t, sizes.device, "Padding") for t in (self.keep, *hull))
        start, stop = start.view(-1, 1, 1), stop.view(-1, 1, 1)
        if whole:
            return Spans(start, stop)

        def residual(batch: slice, heads: slice, queries: slice, keys: slice) -> Tensor:
            return part(keep, batch)[:, None, None, keys]

        def at(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return entry(keep, batch, key)

        return Spans(start, stop, ByPair(residual, at), (self.keep,))

    def _read(self) -> tuple[Tensor, Tensor, bool]:
        """Return the first kept key and one more than the last, (B,), and whether all keys between them are kept."""
        return derived(self, self.keep, _hull)


def _hull(keep: Tensor) -> tuple[Tensor, Tensor, bool]:
    if not keep.shape[1]:
        nothing = torch.zeros(keep.shape[0], dtype=torch.int64, device=keep.device)
        return nothing, nothing, True
    return intervals(keep.clone(), keep.shape[1])  # clone: PyTorch cannot resize memory that a NumPy array shares
