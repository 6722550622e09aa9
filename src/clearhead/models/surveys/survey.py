"""survey(): statistics of every head of a model over many texts, as a table and as a page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from clearhead.base.output.pages import write_page
from clearhead.base.output.written import ending_of
from clearhead.base.torch_state.versions import compute_checksum
from clearhead.inspection.reductions.base import Reduction
from clearhead.models.interception.layers import Layers
from clearhead.models.interception.modules import Stack
from clearhead.models.recordings.calls import parts_apart
from clearhead.models.recordings.reduced import Means
from clearhead.models.surveys.examples import Examples, Spread
from clearhead.models.surveys.looks import CLASSES, NAMED
from clearhead.models.surveys.run import surveyed
from clearhead.models.table import Table
from clearhead.report.heads_page import Statistic, heads_page
from clearhead.report.layer import About


def survey(
    model: nn.Module,
    texts: Iterable[str] | Iterable[Mapping[str, object]],
    tokenizer: Callable[..., Mapping[str, object]],
    *,
    keep: Sequence[str | Reduction[object]] | None = None,
    state: str | Path | None = None,
    batch: int = 4096,
    max_length: int | None = None,
    rank: tuple[int, int] | None = None,
    wait: float = 600.0,
) -> Survey:
    """Statistics of every head of a model over many texts, by one process or many; a stopped survey can go on.

    >>> import torch, torch.nn.functional as F, clearhead as ch
    >>> class Reader(torch.nn.Module):
    ...     def forward(self, input_ids, attention_mask):
    ...         x = F.one_hot(input_ids, 128).float()[:, None]
    ...         return F.scaled_dot_product_attention(x, x, x, attn_mask=attention_mask[:, None, None].bool())
    >>> def tokenizer(texts):
    ...     return {"input_ids": [list(text.encode()) for text in texts]}
    >>> keep = ["first", ch.reductions.Entropy()]
    >>> found = ch.models.survey(Reader().eval(), ["a cab", "a longer text"], tokenizer, keep=keep)
    >>> found
    Survey(2 texts, 18 tokens, 1 heads: first, first uniform, Entropy (nats))
    >>> [row] = found.table()
    >>> row["queries"], round(row["first"], 4), round(row["first uniform"], 4), round(row["Entropy (nats)"], 4)
    (18, 0.1115, 0.1111, 2.299)

    `model`: called with `input_ids` and `attention_mask`, in eval mode; a model of transformers without the layer that
    makes words. Runs of the model in other threads meanwhile are left alone. `texts`: any iterable of strings, or of
    rows with a "text", such as those of `datasets`; it is read once.
    `tokenizer`: of transformers, or a function of a list of texts that gives {"input_ids": a list of ids for each}.
    `keep`: measures of `seen.table()` by their names, each beside uniform attention; "word classes", the weight that
    special tokens, punctuation, numbers, words and continuations of words receive; "examples", for each head and
    measure the three texts in which one query departs most from uniform attention; and reductions, as for
    `statistics`. None is normalised entropy, first, sink, previous, distance, the examples, and the classes where the
    tokenizer has a vocabulary. Means are over all queries (or keys) that count: every word weighs the same, padding
    does not count.
    `state`: a folder with one file for each batch. A file is written under another name first, so that a call that was
    killed at any point can be made again, goes on, and gives the same result. Several processes may share the folder.
    `rank`: (number, of how many) of this process; None takes RANK and WORLD_SIZE, which torchrun sets. Each process
    reads all texts, computes its batches, waits for those of the others, and returns the whole. `wait`: how many
    seconds a process waits without a new file. `batch`: the largest number of tokens in one pass of the model, with
    padding; texts are sorted by length among 1,024. `max_length`: longer texts are cut to it; None is the length that
    the model takes. Gives a `Survey`.
    Formula: each mean is Σ over batches of a sum / Σ of counts, both float64, added in the order of the batches. The
    spread over texts follows from moments of each batch, n, m and M = Σ (x − m)², which are merged in that order too:
    M = M₁ + M₂ + (m₂ − m₁)² n₁ n₂ / n (Chan, Golub and LeVeque 1979). The
    batches do not depend on ranks, so one process and many give the same bits, where the model does (one kind of
    device, one number of threads).
    Raises a `ClearheadError` for texts that are no strings or are empty; for the state of another survey, which is left
    as it is; for a file of the state that was changed, by its SHA-256 (delete it, and it is computed anew); and for
    batches of other ranks that do not come. Several processes may make the same survey in one folder at a time.
    Cost: a pass of the model; for each call a pass over its pairs for all measures, and two passes over one key a query
    for "first" and "previous"; a row of weights for each example of another measure; memory O(batch). The norms take
    two more passes over the pairs of each call, and for the transformed one the model reads 8 tokens more in each
    batch, to find the layer that writes a module's heads; they are NaN where there is none, see `output_projection`.
    The model's weights are read once for their digest.
    """
    parts = surveyed(model, texts, tokenizer, keep, state, batch, max_length, rank, wait)
    return Survey(type(model).__name__, **parts, layers=_layers(model, parts["means"]))


@dataclass(frozen=True, eq=False)
class Survey:
    """Statistics of every head over many texts. `ch.models.survey` gives it.

    `means`: a `Means` of all texts, by module; its entry i is of `columns[i]`, and column 0 is the number of queries of
    a text. `layers`: the layer of each module, as in the table. `texts`, `tokens`, `batches`: how many there were.
    `truncated`: how many texts were cut to `max_length`. `model`: the name of its class. `spread`: the moments of each
    statistic over the texts. `strongest`, `spelling`: what `examples()` is made of.
    """

    model: str
    columns: tuple[str, ...]
    means: Means
    texts: int
    tokens: int
    truncated: int
    batches: int
    max_length: int | None
    layers: Mapping[str, int | str] = field(default_factory=dict)
    spread: Spread = field(default_factory=Spread, repr=False)
    strongest: Examples = field(default_factory=lambda: Examples((), 0), repr=False)
    spelling: Mapping[int, str] = field(default_factory=dict, repr=False)

    @property
    def digest(self) -> str:
        """SHA-256 of all sums, counts and moments, in float64: equal where two surveys agree to the bit."""
        return compute_checksum("", self.means.state_dict() | self.spread.moments)

    def table(self) -> Table:
        """A row for each module and head, as `pandas.DataFrame` takes them.

        Its columns: layer (its number in the model, or its name, such as "decoder 0", where there are several stacks;
        the first layer where several share a module), module, head, queries (how many were added up), and each
        statistic that is one number a head, NaN where nothing counts; with that of uniform attention, "… uniform", and
        the number of queries that it is a mean over, "… queries", where these are known; and of measures and classes
        of words "… sd", the standard deviation over texts of the mean of each text (n − 1 in the denominator, NaN for
        fewer than 2), and "… texts", their number n. The standard error is sd / √n.
        """
        rows, state, counts = Table(), self.means.state_dict(), self.means.counts
        for number, name in enumerate(self.means):
            queries = state[f"{name}:0:sum"].long().tolist()
            columns: dict[str, Iterable[object]] = {"head": range(len(queries)), "queries": queries}
            for place, (column, mean) in enumerate(zip(self.columns, self.means[name], strict=True)):
                if place and mean.numel() == len(mean):
                    columns[column] = mean.flatten().tolist()
                if column.endswith(" uniform"):  # it stands beside the statistic before it
                    named = column.removesuffix(" uniform")
                    columns[f"{named} queries"] = counts[name][place].long().tolist()
                    if name in self.spread.moments:
                        spread = [self.spread.of(name, place // 2 - 1, head) for head in range(len(queries))]
                        columns[f"{named} sd"] = [deviation for deviation, _ in spread]
                        columns[f"{named} texts"] = [texts for _, texts in spread]
            rows += Table.of({"layer": self.layers.get(name, number), "module": name}, columns)
        return rows

    def examples(self) -> Table:
        """A row for each head, measure and text in which one query's measure departs most from uniform attention.

        Its columns: layer, module, head, measure, value and uniform (of that query; for the sink, of the text), query
        and key (positions in the text; the query is None for the sink, the key is the strongest one), tokens (those
        around query and key) and places (their positions).
        """
        rows = Table()
        for number, name in enumerate(self.means):
            for head in range(len(self.means[name][0])):
                row = {"layer": self.layers.get(name, number), "module": name, "head": head}
                for measure, kept in self.strongest.of(name, head):
                    for one in kept:
                        tokens = [self.spelling[token] for token in one.tokens]
                        more = one._asdict() | {"tokens": tokens, "places": list(one.places)}
                        rows.append(row | {"measure": measure} | more)
        return rows

    def write(self, path: str | Path, title: str | None = None) -> Path:
        """Write the table, or the page of all heads: the ending of the path says which, .csv or .html.

        The table is CSV, with every digit. The page shows all heads by any of the statistics: as squares, as a list,
        and as points; and the examples of each head, query and key marked. Squares are coloured by the difference of a
        statistic from that of uniform attention under the same masks, where the latter is known, else by its size. The
        page needs no network. `title`: of the page. An old file is replaced when all is written. Raises a
        `ClearheadError` for another ending, and where the file cannot be written.
        """
        if ending_of(path, [".csv", ".html"], "survey") == ".csv":
            return self.table().write(path)
        said = f"{self.texts:,} texts, {self.tokens:,} tokens"
        if self.truncated:
            said += f", {self.truncated:,} texts cut to {self.max_length:,} tokens"
        title = title or f"Attention of {self.model} over {self.texts:,} texts"
        return write_page(path, [heads_page(title, said, self._shown(), self.table(), self.examples())])

    def _shown(self) -> list[Statistic]:
        """The statistics of the page, each with its description."""
        found = []
        for column in self.columns[1:]:
            if column.endswith(" uniform"):
                continue
            lengths = column in NAMED and {"value", "transformed"} & {*NAMED[column].needs}
            is_share = column != "distance" and not lengths  # from 0 to 1
            beside = f"{column} uniform" if f"{column} uniform" in self.columns else None
            found.append(Statistic(_about(column), beside, share=beside is not None and is_share))
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


def _layers(model: nn.Module, modules: Iterable[str]) -> dict[str, int | str]:
    """The layer of each module, with the part of its name in which it differs from others in one layer."""
    known, turns = Layers(Stack(model).classes), dict[str, int]()
    layers = [(known.site(name, False, turns).layer, name) for name in modules]
    return {
        name: f"{layer}, {part}" if part else layer.column
        for (layer, name), part in zip(layers, parts_apart(layers), strict=True)
    }
