"""One call, as the measures of its heads read it: its weights, and uniform weights under the same mask."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Literal, cast

import torch
from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.base.torch_state.contexts import without_autocast
from clearhead.engines.choose import choose
from clearhead.engines.summarised import summarised
from clearhead.engines.tiled.look import Look
from clearhead.inspection.by_head import as_value, of_value
from clearhead.inspection.measures.allowed import Grouped, Pairs, among, looked_at, uniform
from clearhead.inspection.reductions.base import Reduction
from clearhead.inspection.stream import stream
from clearhead.masks._spans import Edges
from clearhead.problem.guard import zero_unseen
from clearhead.problem.partial import log_sum_exp, rows_of
from clearhead.problem.problem import Problem, with_value
from clearhead.problem.summary import Found, Summary
from clearhead.problem.unseen import finite
from clearhead.problem.visible import Visible
from clearhead.problem.words import ALL_WORDS, Words


class Attention:
    """The weights of a problem without sinks, (B, H, Lq, Lk), and the statistics of them that measures read.

    `placed`: whether the places of queries among the keys are known. `norms`: lengths of vectors, (B, H', Lk) each; H'
    is H, or any number where H is 1. `factor` (B, H, Lq): the number by which each row of the softmax was multiplied;
    `entropy` and `distance` are of the softmax, all else of the product. Queries that see nothing have 0 everywhere.
    Each statistic is found when it is first read.
    """

    def __init__(
        self,
        problem: Problem,
        placed: bool,
        norms: Mapping[str, Tensor] = MappingProxyType({}),
        factor: Tensor | None = None,
    ) -> None:
        self.problem, self.placed, self.norms, self.sizes = problem, placed, norms, problem.sizes
        self._factor = factor

    @cached_property
    def _read(self) -> Problem:
        """The problem as its passes read it: keys that no query sees are zeroed once, if an operand is not finite.
        Masked scores of finite operands do no harm, and there is no value that a weight of 0 would multiply."""
        problem = self.problem
        if problem.visible is not None and finite(problem.query) and finite(problem.key):
            return problem._replace(visible=problem.visible._replace(unseen="none"))
        return zero_unseen(problem)

    @cached_property
    def _found(self) -> Found:
        """The statistics that need whole rows, found in one pass."""
        problem, norms = self._read, self.norms
        if norms:
            problem = self.problem  # the values of keys that no query sees may be anything
            each = torch.stack(list(norms.values()), -1)  # (B, H', Lk, n)
            problem = with_value(problem, as_value(each, problem.key.shape[1]))
        distance = positions(problem).unsqueeze(1) if self.placed else None
        summary = Summary(output=bool(norms), rows=True, entropy=True, distance=distance, received=True)
        summary = summary._replace(factors=self._factor)
        return _summarised(problem, summary)

    def find(self, name: Literal["entropy", "received", "distance", "output"]) -> Tensor:
        """A statistic by its name in `Found`: the entropy in nats, the mean distance in positions, (B, H, Lq), or the
        weight that each key receives from all queries, (B, H, Lk)."""
        return cast(Tensor, getattr(self._found, name))

    def moved(self, name: str) -> Tensor:
        """Σ_j w_ij norms_j, (B, H, Lq); where one head's weights stand for all, of each head of the norms."""
        found = of_value(self.find("output"), len(self.norms))[..., list(self.norms).index(name)]
        return self._multiplied(found)

    @cached_property
    def log_sum_exp(self) -> Tensor:
        """The log-sum-exp of the scores, (B, H, Lq); of uniform attention the log of the number of keys."""
        return log_sum_exp(*rows_of(self._found))

    def on(self, some: Visible) -> Tensor:
        """The weight of each query on the keys of a narrower mask, (B, H, Lq)."""
        problem = self._read
        if finite(problem.query) and finite(problem.key):
            some = some._replace(unseen="none")
        return self._share(*rows_of(_summarised(problem._replace(visible=some), Summary(rows=True))))

    def on_pairs(self, pairs: Pairs, groups: Grouped | None) -> Tensor:
        """The weight of each query on the keys with its token, (B, H, Lq). `groups`: these pairs, sorted. Where it is
        None, or a bias depends on places, all pairs are looked at."""
        if groups is None or self.problem.bias is not None:
            found: Tensor = stream(self.problem, choose(self.problem, None), (PairMass(pairs),))[0]
            return self._multiplied(found)
        rows = rows_of(_summarised(groups.of(self.problem), Summary(rows=True)))
        return self._share(*(groups.back(row) for row in rows))

    def _share(self, maximum: Tensor, log_sum: Tensor) -> Tensor:
        """Σ_j w_ij over some keys: exp(their log-sum-exp − the log-sum-exp of all keys), each given as two numbers."""
        of_all, log_sum_of_all = rows_of(self._found)
        found = ((maximum - of_all) + (log_sum - log_sum_of_all)).exp_()
        found.masked_fill_(log_sum == torch.inf, 0.0)  # a query sees none of these keys, even in a row of NaN
        return self._multiplied(found)

    def _multiplied(self, found: Tensor) -> Tensor:
        """A sum over the weights of each row, (B, H, Lq), times the row's factor."""
        return found if self._factor is None else found * self._factor.to(found.dtype)


def _summarised(problem: Problem, summary: Summary) -> Found:
    with without_autocast(problem.sizes.device):
        return summarised(problem, choose(problem._replace(value=None), None), summary)


def positions(problem: Problem) -> Tensor:
    """Where each query stands among the keys, int64 (B or 1, Lq)."""
    sizes = problem.sizes
    offset = problem.query_offset("measures")
    own = torch.arange(sizes.queries, device=sizes.device)[None]
    return own + (offset[:, 0] if isinstance(offset, Tensor) else offset)


class PairMass(Reduction):
    """Σ_j w_ij over the keys that are paired with query i, (B, H, Lq), by a look at each block of rows."""

    along = "queries"

    def __init__(self, pairs: Pairs) -> None:
        self.pairs = pairs

    def begin(self, problem: Problem) -> Tensor:
        dtype = accumulated(problem.query.dtype)
        return torch.zeros(problem.sizes.shape[:3], dtype=dtype, device=problem.sizes.device)

    def look(self, buffers: Tensor, look: Look) -> None:
        batch, _, queries, keys, _ = look.region
        asked, held = (_of(tensor, batch) for tensor in self.pairs[:2])
        places = torch.arange(held.shape[-1], device=held.device)[keys]
        meant = asked[:, queries, None] == held[:, None, keys]
        if self.pairs.within is not None:
            start, stop = (_of(edge[:, 0], batch)[:, queries, None] for edge in self.pairs.within)
            meant = meant & ((places[:, None] >= start) & (places[:, None] < stop)).any(-1)
        buffers[look.at] = look.weights.masked_fill(~meant.unsqueeze(1), 0.0).sum(-1)


def _of(tensor: Tensor, batch: slice) -> Tensor:
    """The part of a tensor (B or 1, …) for some sequences."""
    return tensor if tensor.shape[0] == 1 else tensor[batch]


class Subject:
    """One call as measures read it: its weights and uniform weights, without padding among queries and keys.

    `problem`: the problem of the call. `own_text`: whether queries and keys are one text, so that positions compare.
    `words`: which positions are words and no padding. `skipped`: queries that are left out for another reason, bool
    (B or 1, H or 1, Lq). `tokens`: numbers of the tokens, int64 (B or 1, Lq) and (B or 1, Lk), equal for equal tokens;
    None for the queries means the keys' tokens. `norms`: lengths of vectors, (B, H, Lk) each: "value" of the values,
    "transformed" of what the head writes for them. `like`: another call of the same mask, kind, `words` and `skipped`,
    without bias and norms, whose results for uniform attention are shared. `factor` (B, H, Lq): the number by which an
    edit multiplied each row of the weights. Shares of weight and norms are of the product; entropy and distance are of
    weights divided by their sum; uniform attention has no factor.

    Queries that are padding, or may see no key, do not count. A word's row is kept whole: a key of padding that the
    model let the word see stays in the row, but is never a previous, next, first or most received key.
    """

    def __init__(
        self,
        problem: Problem,
        own_text: bool,
        words: Words = ALL_WORDS,
        skipped: Tensor | None = None,
        tokens: tuple[Tensor | None, Tensor] | None = None,
        norms: Mapping[str, Tensor] = MappingProxyType({}),
        like: Subject | None = None,
        factor: Tensor | None = None,
    ) -> None:
        sizes = problem.sizes
        self.placed = own_text and problem.has_positions
        self.keys, self._tokens, self.norms = words.keys, tokens, norms
        if like is None:
            self.problem = among(problem, looked_at(words.queries, skipped))
        else:
            whole = sizes._replace(leading=None)
            self.problem = problem._replace(sizes=whole, value=None, visible=like.problem.visible)
        self.own = Attention(self.problem._replace(sinks=None), self.placed, norms, factor)
        self.uniform: Attention = Attention(uniform(self.problem), self.placed, norms) if like is None else like.uniform
        self.shared: dict[str, tuple[Visible, Tensor]] = {} if like is None else like.shared

    @cached_property
    def counted(self) -> Tensor:
        """The queries that count, bool (B, H or 1, Lq)."""
        return self.uniform.log_sum_exp != -torch.inf

    @cached_property
    def tokens(self) -> tuple[Tensor, Tensor] | None:
        """The tokens of queries and keys; None where they are not known."""
        if self._tokens is None or (self._tokens[0] is None and not self.placed):
            return None
        asked, held = self._tokens
        return (self.at(held, self.places) if asked is None else asked), held

    @cached_property
    def places(self) -> Tensor:
        """Where each query stands among the keys, int64 (B or 1, Lq)."""
        return positions(self.problem)

    @property
    def elsewhere(self) -> Edges:
        """For each query all places of the keys but its own: see `Pairs.within`."""
        place, length = self.places[:, None, :, None], self.uniform.sizes.keys
        low, high = place.clamp(0, length), (place + 1).clamp(0, length)
        return torch.cat([low.new_zeros(low.shape), high], -1), torch.cat([low, low.new_full(low.shape, length)], -1)

    @property
    def earlier(self) -> Edges:
        """For each query the places of the keys before its own: see `Pairs.within`."""
        stop = self.places[:, None, :, None].clamp(0, self.uniform.sizes.keys)
        return torch.zeros_like(stop), stop

    @cached_property
    def before(self) -> Tensor:
        """The last word before each place of the keys, int64 (B or 1, Lk + 1); −1 where there is none."""
        every = self._numbers(-1)
        return torch.nn.functional.pad(every.cummax(-1).values, (1, 0), value=-1)

    @cached_property
    def after(self) -> Tensor:
        """The first word at or after each place of the keys, int64 (B or 1, Lk + 1); −1 where there is none."""
        length = self.uniform.sizes.keys
        first = self._numbers(length).flip(-1).cummin(-1).values.flip(-1)
        return torch.nn.functional.pad(first.masked_fill(first == length, -1), (0, 1), value=-1)

    def _numbers(self, otherwise: int) -> Tensor:
        numbers = torch.arange(self.uniform.sizes.keys, device=self.uniform.sizes.device)[None]
        return numbers if self.keys is None else torch.where(self.keys, numbers, otherwise)

    def at(self, table: Tensor, places: Tensor) -> Tensor:
        """A table's entries (B or 1, n) at these places (B or 1, Lq); −1 for places outside of it."""
        batch = max(len(table), len(places))
        found = table.expand(batch, -1).gather(-1, places.clamp(0, table.shape[-1] - 1).expand(batch, -1))
        return found.masked_fill((places < 0) | (places >= table.shape[-1]), -1)

    def moved(self, name: str) -> Tensor:
        """Σ_j w_ij norms_j of each query, by the weights as the model has them, (B, H, Lq). With a sink, the model's
        weights are the weights of the keys times 1 / (1 + exp(sink − log-sum-exp of the keys))."""
        sinks, moved = self.problem.sinks, self.own.moved(name)
        if sinks is None:
            return moved
        rows = self.own.log_sum_exp
        above = (sinks.to(rows)[:, None] - rows).masked_fill(rows == -torch.inf, 0.0)  # a query that sees nothing
        return moved * torch.sigmoid(-above)
