"""One call as measures look at it."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.inspection.measures.allowed import among, looked_at, uniform
from clearhead.inspection.measures.attention import Attention, positions
from clearhead.inspection.reductions.base import arange
from clearhead.problem.problem import Problem


class Subject:
    """One call as measures look at it: its weights beside uniform ones, padding left out on both sides.

    `problem`: the call's. `own_text`: whether queries and keys are of one text, so that positions mean something.
    `words`: which positions are words and no padding, (B, Lq) and (B, Lk), bool, each None where all are. `skipped`,
    bool (B or 1, H or 1, Lq): queries that do not count for another reason. `tokens`: numbers of the tokens, int64
    (B or 1, Lq) and (B or 1, Lk), equal where the tokens are; the queries' None where they are the keys'. `value`:
    (B, Hk, Lk, Ev).

    Queries that are padding, or may see no key, do not count. Of a word's row nothing is left out: a key of padding
    that the model let it see stays in it, but is nobody's previous, next, first or most received key.
    """

    def __init__(
        self,
        problem: Problem,
        own_text: bool,
        words: tuple[Tensor | None, Tensor | None] = (None, None),
        skipped: Tensor | None = None,
        tokens: tuple[Tensor | None, Tensor] | None = None,
        value: Tensor | None = None,
    ) -> None:
        sizes = problem.sizes
        self.placed = own_text and (sizes.align is not None or sizes.queries == sizes.keys)
        self.keys, self._tokens, self.value = words[1], tokens, value
        self._problem = among(problem, looked_at(words[0], skipped))
        self.own = Attention(self._problem._replace(sinks=None), self.placed)
        self.uniform = Attention(uniform(self._problem), self.placed)

    @cached_property
    def counted(self) -> Tensor:
        """The queries that count, bool (B, H or 1, Lq)."""
        return self.uniform.log_sum_exp != -torch.inf

    @cached_property
    def tokens(self) -> tuple[Tensor, Tensor] | None:
        """The tokens of queries and keys, where they are known."""
        if self._tokens is None or (self._tokens[0] is None and not self.placed):
            return None
        asked, held = self._tokens
        return (self.at(held, self.places) if asked is None else asked), held

    @cached_property
    def places(self) -> Tensor:
        """Where each query stands among the keys, int64 (B or 1, Lq)."""
        return positions(self._problem)

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

    @cached_property
    def norms(self) -> Tensor:
        """‖v_j‖ of each key, (B, Hk, Lk)."""
        assert self.value is not None
        norms: Tensor = self.value.to(accumulated(self.value.dtype)).norm(dim=-1)
        return norms

    def moved(self) -> Tensor:
        """Σ_j w_ij ‖v_j‖ of each query, by the weights as the model has them, (B, H, Lq)."""
        with_sinks = self._problem.sinks is not None
        own = Attention(self._problem, self.placed) if with_sinks else self.own
        norms = self.norms
        groups = self._problem.sizes.heads // norms.shape[1]
        return own.moved(norms) if own.sizes.heads > 1 else own.moved(norms.repeat_interleave(groups, 1))

    def moved_by_uniform(self) -> Tensor:
        """The same of uniform attention, (B, H, Lq)."""
        groups = self._problem.sizes.heads // self.norms.shape[1]
        return self.uniform.moved(self.norms.repeat_interleave(groups, 1))
