"""A mask given in full."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clearhead.base.arrays import Array, check_memory, mask_forms, owned, refuse_additive
from clearhead.base.errors import ClearheadError
from clearhead.base.shapes import Sides, Sizes, fit, part, placed
from clearhead.base.torch_state.mode import get_mode
from clearhead.base.torch_state.tensor_kind import is_on_host, is_readable
from clearhead.base.user_functions.rules import ByPair, entry
from clearhead.masks._read import KEPT, intervals
from clearhead.masks.base import Mask, Spans

_COPY = f"{KEPT}_copy"


class DenseMask(Mask):
    """Any pattern, given as a bool matrix; a bool tensor passed as `mask=` becomes a DenseMask.

    >>> import torch, clearhead as ch
    >>> ch.DenseMask(torch.tensor([[True, False, True], [False, True, True]]))
    DenseMask(<2×3>)
    ■ · ■
    · ■ ■

    Rule: query i sees the keys j with keep[..., i, j]. Blocks of 48 × 64 pairs of which none is allowed are
    skipped. Cost: some passes over the matrix; a later use takes one pass, which compares the matrix with a copy.
    `keep`: bool, (Lq, Lk) or broadcasting to the scores: (B, Lq, Lk) without heads, (B, H, Lq, Lk) with heads.
    Raises a `ClearheadError` for other dtypes and shapes; three dimensions on inputs with heads are refused, because
    where B = H they would broadcast to the wrong place.
    """

    def __init__(self, keep: Array) -> None:
        self.keep = check_keep(owned(keep, "keep"), "DenseMask: keep", keep)

    @classmethod
    def example(cls, sizes: Sizes) -> Mask:
        i, j = torch.arange(sizes.queries)[:, None], torch.arange(sizes.keys)[None, :]
        return cls(((i * 7 + j * 3) % 5 < 2).to(sizes.device))

    def depends(self) -> tuple[Tensor, ...] | None:
        """A copy of `keep`, made at the second use, and made again whenever `keep` has changed since.

        `keep` may share its memory with an array, and writes to an array are not counted.
        """
        keep, known = check_memory(self.keep, "DenseMask: keep"), vars(self)
        if not is_on_host(keep) or not is_readable(keep):
            return None
        if _COPY not in known:
            known[_COPY] = None
            return None
        if known[_COPY] is None or not torch.equal(known[_COPY], keep):
            with torch.inference_mode(False):
                known[_COPY] = keep.clone()
        return (known[_COPY],)

    def title(self) -> str:
        return f"DenseMask(<{'×'.join(map(str, self.keep.shape))}>)"

    def drawn(self) -> Sizes:
        shape = (1,) * 4 + tuple(self.keep.shape)
        batch = shape[-3] if self.keep.ndim == 3 else math.prod(shape[:-3])
        return Sizes(batch, 1 if self.keep.ndim == 3 else shape[-3], shape[-2], shape[-1])

    def lower(self, sizes: Sizes) -> Spans:
        keep = placed(fit(self.keep, sizes, "mask"), sizes.device, "DenseMask")
        if get_mode().compiled:  # inductor's code reads a bool as its byte, which may hold any number for True
            keep = keep.view(torch.uint8) != 0
        if not keep.numel() or not sizes.keys:
            nothing = torch.zeros(1, 1, 1, dtype=torch.int64, device=sizes.device)
            return Spans(nothing, nothing)
        start, stop, exact = intervals(keep, sizes.keys)
        if exact:
            return Spans(start, stop)
        pairs = ByPair(lambda *slices: part(keep, *slices), lambda *indices: entry(keep, *indices))
        return Spans(start, stop, pairs, (self.keep,))

    def _compute_part(self, sizes: Sizes, at: Sides) -> Tensor:
        return part(placed(fit(self.keep, sizes, "mask"), sizes.device, "DenseMask"), *at)


def check_keep(keep: Tensor, name: str, given: Array, additive: str = "mask={}") -> Tensor:
    """The tensor. Raise unless it is bool; `given`: what the caller passed, by whose type the error names a remedy.
    `additive`: the remedy for an additive mask, see `refuse_additive`."""
    if keep.dtype != torch.bool:
        refuse_additive(given, name, additive)
        whole = not (keep.is_floating_point() or keep.is_complex())
        lengths = "\nLengths, how many keys may be seen, pass as Lengths(mask)." if whole else ""
        raise ClearheadError(
            f"{name} has dtype {given.dtype}, shape {tuple(keep.shape)}; expected bool, True where a query may attend."
            f"\n{mask_forms('mask', given)}{lengths}\nA float tensor passed as mask= is added to the scores."
        )
    return keep
