"""A recorded call as the checks of `diagnose` look at it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from clearhead.explanation.diagnosis.case import Case, Words
from clearhead.explanation.diagnosis.fills import taken_apart

if TYPE_CHECKING:
    from clearhead.models.call import AttentionCall


@torch.no_grad()
def case_of(call: AttentionCall, run: int | None = None) -> Case:
    """`run`: which run of the model, where there are several."""
    problem, value = call.problem, call.value
    inputs = {"query": call.query, "key": problem.key if call.cached_key.whole else call.key}
    added = {}
    # what hides some pair was taken out of a model's mask: then it is not all 0 and 1
    bias = call.backend.startswith("clearhead") or problem.visible is not None or call.uniform is not None
    name = "bias" if bias else "attn_mask"
    if problem.bias is not None:
        both = {name: problem.bias.dense, "bias of distances": problem.bias.relative}
        added = {name: tensor.detach() for name, tensor in both.items() if tensor is not None}
    apart, blind = taken_apart(problem)
    if call.uniform is not None:
        blind = call.uniform[..., 0] if blind is None else blind | call.uniform[..., 0]
    return Case(
        problem=apart,
        inputs=inputs if value is None else {**inputs, "value": value},
        added=added,
        as_mask=frozenset({"attn_mask"} & added.keys()),
        mask=call.mask,
        blind=blind,
        words=Words() if call.padding is None else Words(call.padding.queries, call.padding.keys),
        output=None if call.outcome is None or call.outcome.dropped else call.outcome.output,
        where={"layer": call.name} if run is None else {"layer": call.name, "run": run},
    )
