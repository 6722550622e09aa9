"""What a module keeps of its last call: enough to compute any of its weights later, and no more."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from clearhead.base.errors import ClearheadError
from clearhead.base.numbers import check_flag
from clearhead.base.tracing import compiling, transformed
from clearhead.base.versions import Versions
from clearhead.inspection.weights import Weights
from clearhead.problem.problem import Problem
from clearhead.problem.reads import tensors_in
from clearhead.scores.base import with_parameters


class RecordedWeights(Weights):
    """The weights of a call that is over: those it had, or an error where they can't be told any more."""

    def __init__(self, query: Any, key: Any, reads: Versions, **options: Any) -> None:
        self._reads_of_call = reads
        super().__init__(query, key, **options)

    def __repr__(self) -> str:
        gradients = "detached" if self._detached or not self._problem.needs_grad else "with gradients"
        return f"{super().__repr__().removesuffix(')')}, {gradients})"

    @property
    def _problem(self) -> Problem:
        self._check()
        return super()._problem

    def _check(self) -> None:
        """Raise where something has been written to since the call."""
        _check(self._reads_of_call)

    def __matmul__(self, value: Any) -> Any:
        self._check()
        return super().__matmul__(value)


def _check(reads: Versions) -> None:
    found = reads.written()
    if found is not None:
        name, tensor = found
        raise ClearheadError(
            f"the {name} of the recorded call, shape {tuple(tensor.shape)}, was modified in place after it: its "
            "attention weights can't be computed any more.\nRead what you need of attention_weights before, or pass "
            f"{name}.clone() to the module."
        )


class LastCall(NamedTuple):
    """The last call, as its weights need it."""

    query: Any
    key: Any
    reads: Versions
    options: dict[str, Any]
    detached: bool


class RecordingModule(nn.Module):
    """A module with `attention_weights`. It records in the forward pass, and computes when it is asked."""

    _last: LastCall | RecordedWeights | None = None

    def __init__(self, record_gradients: bool = False) -> None:
        super().__init__()
        self.record_gradients = check_flag(record_gradients, "record_gradients")

    @property
    def attention_weights(self) -> Weights | None:
        """The weights of the last call, lazy, before dropout; None before any call.

        They are detached: a loss on them trains nothing. With `record_gradients=True` the module keeps the graph of its
        last call until the next one, and `attention_weights[...]` has gradients.

        None too after a call under torch.compile or torch.func, whose tensors do not outlive it. Not part of
        the state dict, of pickles and of copies of the module. Raises a `ClearheadError`, now or when they are looked
        at, where a tensor they are computed from was modified in place since.
        """
        if isinstance(self._last, LastCall):
            query, key, reads, options, detached = self._last
            _check(reads)
            self._last = RecordedWeights(query, key, reads, detached=detached, **options)
        if self._last is not None:
            self._last._check()
        return self._last

    def _record(self, query: Any, key: Any, *, fresh: bool = False, **options: Any) -> None:
        """Keep a call: no copies but of what may change. `fresh`: nobody but the module has query and key."""
        if compiling() or transformed():
            self._last = None
            return
        kept = {name: option for name, option in options.items() if option is not None}
        detached = not self.record_gradients or isinstance(query, np.ndarray)
        if detached:
            kept = {name: _keep(option) for name, option in kept.items()}
            query, key = _keep(query, fresh), _keep(key, fresh)
        named = (("query", query), ("key", key), *kept.items())
        reads = Versions((name, tensor) for name, thing in named for tensor in tensors_in(thing))
        self.__dict__["_last"] = LastCall(query, key, reads, kept, detached)  # a module's own way to set it is slow

    def __getstate__(self) -> dict[str, Any]:  # pickle and copy ask for it
        return {name: value for name, value in self.__dict__.items() if name != "_last"}


def _keep(thing: Any, fresh: bool = False) -> Any:
    """Something that a later optimizer step, or an unseen write, does not change."""
    if isinstance(thing, Tensor):
        tensor = thing.detach()
        # a tensor of inference mode does not count its writes
        return tensor.clone() if tensor.is_inference() and not fresh else tensor
    if isinstance(thing, np.ndarray):
        return thing.copy()
    if isinstance(thing, nn.Module):
        return _frozen(thing)
    return thing


def _frozen(module: nn.Module) -> nn.Module:
    """A copy that nothing trains.

    Its parameters are copied, because an optimizer writes to them; its buffers are watched, because they may be large.
    """
    return with_parameters(module, lambda p: nn.Parameter(p.detach().clone(), requires_grad=False), _keep)
