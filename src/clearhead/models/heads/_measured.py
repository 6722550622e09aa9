"""The measures of a recorded call's heads."""

from __future__ import annotations

import torch

from clearhead.inspection.measures import MEASURES, Found, Measure, Subject
from clearhead.models.attention_call import AttentionCall
from clearhead.models.heads._tokens import Tokens


@torch.no_grad()
def measured(call: AttentionCall, tokens: Tokens) -> dict[Measure, Found]:
    """Each measure that can be computed of the call: positions, tokens or values may not be known."""
    words = (None, None) if call.padding is None else (call.padding.queries, call.padding.keys)
    subject = Subject(
        call.record.problem,
        own_text=call.kind == "self",
        words=words,
        skipped=None if call.uniform is None else call.uniform[..., 0],  # the mask left them no key
        tokens=tokens.of(call),
        value=call.value,
    )
    return {measure: measure.of(subject) for measure in MEASURES if measure.applies(subject)}
