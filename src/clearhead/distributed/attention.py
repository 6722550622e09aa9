"""attention() of a sequence that is shared out over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from clearhead._attention import ScoreLike
from clearhead.base.dropout import check_dropout
from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.tracing import without_autocast
from clearhead.distributed import exchange, fetch
from clearhead.distributed.agreement import agree
from clearhead.distributed.channel import Channel
from clearhead.distributed.exchange import Shard
from clearhead.distributed.layout import Layout
from clearhead.distributed.needs import Needs
from clearhead.problem.problem import as_sinks, make_problem, mask_and_bias

METHODS = ("exchange", "gather")


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
    with other leading dimensions, as for `attention`. `layout`: see `Layout`. `score`, `mask`, `bias`, `scale`, `sinks`,
    `dropout_p`: as for `attention`, global values, the same on every rank.
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
    channel = Channel(layout.group)
    problem = make_problem(query, key, value, score=score, scale=scale)
    check_parts(problem.sizes.queries, problem.sizes.keys, layout)
    sizes = problem.sizes._replace(queries=layout.length, keys=layout.length)
    visible, added = mask_and_bias(mask, bias, sizes, problem.query.dtype)
    local = problem._replace(
        sizes=sizes,
        visible=visible,
        bias=added,
        sinks=None if sinks is None else as_sinks(sinks, sizes),
        dropout_p=check_dropout(dropout_p, "dropout_p"),
    )
    shard = Shard(local, Needs(layout, layout, visible, sizes), channel)
    agree(shard, method, channel)
    if dropout_p:
        shard = shard._replace(local=local._replace(seed=_seed(channel, sizes.device)))
    by_autograd = local.lowered is None or local.by_function
    attend = fetch.attend if method == "gather" or by_autograd else exchange.attend
    with without_autocast(sizes.device):
        output = attend(shard)
    assert local.value is not None
    return sizes.restore(output.to(local.value.dtype))


def check_layout(layout: Any) -> None:
    if not isinstance(layout, Layout):
        raise ClearheadError(f"layout is {layout!r:.60}; pass a Layout, such as ZigZag(length, group).")
    if not dist.is_initialized():
        raise ClearheadError(f"{layout} is of no process group, and serves arithmetic alone: see plan().")


def check_parts(queries: int, keys: int, layout: Layout) -> None:
    held = layout.count()
    if (queries, keys) != (held, held):
        raise ShapeError(
            f"query has {queries} positions and key {keys}, and rank {layout.rank} holds {held} of the "
            f"{layout.length} of {layout}: pass layout.shard(tensor, dim) of each."
        )


def _seed(channel: Channel, device: torch.device) -> Tensor:
    """The dropout's seed, from the generator of the first rank."""
    from clearhead.base.dropout import draw_seed

    seed: Tensor = draw_seed(device)
    return channel.gather(seed.reshape(1))[0].reshape(())
