"""What every attention call of a model has, and what is kept of one that is recorded."""

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
    """What every call has, whatever is known of it beside.

    `name`: of the module that made it. `kind`: "self", or "cross" where the keys come from another sequence than the
    queries. `backend`: what computed it. `shape`: (B, H, Lq, Lk). `run`: which run of the model made it, from 0 on.
    `layer`: the layer of the model, whose text is its name, such as "L3" or "decoder 3, cross".
    """

    name: str
    kind: Kind
    backend: str
    shape: tuple[int, int, int, int]
    run: int
    layer: LayerName

    @property
    def row(self) -> dict[str, Any]:
        """The columns with which each row of a table about it begins."""
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
    """`output` (B, H, Lq, Ev): what was computed; None where a projection had mixed the heads before it could be read.

    `grad`: its gradient, of the same shape, the sum over all backward passes since. `dropped`: whether the call had
    dropout, so that the output is not the formula's.
    """

    def __init__(self, output: Tensor | None = None, grad: Tensor | None = None, dropped: bool = False) -> None:
        self.output, self.grad, self.dropped = output, grad, dropped
        self.followed = False  # whether a backward pass can reach the output

    def of(self, place: Place | None, gradients: bool) -> After:
        """What is done with the result of the call's function: it stays as it is."""

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
        """The gradient of the output, or why there is none."""
        if self.grad is not None:
            return self.grad
        if self.followed:
            reason = "no backward pass has reached its output. Call loss.backward() first"
        else:
            reason = (
                "its output has no gradient. Watch with gradients=True, and run the model without torch.no_grad(), "
                "where its parameters or its inputs require gradients, and without checkpoints of the kind that does "
                "so (use_reentrant=False records)"
            )
        raise ClearheadError(f"{name} has no gradients: {reason}.")


@dataclass(frozen=True, eq=False)
class CallRecord(Call):
    """What is kept of a recorded call: see `AttentionCall`."""

    name: str
    kind: Kind
    query: Tensor
    cached_key: Cached
    score: Score
    mask: Mask | None
    backend: str
    kept: Record  # but that its key is only of the right shape where `cached_key` has to be put together
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
        """The record of the call."""
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
    """A tensor of its shape that takes the memory of one number."""
    return cached.link.new.new_zeros(()).expand(cached.shape)
