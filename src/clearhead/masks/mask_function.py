"""A mask given by a rule."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from clearhead.base.arrays import check_memories
from clearhead.base.shapes import Sizes
from clearhead.base.torch_state.mode import get_mode
from clearhead.base.user_functions.function_reads import FunctionReads
from clearhead.base.user_functions.rules import ByPair, Rule, ask, check_rule, reads_of, title_of
from clearhead.base.user_functions.single_pairs import must_ask_again, reads_rows
from clearhead.masks._read import KEPT
from clearhead.masks.base import Mask, Spans, all_keys

_STATE = f"{KEPT}_state"


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
    It may be called again in the backward pass, and must give the same result then:
    `clearhead.testing.check_mask(mask)` finds a function that does not.
    A function that reads a row of a table, `(labels[i] & labels[j]).any()`, is mapped over the pairs by `torch.vmap`;
    to find out, the function is tried on a few pairs when it is given.
    Indices are counted from 0 for queries and keys alike: where Lq ≠ Lk, the rule places the queries itself. Beside a
    `KeyValueCache` of a module, query_index counts the keys that the cache held before the call too.
    Joined to a mask that is an interval, `Causal() & MaskFunction(fn)`, the scores outside of it are not computed.
    `reads`: the tensors that fn reads. Tensors in its closure, its defaults, its globals and `self.name` are found
    without `reads`. A write to one of them between the forward and the backward pass is an error; recorded and lazy
    weights notice it too. Other values that fn reads (a NumPy array, a list of numbers) must stay as they are.
    The mask caches the rule's results until a value that the rule reads is replaced, or a tensor is written to (a write
    through `.data` or NumPy is not counted). These values are known where the names in fn's code name nothing but
    tensors, numbers, strings, and modules and functions of torch, math and Python, or from `reads`, where `()` means
    none. Otherwise (a list, an object, another function of yours) each call asks the rule again, and `clearhead.plan`
    says so.
    Raises a `ClearheadError` where fn gives anything else. Cost: the rule for every pair, at each call or once; then
    the scores of the blocks of 48 × 64 pairs in which it allows a pair.
    """

    def __init__(self, fn: Rule, reads: Sequence[Tensor] | None = None) -> None:
        self.said = reads is not None
        self.fn, self.reads = check_rule(fn, reads or (), "MaskFunction", "For a bool tensor use DenseMask(keep).")
        self._by_rows = reads_rows(fn)

    @classmethod
    def example(cls, sizes: Sizes) -> Mask:
        return cls(lambda batch, head, query_index, key_index: (batch + head + query_index * 3 + key_index) % 4 < 2)

    def depends(self) -> tuple[Tensor, ...] | None:
        if self.said:
            return reads_of(self.fn, self.reads)
        now = FunctionReads(self.fn)
        if now.unknown is not None:
            vars(self)[_STATE] = None
            return None
        check_memories(("a tensor that the mask reads", tensor) for tensor in now.tensors)
        known = vars(self).get(_STATE)
        if known is None or not known[0].is_same(now):
            with torch.inference_mode(False):
                token = torch.zeros((), dtype=torch.float32, device="cpu")
            known = vars(self)[_STATE] = now, token
        return (known[1],)

    def _list_notes(self) -> list[str]:
        why = None if self.said else FunctionReads(self.fn).unknown
        if why is None:
            return []
        return [
            f"the rule of {self.title()} is asked for every pair at each call, since it {why}: the other "
            "values that it reads are not known. If it reads tensors alone, MaskFunction(fn, reads=[...]) "
            "(reads=() for none) keeps its results until one of them is written to"
        ]

    def title(self) -> str:
        return title_of("MaskFunction", self.fn)

    def lower(self, sizes: Sizes) -> Spans:
        if must_ask_again(self._by_rows):
            self._by_rows = reads_rows(self.fn, device=sizes.device)
        title, known = self.title(), vars(self).get(_STATE)

        def residual(*sides: slice) -> Tensor:
            # code that is compiled or traced asks anew, and keeps nothing
            mode = get_mode()
            if known is not None and not (mode.compiled or mode.traced or known[0].is_same(FunctionReads(self.fn))):
                vars(self)[_STATE] = None  # the rule's state is another now, so these results are not kept
            return ask(self.fn, self._by_rows, sides, sizes, title, boolean=True)

        rest = ByPair(residual, self.fn) if self._by_rows is False else residual
        return all_keys(sizes, rest, reads_of(self.fn, self.reads))
