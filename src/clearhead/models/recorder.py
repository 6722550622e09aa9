"""Where the sources put what they see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from clearhead.masks.base import Mask
from clearhead.masks.causal import Causal
from clearhead.models._masks import MaskStore
from clearhead.models._modules import Stack
from clearhead.models.call import Call
from clearhead.scores.dot import Dot


class Recorder:
    """Makes a record of each call. One seen by two sources is recorded once: see `inside`."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[Call] = []
        self.stack = Stack(model)
        self.masks = MaskStore()
        self._inside = 0

    @contextmanager
    def inside(self) -> Iterator[None]:
        """While a recorded call runs: what it calls in turn is the same call."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    @property
    def busy(self) -> bool:
        return self._inside > 0

    def record(
        self,
        query: Tensor,
        key: Tensor,
        *,
        name: str | None = None,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        causal: Causal | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        backend: str,
    ) -> None:
        """Copy what went in: it may be written over, a key/value cache for one."""
        running = self.stack.innermost()
        if running is None:  # a call of something else than the model
            return
        inner, kind = running
        found = self.masks.convert(mask, bias)
        allowed: Mask | None = causal if found.mask is None else found.mask if causal is None else found.mask & causal
        self.calls.append(
            Call(
                name=inner if name is None else name,
                kind=kind,
                query=query.detach().clone(),
                key=key.detach().clone(),
                mask=allowed,
                bias=found.bias,
                score=Dot(scale=scale, softcap=softcap),
                backend=backend,
                uniform=found.uniform,
            )
        )
