"""The record that a module keeps of its last call, from which any of its weights can be computed later."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from clearhead import _attention
from clearhead._attention import Arguments, Attended
from clearhead.base.errors import ClearheadError
from clearhead.base.numbers import check_flag
from clearhead.base.output.text import brief
from clearhead.base.torch_state.mode import get_mode
from clearhead.inspection.source import DerivedSource, FromCall, FromRecord, Source, shown
from clearhead.inspection.weights import Weights
from clearhead.problem.padded import get_nested_edges, pad_problem
from clearhead.problem.record import record


class RecordedWeights(Weights):
    """The weights of a past call, or an error where a tensor that they need has been modified."""

    def _head(self) -> str:
        gradients = "detached" if self._source.detached or not self.problem.needs_grad else "with gradients"
        return f"{super()._head().removesuffix(')')}, {gradients})"


class RecordingModule(nn.Module):
    """A module with `attention_weights`. It records in the forward pass, and computes weights on access."""

    _last: Source | None = None
    _made: tuple[Source, Weights | Callable[[], Weights]] | None = None

    def __init__(self, record: bool = True, record_gradients: bool = False) -> None:
        super().__init__()
        self._set_record(record, record_gradients)

    def _set_record(self, record: bool, record_gradients: bool) -> None:
        self.record = check_flag(record, "record")
        self.record_gradients = check_flag(record_gradients, "record_gradients")
        if record_gradients and not record:
            raise ClearheadError(
                "record_gradients=True is given with record=False: without a record there are no weights. Leave "
                "record=False out."
            )

    @property
    def attention_weights(self) -> Weights:
        """The weights of the last call, lazy, before dropout.

        Of nested inputs they are those of the padded batch: a query beyond its sequence sees no key.
        They are detached: a loss on them trains nothing. With `record_gradients=True` the module keeps the graph of its
        last call until the next one, and `attention_weights[...]` has gradients.

        After a call that `clearhead.edit` changed they are the edited weights, detached. Compiled code, calls inside
        torch.func, and the second run of a checkpoint record nothing: the weights stay those of the call before. The
        state dict, pickles and copies of the module leave them out. Raises a `ClearheadError` before the first call,
        where the module does not record (`record=False`), and, now or when they are read, where a tensor that they are
        computed from was modified in place since.
        """
        if not self.record:
            raise ClearheadError(
                f"{type(self).__name__} has no attention_weights: it is set to record=False, and keeps nothing of a "
                "call.\nCall ch.nn.set_recording(module, True), then the module."
            )
        last, made = self._last, self._made  # read once: another thread may be calling the module
        if last is None:
            raise ClearheadError(
                f"{type(self).__name__} has no attention_weights yet: no call of it was recorded. Call the module "
                "first.\nCalls inside torch.compile or torch.func are not recorded, and copies have no record."
            )
        if made is None or made[0] is not last:
            made = self.__dict__["_made"] = last, RecordedWeights(last)
        last.check()
        weights = made[1]
        if not isinstance(weights, Weights):  # an edit changed them
            weights = weights()
            self.__dict__["_made"] = last, weights
        return weights

    def _attend(
        self, query: Any, key: Any, value: Any, *, fresh: bool = False, cross: bool = False, **options: Any
    ) -> Attended:
        """Compute and record the output of `attention`, with the problem and the result of an edit.

        `fresh`: whether the module alone holds query and key. `cross`: see `attend_for`.
        """
        # writes to NumPy arrays are not counted
        for name, option in options.items():
            if isinstance(option, np.ndarray):
                options[name] = option.copy()
        call = Arguments(query, key, value, **options)
        found = _attention.attend_for(self, call, cross)
        # in a backward pass this is the second run of a checkpoint
        mode = get_mode()
        if mode.compiled or mode.transforms or mode.backward:
            return found
        last: Source | None = None
        if self.record and self.record_gradients and not isinstance(query, np.ndarray):
            last = FromCall(call, lasting=True)
        elif self.record:
            is_numpy = isinstance(query, np.ndarray)
            mask = None if call.mask is None else shown(call.mask)
            bias = None if call.bias is None else shown(call.bias)
            said = {"score": call.score, "mask": mask, "bias": bias, "align": call.align}
            last = FromRecord(record(found.problem, copy=is_numpy, fresh=fresh), said, is_numpy)
        has_documents = found.padded or found.problem.documents is not None
        edges = get_nested_edges(call.mask) if has_documents else None
        if last is not None and edges is not None and not (found.padded and isinstance(last, FromRecord)):
            last = DerivedSource(last, partial(pad_problem, edges=edges))
        edited = None if last is None or found.ran is None else found.ran.later(last.numpy)
        self.__dict__["_made"] = None if last is None or edited is None else (last, edited)
        self.__dict__["_last"] = last  # nn.Module.__setattr__ is slow
        return found

    def __dir__(self) -> list[str]:
        """Leave `attention_weights` out where reading it raises: torch.jit reads every attribute that is listed."""
        names: list[str] = super().__dir__()  # type: ignore[no-untyped-call]
        return names if self.record and self._last is not None else [n for n in names if n != "attention_weights"]

    def __getstate__(self) -> dict[str, Any]:  # pickle and copy call it
        return {name: value for name, value in self.__dict__.items() if name not in ("_last", "_made")}


def set_recording(model: nn.Module, record: bool) -> None:
    """Switch the record of the last call on or off in all attention modules of `clearhead.nn` in a model.

    >>> import torch, clearhead as ch
    >>> block, x = torch.nn.Sequential(ch.nn.MultiHeadAttention(16, 2)), torch.rand(1, 4, 16)
    >>> ch.nn.set_recording(block, False)                       # as record=False where each module is built
    >>> output = block[0](x, x, x)
    >>> ch.nn.set_recording(block, True)
    >>> output = block[0](x, x, x)
    >>> block[0].attention_weights.shape
    torch.Size([1, 2, 4, 4])

    `model`: a module, with all modules inside it. `record`: whether they record, from the next call on; False also
    drops the records that they hold. Then nothing of a call outlives it but the graph of its output, and
    `attention_weights` raise a `ClearheadError`. Copies and pickles of a module keep the setting; the state dict has
    none. Raises a `ClearheadError` for another `model` or `record`.
    """
    if not isinstance(model, nn.Module):
        raise ClearheadError(f"set_recording takes a torch.nn.Module; got {brief(model)}.")
    check_flag(record, "record")
    for module in model.modules():
        if isinstance(module, RecordingModule):
            module.record = record
            if not record:
                vars(module).update(_last=None, _made=None)
