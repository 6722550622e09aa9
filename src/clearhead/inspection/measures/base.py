"""The base class of the measures of a head, and the means that measures share."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from clearhead.inspection.measures.allowed import Pairs as Pairs
from clearhead.inspection.measures.allowed import grouped, one_key
from clearhead.inspection.measures.subject import Subject as Subject

Needs = tuple[Literal["placed", "tokens", "value", "transformed"], ...]


class Peak(NamedTuple):
    """For each sequence and head, (B, H), the query at which the measure is furthest from uniform attention.

    `value` and `uniform`: the measure of this query, float64 on the CPU, NaN where no query counts. `query`: int64, −1
    for a measure of the sequence as a whole.
    """

    value: Tensor
    uniform: Tensor
    query: Tensor


class Found(NamedTuple):
    """A measure of each head of a call, float64 (H,) on the CPU; NaN where no query counts.

    `uniform`: the measure of uniform attention under the same mask. `queries`: the number of queries in these means.
    `key`: the key of a measure of one key, int64 (B, H). `peak`: a function that finds where the measure is strongest
    in each sequence, or gives None: few callers ask. `texts`: a function that gives the sum of the measure over the
    queries of each sequence, and their number, (B, H) each, H or 1.
    """

    value: Tensor
    uniform: Tensor
    queries: Tensor
    key: Tensor | None = None
    peak: Callable[[], Peak | None] = lambda: None
    texts: Callable[[], tuple[Tensor, Tensor] | None] = lambda: None


class Measure(ABC):
    """A number that describes a head's behaviour.

    `name`: its column in `seen.table()`, by default the words of the class's name. `says`: its meaning, in a sentence.
    `formula`: with w_ij the weights of the keys, which sum to 1: with sinks, they are divided by their sum. `range`:
    its least and largest value. `source`: the publication it comes from. `does`: the behaviour of a head with a high
    value, for shares of weight, which can be compared with one another; None for a measure that is no share. `least`:
    whether a head stands out by a small value. `needs`: the parts of a call that it reads and a call may lack: the
    places of queries among the keys, tokens, the lengths of values, those of transformed values.
    """

    name: ClassVar[str]
    says: ClassVar[str]
    formula: ClassVar[str]
    range: ClassVar[str] = "0 to 1"
    source: ClassVar[str]
    does: ClassVar[str | None] = None
    least: ClassVar[bool] = False
    needs: ClassVar[Needs] = ()

    def __init_subclass__(cls) -> None:
        if "name" not in vars(cls):
            cls.name = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", cls.__name__).lower()

    def applies(self, subject: Subject) -> bool:
        """Whether the measure can be computed of the call: whether the call has all that it needs."""
        has = {"placed": subject.placed, "tokens": subject.tokens is not None}
        return all(name in subject.norms or has.get(name, False) for name in self.needs)

    @abstractmethod
    def of(self, subject: Subject) -> Found:
        """The measure of each head, and that of uniform attention under the same mask."""

    def about(self) -> str:
        """Its meaning in words, with formula, range and source."""
        return f"{self.says} Formula: {self.formula}. Range: {self.range}. Source: {self.source}."


def averaged(value: Tensor, uniform: Tensor, counted: Tensor, least: bool = False) -> Found:
    """Means over the queries that count. `value` (B, H, Lq); `uniform` and `counted` broadcast to it."""
    counted = counted.cpu().expand_as(value)
    count = counted.sum((0, 2)).double()
    both = [torch.where(counted, given.cpu().double().expand_as(value), 0.0) for given in (value, uniform)]
    own, other = (each.sum((0, 2)) / count for each in both)
    return Found(
        own,
        other,
        count,
        peak=partial(_peak, both[0], both[1], counted, least),
        texts=lambda: (both[0].sum(-1), counted.sum(-1).double()),
    )


def _peak(value: Tensor, uniform: Tensor, counted: Tensor, least: bool) -> Peak | None:
    """The query of each sequence and head that is furthest from uniform attention, of (B, H, Lq)."""
    if not value.shape[-1]:
        return None
    apart = (uniform - value if least else value - uniform).nan_to_num(-torch.inf).masked_fill(~counted, -torch.inf)
    query = apart.argmax(-1, keepdim=True)
    none = apart.gather(-1, query) == -torch.inf
    found, other = (each.gather(-1, query).masked_fill(none, torch.nan).squeeze(-1) for each in (value, uniform))
    return Peak(found, other, query.squeeze(-1))


class OnKeys(Measure):
    """The mean weight on one key of each query, over the queries that may see that key."""

    source = "Clark et al. 2019, What Does BERT Look At?"
    needs: ClassVar[Needs] = ("placed",)

    @abstractmethod
    def keys(self, subject: Subject) -> Tensor:
        """The key of each query, int64 (B or 1, Lq), −1 for none."""

    def of(self, subject: Subject) -> Found:
        if self.name not in subject.shared:  # calls of the same mask share the results that depend on the mask alone
            some = one_key(subject.problem, self.keys(subject))
            subject.shared[self.name] = some, subject.uniform.on(some)
        some, uniform = subject.shared[self.name]
        return averaged(subject.own.on(some), uniform, subject.counted & (uniform > 0))


class OnPairs(Measure):
    """The mean weight on the keys that are paired with each query, over the queries that may see such a key."""

    needs: ClassVar[Needs] = ("tokens",)

    @abstractmethod
    def pairs(self, subject: Subject, asked: Tensor, held: Tensor) -> Pairs:
        """The pairs that count, from the tokens of queries and of keys."""

    def of(self, subject: Subject) -> Found:
        assert subject.tokens is not None
        pairs = self.pairs(subject, *subject.tokens)
        groups = grouped(subject.problem, pairs)
        uniform = subject.uniform.on_pairs(pairs, groups)
        return averaged(subject.own.on_pairs(pairs, groups), uniform, subject.counted & (uniform > 0))
