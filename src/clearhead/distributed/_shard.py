"""This rank's part of a problem: its own operands, under the mask and the bias of the whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead.base.errors import ShapeError
from clearhead.base.shapes import Sizes
from clearhead.base.tracing import compiling
from clearhead.distributed.channel import Channel
from clearhead.distributed.layout import Layout
from clearhead.problem.problem import ABSENT, Problem, as_sinks, inputs, make_problem, mask_and_bias, refuse_distributed
from clearhead.problem.unseen import finite, group, seen, zero
from clearhead.problem.visible import Visible


def sharded(
    query: Tensor, key: Tensor, value: Any, layout: Layout, *, mask: Any, bias: Any, sinks: Any, **of_score: Any
) -> Problem:
    """This rank's operands, with the sizes, the mask and the bias of the whole."""
    refuse_distributed({"query": query, "key": key, "value": value})
    problem = make_problem(query, key, value, **of_score)
    held, given = layout.held, (problem.sizes.queries, problem.sizes.keys)
    if given != (held, held):
        raise ShapeError(
            f"query has {given[0]} positions and key {given[1]}, and rank {layout.rank} holds {held} of {layout}: pass "
            "layout.shard(tensor, dim) of each."
        )
    sizes = problem.sizes._replace(queries=layout.length, keys=layout.length)
    if sizes.device.type == "meta":  # shapes alone were passed: masks are read
        sizes = sizes._replace(device=torch.device("cpu"))
    visible, added = mask_and_bias(mask, bias, sizes, problem.query.dtype)
    unseen = visible is not None and visible.unseen != "none" and not compiling()
    if visible is not None and unseen and not (finite(problem.query) and finite(problem.key)):
        problem = make_problem(*_without_unseen(query, key, value, visible, sizes, layout), **of_score)
    sinks = None if sinks is None else as_sinks(sinks, sizes)
    return problem._replace(sizes=sizes, visible=visible, bias=added, sinks=sinks)


def _without_unseen(
    query: Any, key: Any, value: Any, visible: Visible, sizes: Sizes, layout: Layout
) -> tuple[Tensor, Tensor, Any]:
    """The inputs with zeros for what is not finite and seen on no rank: a projection's gradient would become NaN."""
    query, key, value, _ = inputs(query, key, value)
    keys, queries = seen(visible.spans, sizes)
    keys, queries = (t if t.shape[2] != layout.length else layout.shard(t, 2) for t in (keys, queries))
    key = zero(key, group(keys, key.shape[1]), only_not_finite=True)
    return zero(query, queries, only_not_finite=True), key, ABSENT if value is None else value


def shared_seed(seed: Tensor, channel: Channel) -> Tensor:
    """The dropout's seed that the first rank has drawn."""
    return channel.gather(seed.reshape(1))[0].reshape(())
