"""The head that departs most from uniform attention."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from clearhead.base.errors import ClearheadError
from clearhead.base.shapes import part
from clearhead.inspection.measures import MEASURES, Found, Measure, Subject
from clearhead.models.recordings.attention_call import AttentionCall, norms_of
from clearhead.models.recordings.calls import labels
from clearhead.models.recordings.tokens import Tokens
from clearhead.problem.regions import of_sequence
from clearhead.problem.words import ALL_WORDS


@torch.no_grad()
def measured(call: AttentionCall, tokens: Tokens, sequence: int | None = None) -> dict[Measure, Found]:
    """The measures of the call, without those for which positions, tokens or values are not known.

    `sequence`: of this sequence alone.
    """
    words, problem = call.padding or ALL_WORDS, call.record.problem
    norms, factor, skipped = norms_of(call), call.factor, call.uniform
    if sequence is not None:
        problem, some = of_sequence(problem, sequence, words.queries), slice(sequence, sequence + 1)
        words, norms = words.of(some), {name: each[some] for name, each in norms.items()}
        factor = None if factor is None else factor[some]
        skipped = None if skipped is None else part(skipped, some)
    subject = Subject(
        problem,
        own_text=call.kind == "self",
        words=words,
        skipped=None if skipped is None else skipped[..., 0],  # the mask leaves these queries no key
        tokens=tokens.of(call, sequence),
        norms=norms,
        factor=factor,
    )
    return {measure: measure.of(subject) for measure in MEASURES if measure.applies(subject)}


LEAST = 8  # a share is a mean over so many queries at least, or over half of those that count
FEWEST = 5  # no head is named by fewer queries
NAMED = 0.05  # a share of weight that is above uniform by less is not named
NEAR = 0.98  # a head with this part of the largest entropy, or more, is near uniform
ENTROPY = "normalised entropy"


@dataclass(frozen=True)
class Distinctive:
    """The head of a recording that departs most from uniform attention under its mask. `seen.distinctive()` gives it.

    `layer`: its number in the model, or its name where the model has several stacks, as in `seen.explain(layer, head,
    …)`. `call`: the number of the call, as in `seen[call]`. `name`: of the module. `head`: its number. `measure`: the
    measure by which the head departs, a column of `seen.table()`. `value`: of the measure; `uniform`: its value for
    uniform attention; `queries`: how many queries both are means over. `near_uniform`: whether every head of the
    recording is near uniform. `str()` gives `sentence`.
    """

    layer: int | str
    call: int
    name: str
    head: int
    measure: str
    value: float
    uniform: float
    queries: int
    near_uniform: bool
    sentence: str

    def __str__(self) -> str:
        return self.sentence


class HeadMeasure(NamedTuple):
    """One measure of one head. `call`: the number of its call. `found`: the measure of all heads of the call."""

    call: int
    head: int
    measure: Measure
    found: Found
    value: float
    uniform: float
    queries: int

    @property
    def departs(self) -> float:
        return self.value - self.uniform


def distinctive(
    calls: Sequence[AttentionCall],
    tokens: Tokens,
    found: Mapping[int, Mapping[Measure, Found]] | None = None,
    heads: Mapping[int, Sequence[int]] | None = None,
) -> Distinctive:
    """See `Recording.distinctive`. `found`: the measures of calls by the calls' numbers, if they were computed before.
    `heads`: the heads of each call that count; None for all."""
    if found is None:
        tokens.check(calls)
        found = {number: measured(call, tokens) for number, call in enumerate(calls)}
    each = (one for number, measures in found.items() for one in _of_call(number, measures))
    every = [one for one in each if heads is None or one.head in heads.get(one.call, ())]
    shares = [one for one in every if one.measure.does is not None]
    entropies = [one for one in every if one.measure.name == ENTROPY]
    count = len({(calls[one.call].name, calls[one.call].layer, one.head) for one in entropies})
    if not shares or not entropies:
        raise ClearheadError(
            f"no head can be told apart: in no call {FEWEST} queries see several keys: give the model a longer text."
        )
    # of equal shares the first measure is named; shares that differ by rounding are equal
    order = [type(measure) for measure in MEASURES]
    most = max(one.departs for one in shares)
    best = min((one for one in shares if one.departs > most - 1e-6), key=lambda one: order.index(type(one.measure)))
    focused = min(entropies, key=lambda one: one.value)
    near = best.departs < NAMED and focused.value >= NEAR
    if best.departs < NAMED and not near:
        best = focused
    call, name, sentence = calls[best.call], best.measure.name, _said(best, focused, near, calls, tokens, count)
    numbers = best.value, best.uniform, best.queries
    return Distinctive(call.layer.column, best.call, call.name, best.head, name, *numbers, near, sentence)


def _of_call(number: int, found: Mapping[Measure, Found]) -> Iterator[HeadMeasure]:
    """The measures of a call's heads that are finite and are means over enough queries."""
    sees = next(values.queries for measure, values in found.items() if measure.name == "sink")
    for measure, values in found.items():
        each = zip(values.value.tolist(), values.uniform.tolist(), values.queries.tolist(), sees.tolist(), strict=True)
        for head, (value, uniform, queries, seen) in enumerate(each):
            if math.isfinite(value) and queries >= max(min(LEAST, math.ceil(seen / 2)), FEWEST):
                yield HeadMeasure(number, head, measure, values, value, uniform, int(queries))


def _said(
    best: HeadMeasure, focused: HeadMeasure, near: bool, calls: Sequence[AttentionCall], tokens: Tokens, heads: int
) -> str:
    call = calls[best.call]
    where = labels(calls)[best.call].head(best.head)
    if best.measure.name == ENTROPY:
        return (
            f"{where} attends to few keys, of no one kind: its entropy is {_percent(best.value)} of the largest "
            f"possible, uniform would be 100% (a mean over {best.queries} queries of {call.name})."
        )
    if near:
        least = math.floor(focused.value * 1e4) / 100
        return (
            f"All {heads} heads are near uniform: their entropies are at least {least:g}% of the largest possible. The "
            f"furthest from it is {where} by {best.measure.name!r}: {best.value:.3%}, uniform would be "
            f"{best.uniform:.3%} ({call.name})."
        )
    figures = f"{_percent(best.value)}, uniform would be {_percent(best.uniform)}"
    does = f"{best.measure.does}{_which(best, call, tokens)}"
    return f"{where} {does}: {figures} (a mean over {best.queries} queries of {call.name})."


def _which(one: HeadMeasure, call: AttentionCall, tokens: Tokens) -> str:
    """The key of a sink, in words, where it is the same in all sequences."""
    keys = one.found.key
    if keys is None:
        return ""
    here = set(keys[:, one.head].tolist())
    if len(here) > 1:
        return ", in each sequence"
    key = here.pop()
    word = tokens.word(call, 0, key) if len(keys) == 1 else None
    return f", key {key}" + ("" if word is None else f" ({word!r})")


def _percent(share: float) -> str:
    """A share in percent: two digits, and more near 0% and near 100%."""
    percent = 100 * share
    if 1 <= percent <= 99 or percent in (0, 100):
        return f"{percent:.0f}%"
    return f"{percent:.2g}%" if percent < 1 else f"{percent:.4g}%"
