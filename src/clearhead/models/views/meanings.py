"""What a page shows of a call beside its weights: lengths of values, gradients, rollout, and effects of edits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.inspection.measures import Measure
from clearhead.models.recordings.attention_call import AttentionCall
from clearhead.models.recordings.calls import HeadNumbers, Label
from clearhead.report._words import Shown
from clearhead.report.layer import About, Array, Layer, Slopes
from clearhead.report.operands import rounded, steps_of
from clearhead.scores.base import Pairwise

Effects = Mapping[tuple[int | str, int], float]  # by layer and head


class Effect(About):
    """The words about a number of each head that uniform attention does not have."""

    alone = True


def slopes_of(call: AttentionCall, sequence: int, rows: Shown, columns: Shown, error: float) -> Slopes | None:
    """The gradient of the output, rounded as `error` says, in multiples of the root of the mean of (grad · value)².

    None where no gradient was kept, and where it is not finite.
    """
    if call.value is None or call.outcome is None or call.outcome.grad is None or call.factor is not None:
        return None
    try:
        gradients = call.gradients
        above = gradients.by_key(positive=True)[sequence]
        below = above - gradients.by_key()[sequence]
    except ClearheadError:  # its tensors were written to since
        return None
    grad = call.outcome.grad[sequence][:, rows.places].float()
    value = call.value[sequence][:, columns.places].float()
    if not bool(grad.isfinite().all() and value.isfinite().all()):
        return None
    wide = value.repeat_interleave(len(grad) // len(value), 0).double()
    gram = (grad.double().mT @ grad.double()) * (wide.mT @ wide)  # Σ_ij (grad_i · value_j)², without the pairs
    size = float((gram.sum() / (grad.shape[0] * grad.shape[1] * value.shape[1])).sqrt())
    steps = steps_of(Pairwise("mul", grad[None], value[None], scale=1 / size), error) if size > 0 else None
    if steps is not None:
        grad, value = rounded(grad, steps[0]), rounded(value, steps[1])
    return Slopes(
        grad.cpu().numpy(),
        value.cpu().numpy(),
        None if steps is None else (steps[0].cpu().numpy(), steps[1].cpu().numpy()),
        as_shown(above, columns),
        as_shown(below, columns),
    )


def as_shown(numbers: Tensor, keys: Shown) -> Array:
    """Numbers (H, Lk) of the keys that are shown."""
    found: Array = keys.of(numbers.detach().float().cpu().numpy(), 1)
    return found


def flow_of(layer: Layer) -> int | None:
    """The length of a layer that a rollout may pass: not where words see padding, or some heads are left out."""
    queries, keys = layer.shape
    whole = layer.kind == "self" and queries == keys and layer.alone and layer.numbers is None
    return queries if whole else None


def flows(calls: Sequence[AttentionCall], shown: Sequence[tuple[int, int | None]]) -> list[list[int]]:
    """The places of the shown layers that make one rollout: all self-attention of one run and stack, of one length.

    `shown`: for each layer of the page the number of its call, and `flow_of` it.
    """
    groups: dict[tuple[int, str], list[int]] = {}
    wanted = Counter((call.run, call.layer.stack) for call in calls if call.kind == "self")
    for place, (number, length) in enumerate(shown):
        if length is not None and calls[number].windows_of is None:
            groups.setdefault((calls[number].run, calls[number].layer.stack), []).append(place)
    crossed = {call.layer.stack for call in calls if call.kind == "cross"}
    return [
        places
        for at, places in groups.items()
        if len(places) == wanted[at] and len({shown[place][1] for place in places}) == 1 and at[1] not in crossed
    ]


def effects_of(given: Any) -> list[tuple[Effect, Effects]]:
    """The numbers that a page shows as measures of heads, from `effects=` of `Recording.view`."""
    one_given = isinstance(given, HeadNumbers) or not isinstance(given, list | tuple)  # a sweep is a list
    several = [] if given is None else [given] if one_given else given
    found: list[tuple[Effect, Effects]] = []
    for one in several:
        values = one.values if isinstance(one, HeadNumbers) else None
        if values is None or len(values) != len(one._layers):
            raise ClearheadError(
                f"view: effects has a {type(one).__name__:.60}; expected a number for each layer and head: a sweep, a "
                "logit attribution or the differences of two recordings, or a list of these."
            )
        rows = values.detach().cpu().tolist()
        named = zip(one._layers, rows, strict=True)
        of = {(layer, head): value for layer, row in named for head, value in enumerate(row)}
        size = f"any number{one.unit and ' of '}{one.unit}"
        about = Effect(one.name, one.sentence, "one number for each head", size, None)
        found.append((about, of))
    names = _distinct([about.name for about, _ in found], [getattr(one, "edited", "") for one in several])
    return [(about._replace(name=name), of) for (about, of), name in zip(found, names, strict=True)]


def _distinct(names: list[str], edited: list[str]) -> list[str]:
    """The names of effects. Sweeps of one metric are told apart by their edits; then equal names are numbered."""
    by = [
        f"{name} by {edits}" if edits and names.count(name) > 1 else name
        for name, edits in zip(names, edited, strict=True)
    ]
    return [f"{name} ({by[:n].count(name) + 1})" if by.count(name) > 1 else name for n, name in enumerate(by)]


def largest_effect(
    calls: Sequence[AttentionCall],
    names: Sequence[Label],
    effects: Sequence[tuple[Effect, Effects]],
    heads: Mapping[int, tuple[int, Sequence[int]]],
) -> dict[str, Any] | None:
    """The head with the largest first effect, as a page opens on it; None where no shown head has one.

    `names`: of the calls. `heads`: for each shown call its place on the page, and the numbers of its heads.
    """
    for about, of in effects:
        each = [
            (abs(value), number, place, head, of_page)
            for number, (of_page, own) in heads.items()
            for place, head in enumerate(own)
            if math.isfinite(value := of.get((calls[number].layer.column, head), math.nan))
        ]
        if not each:
            continue
        _, number, place, head, of_page = max(each, key=lambda one: one[0])
        value = of[calls[number].layer.column, head]
        said = f"{names[number].head(head)} has the largest {about.name}: {value:.3g}. {about.says}"
        return {"layer": of_page, "head": place, "sentence": said, "measure": about.name, "nearUniform": False}
    return None


def with_effects(layer: Layer, call: AttentionCall, effects: Sequence[tuple[Effect, Effects]]) -> Layer:
    """The layer with these effects among the measures of its heads."""
    if not effects or layer.measures is None:
        return layer
    each: list[dict[Any, Any]] = [dict(known) for known in layer.measures]
    for about, of in effects:
        for head, known in enumerate(each):
            value = of.get((call.layer.column, head))
            if value is not None and math.isfinite(value):
                known[about] = value, 0.0, None
    measures: tuple[Mapping[Measure | About, Any], ...] = tuple(each)
    return replace(layer, measures=measures)
