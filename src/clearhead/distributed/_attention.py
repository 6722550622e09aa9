"""attention() of a sequence that is shared out over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead._attention import ScoreLike
from clearhead.base.dropout import check_dropout, draw_seed
from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.shapes import Sizes
from clearhead.base.tracing import eagerly, without_autocast
from clearhead.distributed import exchange, fetch
from clearhead.distributed.agreement import agree
from clearhead.distributed.channel import Channel
from clearhead.distributed.exchange import Shard
from clearhead.distributed.layout import Layout
from clearhead.distributed.needs import Needs
from clearhead.distributed.once import refuse_transforms
from clearhead.problem.problem import Problem, as_sinks, inputs, make_problem, mask_and_bias, refuse_distributed
from clearhead.problem.unseen import finite, group, seen, zero
from clearhead.problem.visible import Visible

METHODS = ("exchange", "gather")


@eagerly
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    layout: Layout,
    score: ScoreLike = None,
    mask: Any = None,
    bias: Any = None,
    scale: float | None = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    method: str = "exchange",
) -> Tensor:
    """Attention of a sequence whose positions are shared out over the ranks of a group: each gives its own part.

    Every rank of the group calls it together, with its part of query, key and value (`layout.shard`), and with masks,
    biases and sinks of the whole sequence:

        layout = ch.distributed.ZigZag(length, group)
        query, key, value = (layout.shard(t, dim=2) for t in (query, key, value))
        output = ch.distributed.attention(query, key, value, layout=layout, mask=ch.Causal())

    Formula: that of `attention` over the whole sequence, and the same numbers; dropout too has each pair's fate.

    query (B, H, l, Eq), key (B, Hk, l, Ek), value (B, Hk, l, Ev), the l positions that this rank holds, or the same
    with other leading dimensions, as for `attention`. `layout`: see `Layout`. `score`, `mask`, `bias`, `scale`,
    `sinks`, `dropout_p`: as for `attention`, global values, the same on every rank.
    `method`: "exchange": keys and values that some query here sees come from one rank after another, the next while
    the last are computed with, and again in the backward pass, which sends their gradients, in float32 at least, to
    their owners. "gather": all that are needed come at once, and are held until the backward pass; a score with
    `tile()` alone, and a bias by a function, are computed so in any case, since only autograd knows what they learn.
    Returns (B, H, l, Ev), this rank's part of the output. Differentiable, once, in all inputs; gradients of what all
    ranks share (scores, biases, sinks) are this rank's part of a sum over the group. Call backward on every rank.
    Raises a `ClearheadError` where ranks call with different arguments, which it names, or where one has ended; and as
    `attention` does. Cost: the pairs, the messages and the bytes that `plan` shows; memory of two ranks' keys.
    Sources: Liu et al. 2023, "Ring Attention with Blockwise Transformers"; Llama Team 2024, "The Llama 3 Herd of
    Models" (gathered keys).
    """
    if method not in METHODS:
        raise ClearheadError(f"method is {method!r}; it is one of {', '.join(map(repr, METHODS))}.")
    check_layout(layout)
    refuse_transforms()
    channel = Channel(layout.group)
    local, needs = sharded(query, key, value, layout, score=score, mask=mask, bias=bias, scale=scale, sinks=sinks)
    local = local._replace(dropout_p=check_dropout(dropout_p, "dropout_p"))
    shard, sizes = Shard(local, needs, channel), local.sizes
    agree(shard, method, channel)
    if dropout_p:
        shard = shard._replace(local=local._replace(seed=_seed(channel, sizes.device)))
    by_autograd = local.lowered is None or local.by_function
    attend = fetch.attend if method == "gather" or by_autograd else exchange.attend
    with without_autocast(sizes.device):
        output = attend(shard)
    assert local.value is not None
    return sizes.restore(output.to(local.value.dtype))


def sharded(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, *, mask: Any, bias: Any, sinks: Any, **of_score: Any
) -> tuple[Problem, Needs]:
    """This rank's operands, with the sizes, the mask and the bias of the whole; and what follows for all ranks."""
    refuse_distributed({"query": query, "key": key, "value": value})
    problem = make_problem(query, key, value, **of_score)
    held, given = layout.count(), (problem.sizes.queries, problem.sizes.keys)
    if given != (held, held):
        raise ShapeError(
            f"query has {given[0]} positions and key {given[1]}, and rank {layout.rank} holds {held} of {layout}: pass "
            "layout.shard(tensor, dim) of each."
        )
    sizes = problem.sizes._replace(queries=layout.length, keys=layout.length)
    if sizes.device.type == "meta":  # shapes alone were passed: masks are read
        sizes = sizes._replace(device=torch.device("cpu"))
    visible, added = mask_and_bias(mask, bias, sizes, problem.query.dtype)
    if visible is not None and visible.unseen != "none" and not (finite(problem.query) and finite(problem.key)):
        problem = make_problem(*_without_unseen(query, key, value, visible, sizes, layout), **of_score)
    sinks = None if sinks is None else as_sinks(sinks, sizes)
    local = problem._replace(sizes=sizes, visible=visible, bias=added, sinks=sinks)
    return local, Needs(layout, visible, sizes)


def _without_unseen(
    query: Any, key: Any, value: Any, visible: Visible, sizes: Sizes, layout: Layout
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The inputs with zeros for what is not finite and seen on no rank: a projection's gradient would become NaN."""
    query, key, value, _ = inputs(query, key, value)
    keys, queries = seen(visible.spans, sizes)
    keys, queries = (t if t.shape[2] != layout.length else layout.shard(t, 2) for t in (keys, queries))
    key = zero(key, group(keys, key.shape[1]), only_not_finite=True)
    return zero(query, queries, only_not_finite=True), key, value


def check_layout(layout: Any) -> None:
    """Raise for anything but a layout whose ranks are processes."""
    if not isinstance(layout, Layout):
        raise ClearheadError(f"layout is {layout!r:.60}; pass a Layout, such as ZigZag(length, group).")
    if not layout.members:
        raise ClearheadError(
            f"{layout} was made for {layout.ranks} ranks without a process group, for arithmetic: pass it to plan(), "
            "or make it with the group of the processes."
        )


def _seed(channel: Channel, device: torch.device) -> Tensor:
    """The dropout's seed, from the generator of the first rank."""
    return channel.gather(draw_seed(device).reshape(1))[0].reshape(())
