"""A mask given as a bool matrix."""

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
    """Any pattern, given as a bool matrix; a bool tensor passed as `mask=` becomes a `DenseMask`.

    >>> import torch, clearhead as ch
    >>> ch.DenseMask(torch.tensor([[True, False, True], [False, True, True]]))
    DenseMask(<2×3>)
    ■ · ■
    · ■ ■

    The mask reads `keep` itself, not a copy: later writes to the tensor change the mask.

    Args:
        keep: The matrix, bool, True = may attend: (Lq, Lk), or a shape that broadcasts to the scores: (B, Lq, Lk) for
            inputs without heads, (B, H, Lq, Lk) for inputs with heads.

    Raises:
        ClearheadError: If the dtype is not bool. A call raises one if the shape does not fit the scores. Three
            dimensions beside inputs with heads are an error too, because for B = H they would broadcast along the wrong
            axis.

    Formula:
        Query i attends to the keys j with keep[..., i, j].

    Cost:
        A few passes over the matrix at the first use. A later use takes one pass, which compares the matrix with a
        copy. Blocks of 48 × 64 pairs without an allowed pair are skipped.
    """

    def __init__(self, keep: Array) -> None:
        self.keep = check_keep(owned(keep, "keep"), "DenseMask: keep", keep)

    @classmethod
    def example(cls, sizes: Sizes) -> Mask:
        i, j = torch.arange(sizes.queries)[:, None], torch.arange(sizes.keys)[None, :]
        return cls(((i * 7 + j * 3) % 5 < 2).to(sizes.device))

    def depends(self) -> tuple[Tensor, ...] | None:
        """Return a copy of `keep` that changes whenever `keep` changes.

        The copy is made at the second use, and again whenever the values of `keep` differ from it. A version counter
        would not do: `keep` may share its memory with a NumPy array, and PyTorch does not count writes to an array.

        Returns:
            The copy in a tuple; None at the first use, and where the values cannot be read on the host.

        Raises:
            ClearheadError: If the memory of `keep` was freed.
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
        if get_mode().compiled:  # inductor reads the byte of a bool, which may hold any number for True
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
    """Return the tensor `keep`; raise unless it is bool.

    Args:
        keep: The tensor.
        name: The name of the argument, for the error.
        given: The value that the caller passed; its type decides the remedy that the error names.
        additive: The remedy for an additive mask, as in `refuse_additive`.
    """
    if keep.dtype != torch.bool:
        refuse_additive(given, name, additive)
        whole = not (keep.is_floating_point() or keep.is_complex())
        lengths = "\nIf it holds numbers of allowed keys, pass Lengths(mask)." if whole else ""
        raise ClearheadError(
            f"{name} has dtype {given.dtype}, shape {tuple(keep.shape)}; expected bool, True = may attend."
            f"\n{mask_forms('mask', given)}{lengths}"
        )
    return keep
