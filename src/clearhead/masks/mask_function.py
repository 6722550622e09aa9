"""A mask given by a rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from clearhead.base.closures import read_by
from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.shapes import Sizes, extent
from clearhead.base.tracing import compiling
from clearhead.masks.base import Mask, Spans

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class MaskFunction(Mask):
    """Any rule: a function of the indices that says which pairs are allowed.

    >>> import clearhead as ch
    >>> ch.MaskFunction(lambda batch, head, query_index, key_index: (query_index - key_index) % 2 == 0)
    MaskFunction(<lambda>)
    ■ · ■ · ■ ·
    · ■ · ■ · ■
    ■ · ■ · ■ ·
    · ■ · ■ · ■
    ■ · ■ · ■ ·
    · ■ · ■ · ■

    Rule: query i of head h of sequence b sees the keys j with fn(b, h, i, j).
    `fn(batch, head, query_index, key_index)` is called on int64 tensors of shapes (B, 1, 1, 1), (1, H, 1, 1),
    (1, 1, Lq, 1) and (1, 1, 1, Lk), for any part of the matrix, and gives a bool tensor that broadcasts with them.
    The rule gives the same answer whenever it is asked: it may be asked again in the backward pass.
    Indices are counted from 0 for queries and keys alike: where Lq ≠ Lk, the rule places the queries itself.
    Joined to a mask that is an interval, `Causal() & MaskFunction(fn)`, the rule is asked about that interval alone.
    `reads`: the tensors that fn reads. Those in its closure, its defaults, its globals and `self.name` are found
    without it. Where one is written to between the forward and the backward pass, that is an error; recorded and lazy
    weights notice it too. What fn reads in another way (a NumPy array, a list of numbers) must stay as it is.
    Raises a `ClearheadError` where fn gives anything else. Cost: the rule, for every pair that the rest allows.
    """

    def __init__(self, fn: Rule, reads: Sequence[Tensor] = ()) -> None:
        if not callable(fn):
            raise ClearheadError(
                f"MaskFunction takes a function of (batch, head, query_index, key_index); got a {type(fn).__name__}. "
                "For a bool tensor use DenseMask(keep)."
            )
        if isinstance(reads, Tensor) or not all(isinstance(tensor, Tensor) for tensor in reads):
            raise ClearheadError("MaskFunction: reads takes a list of the tensors that the rule reads.")
        self.fn, self.reads = fn, tuple(reads)

    @classmethod
    def example(cls, sizes: Sizes) -> Mask:
        return cls(lambda batch, head, query_index, key_index: (batch + head + query_index * 3 + key_index) % 4 < 2)

    def title(self) -> str:
        return f"MaskFunction({getattr(self.fn, '__name__', type(self.fn).__name__)})"

    def _ask(self, indices: list[Tensor]) -> object:
        try:
            return self.fn(*indices)
        except Exception as error:
            raise ClearheadError(
                f"{self.title()} failed on {[tuple(index.shape) for index in indices]}: {type(error).__name__}: {error}"
                "\nIt is called with four index tensors, (batch, head, query_index, key_index); join conditions with & "
                "and |, not with and, or."
            ) from error

    def lower(self, sizes: Sizes) -> Spans:
        def residual(*sides: slice) -> Tensor:
            indices = []
            for dim, (size, side) in enumerate(zip(sizes.shape, sides, strict=True)):
                index = torch.arange(*extent(side, size), device=sizes.device)
                indices.append(index.view((1,) * dim + (-1,) + (1,) * (3 - dim)))
            return _checked(self._ask(indices), [index.numel() for index in indices], self.title())

        whole = torch.zeros(1, 1, 1, dtype=torch.int64, device=sizes.device)
        return Spans(
            whole, whole + sizes.keys, residual, self.reads if compiling() else (*self.reads, *read_by(self.fn))
        )


def _checked(keep: object, shape: list[int], title: str) -> Tensor:
    if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
        got = keep.dtype if isinstance(keep, Tensor) else type(keep).__name__
        raise ClearheadError(f"{title} gave {got}; expected a bool tensor, True where a query may attend.")
    wrong = keep.ndim > 4 or any(n not in (1, size) for n, size in zip(keep.shape[::-1], shape[::-1], strict=False))
    if wrong:
        raise ShapeError(
            f"{title} gave a tensor of shape {tuple(keep.shape)}, which does not broadcast to {tuple(shape)}, the "
            "(batch, heads, queries, keys) it was asked about: compute with the indices as they come."
        )
    return keep.reshape((1,) * (4 - keep.ndim) + tuple(keep.shape))
