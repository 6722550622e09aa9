"""A mask given by a rule."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.base.rules import Rule, ask, broadcast, check_rule, reads_of, title_of
from clearhead.base.shapes import Sizes
from clearhead.masks.base import Mask, Spans


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
    It must give the same result on every call: the backward pass may call it again.
    Indices are counted from 0 for queries and keys alike: where Lq ≠ Lk, the rule places the queries itself.
    Joined to a mask that is an interval, `Causal() & MaskFunction(fn)`, the scores outside of it are not computed.
    `reads`: the tensors that fn reads. Those in its closure, its defaults, its globals and `self.name` are found
    without it. Where one is written to between the forward and the backward pass, that is an error; recorded and lazy
    weights notice it too. What fn reads in another way (a NumPy array, a list of numbers) must stay as it is.
    Where `reads` is given, `()` for none, the mask keeps what the rule says until one of them is written to; else each
    call asks it again.
    Raises a `ClearheadError` where fn gives anything else. Cost: the rule, for every pair, once a call or once in all;
    then scores of the blocks of 48 × 64 pairs of which it allows some.
    """

    def __init__(self, fn: Rule, reads: Sequence[Tensor] | None = None) -> None:
        self.said = reads is not None
        self.fn, self.reads = check_rule(fn, reads or (), "MaskFunction", "For a bool tensor use DenseMask(keep).")

    @classmethod
    def example(cls, sizes: Sizes) -> Mask:
        return cls(lambda batch, head, query_index, key_index: (batch + head + query_index * 3 + key_index) % 4 < 2)

    def depends(self) -> tuple[Tensor, ...] | None:
        return reads_of(self.fn, self.reads) if self.said else None

    def title(self) -> str:
        return title_of("MaskFunction", self.fn)

    def lower(self, sizes: Sizes) -> Spans:
        title = self.title()

        def residual(*sides: slice) -> Tensor:
            found, shape = ask(self.fn, sides, sizes, title, "join conditions with & and |, not with and, or.")
            if not isinstance(found, Tensor) or found.dtype != torch.bool:
                got = found.dtype if isinstance(found, Tensor) else type(found).__name__
                raise ClearheadError(f"{title} gave {got}; expected a bool tensor, True where a query may attend.")
            return broadcast(found, shape, title)

        whole = torch.zeros(1, 1, 1, dtype=torch.int64, device=sizes.device)
        return Spans(whole, whole + sizes.keys, residual, reads_of(self.fn, self.reads))
