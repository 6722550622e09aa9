"""The inputs of a call as a table of their sizes, with a legend of the axes, and sentences on broadcasting."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from clearhead.base.shapes import Sizes

LEGEND = {
    "B": "sequences",
    "H": "heads",
    "Lq": "queries",
    "Lk": "keys",
    "E": "numbers in a query and in a key",
    "Eq": "numbers in a query",
    "Ek": "numbers in a key",
    "Ev": "numbers in a value",
}
COUNTED = {"i": "queries", "j": "keys", "h": "heads"}  # the letters of formulas
INDEX = re.compile(r"\[([^\]]*)\]")
VECTOR = re.compile(r"\b(query|key|value)\[([ij]), ([den])\]")
Row = dict[str, str]  # the size of each axis that an array has


def drawn(shapes: Mapping[str, tuple[int, ...]], sizes: Sizes) -> str:
    """A table with axes as columns and arrays as rows, then sentences on broadcasting and on heads that share keys.

    `shapes`: the shapes of query, key and value as the caller gave them.
    """
    same = shapes["query"][-1] == shapes["key"][-1]
    inner = {"query": ("Lq", "E" if same else "Eq"), "key": ("Lk", "E" if same else "Ek"), "value": ("Lk", "Ev")}
    rows = {name: _leading(shape[:-2]) | _row(inner[name], shape[-2:]) for name, shape in shapes.items()}
    whole = _leading(sizes.shown)
    rows["scores"] = whole | _row(("Lq", "Lk"), (sizes.queries, sizes.keys))
    rows["output"] = whole | _row(("Lq", "Ev"), (sizes.queries, shapes["value"][-1]))
    axes = [axis for axis in LEGEND if any(axis in row for row in rows.values())]
    table = [["", *axes], *([name, *(row.get(axis, "·") for axis in axes)] for name, row in rows.items())]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        name.ljust(widths[0]) + "".join(f"  {cell.rjust(n)}" for cell, n in zip(cells, widths[1:], strict=True))
        for name, *cells in table
    ]
    meanings = ", ".join(f"{axis} {LEGEND[axis]}" for axis in axes)
    return "\n".join([*lines, "", f"{meanings}.", *_repeated(rows, whole, sizes)])


def letters(lead: Collection[str], formulas: Iterable[str]) -> str:
    """Sentences on how to read formulas and tables. They explain only letters that occur in the formulas.

    `lead`: the axes that the scores have, among "B" and "H".
    """
    every = " ".join(formulas)
    used = {letter for index in INDEX.findall(every) for letter in re.findall(r"[a-z]+", index)}
    counted = [f"{letter} counts {what}" for letter, what in COUNTED.items() if letter in used]
    numbers = [letter for letter in "den" if letter in used]
    if numbers:
        listed = " and ".join([", ".join(numbers[:-1]), numbers[-1]] if len(numbers) > 1 else numbers)
        counted.append(f"{listed} count{'s' * (len(numbers) == 1)} the numbers of a vector")
    found = f"In a formula {', '.join(counted[:-1])}, and {counted[-1]}"
    vector, added = VECTOR.search(every), re.search(r"Σ_([a-z])", every)
    if vector:
        found += f": {vector[0]} is number {vector[3]} of {vector[1]} {vector[2]}"
    found += f". Σ_{added[1]} adds up over all {added[1]}." if added else "."
    if lead:
        each = " and ".join({"B": "sequence", "H": "head"}[axis] for axis in lead)
        found += (
            f" Each {each} is computed separately and in the same way, so formulas leave {' and '.join(lead)} out; the "
            "number written out below a table names it first where there are several."
        )
    found += (
        "\nIn a table the last axis is the columns, and the axis before it the rows. Where two shapes differ, an axis "
        "of size 1 is repeated: broadcasting."
    )
    return found


def _row(axes: tuple[str, ...], shape: tuple[int, ...]) -> Row:
    return {axis: str(size) for axis, size in zip(axes, shape, strict=True)}


def _leading(lead: tuple[int, ...]) -> Row:
    """The leading dimensions: the last of two or more is the heads, those before it the sequences."""
    if len(lead) <= 1:
        return _row(("B",), lead) if lead else {}
    return {"B": "×".join(map(str, lead[:-1])), "H": str(lead[-1])}


def _repeated(rows: Mapping[str, Row], whole: Row, sizes: Sizes) -> list[str]:
    found = []
    for name in ("query", "key", "value"):
        for axis, size in whole.items():
            what = {"B": "sequence", "H": "head"}[axis]
            if axis not in rows[name] and size != "1":
                found.append(f"The {name} has no axis {axis}: it is used for each {what}.")
            elif rows[name].get(axis) == "1" != size:
                found.append(f"The {name} has {axis} 1: it is repeated for each of the {size} {what}s.")
    key_heads = int(rows["key"].get("H", 1))
    if 1 < key_heads < sizes.heads:
        group = sizes.heads // key_heads
        found.append(f"Grouped heads: {group} query heads share one key head; head h uses key head h // {group}.")
    return found
