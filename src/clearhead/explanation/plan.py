"""plan()."""

from __future__ import annotations

from typing import Any, Unpack, overload

from torch import nn

from clearhead._attention import Plan, planned
from clearhead.base.arrays import ArrayT
from clearhead.engines.base import Engine
from clearhead.explanation.call_arguments import AttentionOptions, bind_attention
from clearhead.explanation.modules.captured import reach_call


class PlannedCall(AttentionOptions, total=False):
    """The options beside query, key and value."""

    engine: str | Engine | None


@overload
def plan(query: ArrayT, key: ArrayT, value: ArrayT, **options: Unpack[PlannedCall]) -> Plan: ...


@overload
def plan(query: nn.Module, *inputs: object, **keywords: object) -> Plan: ...


def plan(*inputs: Any, **options: Any) -> Plan:
    """What `attention` with these arguments would do: the engine, why each other one declined, work and memory.

    >>> import torch, clearhead as ch
    >>> x = torch.rand(1, 8, 4096, 64)
    >>> ch.plan(x, x, x, mask=ch.SlidingWindow(before=255))  # doctest: +ELLIPSIS
    plan: query (1, 8, 4096, 64), key (1, 8, 4096, 64), value (1, 8, 4096, 64)
      engine        native
      not flex      on a CPU other engines are faster
      not sdpa      eligible; lower priority than native
      not triton    the inputs are on cpu: its kernels are for cuda
      not tiled     eligible; lower priority than native
      not reference it computes every pair at once, more than 4,194,304: only if engine= names it
      operations    2.46e+09
      extra memory  8.0... MiB, forward alone
      skipped       92.8% of 134,217,728 pairs
    >>> attend = ch.nn.MultiHeadAttention(embed_dim=64, num_heads=8)
    >>> ch.plan(attend, x[:, 0], x[:, 0], x[:, 0], mask=ch.Causal()).engine             # the call that a module makes
    'native'

    `plan(query, key, value, score=, mask=, valid_lens=, bias=, scale=, sinks=, align=, dropout_p=, layout=, engine=)`:
    the arguments of `attention`. Only projections are computed.
    `plan(module, *inputs, **keywords)`: a module of `clearhead.nn`, or an `nn.MultiheadAttention`, and the arguments of
    its call. The module runs no further than to its attention, and its record and caches stay. Its engine is the one
    that is chosen for the call by itself.
    Returns a `Plan`, whose attributes hold these lines. Operations count the score and the weighted sum of the pairs
    the engine computes; extra memory is an estimate of the largest need of the forward pass beyond inputs and output.
    A step of training needs more: the gradients of query, key and value, and what the engine's backward pass works in.
    Raises the errors of `attention`, and a `ClearheadError` for another module.
    """
    if inputs and isinstance(inputs[0], nn.Module):
        call, *_ = reach_call("plan", inputs[0], inputs[1:], options)
        return planned(call, (call.query, call.key, call.value))
    return planned(*bind_attention("plan", inputs, options))
