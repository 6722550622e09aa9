"""What a survey gives: a table of heads, and a page of it."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from clearhead.base.errors import ShapeError
from clearhead.base.pages import write_page
from clearhead.models.use.means import Means
from clearhead.models.use.surveys.looks import CLASSES, NAMED
from clearhead.models.use.surveys.state import Done
from clearhead.report.heads_page import About, Shown, heads_page


@dataclass(frozen=True, eq=False)
class Survey:
    """Statistics of every head over many texts. `ch.survey` gives it.

    >>> import torch, torch.nn.functional as F, clearhead as ch
    >>> class Reader(torch.nn.Module):
    ...     def forward(self, input_ids, attention_mask):
    ...         x = F.one_hot(input_ids, 128).float()[:, None]
    ...         return F.scaled_dot_product_attention(x, x, x, attn_mask=attention_mask[:, None, None].bool())
    >>> def tokenizer(texts):
    ...     return {"input_ids": [list(text.encode()) for text in texts]}
    >>> ch.survey(Reader().eval(), ["a cab", "a longer text"], tokenizer, keep="previous")
    Survey(2 texts, 18 tokens, 1 heads: previous, previous uniform)

    `means`: a `Means` of all texts, by module; entry i is `columns[i]`, of which the first is how many queries a text
    has. `texts`, `tokens`, and `truncated`: how many texts were cut to `max_length`. `model`: its class. `batches`.
    """

    model: str
    columns: tuple[str, ...]
    means: Means
    texts: int
    tokens: int
    truncated: int
    batches: int
    max_length: int | None

    @property
    def digest(self) -> str:
        """SHA-256 of all sums and counts, in float64: equal where two surveys agree to the bit."""
        found = hashlib.sha256()
        for name, tensor in sorted(self.means.state_dict().items()):
            found.update(f"{name} {tuple(tensor.shape)} ".encode())
            found.update(tensor.contiguous().numpy().tobytes())
        return found.hexdigest()

    def table(self) -> list[dict[str, Any]]:
        """A row for each module and head, as `pandas.DataFrame` takes them.

        Its columns: layer (the number of the module in the order of the calls), module, head, queries (how many were
        added up), and each statistic that is one number a head; NaN where nothing counts.
        """
        rows = []
        for layer, name in enumerate(self.means):
            means, state = self.means[name], self.means.state_dict()
            queries = state[f"{name}:0:sum"]
            for head in range(len(queries)):
                row: dict[str, Any] = {"layer": layer, "module": name, "head": head, "queries": int(queries[head])}
                for column, mean in zip(self.columns[1:], means[1:], strict=True):
                    if mean.numel() == len(mean):
                        row[column] = float(mean.flatten()[head])
                rows.append(row)
        return rows

    def save(self, path: str | Path) -> Path:
        """Write the table as CSV, every digit of it. A file that was there is as it was until all is written."""
        rows, text = self.table(), io.StringIO()
        writer = csv.DictWriter(
            text, list(dict.fromkeys(column for row in rows for column in row)), lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(rows)
        return write_page(path, text.getvalue(), "table")

    def report(self, path: str | Path, title: str | None = None) -> Path:
        """Write one HTML page that shows all heads by any of the statistics: as squares, as a list, and as points.

        Squares are coloured by how far a statistic is from that of uniform attention under the same masks, where that
        is known, else by its own size. Needs no network. Raises a `ClearheadError` where it cannot be written.
        """
        return write_page(path, self._page(title))

    def _page(self, title: str | None) -> str:
        said = f"{self.texts:,} texts, {self.tokens:,} tokens"
        if self.truncated:
            said += f", {self.truncated:,} texts cut to {self.max_length:,} tokens"
        return heads_page(
            title or f"Attention of {self.model} over {self.texts:,} texts", said, self._shown(), self.table()
        )

    def _shown(self) -> list[Shown]:
        """The statistics of the page, each with what it is."""
        found = []
        for column in self.columns[1:]:
            if column.endswith(" uniform"):
                continue
            beside = f"{column} uniform" if f"{column} uniform" in self.columns else None
            found.append(Shown(_about(column), beside, share=beside is not None and column != "distance"))
        return found

    def __repr__(self) -> str:
        heads = sum(len(self.means[name][0]) for name in self.means)
        return f"Survey({self.texts} texts, {self.tokens} tokens, {heads} heads: {', '.join(self.columns[1:])})"


def _about(column: str) -> About:
    measure = NAMED.get(column)
    if measure is not None:
        return About(measure.name, measure.says, measure.formula, measure.range, measure.does)
    kind = column.removeprefix("to ")
    if kind in CLASSES:
        says = f"The share of all weight that goes to tokens of the class “{kind}”."
        return About(
            column, says, "Σ_j r_j / N, j of the class, r_j = Σ_i w_ij, N the queries", "0 to 1", f"attends {column}"
        )
    return About(column, f"The mean of {column} over all queries, keys or texts that count.", "a mean", "any", None)


class Total:
    """The sum over batches, added in the order in which they are given."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns, self._counts = tuple(columns), [0, 0, 0]
        self._modules: dict[str, None] = {}
        self._sums: dict[str, Tensor] = {}

    def add(self, found: Done) -> None:
        for name, tensor in found.sums.items():
            before = self._sums.get(name)
            if before is not None and before.shape != tensor.shape:
                raise ShapeError(
                    f"survey: {name.rsplit(':', 2)[0]} gave a result of shape {tuple(before.shape)} before, and of "
                    f"{tuple(tensor.shape)} now: it depends on the length of the texts, as a Pool's map does, and "
                    "cannot be added up. Leave it out of keep."
                )
            self._sums[name] = tensor if before is None else before + tensor
        self._modules |= dict.fromkeys(found.modules)
        counts = (found.texts, found.tokens, found.truncated)
        self._counts = [a + b for a, b in zip(self._counts, counts, strict=True)]

    def survey(self, model: str, max_length: int | None, batches: int) -> Survey:
        means = Means()
        order = {name: number for number, name in enumerate(self._modules)}
        by_module = sorted(self._sums.items(), key=lambda item: order[item[0].rsplit(":", 2)[0]])
        means.load_state_dict(dict(by_module))
        texts, tokens, truncated = self._counts
        return Survey(model, self._columns, means, texts, tokens, truncated, batches, max_length)
