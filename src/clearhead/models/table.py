"""Rows of heads, and what their columns are."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from clearhead.base.errors import ClearheadError
from clearhead.inspection.measures import MEASURES, Found, Measure


class Table(list[dict[str, Any]]):
    """A list of rows, one a head, each a dict by its columns. `Recording.table` gives it.

    >>> import torch, torch.nn.functional as F, clearhead as ch
    >>> class Block(torch.nn.Module):
    ...     def forward(self, x):
    ...         return F.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> block = Block()
    >>> with ch.watch(block) as seen:
    ...     output = block(torch.zeros(1, 2, 5, 8))
    >>> table = seen.table()
    >>> len(table), round(table[0]["previous"], 3), round(table[0]["previous uniform"], 3)
    (2, 0.321, 0.321)
    >>> print(table.about("previous"))
    The weight on the token before the query's own, a mean over the queries that may see one. Formula: mean_i w_ij, ...

    `about(column)` says what a measure is, with its formula, range and source; `to_pandas()` makes a DataFrame.
    """

    def about(self, column: str) -> str:
        """What a measure is, its formula, range and source. Raises a `ClearheadError` for what is no measure."""
        for measure in MEASURES:
            if column in (measure.name, f"{measure.name} uniform"):
                return measure.about()
        names = ", ".join(measure.name for measure in MEASURES)
        raise ClearheadError(f"{column!r} is no measure of a head; the measures are {names}.")

    def to_pandas(self) -> Any:
        """The rows as a `pandas.DataFrame`; NaN where a measure could not be computed. Needs pandas."""
        try:
            pandas = import_module("pandas")
        except ImportError as missing:
            raise ClearheadError(
                f"to_pandas() needs pandas, which could not be imported ({missing}). Install it with:  pip install "
                "pandas  or use the table as it is: a list of dicts."
            ) from missing
        return pandas.DataFrame(list(self))


def columns_of(found: dict[Measure, Found], head: int) -> dict[str, float]:
    """A head's measures, each beside that of uniform attention."""
    columns = {}
    for measure, values in found.items():
        columns[measure.name] = float(values.value[head])
        columns[f"{measure.name} uniform"] = float(values.uniform[head])
    return columns


def joined(rows: Iterable[dict[str, Any]], found: dict[Measure, Found]) -> list[dict[str, Any]]:
    """A call's rows, one a head, with its measures."""
    return [row | columns_of(found, head) for head, row in enumerate(rows)]
