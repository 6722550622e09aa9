"""Attention rolled out over the layers of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.base.errors import ClearheadError, human_bytes
from clearhead.base.selected import numbers_of
from clearhead.base.text import listed
from clearhead.inspection.index import DENSE_BYTES
from clearhead.inspection.source import FromRecord
from clearhead.inspection.weights import Weights
from clearhead.models.attention_call import AttentionCall
from clearhead.models.calls import chosen_calls
from clearhead.models.tap.choice import Layers, Positions
from clearhead.models.weights import weights_of

COLUMNS = 64  # tokens at a time: memory grows with their number, for each head


def rollout(calls: Sequence[AttentionCall], tokens: Positions, layers: Layers) -> Tensor:
    """See `Recording.rollout`."""
    calls = [calls[number] for number in chosen_calls(calls, layers, "rollout")]
    length = _length(calls)
    batch, device = calls[0].query.shape[0], calls[0].query.device
    rows = numbers_of(tokens, length, "rollout: tokens", f"there are {length} positions")
    size = batch * len(rows) * length * 4
    if size > DENSE_BYTES:
        raise ClearheadError(
            f"rollout would give {(batch, len(rows), length)}, {human_bytes(size)}, above {human_bytes(DENSE_BYTES)}: "
            "name the tokens whose sources are wanted, such as tokens=[-1]."
        )
    with torch.inference_mode(False):
        parts = []
        for first in range(0, len(rows), COLUMNS):
            some = torch.tensor(rows[first : first + COLUMNS], device=device)
            own = F.one_hot(some, length).to(calls[0].weights.dtype)
            parts.append(_rolled(calls, own.expand(batch, -1, -1)))
    return torch.cat(parts, 1)


def _rolled(calls: Sequence[AttentionCall], flow: Tensor) -> Tensor:
    """The flow (B, T, L), the share of each token at each position, carried from the last layer to the first."""
    for call in reversed(calls):
        weights = _wide(call)
        heads = weights.shape[1]
        one = flow.new_ones(flow.shape[0], 1, flow.shape[-1], 1)
        # the sum of each row: 0 where the query sees no key, and less than 1 with sinks
        total = (weights @ one).mean(1)[..., 0].unsqueeze(1)
        flow = flow / (1 + total)
        # the gradient of A V in V is Aᵀ times the gradient of the output, so that no matrix is made
        with torch.enable_grad():
            value = flow.new_zeros(flow.shape[0], 1, flow.shape[-1], flow.shape[1]).requires_grad_()
            grad = (flow.transpose(1, 2) / heads).unsqueeze(1).expand(-1, heads, -1, -1)
            (back,) = torch.autograd.grad(weights @ value, value, grad)
        flow = flow + back[:, 0].transpose(1, 2)
    return flow


def _wide(call: AttentionCall) -> Weights:
    """The weights of a call, of all positions; a query and a key in low precision are brought to float32."""
    scores, dtype = call.problem.scores, call.weights.dtype
    scores = scores._replace(query=scores.query.to(dtype), key=scores.key.to(dtype))
    record = call.record._replace(problem=call.problem._replace(scores=scores))
    return weights_of(FromRecord(record, {}), None, call.factor)


def _length(calls: Sequence[AttentionCall]) -> int:
    """The length of all calls: raises where they are not self-attention of one length in one run."""
    sizes = {tuple(call.weights.shape[-2:]) for call in calls}
    runs = {call.run for call in calls}
    lengths = {size for pair in sizes for size in pair}
    if not calls or len(lengths) != 1 or len(runs) != 1 or any(call.kind != "self" for call in calls):
        names = listed(dict.fromkeys(call.name for call in calls))
        raise ClearheadError(
            f"rollout takes the self-attention of one run, each call over all positions; these are {len(calls)} calls "
            f"of {len(runs)} runs, with (queries, keys) {sorted(sizes)}, by {names}."
            "\nPass some of them: seen.rollout(layers='encoder *'), or seen.runs[0].rollout()."
        )
    return lengths.pop()
