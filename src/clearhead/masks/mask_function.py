"""A mask given by a function of indices."""

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
    """A mask given by a function of indices, which returns the allowed pairs.

    >>> import clearhead as ch
    >>> ch.MaskFunction(lambda batch, head, query_index, key_index: (query_index - key_index) % 2 == 0)
    MaskFunction(<lambda>)
    ■ · ■ · ■ ·
    · ■ · ■ · ■
    ■ · ■ · ■ ·
    · ■ · ■ · ■
    ■ · ■ · ■ ·
    · ■ · ■ · ■

    Indices count from 0 for queries and keys alike: where Lq ≠ Lk, add the position of query 0 in the function. With a
    `KeyValueCache` of a module, query_index also counts the keys that the cache held before the call.

    The function may run again in the backward pass, and must return the same result then;
    `clearhead.testing.check_mask(mask)` finds a function that does not. A function that reads a row of a table, such as
    `(labels[i] & labels[j]).any()`, is mapped over the pairs by `torch.vmap`; the constructor runs the function on a
    few pairs to detect this.

    The mask caches the results until a value that the function reads is replaced, or a tensor is written to (PyTorch
    does not count writes through `.data` or NumPy). This needs all values that it reads: clearhead finds them if the
    names in the function's code are tensors, numbers, strings, and modules and functions of torch, math and Python.
    Otherwise (a list, an object, another function of yours) pass `reads`, where `()` means none; without `reads` each
    call runs the function again, and `clearhead.plan` notes it.

    A write to a tensor that the function reads, between the forward and the backward pass, is an error; recorded and
    lazy weights detect such a write too. Other values that it reads (a NumPy array, a list of numbers) must not change.

    Args:
        fn: The function `fn(batch, head, query_index, key_index)`. Its arguments are int64 tensors of shapes (B, 1, 1,
            1), (1, H, 1, 1), (1, 1, Lq, 1) and (1, 1, 1, Lk), for any part of the matrix. It returns a bool tensor that
            broadcasts with them.
        reads: The tensors that `fn` reads, of any shapes (...). By default clearhead finds the tensors in its closure,
            defaults and globals, and in the attributes of `self`.

    Raises:
        ClearheadError: If `fn` is not callable. A call raises one if `fn` returns anything but such a bool tensor.

    Formula:
        Query i of head h of sequence b attends to the keys j with fn(b, h, i, j).

    Cost:
        `fn` for every pair, at each call or once; then the scores of the blocks of 48 × 64 pairs with an allowed pair.
        `Causal() & MaskFunction(fn)`, or another mask of intervals beside it, skips the scores outside of the
        intervals.
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
            f"{self.title()} computes every pair at each call, since its function {why}: clearhead cannot find the "
            "values that it reads. If they are tensors, MaskFunction(fn, reads=[...]) (reads=() for none) "
            "caches its results until one of them is written to"
        ]

    def title(self) -> str:
        return title_of("MaskFunction", self.fn)

    def lower(self, sizes: Sizes) -> Spans:
        if must_ask_again(self._by_rows):
            self._by_rows = reads_rows(self.fn, device=sizes.device)
        title, known = self.title(), vars(self).get(_STATE)

        def residual(*sides: slice) -> Tensor:
            # compiled and traced code computes the rule again and caches nothing
            mode = get_mode()
            if known is not None and not (mode.compiled or mode.traced or known[0].is_same(FunctionReads(self.fn))):
                vars(self)[_STATE] = None  # a value that the rule reads has changed: do not cache these results
            return ask(self.fn, self._by_rows, sides, sizes, title, boolean=True)

        rest = ByPair(residual, self.fn) if self._by_rows is False else residual
        return all_keys(sizes, rest, reads_of(self.fn, self.reads))
