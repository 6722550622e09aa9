"""The parts that every attention call of a model has, and the parts of a recorded call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.base.tracing import unobserved
from clearhead.explanation.modules.origin.ran import Origin
from clearhead.masks.base import Mask
from clearhead.models.chain.cached import Cached
from clearhead.models.tap.layers import FIRST, LayerName
from clearhead.models.tap.modules import Kind
from clearhead.models.tap.place import Place
from clearhead.models.tap.receiver import After
from clearhead.problem.problem import Problem
from clearhead.problem.record import Record, copied
from clearhead.problem.words import Words
from clearhead.scores.base import Score


class Call:
    """The parts that every call has.

    `name`: of the module that made the call. `kind`: "self", or "cross" where the keys come from another sequence than
    the queries. `backend`: the name of the function that computed it. `shape`: (B, H, Lq, Lk). `run`: which run of the
    model made it, from 0 on. `layer`: the layer of the model; its text is its name, such as "L3" or "decoder 3, cross".
    """

    name: str
    kind: Kind
    backend: str
    shape: tuple[int, int, int, int]
    run: int
    layer: LayerName

    @property
    def row(self) -> dict[str, Any]:
        """The columns with which each row of a table about the call begins."""
        _, _, queries, keys = self.shape
        same = {
            "layer": self.layer.column,
            "run": self.run,
            "module": self.name,
            "kind": self.kind,
            "backend": self.backend,
        }
        return same | {"queries": queries, "keys": keys}


class Outcome:
    """The output of a call, and its gradient.

    `output` (B, H, Lq, Ev); None where a projection had mixed the heads before it could be read. `grad`: its gradient,
    of the same shape, the sum over all backward passes since the call. `dropped`: whether the call had dropout, so that
    the output is not the formula's.
    """

    def __init__(self, output: Tensor | None = None, grad: Tensor | None = None, dropped: bool = False) -> None:
        self.output, self.grad, self.dropped = output, grad, dropped
        self.followed = False  # whether a backward pass can reach the output

    def of(self, place: Place | None, gradients: bool) -> After:
        """A function that reads the output in a result, and gives the result back as it is."""

        def read(result: Any) -> Any:
            if place is None:
                return result
            with unobserved():
                tensor = place.tensor(result)
                heads = place.by_head(tensor)
                self.output = None if heads is None else copied(heads)
                if gradients and tensor.requires_grad:
                    self.followed = True
                    kept = place.kept()
                    tensor.register_hook(lambda grad: self._add(kept, grad))  # type: ignore[no-untyped-call]
            return result

        return read

    def _add(self, place: Place, grad: Tensor) -> None:
        with unobserved():
            found = place.gradient(grad.detach())
            self.grad = copied(found) if self.grad is None else self.grad + found

    def gradient(self, name: str) -> Tensor:
        """The gradient of the output. Raises a `ClearheadError` that says why there is none."""
        if self.grad is not None:
            return self.grad
        if self.followed:
            reason = "no backward pass has reached its output. Call loss.backward() first"
        else:
            reason = (
                "its output has no gradient. Watch with gradients=True, and run the model without torch.no_grad(), "
                "where its parameters or its inputs require gradients, and without reentrant checkpoints, which run it "
                "without gradients (use_reentrant=False does not)"
            )
        raise ClearheadError(f"{name} has no gradients: {reason}.")


@dataclass(frozen=True, eq=False)
class CallRecord(Call):
    """The parts of a recorded call: see `AttentionCall`."""

    name: str
    kind: Kind
    query: Tensor
    cached_key: Cached
    score: Score
    mask: Mask | None
    backend: str
    kept: Record  # its key has the right shape alone where `cached_key` has to be put together
    uniform: Tensor | None = None
    padding: Words | None = None
    run: int = 0
    cached_value: Cached | None = None
    outcome: Outcome | None = None
    origin: Origin | None = None  # the layers around the call, for `explain`
    factor: Tensor | None = None
    layer: LayerName = FIRST

    @property
    def shape(self) -> tuple[int, int, int, int]:  # type: ignore[override]
        """(B, H, Lq, Lk)."""
        batch, heads, queries, _ = self.query.shape
        return batch, heads, queries, self.cached_key.link.length

    @property
    def key(self) -> Tensor:
        return self.cached_key.tensor()

    @property
    def value(self) -> Tensor | None:
        return None if self.cached_value is None else self.cached_value.tensor()

    @property
    def record(self) -> Record:
        """The record of the call, with its key."""
        return self.kept if self.cached_key.whole else self.kept._replace(problem=with_key(self.kept.problem, self.key))

    @property
    def problem(self) -> Problem:
        """The call in its normal form, without a value."""
        return self.record.problem

    def values(self) -> tuple[Tensor, Outcome]:
        value = self.value
        if value is None or self.outcome is None:
            raise ClearheadError(
                f"the value of {self.name} was not kept. Watch with values=True, or with gradients=True."
            )
        return value, self.outcome


def with_key(problem: Problem, key: Tensor) -> Problem:
    return problem._replace(scores=problem.scores._replace(key=key))


def no_key(cached: Cached) -> Tensor:
    """A tensor of the key's shape that takes the memory of one number."""
    return cached.link.new.new_zeros(()).expand(cached.shape)
