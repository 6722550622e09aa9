"""A page of heads alone: the report's matrix, list and points of heads, for the statistics in a table.

`meta`: title, said, measures [{name, says, formula, range, does, share}], layers [{name, label, kind, heads: [{number,
measures: [[value, value of uniform attention or null, queries or null], …], examples}]}], words. The page is
`front/survey.js` with the panes of the report. examples: {measure: [[value, uniform, query or null, key, runs], …]} by
the places of measures; runs: the tokens around query and key as [position, word, word, …], by their places in words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from clearhead.base.output.pages import bundled, embedded, filled, head, source
from clearhead.report.describe import finite
from clearhead.report.layer import About
from clearhead.report.page import heads_pane


class Statistic(NamedTuple):
    """A statistic: its words, and the column of uniform attention's value.

    `share`: whether it is a share of weight, or of the largest entropy; other statistics are shown as numbers.
    """

    about: About
    uniform: str | None
    share: bool


def heads_page(
    title: str,
    said: str,
    statistics: Sequence[Statistic],
    rows: Sequence[Mapping[str, Any]],
    examples: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The page of the heads in `rows`, which have the columns layer, module, head, and those of the statistics.

    `examples`: the rows of `Survey.examples`.
    """
    layers: dict[int | str, dict[str, Any]] = {}
    words: dict[str, int] = {}
    names = [one.about.name for one in statistics]
    of: dict[tuple[str, int], dict[int, list[Any]]] = {}
    for one in examples:
        of.setdefault((one["module"], one["head"]), {}).setdefault(names.index(one["measure"]), []).append(
            [finite(one["value"]), finite(one["uniform"]), one["query"], one["key"], _runs(one, words)]
        )
    for row in rows:
        which = row["layer"]
        label = f"L{which}" if isinstance(which, int) else which
        layer = layers.setdefault(which, {"name": row["module"], "label": label, "heads": []})
        own = {"number": row["head"], "measures": [_figure(one, row) for one in statistics]}
        layer["heads"].append(own | {"examples": of.get((row["module"], row["head"]), {})})
    about = [one.about._asdict() | {"share": one.share} for one in statistics]
    meta = {"title": title, "said": said, "measures": about, "layers": list(layers.values()), "words": list(words)}
    inside, script = bundled("survey.css"), bundled("survey.js")
    parts = {
        "head": head(title, "This page draws the heads of a model", (bundled("outside.css"), inside), script),
        "report": filled(source(__package__, "survey_panes.html"), {"style": inside, "heads": heads_pane()}),
        "meta": embedded(meta),
        "program": script,
    }
    return filled(source(__package__, "survey.html"), parts)


def _runs(example: Mapping[str, Any], words: dict[str, int]) -> list[list[int]]:
    """The tokens of an example as runs of neighbours."""
    runs: list[list[int]] = []
    last = None
    for place, token in zip(example["places"], example["tokens"], strict=True):
        if last is None or place != last + 1:
            runs.append([place])
        runs[-1].append(words.setdefault(token, len(words)))
        last = place
    return runs


def _figure(one: Statistic, row: Mapping[str, Any]) -> Any:
    value = finite(row.get(one.about.name, float("nan")))
    if value is None:
        return 0
    queries = row.get(f"{one.about.name} queries")
    return [value, None if one.uniform is None else finite(row[one.uniform]), queries]
