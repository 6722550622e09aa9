"""Recorded calls as the layers of a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.output.words import TokensLike, word_list
from clearhead.inspection.measures import Found, Measure
from clearhead.models.origins.find import Pair, frequencies
from clearhead.models.recordings.attention_call import AttentionCall, norms_of
from clearhead.models.recordings.calls import labels
from clearhead.models.recordings.distinctive import distinctive, measured
from clearhead.models.recordings.rollout import check_whole
from clearhead.models.recordings.tokens import Tokens, not_joined, told_unread
from clearhead.models.views.image import patches_of
from clearhead.models.views.meanings import (
    as_shown,
    effects_of,
    flow_of,
    flows,
    largest_effect,
    slopes_of,
    with_effects,
)
from clearhead.report import Layer, Page
from clearhead.report._words import Shown, list_shown
from clearhead.report.from_call import layer_from_call
from clearhead.report.layer import LeftOut
from clearhead.report.operands import ERROR, checked_error


class Paged:
    """The calls of a recording as layers, which are made one at a time, and the measures of their heads.

    `tokens`, `source_tokens`, `sequence`, `error`: as for `Recording.view`. `answer`: the first token that the model
    has generated. `name`: the caller's name of the argument of tokens. Where an encoder and a decoder have the same
    number of positions, the encoder has the source tokens.
    """

    def __init__(
        self,
        calls: Sequence[AttentionCall],
        tokens: TokensLike | None = None,
        source_tokens: TokensLike | None = None,
        sequence: Any = 0,
        error: Any = ERROR,
        answer: int | None = None,
        name: str = "tokens",
        effects: Any = None,
        image: Any = None,
    ) -> None:
        self.answer, self.effects = answer, effects_of(effects)
        self.calls, self.sequence, self.error = calls, sequence, checked_error(error)
        sizes = _sizes(calls, self.sequence)
        lengths = {call.shape[2] for call in calls if call.kind == "self" and call.windows_of is None}
        if image is not None and not lengths:
            check_whole(calls, "view: image")
        self.image = None if image is None else patches_of(image, lengths)
        if self.image is not None and tokens is None:
            tokens = self.image.words
        own: list[str] | None = told_unread(calls, word_list(name, tokens, self.sequence), name)
        source = word_list("source_tokens", source_tokens, self.sequence)
        instead = not_joined(calls)
        self.words, self.source = (words(name, own, sizes, instead), words("source_tokens", source, sizes, instead))
        self.tokens = Tokens(self.words or None, self.source or None)
        self.labels = labels(calls)
        self.roles = roles([(call.name, call.kind) for call in calls])
        self.found: dict[int, Mapping[Measure, Found]] = {}
        self.last = {call.cached_key.chain: call for call in calls}

    def alike(self, calls: Sequence[AttentionCall], tokens: TokensLike | None) -> Paged:
        """The calls of another recording, for the same page. `tokens`: its words; None for the same words."""
        sizes = _sizes(calls, self.sequence)
        own = tokens if tokens is not None or len(self.words) not in sizes else self.words
        source = self.source if len(self.source) in sizes else None
        return Paged(calls, own, source, self.sequence, self.error, name="beside_tokens")

    def layer(self, number: int) -> Layer | LeftOut:
        """Call `number`, with the measures of its heads."""
        call, sequence = self.calls[number], self.place(number)
        if call.factor is not None:
            return LeftOut(
                call.name,
                "an edit multiplied its weights after the softmax (ScaleHeads, Knockout(after=True), or MapWeights), "
                "which the page does not compute. Look at seen[name][i].weights.",
            )
        layer = layer_from_call(call, *self.texts(number), sequence, self.error)
        if isinstance(layer, LeftOut):
            return layer
        self.found[number] = measured(call, self.tokens, sequence)
        rows, columns = list_shown(call, sequence)
        norms: dict[str, Any] = {
            f"{name}_norms": as_shown(one[sequence], columns) for name, one in norms_of(call).items()
        }
        layer = replace(
            layer,
            label=str(self.labels[number]),
            role=self.roles[number],
            measures=_by_head(self.found[number], columns, layer.heads),
            **norms,
            slopes=slopes_of(call, sequence, rows, columns, self.error),
            **_steps(call, rows, self.answer),
            pairs=_turned(call, layer, sequence),
        )
        return with_effects(layer, call, self.effects)

    def place(self, number: int) -> int:
        """The place of the sequence in the batch of a call."""
        return place_in(self.calls[number], self.sequence)

    def texts(self, number: int) -> tuple[list[str], list[str]]:
        """The words of a call's queries and keys."""
        call = self.calls[number]
        queries, keys = call.shape[2:]
        if call.kind == "cross":
            return self._looking(call, queries), self.source or self.words
        role = self.roles[number]
        given = [self.words, self.source] if role != "encoder" else [self.source, self.words]
        last = self.last[call.cached_key.chain]  # a step of a generation has read the first words of the last step
        lengths, whole = (_lengths(one, self.sequence)[1] for one in (call, last))
        for text in given[: 1 if role == "decoder" else 2]:
            if len(text) in lengths:
                return text[-queries:], text
            if len(text) in whole:
                text = text[: lengths[whole.index(len(text))]]
                return text[-queries:], text
        return [str(place) for place in range(keys)][-queries:], []

    def _looking(self, call: AttentionCall, queries: int) -> list[str]:
        """The words of the queries of cross attention, whose steps in a generation follow each other."""
        steps = [other for other in self.calls if call.cached_key.chain.has(other.cached_key)]
        if len(steps) == 1:
            return self.words[-queries:]
        before = sum(other.query.shape[2] for other in steps if other.cached_key.number < call.cached_key.number)
        every = sum(other.query.shape[2] for other in steps)
        text = self.words or [str(place) for place in range(every)]
        return text[before:][:queries] if every == len(text) else []

    def page(self, layers: Iterable[Layer | LeftOut], title: str) -> Page:
        """The page of these layers. It opens on the head with the largest effect, where effects were given, else on the
        head that departs most from uniform attention."""
        page, names = Page(title), list(map(str, self.labels))
        shown = []
        for layer in layers:
            page.add(layer)
            if isinstance(layer, Layer):
                shown.append((names.index(layer.label), flow_of(layer)))
        page.flows = flows(self.calls, shown)
        if self.image is not None:
            page.show(*self.image)
        page.distinctive = self.distinctive(page.shown)
        return page

    def distinctive(self, shown: Sequence[tuple[str, Sequence[int]]]) -> dict[str, Any] | None:
        """The head that a page of these heads opens on. `shown`: the labels of layers with their head numbers.

        None where queries see one key each, so that heads cannot be told apart, and no effects were given.
        """
        numbers = {str(label): number for number, label in enumerate(self.labels)}
        heads = {numbers[label.split("#")[0]]: (place, own) for place, (label, own) in enumerate(shown)}
        largest = largest_effect(self.calls, self.labels, self.effects, heads)
        if largest is not None:
            return largest
        try:
            most = distinctive(self.calls, self.tokens, self.found, {n: own for n, (_, own) in heads.items()})
        except ClearheadError:
            return None
        place, own = heads[most.call]
        return {
            "layer": place,
            "head": list(own).index(most.head),
            "sentence": str(most),
            "measure": most.measure,
            "nearUniform": most.near_uniform,
        }


def _lengths(call: AttentionCall, sequence: int) -> list[tuple[int, int]]:
    """The number of queries, and of those that are no padding; the same of keys. Of any number of a sequence."""
    return [(side.length, len(side.places)) for side in list_shown(call, sequence % max(call.shape[0], 1))]


def _sizes(calls: Sequence[AttentionCall], sequence: int) -> set[int]:
    """The numbers of words that a text of these calls may have."""
    return {n for call in calls for side in _lengths(call, sequence) for n in side}


def roles(calls: Sequence[tuple[str, str]]) -> list[str]:
    """The role of each call, from its name and kind. Without cross attention all are "self".

    Otherwise cross attention is "cross", self attention in one module with it is "decoder", and any other "encoder".
    """
    crossing = [name.split(".") for name, kind in calls if kind == "cross"]
    if not crossing:
        return ["self"] * len(calls)
    stack = []
    for parts in zip(*crossing, strict=False):
        if len(set(parts)) > 1 or parts[0].isdigit():
            break
        stack.append(parts[0])

    own = {name: "decoder" if name.split(".")[: len(stack)] == stack else "encoder" for name, _ in calls}
    return ["cross" if kind == "cross" else own[name] for name, kind in calls]


def _steps(call: AttentionCall, rows: Shown, answer: int | None) -> dict[str, Any]:
    """The first query of each step of a joined generation, and of the answer, among the queries that are shown."""
    if not call.begins:
        return {"answer": answer}
    begins = tuple(rows.before()[list(call.begins)].tolist())
    return {"begins": begins, "answer": begins[1] if answer is None and len(begins) > 1 else answer}


def _turned(call: AttentionCall, layer: Layer, sequence: int) -> tuple[Pair, ...]:
    """The features that rotary positions turn together, where the layers around the call were kept."""
    if call.origin is None or layer.phi != "mul" or layer.query.shape[-1] != call.query.shape[-1]:
        return ()
    return frequencies(call.origin, call.query, call.key, sequence)


def _by_head(
    found: Mapping[Measure, Found], columns: Shown, heads: int
) -> tuple[dict[Measure, tuple[float, float, int | None, int]], ...]:
    """The measures of each head. Keys are given by their place among those that are shown."""
    places = columns.before()

    def of(one: Found, head: int) -> tuple[float, float, int | None, int]:
        key = None if one.key is None else int(places[int(one.key[0, head])])
        return float(one.value[head]), float(one.uniform[head]), key, int(one.queries[head])

    return tuple({m: of(one, head) for m, one in found.items()} for head in range(heads))


def place_in(call: AttentionCall, sequence: int) -> int:
    """The place of a sequence, by its number, in the batch of a call."""
    batch = call.query.shape[0]
    if not -batch <= sequence < batch:
        raise ClearheadError(f"sequence is {sequence}, and {call.name} was given a batch of {batch}.")
    return int(sequence) % batch


def words(name: str, tokens: list[str] | None, sizes: set[int], instead: str) -> list[str]:
    """The words, one for each position; [] for None. `instead`: what an error says at its end."""
    found = tokens or []
    if tokens is not None and len(found) not in sizes:
        raise ShapeError(
            f"{name} has {len(found)} words, and the calls have {sorted(sizes)} queries or keys; pass one "
            f"word for each position of the sequence that the model was given.{instead}"
        )
    return found
