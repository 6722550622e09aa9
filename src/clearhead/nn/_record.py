"""The record that a module keeps of its last call, from which any of its weights can be computed later."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import nn

from clearhead import _attention
from clearhead._attention import Arguments, Attended
from clearhead.base.errors import ClearheadError
from clearhead.base.numbers import check_flag
from clearhead.base.tracing import compiling, refuse_script, transformed
from clearhead.base.unpacked import looked_into
from clearhead.inspection.source import FromCall, FromRecord, Source, Unpacked, shown
from clearhead.inspection.weights import Weights
from clearhead.masks.ragged import RaggedMask
from clearhead.problem.record import record


class RecordedWeights(Weights):
    """The weights of a past call, or an error where a tensor that they need has been modified."""

    def _head(self) -> str:
        gradients = "detached" if self._source.detached or not self.problem.needs_grad else "with gradients"
        return f"{super()._head().removesuffix(')')}, {gradients})"


class RecordingModule(nn.Module):
    """A module with `attention_weights`. It records in the forward pass, and computes weights on access."""

    __prepare_scriptable__ = refuse_script
    _last: Source | None = None
    _made: tuple[Source, Weights | Callable[[], Weights]] | None = None

    def __init__(self, record_gradients: bool = False) -> None:
        super().__init__()
        self.record_gradients = check_flag(record_gradients, "record_gradients")

    @property
    def attention_weights(self) -> Weights | None:
        """The weights of the last call, lazy, before dropout; None before any call, of which `[…]` and `.plot` raise.

        Of nested inputs they are those of the padded batch: a query beyond its sequence sees no key.
        They are detached: a loss on them trains nothing. With `record_gradients=True` the module keeps the graph of its
        last call until the next one, and `attention_weights[...]` has gradients.

        After a call that `clearhead.edit` changed they are the edited weights, detached. They are None after a call
        under torch.compile or torch.func, whose tensors do not outlive the call. The state dict, pickles and copies of
        the module leave them out. Raises a `ClearheadError`, now or when they are read, where a tensor that they are
        computed from was modified in place since.
        """
        last, made = self._last, self._made  # read once: another thread may be calling the module
        if last is None:
            if not compiling() and looked_into(sys._getframe(1)):
                raise ClearheadError(
                    f"{type(self).__name__}.attention_weights is None: it shows the weights of the last call, and "
                    "there was none. Calls inside torch.compile or torch.func are not kept, nor are those of a copy."
                )
            return None
        if made is None or made[0] is not last:
            made = self.__dict__["_made"] = last, RecordedWeights(last)
        last.check()
        weights = made[1]
        if not isinstance(weights, Weights):  # an edit changed them
            weights = weights()
            self.__dict__["_made"] = last, weights
        return weights

    def _attend(self, query: Any, key: Any, value: Any, *, fresh: bool = False, **options: Any) -> Any:
        """The output of `attention`, recorded. `fresh`: only the module holds query and key."""
        return self._attended(query, key, value, fresh=fresh, **options).output

    def _attended(self, query: Any, key: Any, value: Any, *, fresh: bool = False, **options: Any) -> Attended:
        """The output of `attention`, recorded, with the problem and the result of an edit."""
        # writes to NumPy arrays are not counted
        copies = {name: a.copy() for name, a in options.items() if isinstance(a, np.ndarray)}
        call = Arguments(query, key, value, **(options | copies if copies else options))
        found = _attention.attend(call)
        problem = found.problem
        last: Source | None = None
        if not compiling() and not transformed():
            numpy = isinstance(query, np.ndarray)
            if self.record_gradients and not numpy:
                last = FromCall(call, lasting=True)
            else:
                said = {"score": call.score, "mask": _words(call.mask), "bias": _words(call.bias), "align": call.align}
                last = FromRecord(record(problem, copy=numpy, fresh=fresh), said, numpy)
            ragged = call.mask is not None and isinstance(call.mask, RaggedMask)
            if ragged and not (found.padded and isinstance(last, FromRecord)):
                last = Unpacked(last, call.mask.sequences)
        edited = None if last is None or found.ran is None else found.ran.later(last.numpy)
        self.__dict__["_made"] = None if last is None or edited is None else (last, edited)
        self.__dict__["_last"] = last  # nn.Module.__setattr__ is slow
        return found

    def __getstate__(self) -> dict[str, Any]:  # pickle and copy call it
        return {name: value for name, value in self.__dict__.items() if name not in ("_last", "_made")}


def _words(value: Any) -> str | None:
    return None if value is None else shown(value)
