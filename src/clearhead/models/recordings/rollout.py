"""Attention rolled out over the layers of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.base.errors import ClearheadError, UnsupportedError, human_bytes
from clearhead.base.numbers import check_flag, check_number
from clearhead.base.selected import numbers_of
from clearhead.inspection.index import DENSE_BYTES
from clearhead.inspection.source import FromRecord
from clearhead.inspection.weights import Weights
from clearhead.models.interception.choice import Layers, Positions
from clearhead.models.recordings.attention_call import AttentionCall
from clearhead.models.recordings.calls import chosen_calls
from clearhead.models.recordings.weights import weights_of

BLOCK = 2**20  # numbers of a block of rows
COLUMNS = 64  # tokens at a time: memory grows with their number, for each head


def rollout(
    calls: Sequence[AttentionCall], tokens: Positions, layers: Layers, residual: Any = 0.5, gradients: Any = False
) -> Tensor:
    """See `Recording.rollout`."""
    share = check_number(residual, "rollout: residual")
    if not 0 <= share <= 1 or (check_flag(gradients, "rollout: gradients") and share != 0.5):
        raise ClearheadError(
            f"rollout: residual is {share:g}; expected a share from 0 to 1, and none with gradients=True."
        )
    calls = [calls[number] for number in chosen_calls(calls, layers, "rollout")]
    check_whole(calls, "rollout")
    length = _length(calls)
    batch, device = calls[0].query.shape[0], calls[0].query.device
    rows = numbers_of(tokens, length, "rollout: tokens", f"there are {length} positions")
    size = batch * len(rows) * length * 4
    if size > DENSE_BYTES:
        raise ClearheadError(
            f"rollout gives {(batch, len(rows), length)}, above {human_bytes(DENSE_BYTES)}: choose tokens, as [-1]."
        )
    with torch.inference_mode(False):
        parts = []
        for first in range(0, len(rows), COLUMNS):
            some = torch.tensor(rows[first : first + COLUMNS], device=device)
            own = F.one_hot(some, length).to(calls[0].weights.dtype).expand(batch, -1, -1)
            parts.append(_by_gradients(calls, own) if gradients else _rolled(calls, own, share))
    return torch.cat(parts, 1)


def _rolled(calls: Sequence[AttentionCall], flow: Tensor, residual: float) -> Tensor:
    """The flow (B, T, L), the share of each token at each position, carried from the last layer to the first."""
    for call in reversed(calls):
        weights = _wide(call)
        heads = weights.shape[1]
        one = flow.new_ones(flow.shape[0], 1, flow.shape[-1], 1)
        # the sum of each row: 0 where the query sees no key, and less than 1 with sinks
        total = (weights @ one).mean(1)[..., 0].unsqueeze(1)
        whole = residual + (1 - residual) * total
        # without a residual stream nothing reaches a query that sees no key
        flow = flow / whole.masked_fill(whole == 0, 1.0)
        # the gradient of A V in V is Aᵀ times the gradient of the output, so that no matrix is made
        with torch.enable_grad():
            value = flow.new_zeros(flow.shape[0], 1, flow.shape[-1], flow.shape[1]).requires_grad_()
            grad = (flow.transpose(1, 2) / heads).unsqueeze(1).expand(-1, heads, -1, -1)
            (back,) = torch.autograd.grad(weights @ value, value, grad)
        flow = residual * flow + (1 - residual) * back[:, 0].transpose(1, 2)
    return flow


def _by_gradients(calls: Sequence[AttentionCall], flow: Tensor) -> Tensor:
    """The flow (B, T, L), where each layer passes on itself and mean_h (A ∘ ∂L/∂A)⁺, a block of rows at a time."""
    for call in reversed(calls):
        weights, gradients = call.weights, call.gradients
        batch, heads, queries, keys = weights.shape
        rows, below = max(BLOCK // (batch * heads * keys), 1), flow
        for first in range(0, queries, rows):
            some = slice(first, first + rows)
            products = weights[:, :, some].detach() * gradients[:, :, some]
            passed = products.nan_to_num(0.0).clamp_(min=0).mean(1)  # the gradient of a hidden pair may be anything
            below = below + flow[:, :, some] @ passed.to(flow.dtype)
        flow = below
    return flow


def _wide(call: AttentionCall) -> Weights:
    """The weights of a call, of all positions; a query and a key in low precision are brought to float32."""
    scores, dtype = call.problem.scores, call.weights.dtype
    scores = scores._replace(query=scores.query.to(dtype), key=scores.key.to(dtype))
    record = call.record._replace(problem=call.problem._replace(scores=scores))
    return weights_of(FromRecord(record, {}), None, call.factor)


def check_whole(calls: Sequence[AttentionCall], who: str) -> None:
    """Raise where the sequences of a call are windows of longer ones: the next layer may cut others."""
    for call in calls:
        if call.windows_of is not None:
            raise UnsupportedError(
                f"{who}: {call.name} attends in {call.shape[0]} windows, cut from {call.windows_of} sequences, and "
                "another layer may cut others. Look at each layer by itself: seen[layer][0].weights."
            )


def _length(calls: Sequence[AttentionCall]) -> int:
    """The length of all calls: raises where they are not self-attention of one length in one run."""
    sizes = {call.shape[2:] for call in calls}
    lengths, runs = {size for pair in sizes for size in pair}, {call.run for call in calls}
    if len(lengths) != 1 or len(runs) != 1 or any(call.kind != "self" for call in calls):
        raise ClearheadError(
            f"rollout takes the self-attention of one run, over all positions; got calls of {len(runs)} runs, "
            f"with (queries, keys) {sorted(sizes)}.\nPass seen.rollout(layers='encoder *'), seen.runs[0].rollout()."
        )
    return lengths.pop()
