"""Two recordings on one page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from clearhead.base.errors import ClearheadError
from clearhead.base.shapes import part
from clearhead.models.comparison.differences import (
    CallDifference,
    Differences,
    MasksDiffer,
    Places,
    check_calls,
    check_pair,
    difference_of,
)
from clearhead.models.recordings.attention_call import AttentionCall, CallInputs, CallResult
from clearhead.models.recordings.cached import alone
from clearhead.models.recordings.tokens import match_tokens
from clearhead.models.views.paged import Paged
from clearhead.problem.regions import of_sequence
from clearhead.problem.words import ALL_WORDS
from clearhead.report import Layer, Page
from clearhead.report._words import Shown, list_shown
from clearhead.report.layer import About, LeftOut, of_heads

DIVERGENCE = About(
    "divergence",
    "How far the head's weights are from those of the same head in the other recording: the Jensen–Shannon divergence "
    "of each query's weights in nats, a mean over the queries that both have. The weight on tokens that only one text "
    "has counts as one more key. It is 0 for equal weights.",
    "mean_i ½ Σ_j (p_ij log(p_ij / m_ij) + q_ij log(q_ij / m_ij)), m = (p + q) / 2",
    "0 to log 2 = 0.693 nats",
    None,
)


class Beside:
    """The layers of two recordings, as `Paged` gives those of one, and the divergences of the first's heads.

    The positions of two calls correspond one to one where equally many are shown, else by `match_tokens` of their
    words, those too that replace each other. `match_tokens` is used too where it finds more equal words, as where one
    word was put in and another left out. Raises the errors of `Recording.compare` where calls do not fit, and a
    `ClearheadError` where words are needed.
    """

    def __init__(self, mine: Paged, theirs: Paged) -> None:
        check_calls(mine.calls, theirs.calls)
        self.sides, self.calls = (mine, theirs), mine.calls
        self.texts: dict[tuple[tuple[str, ...], tuple[str, ...]], tuple[list[int], list[int]] | None] = {}
        self.places = [self._places(number) for number in range(len(self.calls))]
        self.found: list[CallDifference] = []

    def layer(self, number: int) -> Layer | LeftOut:
        """A layer of the first recording. Its heads are measured beside the second's, unless their masks differ."""
        layer = self.sides[0].layer(number)
        if isinstance(layer, LeftOut) or self.sides[1].calls[number].factor is not None:
            return layer
        try:
            label = self.sides[0].labels[number]
            self.found.append(difference_of(number, *self._calls(number), self.places[number], label))
        except MasksDiffer:
            return layer
        return _measured(layer, self.found[-1])

    def place(self, number: int) -> int:
        """The place of the sequence in the batch of a call of the first recording."""
        return self.sides[0].place(number)

    def page(self, layers: Iterable[Layer | LeftOut], title: str) -> Page:
        """The page of these layers of the first recording, with the second's beside them.

        It opens on the head that differs most, or on the head with the largest effect, where effects were given.
        """
        page = self.sides[0].page(layers, title)
        for (text, other), positions in self.texts.items():
            if positions is not None:
                page.align(text, other, positions)
        names = list(map(str, self.sides[0].labels))
        first = page.shown
        for place, (label, heads) in enumerate(first):
            counterpart = self.second(names.index(label), heads)
            page.add(counterpart)
            if isinstance(counterpart, Layer):
                page.beside.append((place, len(page.shown) - 1))
        own = None if self.sides[0].effects else self.distinctive(first)
        page.distinctive = own or page.distinctive or self.distinctive(first)
        return page

    def second(self, number: int, heads: Sequence[int]) -> Layer | LeftOut:
        """A layer of the second recording, with the given heads."""
        layer = self.sides[1].layer(number)
        if isinstance(layer, LeftOut):
            return layer
        own, comma, more = layer.label.partition(", ")
        layer = replace(layer, label=f"{own}′{comma}{more}", role=f"{layer.role}, beside")  # "L3′, step 2"
        for difference in self.found:
            if difference.number == number:
                layer = _measured(layer, difference)
        return layer if heads == list(range(layer.heads)) else of_heads(layer, heads)

    def distinctive(self, shown: Sequence[tuple[str, Sequence[int]]]) -> dict[str, Any] | None:
        """The page's data of the shown head that differs most; None where no divergence is known."""
        names = list(map(str, self.sides[0].labels))
        places = {names.index(label): place for place, (label, _) in enumerate(shown)}
        known = []
        for call in self.found:
            if call.number in places:
                own = list(shown[places[call.number]][1])
                by_query = torch.full_like(call.by_query, torch.nan)
                by_query[:, own] = call.by_query[:, own]
                known.append(replace(call, by_query=by_query))
        if not known:
            return None
        found = Differences(known)
        at, head = found.most
        place = places[known[at].number]
        most = {"layer": place, "head": list(shown[place][1]).index(head), "sentence": str(found)}
        return {**most, "measure": DIVERGENCE.name, "nearUniform": False}

    def _calls(self, number: int) -> tuple[AttentionCall, AttentionCall]:
        """The two calls with one number, each with the shown sequence alone."""
        mine, theirs = (one_sequence(paged.calls[number], paged.place(number)) for paged in self.sides)
        return mine, theirs

    def _places(self, number: int) -> Places:
        """The positions to compare, as positions of each call; None where all are compared."""
        calls = self._calls(number)
        places: Places = None
        if all(call.kind == "self" and call.problem.sizes.queries == call.problem.sizes.keys for call in calls):
            sides = [list_shown(call, 0)[1] for call in calls]
            mine, theirs = (side.places for side in sides)
            pairs = self._aligned(number, sides)
            if pairs is not None:
                mine, theirs = mine[pairs[0]], theirs[pairs[1]]
            if len(mine) < max(side.length for side in sides):
                places = torch.from_numpy(mine), torch.from_numpy(theirs)
        check_pair(number, *calls, places)
        return places

    def _aligned(self, number: int, sides: Sequence[Shown]) -> tuple[list[int], list[int]] | None:
        """The shown positions of a call's two texts that correspond; None where they correspond one to one."""
        given = [paged.texts(number)[1] for paged in self.sides]
        one, other = (len(side.places) for side in sides)
        if any(len(words) not in (side.length, len(side.places)) for side, words in zip(sides, given, strict=True)):
            if one == other:
                return None
            raise ClearheadError(
                f"the texts of call {number} have {one} and {other} tokens: pass tokens= and beside_tokens=."
            )
        text, beside = (tuple(side.labels(words)) for side, words in zip(sides, given, strict=True))
        if (text, beside) not in self.texts:
            self.texts[text, beside] = _correspondence(text, beside)
        return self.texts[text, beside]


def _correspondence(text: Sequence[str], other: Sequence[str]) -> tuple[list[int], list[int]] | None:
    """The positions that correspond, or None for one to one.

    They are not one to one where the lengths differ, or where more words are equal when one text is moved along the
    other.
    """
    if len(text) == len(other):
        in_place = sum(a == b for a, b in zip(text, other, strict=True))
        if not set(text) & set(other) or len(match_tokens(text, other)[0]) <= in_place:
            return None
    return match_tokens(text, other, replaced=True)


def _measured(layer: Layer, difference: CallDifference) -> Layer:
    """The layer with the divergence of each of its heads, which is the same for both recordings."""
    each = zip(layer.measures or (), difference.divergence.tolist(), strict=True)
    return replace(layer, measures=tuple({**known, DIVERGENCE: (d, 0.0, None)} for known, d in each))


def one_sequence(call: AttentionCall, sequence: int) -> AttentionCall:
    """The call with only this sequence."""
    if call.query.shape[0] == 1:
        return call
    some = slice(sequence, sequence + 1)
    words = call.padding or ALL_WORDS
    inputs = CallInputs(
        call.query[some],
        alone(call.key[some]),
        call.score,
        call.mask,
        call.record._replace(problem=of_sequence(call.problem, sequence, words.queries)),
        uniform=None if call.uniform is None else part(call.uniform, some),
        padding=None if call.padding is None else words.of(some),
        ids=call.ids,
    )
    factor = None if call.factor is None else call.factor[some]
    return AttentionCall(inputs, CallResult(None, factor, call.edited), call.context)
