"""An explanation as HTML without a script, which a notebook shows in a cell.

It is no frame with the whole page in it: notebooks keep what they show, and those who read them elsewhere (in a list of
changes, on a site that renders them) get no scripts and no frames.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from clearhead.base.steps import Step
from clearhead.base.text import escaped
from clearhead.explanation.shown import Shown
from clearhead.explanation.tables import Table, shape_of, tables, text_of, written_out

if TYPE_CHECKING:
    from clearhead.explanation.explanation import Part

CELL = "text-align:right;font-variant-numeric:tabular-nums;padding:1px 8px"
NAME = "text-align:left;font-weight:normal;opacity:.75;padding:1px 8px"


def render(title: str, parts: Sequence[Part], shown: Shown) -> str:
    """The whole explanation: a heading a part, its steps folded under it, a table a step."""
    lines = [f"<div><h3>{escaped(title)}</h3>"]
    lines += [f"<p>Shown: {escaped(shown.chosen)}.</p>"] if shown.chosen else []
    lines += [f"<p>Of {escaped(left_out)}.</p>" for left_out in shown.left_out]
    for part in parts:
        lines.append(f"<details open><summary><b>{escaped(part.title)}</b></summary>")
        if part.drawn:
            lines.append(f"<pre>{escaped(part.drawn, lines=True)}</pre>")
        for step in part.steps:
            lines += _step(step, shown)
        lines.append("</details>")
    return "\n".join([*lines, "</div>"])


def _step(step: Step, shown: Shown) -> Iterator[str]:
    why = ("<i>For comparison.</i> " if step.aside else "") + escaped(step.why)
    yield f"<p><b>{escaped(step.formula or step.name)}</b> ({escaped(shape_of(step, shown))})<br>{why}</p>"
    for table in tables(step, shown):
        yield from _table(table)
    sentence = written_out(step, shown)
    if sentence:
        yield f"<p>{escaped(sentence)}</p>"


def _table(table: Table) -> Iterator[str]:
    yield '<div style="overflow-x:auto"><table>'
    if table.caption:
        yield f"<caption>{escaped(table.caption)}</caption>"
    if any(table.columns):
        yield f"<tr><td></td>{''.join(_cell('th', NAME, name) for name in table.columns)}</tr>"
    for name, row in zip(table.rows, table.cells, strict=True):
        numbers = "".join(_cell("td", CELL, text_of(x, table.kind)) for x in row)
        yield f"<tr>{_cell('th', NAME, name)}{numbers}</tr>"
    yield "</table></div>"
    if table.missing:
        yield f"<p>… {escaped(table.missing)}</p>"


def _cell(tag: str, style: str, text: str) -> str:
    return f'<{tag} style="{style}"><bdi>{escaped(text)}</bdi></{tag}>'
