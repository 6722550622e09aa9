"""The attention calls of a run, each judged when it has ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from clearhead.masks.base import Mask
from clearhead.models.audits.audit_report import AuditTest
from clearhead.models.audits.computed import ComputedTest
from clearhead.models.audits.expected_masks import Expected, ExpectedMasks
from clearhead.models.audits.given import GivenTest
from clearhead.models.interception.layers import LayerName
from clearhead.models.interception.modules import Kind
from clearhead.models.recordings.attention_call import AttentionCall


class ExpectedCall(NamedTuple):
    """An attention call of the model, without its tensors, and its expected mask. `shape`: (B, H, Lq, Lk)."""

    name: str
    kind: Kind
    layer: LayerName
    shape: tuple[int, int, int, int]
    mask: Mask


class CallTests:
    """The given and the computed test of the attention calls of a run.

    A call's tensors are not kept after it is judged. Where the masks are a dict by layer, all calls are judged at the
    end: which layers a key of the dict names follows from all of them.
    """

    def __init__(self, expected: Expected) -> None:
        self._masks, self._waits = ExpectedMasks(expected), isinstance(expected, Mapping)
        self._given, self._computed = GivenTest(), ComputedTest()
        self._waiting: list[AttentionCall] = []
        self._error: Exception | None = None
        self.calls: list[ExpectedCall] = []

    def add(self, call: AttentionCall) -> None:
        """Judge a call. An error is raised by `finish`: here it would pass through the model's own code."""
        self._waiting.append(call)
        if not self._waits and self._error is None:
            try:
                self._judge()
            except Exception as error:
                self._error = error

    def finish(self) -> list[AuditTest]:
        """The results of the given and of the computed test."""
        if self._error is not None:
            raise self._error
        self._judge()
        return [self._given.make_test(), self._computed.make_test()]

    def _judge(self) -> None:
        for call, mask in self._masks.pair(self._waiting):
            self._given.add(call, mask)
            self._computed.add(call, mask)
            self.calls.append(ExpectedCall(call.name, call.kind, call.layer, call.shape, mask))
        self._waiting.clear()
