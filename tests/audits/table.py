"""docs/audited_models.md: what the audits of the architectures found."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from zoo import document
from zoo.registry import names

from audits.architectures import find_group

PATH = Path(__file__).parents[2] / "docs" / "audited_models.md"
CASES = ("plain", "right padding", "left padding", "packed")
COLUMNS = (*CASES, "cache")
DEPENDENCE = ("influence", "layer", "gradient")  # tests of what outputs depend on
CACHE = {"cache-differs": "token by token", "chunks-differ": "in chunks"}
ROUNDING = re.compile(r"move by rounding alone, (\S+) of")
SIZE = re.compile(r"by (\S+) of its size")
PLACE = re.compile(r"on input (?:\([^)]*\)|None), (?:.*, )?(in .*|between .*|before .*)$")
MODULE = re.compile(r"\b\w+(?:\.\w+)+\b|(?<=of )\w+|(?<=^in )\w+$")
SOURCES = {  # codes of findings: the inputs that outputs depend on
    "padding-reaches-outputs": "padding",
    "sequences-mix": "another sequence",
    "documents-mix": "another document",
    "later-positions-reach-outputs": "later positions",
    "window-exceeded": "earlier positions",
    "outputs-leak": "several inputs",
}
KINDS = {
    "causal": "causal",
    "full": "every key",
    "seq2seq": "encoder and cross attention: every key; decoder: causal",
    "causal beside other keys": "causal; keys that are no positions: as given",
    "given": "as given",
}
SHORT = {kind: words.split(";")[0] for kind, words in KINDS.items()} | {"seq2seq": "by stack"}
Row = dict[str, Any]


def list_built() -> list[str]:
    """The architectures that docs/models.md says are built, and those that it does not name."""
    _, outcomes = document.read()
    return [name for name in names() if not outcomes.get(name, "").startswith("not built")]


def describe_case(case: Row) -> tuple[str, str]:
    """A cell of the table, and a note: by which path inputs leak, or why the batch was not examined."""
    if "error" in case:
        return "not examined", _escape(case["error"])
    holds, text = case["tests"]["influence"]
    if holds is None or any(code == "outputs-random" for _, code, *_ in case["findings"] + case["once"]):
        return "not examined", _escape(text.removeprefix("not examined: ") if holds is None else "two runs differ")
    found = [finding for finding in case["findings"] if finding[0] in DEPENDENCE and finding[1] in SOURCES]
    if found:
        return "**leaks**", _describe_path(case["findings"], found, case.get("place", ""))
    wrong = [code for test, code, *_ in case["findings"] if test in ("given", "computed")]
    if wrong:
        return "mask differs", ", ".join(dict.fromkeys(wrong))
    rounding = ROUNDING.search(text)
    left = re.search(r"not examined: ([^;]+)", text)
    notes = [f"partly, for {left[1]}"] if left else []
    notes += [case["note"]] if "note" in case else []
    notes += [f"seen with one seed of two: {code}" for test, code, *_ in case["once"] if test in DEPENDENCE]
    return ("rounding" if rounding else "exact"), ", ".join(dict.fromkeys(notes))


def _describe_path(findings: list[list[Any]], found: list[list[Any]], first: str) -> str:
    """Which inputs leak, and by which path: the mask that attention is given, or the first module of a block."""
    source = SOURCES[found[0][1]]
    if any(test == "given" for test, *_ in findings):
        return f"{source}, by the mask that attention is given"
    for test, _, module, text in found:
        place = PLACE.search(text) if test == "layer" else None
        if place:
            inner = place[1].removeprefix("in ")
            if inner != place[1]:
                return f"{source}, in `{module}.{inner}`"
            return f"{source}, in `{module}`, {MODULE.sub(lambda name: f'`{name[0]}`', inner)}"
    return f"{source}, first in `{first}`" if first else f"{source}, outside of the blocks"


def describe_cache(case: Row) -> tuple[str, str]:
    """The cell and the note of the cache."""
    text = case.get("tests", {}).get("same", [None, ""])[1]
    sizes = {code: SIZE.search(said) for _, code, _, said in case.get("findings", []) if code in CACHE}
    if sizes:
        return "**differs**", ", ".join(f"{CACHE[code]} by {size[1]}" for code, size in sizes.items() if size)
    if "not with a cache" in text:
        return "not examined", _escape(text[text.index("not with a cache") + 4 :].rstrip(")"))
    return ("equal" if "with a cache" in text else ""), ""


def make_row(row: Row) -> tuple[str, dict[str, str]]:
    """The line of an architecture in the table, and its cells by column."""
    cells, notes = dict.fromkeys(COLUMNS, ""), {}
    if "error" in row:
        cells["plain"], notes["plain"] = "not examined", _escape(row["error"])
    for name, case in row.get("cases", {}).items():
        cells[name], notes[name] = describe_case(case)
        if row["kind"] == "given" and cells[name] == "**leaks**":  # attention alone may not be all that mixes positions
            cells[name], notes[name] = "not examined", "no source says what may reach its outputs"
    if "plain" in row.get("cases", {}):
        cells["cache"], notes["cache"] = describe_cache(row["cases"]["plain"])
    same: dict[str, list[str]] = {}
    for name, note in notes.items():
        if note:
            same.setdefault(note, []).append(name)
    told = "; ".join(f"{', '.join(columns)}: {note}" for note, columns in same.items())
    return f"| {row['name']} | {SHORT[row['kind']]} | {' | '.join(cells.values())} | {told} |", cells


def _escape(text: str) -> str:
    text = text.removeprefix("audit: ").removeprefix("no test could examine the model: ").split(" Pick it: ")[0]
    line = next(iter(re.sub(r"/\S*/site-packages/", "", text).strip().splitlines()), "")
    return line.replace("|", "\\|").replace("<", "&lt;").replace("`", "").replace("*", "\\*")[:120].rstrip(". :")


def count_outcomes(cells: list[dict[str, str]]) -> str:
    """The table of how many architectures have which outcome for each batch."""
    kinds = ("exact", "rounding", "equal", "**leaks**", "**differs**", "mask differs", "not examined")
    counts = {column: Counter(row[column] for row in cells) for column in COLUMNS}
    lines = [
        f"| {kind} | " + " | ".join(str(counts[column][kind] or "") for column in COLUMNS) + " |"
        for kind in kinds
        if any(counts[column][kind] for column in COLUMNS)
    ]
    return "\n".join(lines)


def list_masks(rows: list[Row]) -> str:
    """The table of masks: the kind, its source, and the architectures."""
    groups: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        group = find_group(row["name"])  # its words may have changed since
        groups.setdefault((KINDS[group.kind], group.source), []).append(row["name"])
    return "\n".join(f"| {kind} | {source} | {', '.join(found)} |" for (kind, source), found in sorted(groups.items()))


def write_page(rows: list[Row]) -> None:
    """Write the page of these results."""
    import torch
    import transformers

    rows = sorted(rows, key=lambda row: row["name"])
    made = [make_row(row) for row in rows]
    text = TEXT.format(
        transformers=transformers.__version__,
        torch=torch.__version__.split("+")[0],
        number=len(rows),
        built=len(list_built()),
        all=len(names()),
        columns=" | ".join(COLUMNS),
        lines="---|" * (len(COLUMNS) + 1),
        counts=count_outcomes([cells for _, cells in made]),
        masks=list_masks(rows),
        rows="\n".join(line for line, _ in made),
    )
    PATH.write_text(text, encoding="utf-8")


TEXT = """# Audited models

Do the outputs of each architecture depend on what its mask allows, and on nothing else? Of the {all} architectures of
transformers {transformers}, {built} are built small, as for [the tested models](models.md), and {number} of these were
audited with `ch.audit` on torch {torch} by `tests/every_audit.py`, which writes this page. Each has random weights,
two layers or one of each kind, and two sequences of 12 words.

| outcome | {columns} |
|{lines}
{counts}

How to read a cell:

- **exact**: outputs keep every bit when inputs change that must not reach them.
- **rounding**: they move by less than 1e-3 of their usual movement, and the gradient of these inputs is exactly zero.
- **leaks**: an output depends on an input that its mask hides. The last column has the input, and the first module of
  the first block where the dependence is seen. Each leak was found again with other changed inputs.
- **not examined**: for the reason in the last column. Most need another input than words, such as the pixels of an
  image, which have no positions to change.
- **mask differs**: attention was given another mask than expected, and no output showed it.
- An empty cell: the architecture has no such input, or no cache.

The batches: **plain** has no padding; **right padding** and **left padding** have four padded positions in the second
sequence, by `attention_mask`; **packed** has two documents in each row, by `position_ids` that begin again, without
`attention_mask` and without a cache. Models whose positions have three axes read documents from `position_ids` of shape
(4, B, L) alone, where the first row is that of the text. The **cache** of the plain batch is used token by token and in
chunks: *equal* is a difference of at most 1e-3 of the outputs' size, or of what rounding does. An architecture with a
leak can be used all the same: it needs batches without padding, or one document in each row, or another mask. The
backend is the one that the model takes by itself; on another one the result can differ, so audit your own model as
[the guide](guides/auditing.md) shows.

To audit some again: `.venv/bin/python tests/every_audit.py STATE llama opt`, where STATE is a file for the results;
without names, it goes on with all that the file does not hold; then `--write`.

| architecture | mask | {columns} | path, or reason |
|---|{lines}---|
{rows}

## The masks

The mask of an architecture is no guess: each has a source. *As given* is where no source is known: outputs may then
depend on what the masks allow that the model gives to its attention.

| mask | source | architectures |
|---|---|---|
{masks}
"""
