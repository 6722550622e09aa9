"""The parts that every attention call of a model has, and the output of a recorded one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, ClassVar

from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.base.output.text import said, short
from clearhead.base.torch_state.contexts import without_function_modes
from clearhead.models.interception.layers import LayerName
from clearhead.models.interception.modules import Kind
from clearhead.models.interception.place import Place
from clearhead.models.recordings.cached import Cached
from clearhead.models.table import Table
from clearhead.problem.problem import Problem
from clearhead.problem.record import copied

COLUMNS: Mapping[str, Callable[[Any], object]] = {  # of the tables about calls: what each holds of a call
    **{name: attrgetter(name) for name in ("run", "kind", "backend")},
    "layer": attrgetter("layer.column"),
    "call": attrgetter("number"),
    "module": attrgetter("name"),
    "queries": lambda call: call.shape[2],
    "keys": lambda call: call.shape[3],
    "B × H × Lq × Lk": lambda call: " × ".join(map(str, call.shape)),
    "mask": lambda call: "" if call.mask is None else short(said(call.mask, call.mask.title), 60),
}


class Call:
    """What a list of calls reads of each of them.

    `name`: of the module that made the call. `kind`: "self", or "cross" where the keys come from another sequence than
    the queries. `run`: which run of the model made it, from 0 on. `layer`: the layer of the model; its text is its
    name, such as "L3" or "decoder 3, cross".
    """

    name: str
    kind: Kind
    run: int
    layer: LayerName
    _columns: ClassVar[tuple[str, ...]] = "layer", "run", "module", "kind", "backend", "queries", "keys"

    @property
    def row(self) -> dict[str, object]:
        """The columns with which each row of a table about the call begins."""
        return {name: COLUMNS[name](self) for name in self._columns}

    def table(self) -> Table:
        """A row for each head, where the call has numbers of its heads, else one row."""
        return Table.of(self.row, self._by_head())

    def _by_head(self) -> Mapping[str, Iterable[object]]:
        """The columns that have a value for each head."""
        return {}


class Outcome:
    """The output of a call, and its gradient.

    `output` (B, H, Lq, Ev); None where a projection had mixed the heads before it could be read. `grad`: its gradient,
    of the same shape, the sum over all backward passes since the call. `dropped`: whether the call had dropout, so that
    the output is not the formula's.
    """

    def __init__(self, output: Tensor | None = None, grad: Tensor | None = None, dropped: bool = False) -> None:
        self.output, self.grad, self.dropped = output, grad, dropped
        self.followed = False  # whether a backward pass can reach the output
        self.error: Exception | None = None  # why a gradient that reached the output could not be kept

    def of(self, place: Place | None, gradients: bool) -> Callable[[Any], None]:
        """A function that reads the output in a result."""

        def read(result: Any) -> None:
            if place is None:
                return
            with without_function_modes():
                tensor = place.tensor(result)
                heads = place.by_head(tensor)
                self.output = None if heads is None else copied(heads)
                if gradients and tensor.requires_grad:
                    self.followed = True
                    kept = place.kept()
                    tensor.register_hook(lambda grad: self._add(kept, grad))  # type: ignore[no-untyped-call]

        return read

    def _add(self, place: Place, grad: Tensor | None) -> None:
        if grad is None:  # a function behind the call gives its input no gradient
            return
        try:
            with without_function_modes():
                found = place.gradient(grad.detach())
                self.grad = copied(found) if self.grad is None else self.grad + found
        except Exception as error:  # it would end the backward pass
            self.error = error

    def gradient(self, name: str) -> Tensor:
        """The gradient of the output. Raises a `ClearheadError` that says why there is none."""
        if self.error is not None:
            reason = f"one that reached its output could not be kept: {type(self.error).__name__}: {self.error}"
        elif self.grad is not None:
            return self.grad
        elif self.followed:
            reason = "no backward pass has reached its output. Call loss.backward() first"
        else:
            reason = (
                "its output has no gradient. Watch with gradients=True, where parameters or inputs require gradients, "
                "without torch.no_grad() and without reentrant checkpoints (use_reentrant=False is right)"
            )
        raise ClearheadError(f"{name} has no gradients: {reason}.")


def with_key(problem: Problem, key: Tensor) -> Problem:
    return problem._replace(scores=problem.scores._replace(key=key))


def whole_or_shape(cached: Cached) -> Tensor:
    """The key where it is whole; else a tensor of its shape that takes the memory of one number."""
    return cached.link.new if cached.whole else cached.link.new.new_zeros(()).expand(cached.shape)
