"""Tables of heads, and descriptions of their columns."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from clearhead.base.errors import ClearheadError
from clearhead.base.pages import write_page
from clearhead.base.text import listed, printable, said
from clearhead.base.written import ending_of
from clearhead.inspection.measures import MEASURES

if TYPE_CHECKING:
    from pandas import DataFrame

ROWS, COLUMNS = 20, 100  # the largest number of rows, and of characters in a line, of a table as text


class Table(list[dict[str, Any]]):
    """A list of rows, one for each head; a row is a dict by columns. `Recording.table` gives it.

    >>> import torch, clearhead as ch
    >>> block, x = ch.nn.DotProductAttention(), torch.zeros(1, 2, 5, 8)
    >>> with ch.watch(block) as seen:
    ...     output = block(x, x, x, mask=ch.Causal())
    >>> table = seen.table()
    >>> len(table), round(table[0]["previous"], 3), round(table[0]["previous uniform"], 3)
    (2, 0.321, 0.321)
    >>> rows = seen.table(ch.reductions.Entropy())
    >>> print(ch.models.Table({name: row[name] for name in ("layer", "head", "Entropy (nats)")} for row in rows))
    layer  head  Entropy (nats)
        0     0           0.957
        0     1           0.957
    >>> print(table.about("previous"))
    The weight on the token before the query's own, a mean over the queries that may see one. Formula: mean_i w_ij, ...

    `about(column)` describes a measure, with its formula, range and source; `to_pandas()` makes a DataFrame, and
    `write(path)` a file of CSV.
    """

    @classmethod
    def of(cls, row: Mapping[str, object], columns: Mapping[str, Iterable[object]]) -> Self:
        """A row for each entry of the columns, which are of one length; every row begins with `row`."""
        entries = zip(*columns.values(), strict=True)
        return cls({**row, **dict(zip(columns, each, strict=True))} for each in entries)

    def __str__(self) -> str:
        """The first rows and columns that fit a screen of 100 columns and 24 lines."""
        return said(self, self._fitted)

    def __repr__(self) -> str:
        """The same, so that a table at a prompt or in a notebook does not fill it; `list(table)` shows every row."""
        return str(self)

    def _fitted(self) -> str:
        rows = self[:ROWS]
        columns = list(dict.fromkeys(column for row in rows for column in row))
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
        more += [f"{len(cells) - fit} more columns: {listed(columns[fit:])}"] * (len(cells) > fit)
        return "\n".join([*lines, *more]) or "no rows"

    def about(self, column: str) -> str:
        """A measure's description, formula, range and source. Raises a `ClearheadError` for another column."""
        for measure in MEASURES:
            if column in (measure.name, f"{measure.name} uniform", f"{measure.name} queries"):
                return measure.about()
        names = ", ".join(measure.name for measure in MEASURES)
        raise ClearheadError(f"{column!r} is no measure of a head; the measures are {names}.")

    def write(self, path: str | Path) -> Path:
        """Write the rows as CSV, every digit of them, to a path that ends in .csv.

        An old file is replaced when all is written. Raises a `ClearheadError` where the file cannot be written.
        """
        ending_of(path, [".csv"], "table")
        text = io.StringIO()
        writer = csv.DictWriter(
            text, list(dict.fromkeys(column for row in self for column in row)), lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(self)
        return write_page(path, text.getvalue(), "table")

    def to_pandas(self) -> DataFrame:
        """The rows as a `pandas.DataFrame`; NaN where a measure could not be computed. Needs pandas."""
        try:
            pandas = import_module("pandas")
        except ImportError as missing:
            raise ClearheadError(
                f"to_pandas() needs pandas, which could not be imported ({missing}). Install it with:  pip install "
                "pandas  or use the table as it is: a list of dicts."
            ) from missing
        return pandas.DataFrame(list(self))


def _cell(value: Any) -> str:
    """A number with three digits after the point, text in one line of at most 40 characters."""
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 1e5 else f"{value:.3g}"
    text = "" if value is None else printable(str(value))
    return text if len(text) <= 40 else f"{text[:39]}…"
