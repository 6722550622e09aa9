"""Tables of heads, and descriptions of their columns."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, SupportsIndex, overload

import numpy as np

from clearhead.base.errors import ClearheadError
from clearhead.base.numbers import check_count
from clearhead.base.output.pages import write_page
from clearhead.base.output.text import brief, printable, said
from clearhead.base.output.written import ending_of
from clearhead.inspection.measures import MEASURES

if TYPE_CHECKING:
    from pandas import DataFrame

ROWS, COLUMNS = 20, 100  # the largest number of rows, and of characters in a line, of a table as text
BESIDE = ("uniform", "queries", "sd", "texts")  # what may stand beside a measure
HEAD = ("layer", "head")  # the columns that are shown in any case

Row = dict[str, Any]  # the values of a row, by the names of their columns


class Table(list[Row]):
    """A list of rows, one for each head; a row is a dict by columns. `Recording.table` gives it.

    >>> import torch, clearhead as ch
    >>> block, x = ch.nn.DotProductAttention(), torch.zeros(1, 2, 5, 8)
    >>> with ch.watch(block) as seen:
    ...     output = block(x, x, x, mask=ch.Causal())
    >>> table = seen.table()
    >>> len(table), round(table[0]["previous"], 3), round(table[0]["previous uniform"], 3)
    (2, 0.321, 0.321)
    >>> table["previous"].round(3)
    array([0.321, 0.321])
    >>> rows = [{"layer": 3, "kind": "self", "head": head, "first": head / 4} for head in range(3)]
    >>> print(ch.models.Table(rows).top("first", 2))
    layer  head  first
        3     2  0.500
        3     1  0.250
    the same in every row: kind self
    >>> print(table.about("previous"))
    The weight on the token before the query's own, a mean over the queries that may see one. Formula: mean_i w_ij, ...

    `table["previous"]`: a column, as an array of NumPy; `table[3]`: a row; `table[:3]`: a `Table` of rows.
    `sort_values(column)` sorts the rows as pandas does, and `top(column, 5)` gives those with the largest numbers.
    `about(column)` describes a measure, with its formula, range and source; `to_pandas()` makes a DataFrame, and
    `write(path)` a file of CSV. Printed, it shows the layer, the head and the measures that differ between rows; what
    is the same in every row stands below them, once, and the names of columns that do not fit a line.
    """

    by = ""  # the column by which the rows were sorted, which is printed first

    @classmethod
    def of(cls, row: Mapping[str, object], columns: Mapping[str, Iterable[object]]) -> Self:
        """A row for each entry of the columns, of one length, or one row without them; every row begins with `row`."""
        entries = zip(*columns.values(), strict=True) if columns else [()]
        return cls({**row, **dict(zip(columns, each, strict=True))} for each in entries)

    @overload
    def __getitem__(self, which: SupportsIndex) -> Row: ...

    @overload
    def __getitem__(self, which: slice) -> Table: ...

    @overload
    def __getitem__(self, which: str) -> np.ndarray: ...

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, str):
            return self._column(which)
        found = super().__getitem__(which)
        return self._like(found) if isinstance(which, slice) else found

    def _column(self, name: str) -> np.ndarray:
        """Numbers as such, NaN where a row has none; anything else as objects, None where a row has none."""
        if not any(name in row for row in self):
            held = f"its columns are {', '.join(self._columns)}" if self else "it has no rows"
            raise ClearheadError(f"the table has no column {brief(name)}; {held}.")
        found = [row.get(name) for row in self]
        if all(one is None or isinstance(one, int | float | np.number) for one in found):
            return np.array([math.nan if one is None else one for one in found])
        objects = np.empty(len(found), dtype=object)
        objects[:] = found
        return objects

    @property
    def _columns(self) -> list[str]:
        """The names of all columns, in the order in which rows have them."""
        return list(dict.fromkeys(column for row in self for column in row))

    def _like(self, rows: Iterable[dict[str, Any]], by: str | None = None) -> Table:
        found = Table(rows)
        found.by = self.by if by is None else by
        return found

    def sort_values(self, by: str, ascending: bool = True) -> Table:
        """The rows in the order of a column; NaN, and rows without a number, last. Equal rows keep their order.

        >>> import clearhead as ch
        >>> firsts = [0.5, float("nan"), 0.1]
        >>> table = ch.models.Table({"head": head, "first": first} for head, first in enumerate(firsts))
        >>> table.sort_values("first", ascending=False)["head"].tolist()
        [0, 2, 1]

        `by` and `ascending` are those of pandas. Gives a new `Table`. Raises a
        `ClearheadError` for a column that is not there, or whose entries have no order, as arrays have none.
        """
        column = self._column(by)
        sign = 1 if ascending else -1
        try:
            last = [one is None or bool(one != one) for one in column]
            known = sorted((i for i, none in enumerate(last) if not none), key=lambda i: column[i], reverse=sign < 0)
        except (TypeError, ValueError, RuntimeError) as error:  # arrays have no order
            raise ClearheadError(f"the column {by!r} cannot be sorted: {error}.") from error
        return self._like(([self[i] for i in known] + [row for row, none in zip(self, last, strict=True) if none]), by)

    def top(self, by: str, count: int = 5) -> Table:
        """The rows with the largest numbers of a column, the largest first: `sort_values(by, False)[:count]`.

        >>> import clearhead as ch
        >>> table = ch.models.Table({"head": head, "first": head % 3 / 2} for head in range(12))
        >>> table.top("first", 3)["head"].tolist()
        [2, 5, 8]

        NaN last; equal rows keep their order. Gives a new `Table`. Raises a `ClearheadError` as `sort_values`, and for
        a count that is no whole number from 0 on.
        """
        return self.sort_values(by, ascending=False)[: check_count(count, 0, "top: count")]

    def __str__(self) -> str:
        """The first rows, and the columns that differ, as fit a screen of 100 columns and 24 lines."""
        return said(self, self._fitted)

    def __repr__(self) -> str:
        """The same, so that a table at a prompt or in a notebook does not fill it; `list(table)` shows every row."""
        return str(self)

    def _fitted(self) -> str:
        rows, columns = self[:ROWS], self._columns
        same = {column: self[0].get(column) for column in columns if self._constant(column)}
        columns = self._shown([column for column in columns if column not in same])
        cells = [[column, *(_cell(row.get(column)) for row in rows)] for column in columns]
        widths = [max(map(len, column)) for column in cells]
        fit = 1
        while fit < len(cells) and sum(widths[: fit + 1]) + 2 * fit <= COLUMNS:
            fit += 1
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=False))
            for line in zip(*cells[:fit], strict=True)
        ]
        more = [f"{len(self) - len(rows)} more rows"] * (len(self) > len(rows))
        more += [_line(f"{len(cells) - fit} more columns", columns[fit:])] * (len(cells) > fit)
        more += [_line("the same in every row", [f"{name} {_cell(one)}" for name, one in same.items()])] * bool(same)
        return "\n".join([*lines, *more]) or "no rows"

    def _constant(self, column: str) -> bool:
        """Whether a column tells nothing of a row: its entries are equal. Of one row the numbers are shown."""
        first, *others = (row.get(column) for row in self)
        if column in HEAD or column == self.by or (not others and isinstance(first, float)):
            return False
        return all(_same(one, first) for one in others)

    def _shown(self, columns: list[str]) -> list[str]:
        """In the order in which they are printed: up to the head, the sorted one, measures, others, those beside."""
        if {"layer", "module"} <= set(columns):
            pairs = {(str(row.get("layer")), str(row.get("module"))) for row in self}
            if len(pairs) == len({layer for layer, _ in pairs}):  # the layer says the module
                columns = [column for column in columns if column != "module"] + ["module"]
        names = [measure.name for measure in MEASURES]
        stop = columns.index("head") + 1 if "head" in columns else 0

        def place(column: str) -> int:
            if column in columns[:stop]:
                return 0
            if column == self.by:
                return 1
            beside = column == "module" or column.rpartition(" ")[0] in columns
            return 4 if beside else 2 if column in names else 3

        return sorted(columns, key=place)

    def about(self, column: str) -> str:
        """A measure's description, formula, range and source. Raises a `ClearheadError` for another column."""
        for measure in MEASURES:
            if column in (measure.name, *(f"{measure.name} {more}" for more in BESIDE)):
                return measure.about()
        names = ", ".join(measure.name for measure in MEASURES)
        raise ClearheadError(f"{column!r} is no measure of a head; the measures are {names}.")

    def write(self, path: str | Path) -> Path:
        """Write the rows as CSV, every digit of them, to a path that ends in .csv.

        An old file is replaced when all is written. Raises a `ClearheadError` where the file cannot be written.
        """
        ending_of(path, [".csv"], "table")
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self)
        return write_page(path, [text.getvalue()], "table")

    def to_pandas(self) -> DataFrame:
        """The rows as a `pandas.DataFrame`; NaN where a measure could not be computed. Needs pandas."""
        import pandas

        return pandas.DataFrame(list(self))


def _same(one: Any, other: Any) -> bool:
    """Whether two entries are equal; NaN is equal to NaN, and arrays are compared as they are printed."""
    if getattr(one, "ndim", 0) or getattr(other, "ndim", 0):
        return repr(one) == repr(other)
    return bool(one == other or (one != one and other != other))


def _cell(value: Any) -> str:
    """A number with three digits after the point, text in one line of at most 40 characters."""
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 1e5 else f"{value:.3g}"
    text = "" if value is None else printable(str(value))
    return text if len(text) <= 40 else f"{text[:39]}…"


def _line(begins: str, words: Iterable[str]) -> str:
    """The words after these, as many as fit a line."""
    line, comma = f"{begins}: ", ""
    for word in words:
        if len(line) + len(comma) + len(word) + len(", …") > COLUMNS:
            return f"{line}{comma}…"
        line, comma = f"{line}{comma}{word}", ", "
    return line
