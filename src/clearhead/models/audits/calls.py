"""The given and the computed test of the attention calls of a run."""

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
    """An attention call without its tensors, and the mask that is expected of it.

    `shape`: (B, H, Lq, Lk). The other fields: see `Call`.
    """

    name: str
    kind: Kind
    layer: LayerName
    shape: tuple[int, int, int, int]
    mask: Mask


class CallTests:
    """The given and the computed test of the attention calls of a run.

    `add` judges a call and drops its tensors. Where the expected masks are a dict by layer, `finish` judges all calls:
    a key such as −1 names a layer only if the number of layers is known.
    """

    def __init__(self, expected: Expected) -> None:
        self._masks, self._waits = ExpectedMasks(expected), isinstance(expected, Mapping)
        self._given, self._computed = GivenTest(), ComputedTest()
        self._waiting: list[AttentionCall] = []
        self._error: Exception | None = None
        self.calls: list[ExpectedCall] = []

    def add(self, call: AttentionCall) -> None:
        """Judge a call that has ended.

        `finish` raises the error of a user's function: the model, which runs now, may catch errors.
        """
        self._waiting.append(call)
        if not self._waits and self._error is None:
            try:
                self._judge()
            except Exception as error:
                self._error = error

    def finish(self) -> list[AuditTest]:
        """Return the results of the given and of the computed test."""
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
