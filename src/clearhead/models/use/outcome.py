"""What a call's own function gave, kept with its record where it was asked for."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.base.tracing import unobserved
from clearhead.models.tap.place import Place
from clearhead.models.tap.receiver import After
from clearhead.problem.record import copied


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
