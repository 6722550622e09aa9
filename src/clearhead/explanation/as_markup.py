"""An explanation as Markdown, and as HTML without a script, which a notebook shows in a cell.

The HTML does not embed the whole page: a notebook is stored with what it shows, and other viewers (a code review, a
site that renders notebooks) remove scripts and frames.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

from clearhead.base.output.text import escaped, printable
from clearhead.explanation.document import Document, Entry, Section, Table, text_of

CELL = "text-align:right;font-variant-numeric:tabular-nums;padding:1px 8px"
NAME = "text-align:left;font-weight:normal;opacity:.75;padding:1px 8px"


def markdown(document: Document) -> str:
    """The document with one heading per part and one table per step."""
    lines = opening(document)
    for section in document.sections:
        lines += ["", *heading(section)]
        for entry in section.entries:
            lines += ["", *about(entry)]
            for table in entry.tables:
                lines += ["", *_markdown_table(table)]
            lines += written_out(entry)
    return "\n".join(lines) + "\n"


def opening(document: Document) -> list[str]:
    return [f"# {marked(document.title)}", *(f"\n{marked(note)}" for note in document.notes)]


def heading(section: Section) -> list[str]:
    lines = [f"## {marked(section.title)}", *([""] if section.drawn else [])]
    for line in map(printable, section.drawn.splitlines()):
        wrapped = textwrap.wrap(line, 76, subsequent_indent="  ") if len(line) > 76 else [line]
        lines += [f"    {each}" for each in wrapped]
    return lines


def about(entry: Entry) -> list[str]:
    """The formula of a step, its shape and its reason."""
    why = ("*For comparison.* " if entry.step.aside else "") + marked(entry.step.why)
    return [f"**{marked(entry.formula)}** ({entry.shape})", "", why]


def written_out(entry: Entry) -> list[str]:
    """How one number of a step is computed, where that is short."""
    return ["", marked(entry.sentence)] if entry.sentence else []


def _markdown_table(table: Table) -> Iterator[str]:
    if table.caption:
        yield from (f"{marked(table.caption)}:", "")
    yield "|  | " + " | ".join(map(marked, table.columns)) + " |"
    yield "|---" * (len(table.columns) + 1) + "|"
    for name, row in zip(table.rows, table.cells, strict=True):
        yield f"| {marked(name)} | " + " | ".join(text_of(x, table.kind) for x in row) + " |"
    if table.missing:
        yield from ("", f"… {table.missing}")


def marked(text: str) -> str:
    """The text in one line, escaped so that Markdown, and HTML inside it, show it as it is."""
    marked = re.sub(r"([\\`*_{}\[\]()#+!|~$^:@-])", r"\\\1", printable(text))
    marked = re.sub(r"(www)\.", r"\1\\.", marked, flags=re.IGNORECASE)  # GitHub makes a link of www.
    return marked.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def html(document: Document) -> str:
    """The document with one heading per part, the part's steps folded under it, and one table per step."""
    lines = [f"<div><h3>{escaped(document.title)}</h3>", *(f"<p>{escaped(note)}</p>" for note in document.notes)]
    for section in document.sections:
        lines.append(f"<details open><summary><b>{escaped(section.title)}</b></summary>")
        lines += [f"<pre>{escaped(section.drawn, lines=True)}</pre>"] if section.drawn else []
        for entry in section.entries:
            why = ("<i>For comparison.</i> " if entry.step.aside else "") + escaped(entry.step.why)
            lines.append(f"<p><b>{escaped(entry.formula)}</b> ({escaped(entry.shape)})<br>{why}</p>")
            lines += [line for table in entry.tables for line in _html_table(table)]
            lines += [f"<p>{escaped(entry.sentence)}</p>"] if entry.sentence else []
        lines.append("</details>")
    return "\n".join([*lines, "</div>"])


def _html_table(table: Table) -> Iterator[str]:
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
