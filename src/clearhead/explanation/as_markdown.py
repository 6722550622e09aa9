"""An explanation as Markdown."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from clearhead.base.steps import Step
from clearhead.explanation.columns import printable
from clearhead.explanation.shown import Shown
from clearhead.explanation.tables import Table, shape_of, tables, text_of, written_out

if TYPE_CHECKING:
    from clearhead.explanation.explanation import Part


def render(title: str, parts: Sequence[Part], shown: Shown) -> str:
    """The whole explanation: a heading a part, a table a step."""
    lines = [f"# {escaped(title)}"]
    lines += [f"\nShown: {escaped(shown.chosen)}."] if shown.chosen else []
    lines += [f"\nOf {escaped(left_out)}." for left_out in shown.left_out]
    for part in parts:
        lines += ["", f"## {escaped(part.title)}"]
        if part.drawn:
            lines.append("")
            for line in map(printable, part.drawn.splitlines()):
                wrapped = textwrap.wrap(line, 76, subsequent_indent="  ") if len(line) > 76 else [line]
                lines += [f"    {each}" for each in wrapped]
        for step in part.steps:
            lines += ["", *_step(step, shown)]
    return "\n".join(lines) + "\n"


def _step(step: Step, shown: Shown) -> Iterator[str]:
    yield f"**{escaped(step.formula or step.name)}** ({shape_of(step, shown)})"
    yield ""
    yield ("*For comparison.* " if step.aside else "") + escaped(step.why)
    for table in tables(step, shown):
        yield ""
        yield from _table(table)
    sentence = written_out(step, shown)
    if sentence:
        yield from ("", escaped(sentence))


def _table(table: Table) -> Iterator[str]:
    if table.caption:
        yield from (f"{escaped(table.caption)}:", "")
    yield "|  | " + " | ".join(map(escaped, table.columns)) + " |"
    yield "|---" * (len(table.columns) + 1) + "|"
    for name, row in zip(table.rows, table.cells, strict=True):
        yield f"| {escaped(name)} | " + " | ".join(text_of(x, table.kind) for x in row) + " |"
    if table.missing:
        yield from ("", f"… {table.missing}")


def escaped(text: str) -> str:
    """Text that Markdown, and the HTML that it allows, show as it is, in one line."""
    marked = re.sub(r"([\\`*_{}\[\]()#+!|~$^:@-])", r"\\\1", printable(text))
    marked = re.sub(r"(www)\.", r"\1\\.", marked, flags=re.IGNORECASE)  # which GitHub makes a link
    return marked.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
