"""attention() over a sequence that is shared out over ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from clearhead._attention import ScoreLike
from clearhead.base.dropout import check_dropout, draw_seed
from clearhead.base.errors import ClearheadError
from clearhead.base.torch_state.contexts import disable_compiler, without_autocast
from clearhead.base.torch_state.mode import get_mode
from clearhead.biases.base import BiasLike
from clearhead.distributed import exchange, fetch, operation
from clearhead.distributed.agreement import agree
from clearhead.distributed.layout import Layout, check_layout
from clearhead.distributed.once import refuse_transforms
from clearhead.distributed.pieces import Shard, sharded, share_seed
from clearhead.masks.base import MaskLike
from clearhead.problem.problem import Problem

METHODS = ("exchange", "gather")


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    layout: Layout,
    score: ScoreLike = None,
    mask: MaskLike = None,
    bias: BiasLike = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    method: str = "exchange",
) -> Tensor:
    """Attention over a sequence whose positions are shared out over the ranks of a group.

    Every rank of the group calls it together, with its part of query, key and value (`layout.shard`), and with masks,
    biases and sinks of the whole sequence:

        layout = ch.distributed.ZigZag(length, group)
        query, key, value = (layout.shard(t, dim=2) for t in (query, key, value))
        output = ch.distributed.attention(query, key, value, layout=layout, mask=ch.Causal())

    Formula: that of `attention` over the whole sequence, with the same numbers; dropout drops the same pairs.

    query (B, H, l, Eq), key (B, Hk, l, Ek), value (B, Hk, l, Ev): the l positions that this rank holds, or tensors with
    other leading dimensions, as for `attention`. `layout`: see `Layout`. `score`, `mask`, `bias`, `scale`, `sinks`,
    `dropout_p`: as for `attention`, for the whole sequence, and the same on every rank.
    `method`: "exchange" receives the keys and values that this rank's queries see from one rank after another; the next
    ones arrive while the last ones are used. The backward pass receives them again, and sends their gradients, in
    float32 at least, to the ranks that hold them. "gather" receives all of them before it computes, and holds them
    until the backward pass. A score with only `tile()`, and a bias by a function, always use "gather", since only
    autograd knows which tensors they learn.
    Returns (B, H, l, Ev), this rank's part of the output. It is differentiable once, in all inputs. Gradients of inputs
    that all ranks share (scores, biases, sinks) are this rank's part of a sum over the group. Call backward on every
    rank. Raises a `ClearheadError` where ranks call with different arguments, which it names, or where a rank has
    ended; otherwise it raises as `attention` does. Cost: the pairs, messages and bytes that `plan` shows; memory for
    the keys of two ranks.
    Sources: Liu et al. 2023, "Ring Attention with Blockwise Transformers"; Llama Team 2024, "The Llama 3 Herd of
    Models" (gathered keys).
    """
    if method not in METHODS:
        raise ClearheadError(f"method is {method!r}; it is one of {', '.join(map(repr, METHODS))}.")
    check_layout(layout)
    dropout_p = check_dropout(dropout_p, "dropout_p")
    given = {"score": score, "mask": mask, "bias": bias, "scale": scale, "sinks": sinks}
    if get_mode().compiled:
        local = _with_dropout(sharded(query, key, value, layout, **given), dropout_p)
        if not _by_autograd(local):
            return _output(operation.run(local, layout, method), local)
    return _eager((query, key, value), layout, given, dropout_p, method)


@disable_compiler
def _eager(
    inputs: tuple[Any, Any, Any], layout: Layout, given: dict[str, Any], dropout_p: float, method: str
) -> Tensor:
    refuse_transforms()
    local = _with_dropout(sharded(*inputs, layout, **given), dropout_p)
    shard = Shard.from_problem(local, layout)
    agree(shard, ("attention", method))
    attend = fetch.attend if method == "gather" or _by_autograd(local) else exchange.attend
    with without_autocast(local.sizes.device):
        return _output(attend(share_seed(shard)), local)


def _with_dropout(local: Problem, p: float) -> Problem:
    return local._replace(dropout_p=p, seed=draw_seed(local.query.device)) if p else local


def _by_autograd(local: Problem) -> bool:
    """Whether only autograd knows which tensors are learnt."""
    return local.lowered is None or local.by_function


def _output(output: Tensor, local: Problem) -> Tensor:
    assert local.value is not None
    return local.sizes.restore(output.to(local.value.dtype))
