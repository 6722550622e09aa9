"""The recorder, to which the sources pass each call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from clearhead.base.errors import UnsupportedError
from clearhead.base.tracing import in_backward, transformed, unobserved
from clearhead.base.versions import Versions
from clearhead.masks.base import Mask
from clearhead.models._asked import Asked
from clearhead.models._masks import MaskStore, Recorded
from clearhead.models._modules import Kind, Running, Stack
from clearhead.models._padding import as_said, fits, of_call
from clearhead.models.attention_call import AttentionCall
from clearhead.models.reduced import ReducedCall, reduced
from clearhead.problem.record import Record
from clearhead.scores.base import Score
from clearhead.scores.dot import Dot


class Recorder:
    """Makes a record of each call. One seen by two sources is recorded once: see `inside`."""

    def __init__(self, model: nn.Module, asked: Asked, padding: Tensor | None = None) -> None:
        self.calls: list[AttentionCall] = []
        self.reduced: list[ReducedCall] = []
        self.asked = asked
        self.seen = 0  # how many calls were recorded
        self.modules: dict[str, int] = {}  # the numbers of the modules that made a call, whether it was recorded or not
        self.padding = padding  # what was passed as watch(padding=)
        self.fitted = False  # whether it fitted any call
        self.sizes: set[tuple[int, int]] = set()  # (batch, keys) of the calls
        self.stack = Stack(model)
        self.masks = MaskStore()
        self.unattributed: list[None] = []  # one for each call in a thread that runs no module
        self._inside = _Inside()
        self._lock = threading.Lock()
        self._runs: dict[int, int] = {}  # by the entry of the stack

    @contextmanager
    def inside(self) -> Iterator[None]:
        """While a recorded call runs: calls inside it are parts of it."""
        self._inside.depth += 1
        try:
            yield
        finally:
            self._inside.depth -= 1

    @property
    def idle(self) -> bool:
        """Nothing to record: no module runs, the call is a part of a recorded one, or it is of a run not asked for."""
        # gradient checkpointing runs a module again in the backward pass: the same calls
        if self.stack.innermost is None or self._inside.depth > 0 or in_backward():
            return True
        return self.run % self.asked.every > 0

    @property
    def run(self) -> int:
        """The number of this run of the model, among those that made a call."""
        with self._lock:
            return self._runs.setdefault(self.stack.entry, len(self._runs))

    def wants(self, name: str | None) -> bool:
        """Whether calls of this module are asked for; None: of the innermost running one."""
        name = name or self.stack.names[id(self._innermost().module)]
        with self._lock:
            number = self.modules.setdefault(name, len(self.modules))
        return self.asked.chooses(name, number)

    @property
    def copies(self) -> bool:
        """Whether query and key are kept; else the call is reduced before they can be written to."""
        return self.asked.keep is None

    def record(
        self,
        query: Tensor,
        key: Tensor,
        *,
        name: str | None = None,
        kind: Kind | None = None,
        masks: Recorded,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        backend: str,
    ) -> None:
        """Record a call of dot products. Where query and key are kept they are copied: a cache is overwritten.

        query (B, H, Lq, E), key (B, Hk, Lk, E). `name`, `kind`: None means those of the innermost running module.
        `masks`: the call's own, converted by `self.masks`.
        """
        self.check(query, key, name)
        if not self.wants(name):
            return
        with unobserved():  # else the watch's function mode would see each operation here
            dtype = torch.promote_types(query.dtype, key.dtype)  # under autocast they may differ
            query, key = (tensor.detach().to(dtype, copy=self.copies) for tensor in (query, key))
            if sinks is not None:
                sinks, masks = sinks.detach().clone(), masks.with_sinks(key.shape[2])
            score = Dot(scale=scale, softcap=softcap)
            problem = masks.problem(query, key, score, sinks)
        kept = Record(problem, Versions(()), copied=True)
        self.keep(kept, query, key, score, masks.mask, backend, name=name, kind=kind, uniform=masks.uniform)

    def keep(
        self,
        record: Record,
        query: Tensor,
        key: Tensor,
        score: Score,
        mask: Mask | None,
        backend: str,
        *,
        name: str | None = None,
        kind: Kind | None = None,
        uniform: Tensor | None = None,
    ) -> None:
        """A call whose problem is recorded already. `score` and `mask`: what it came from."""
        innermost = self._innermost()
        name = name or self.stack.names[id(innermost.module)]
        problem = record.problem
        sizes = problem.sizes
        if kind is None:  # no cache leaves a sequence fewer keys than queries
            kind = "cross" if sizes.queries > sizes.keys else innermost.kind
        padding = of_call(innermost.told, kind, problem, uniform)
        if self.padding is not None and fits(self.padding, kind, sizes):
            self.fitted = True
            own = innermost.told.own
            knows_more = own is not None and own.shape[1] > self.padding.shape[1]  # a generation's mask grows with it
            if not (knows_more or (kind == "self" and self._decodes(name))):
                padding = as_said(self.padding, kind, problem)
        call = AttentionCall(name, kind, query, key, score, mask, backend, record, uniform, padding, self.run)
        self.sizes.add((sizes.batch, sizes.keys))
        if self.asked.keep is None:
            self.calls.append(call)
        else:
            with unobserved(), self.inside():  # a reduction of the caller's own may compute attention
                found = reduced(call, self.asked.keep, self.asked.heads)
            if self.asked.merge is None:
                self.reduced.append(found)
            else:
                self.asked.merge.add(found)
        self.seen += 1

    def _innermost(self) -> Running:
        innermost = self.stack.innermost
        assert innermost is not None, "a source checks `idle` first"
        return innermost

    def check(self, query: Tensor, key: Tensor, name: str | None = None) -> None:
        """Refuse what cannot be recorded."""
        name = name or self.stack.names[id(self._innermost().module)]
        if query.is_nested or key.is_nested:
            raise UnsupportedError(
                f"{name} called attention with nested tensors, which watch() reads from torch.nn.TransformerEncoder "
                "alone. Run the model on a padded batch and a mask."
            )
        if transformed():
            raise UnsupportedError(
                f"{name} was called inside a transform of torch.func (vmap, grad), whose tensors have no values of "
                "their own to record. Watch the model where it is called without one."
            )

    def _decodes(self, name: str) -> bool:
        """Whether a module is of the decoder of an encoder–decoder, whose own sequence is not the padded one."""
        config = getattr(self.stack.model, "config", None)
        return bool(getattr(config, "is_encoder_decoder", False)) and "decoder" in name.split(".")


class _Inside(threading.local):
    depth = 0
