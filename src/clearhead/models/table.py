"""Rows of heads, and what their columns are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any, Self

from clearhead.base.errors import ClearheadError
from clearhead.inspection.measures import MEASURES


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

    @classmethod
    def of(cls, row: Mapping[str, Any], columns: Mapping[str, Iterable[Any]]) -> Self:
        """A row for each entry of the columns, which are of one length; `row` is what all of them begin with."""
        entries = zip(*columns.values(), strict=True)
        return cls({**row, **dict(zip(columns, each, strict=True))} for each in entries)

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
