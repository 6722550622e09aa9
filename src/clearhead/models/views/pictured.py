"""Pictures of recorded calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from clearhead.base.errors import ShapeError
from clearhead.base.output.pictures import Array, Axes, Panel, Side, Style, check_style, draw
from clearhead.inspection.plot import CELLS, IN_GRID, allowed, numbers, panels, picks, titles
from clearhead.masks._draw import cell_of, shares
from clearhead.models.recordings.attention_call import AttentionCall
from clearhead.models.recordings.calls import Label
from clearhead.models.recordings.tokens import words_read
from clearhead.models.views.paged import place_in
from clearhead.problem.regions import of_sequence
from clearhead.problem.words import ALL_WORDS
from clearhead.report._words import Cells, Shown, list_shown
from clearhead.report.statistics import lazy

Words = list[str] | None


def plotted(
    call: AttentionCall, label: Label, heads: Any, sequence: Any, words: tuple[Words, Words], style: Style
) -> Axes | np.ndarray:
    """The picture of `Recording.plot`. `label`: the name of the call."""
    check_style(style)
    place = place_in(call, sequence)
    chosen = picks((place,) if heads is None else (place, heads), call.shape[:2])
    most = CELLS if len(chosen) == 1 else IN_GRID
    rows, columns = list_shown(call, place)
    drawn = panels(call.weights, chosen, most) if rows.all and columns.all else _of_words(call, chosen, rows, columns)
    one = len(drawn) == 1 and heads is not None
    if style.title is None:
        title = f"{label.head(chosen[0][1]) if one else label} ({call.name})"
    else:
        title = f"{style.title}, head {chosen[0][1]}" if one else style.title
    crosses = call.kind == "cross"
    key_tokens = "source_tokens" if crosses else "tokens"
    sides = (
        Side("query", len(rows.places), _labels(words[0], call, rows, columns, "tokens")),
        Side("key", len(columns.places), _labels(words[crosses], call, columns, columns, key_tokens)),
    )
    long = max(side.length for side in sides) > most
    style = replace(style, title=title)
    return draw(drawn, *sides, style, "largest weight in the cell" if long else "weight")


def _of_words(call: AttentionCall, chosen: Sequence[tuple[int, ...]], rows: Shown, columns: Shown) -> list[Panel]:
    """The weights of the heads, without padding on either side."""
    most = CELLS if len(chosen) == 1 else IN_GRID
    sequence, problem = chosen[0][0], call.problem
    with torch.no_grad():
        one = of_sequence(problem, sequence, (call.padding or ALL_WORDS).queries)
        maps = numbers(lazy(one).reduce(Cells(rows, columns, (most, most)))[0])
    cell = cell_of(len(rows.places), len(columns.places), most)

    def hidden(head: int) -> Array:
        def keep(part: slice) -> torch.Tensor:
            places = rows.places[part]
            first, last = int(places[0]), int(places[-1])
            found = allowed(problem, sequence, head, slice(first, last + 1))
            return found[places - first][:, columns.places]

        found: Array = shares(keep, len(rows.places), len(columns.places), cell) == 0
        return found

    heads = [pick[1] for pick in chosen]
    return [Panel(maps[h], hidden(h), title) for h, title in zip(heads, titles(chosen), strict=True)]


def _labels(tokens: list[str] | None, call: AttentionCall, side: Shown, keys: Shown, name: str) -> Words:
    """A word for each shown position. Queries that continue a cached text have the last words of the text."""
    if tokens is None:
        return None
    if call.kind == "self":
        tokens = tokens[: words_read(call, len(tokens))]
    count = len(tokens)
    if count in (side.length, len(side.places)):
        return side.labels(tokens)
    if call.kind == "self" and count == keys.length > side.length:
        return side.labels(tokens[-side.length :])
    raise ShapeError(f"{name} has {count} words, and {call.name} has {side.length} positions; pass one word for each.")
