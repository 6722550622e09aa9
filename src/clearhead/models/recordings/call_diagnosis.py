"""A recorded call as `diagnose` takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead.explanation.diagnosis.case import Case
from clearhead.explanation.diagnosis.reading import parameters_of
from clearhead.models.origins.ran import Ran
from clearhead.problem.fills import taken_apart
from clearhead.problem.words import ALL_WORDS

if TYPE_CHECKING:
    from clearhead.models.recordings.attention_call import AttentionCall


@torch.no_grad()
def case_of(call: AttentionCall, label: str = "") -> Case:
    """The call as `diagnose` takes it. `label`: the call's name in its recording."""
    problem, value = call.problem, call.value
    inputs = {"query": call.query, "key": problem.key if call.cached_key.whole else call.key}
    added = {}
    # entries that hide a pair were taken out of the model's mask: the rest is called a bias
    bias = call.backend.startswith("clearhead") or problem.visible is not None or call.uniform is not None
    name = "bias" if bias else "attn_mask"
    if problem.bias is not None:
        both = {name: problem.bias.dense, "bias of distances": problem.bias.relative}
        added = {name: tensor.detach() for name, tensor in both.items() if tensor is not None}
    apart, blind = taken_apart(problem)
    if call.uniform is not None:
        blind = call.uniform[..., 0] if blind is None else blind | call.uniform[..., 0]
    inputs = inputs if value is None else {**inputs, "value": value}
    return Case(
        problem=apart,
        inputs=inputs,
        added=added,
        mask=call.mask,
        blind=blind,
        words=call.padding or ALL_WORDS,
        output=None if call.outcome is None or call.outcome.dropped else call.outcome.output,
        factor=call.factor,
        where={"layer": label or str(call.layer), "module": call.name},
        **_learnt(call, inputs),
    )


def _learnt(call: AttentionCall, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """The parameters of the score, of the layers around the call that were given finite numbers, and of the layer that
    writes its heads, as fields of a `Case`. `inputs`: query, key, and the value where it is known."""
    layers = [] if call.origin is None else [one for one in call.origin.ran if one.stands]
    given = [bool(one.x.isfinite().all()) for one in layers]
    finite = all(bool(tensor.isfinite().all()) for tensor in inputs.values())
    writers = [] if call.origin is None else [one for one in call.origin.writers if one.versions.written() is None]
    learnt, factors = parameters_of(call.score, call.problem)
    for one in (*(one for one, fine in zip(layers, given, strict=True) if fine), *(writers if finite else ())):
        for side in ("weight", "bias"):  # of a layer that is called, the layers inside are among these
            if (tensor := getattr(one.source, side, None)) is not None:
                learnt[name := f"{one.name}.{side}".replace(",.", ": ")] = tensor
                factors |= set() if isinstance(one, Ran) else {name}
    before = 0 if call.origin is None else call.origin.before
    return {
        "parameters": learnt,
        "factors": factors,
        "given_finite": all(given[:before]) if layers else finite,
    }
