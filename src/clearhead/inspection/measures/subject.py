"""One call, as the measures of its heads read it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType

import torch
from torch import Tensor

from clearhead.inspection.measures.allowed import among, looked_at, uniform
from clearhead.inspection.measures.attention import Attention, positions
from clearhead.inspection.reductions.base import arange
from clearhead.masks._spans import Edges
from clearhead.problem.problem import Problem
from clearhead.problem.visible import Visible
from clearhead.problem.words import ALL_WORDS, Words


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
        numbers = arange(self.uniform.sizes.keys, self.uniform.sizes.device)[None]
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
