"""The measures of a recorded call's heads."""

from __future__ import annotations

import torch

from clearhead.inspection.measures import MEASURES, Found, Measure, Subject
from clearhead.models.attention_call import AttentionCall
from clearhead.models.heads._tokens import Tokens
from clearhead.report.from_call import of_sequence


@torch.no_grad()
def measured(call: AttentionCall, tokens: Tokens, sequence: int | None = None) -> dict[Measure, Found]:
    """Each measure that can be computed of the call: positions, tokens or values may not be known.

    `sequence`: of this one alone.
    """
    words = (None, None) if call.padding is None else (call.padding.queries, call.padding.keys)
    problem, value, skipped = call.record.problem, call.value, call.uniform
    factor = call.factor
    if sequence is not None:
        problem, some = of_sequence(call, sequence), slice(sequence, sequence + 1)
        words = (None if words[0] is None else words[0][some], None if words[1] is None else words[1][some])
        value = None if value is None else value[some]
        factor = None if factor is None else factor[some]
        skipped = skipped if skipped is None or len(skipped) == 1 else skipped[some]
    subject = Subject(
        problem,
        own_text=call.kind == "self",
        words=words,
        skipped=None if skipped is None else skipped[..., 0],  # the mask left them no key
        tokens=tokens.of(call, sequence),
        value=value,
        factor=factor,
    )
    return {measure: measure.of(subject) for measure in MEASURES if measure.applies(subject)}
