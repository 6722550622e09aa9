"""The specification: attention by its formula, with every matrix in full."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.base.dropout import factors
from clearhead.engines.base import Cost, Engine
from clearhead.masks.base import dense
from clearhead.problem.guard import guard
from clearhead.problem.partial import Partial
from clearhead.problem.problem import Problem
from clearhead.problem.region import Region
from clearhead.scores.base import ByTile, by_tile

PAIRS = 2**22  # it computes every matrix in full: above this many pairs it runs only if `engine=` names it


class Reference(Engine):
    """Attention by its formula, dense and eager.

    It computes dropout(softmax(score(query, key) + bias, over the allowed keys)) · value.
    """

    name = "reference"

    def objections(self, problem: Problem) -> list[str]:
        return []

    def reservations(self, problem: Problem) -> list[str]:
        if math.prod(problem.sizes.shape) <= PAIRS:
            return []
        return [f"it computes every pair at once, more than {PAIRS:,}: only if engine= names it"]

    def forward(self, problem: Problem, rows: bool = False) -> Partial:
        problem = guard(problem)
        assert problem.value is not None
        value = problem.value.repeat_interleave(problem.groups, dim=1).to(accumulated(problem.value.dtype))
        chosen = weights(problem)
        if problem.seed is not None:
            chosen = chosen * factors(problem.seed, problem.dropout_p, problem.sizes, problem.origin, chosen.dtype)
        return Partial((chosen @ value).to(problem.value.dtype))

    def walk(self, problem: Problem) -> Iterator[Region]:
        batch, heads, queries, keys = (slice(0, size) for size in problem.sizes.shape)
        yield Region(batch, heads, queries, keys)

    def scores(self, problem: Problem) -> Tensor:
        return scores(problem)

    def cost(self, problem: Problem) -> Cost:
        pairs = math.prod(problem.sizes.shape)
        return Cost(pairs, 3 * accumulated(problem.query.dtype).itemsize * pairs)


def scores(problem: Problem) -> Tensor:
    """Compute the score of every pair, plus the bias, and −∞ at masked pairs."""
    assert isinstance(problem.scores, ByTile), "a problem as it is written"
    tile = by_tile(problem.scores._replace(key=problem.key.repeat_interleave(problem.groups, dim=1)))
    if problem.bias is not None:
        every = slice(None)
        tile = tile + problem.bias.tile(every, every, every, every, problem.sizes).to(tile.dtype)
    if problem.poison is not None:
        query_poison, key_poison = problem.poison
        tile = tile + query_poison + key_poison.repeat_interleave(problem.groups, dim=1)
    if problem.spans is not None:
        tile = torch.where(dense(problem.spans, problem.sizes), tile, -torch.inf)
    return tile


def weights(problem: Problem) -> Tensor:
    """Compute the softmax of the scores over the keys; a fully masked row has weights of 0."""
    tile = scores(problem)
    if not problem.sizes.keys:
        return tile
    unseen = tile == -torch.inf  # the weight and its gradient must be 0, whatever the value is
    # replace −∞ by a constant −∞: in a row of NaN its gradient would be NaN
    tile = tile.masked_fill(unseen, -torch.inf).masked_fill(unseen.all(-1, keepdim=True), 0.0)
    if problem.sinks is not None:  # a sink is one more key, without a value
        sink = problem.sinks.to(tile.dtype)[:, None, None].expand(*tile.shape[:-1], 1)
        return torch.where(unseen, 0.0, torch.cat([tile, sink], -1).softmax(-1)[..., :-1])
    return torch.where(unseen, 0.0, tile.softmax(-1))
