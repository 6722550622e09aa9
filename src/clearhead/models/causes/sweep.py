"""sweep(): one edit for each layer, head or position, and what each changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn

from clearhead.base.errors import ClearheadError
from clearhead.base.numbers import check_count
from clearhead.base.output.pictures import Side
from clearhead.base.output.text import listed
from clearhead.models.causes.cells import Over, cells_of, checked_sides, edits_of, measured, number_of, sequences_of
from clearhead.models.causes.kept import Kept
from clearhead.models.causes.metrics import refuse_padding
from clearhead.models.edits.base import Edit
from clearhead.models.model_calls import call_without_grad
from clearhead.models.recordings.calls import HeadNumbers
from clearhead.models.surveys.run import bar
from clearhead.models.table import Table
from clearhead.models.watch import watch_own


class Sweep(HeadNumbers, Table):
    """A row for each cell of a sweep: its layer, head or position, the `value` of the metric, and the `effect`.

    `sweep` gives it. `plain`: the metric without an edit. The effect is value − plain. `values`, (layers, heads): the
    effects as a tensor, whose meaning `name`, `unit` and `sentence` say, for a picture of every head; other sides are
    read by `grid`, as in `grid("layer", "position")[0]`. Of `attribution_patching` the effects are estimates; the rows
    in `checked` have the `exact` effect and its `error`.
    """

    plain: float
    metric: str = "metric"  # its name
    unit: str = ""
    edited: str = ""  # the classes of its edits, such as "Patch"
    estimated = False  # whether the effects are estimates from a gradient

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{'estimated ' * self.estimated}effect on the {self.metric}"

    @property
    def sentence(self) -> str:  # type: ignore[override]
        plain = f"{self.plain:.4g} {self.unit}".rstrip()
        change = "The change, to first order," if self.estimated else "The change"
        return f"{change} of the {self.metric} by the edits of this head alone; without an edit it is {plain}."

    @property
    def checked(self) -> Table:
        """The rows of an estimate whose exact effect was computed, the largest estimate first."""
        known = (row for row in self if not math.isnan(row.get("exact", math.nan)))
        return Table(sorted(known, key=lambda row: -abs(row["effect"])))

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        """The effects, float64 (layers, heads), layers in the order of the table; NaN where there is no such head."""
        sides = [side for side in get_args(Over) if self and side in self[0]]
        if sides != ["layer", "head"]:
            raise ClearheadError(
                f"values is over layers and heads, this sweep over {listed(sides)}: use grid(rows, columns)."
            )
        return torch.from_numpy(self.grid("layer", "head")[0])

    def grid(
        self, rows: Over, columns: Over, **fixed: int | str
    ) -> tuple[np.ndarray, list[int | str], list[int | str]]:
        """The effects as a matrix, with the names of its rows and of its columns; NaN where there is no cell.

        `fixed`: of a sweep over three sides, the number of the third: `grid("head", "position", layer=2)`. Raises a
        `ClearheadError` where several cells have one place in the matrix.
        """
        chosen = [row for row in self if all(row.get(side) == number for side, number in fixed.items())]
        names = [list(dict.fromkeys(row[side] for row in chosen)) for side in (rows, columns)]
        found, met = np.full((len(names[0]), len(names[1])), np.nan), set()
        for row in chosen:
            place = names[0].index(row[rows]), names[1].index(row[columns])
            if place in met:
                there = f"several cells have {rows} {row[rows]} and {columns} {row[columns]}"
                raise ClearheadError(f"grid: {there}. Choose a number of the third side, such as layer=0.")
            met.add(place)
            found[place] = row["effect"]
        return found, names[0], names[1]

    @property
    def _layers(self) -> list[int | str]:
        return list(dict.fromkeys(row["layer"] for row in self))

    @property
    def _meaning(self) -> str:  # type: ignore[override]
        return f"{'estimated ' * self.estimated}change of the {self.metric}, {self.plain:.4g} without an edit"

    def _picture(self) -> tuple[np.ndarray, Side, Side]:
        sides: list[Over] = [side for side in get_args(Over) if self and side in self[0]]
        if len(sides) == 1:
            names, effects = [row[sides[0]] for row in self], np.array([[row["effect"]] for row in self])
            across = Side("effect", 1)
        else:
            effects, names, others = self.grid(*sides[:2])  # raises for three sides
            across = Side(sides[1], len(others), [str(name) for name in others])
        return effects, Side(sides[0], len(names), [str(name) for name in names]), across


def sweep(
    model: nn.Module,
    make_edit: Callable[..., Edit | Sequence[Edit]],
    inputs: object,
    metric: Callable[..., Tensor | float],
    over: Over | Sequence[Over] = ("layer", "head"),
    *,
    batch: int = 1,
    folder: str | Path | None = None,
) -> Sweep:
    """Run a model once for each layer and head, or position, each time with another edit, and measure its output.

    >>> import torch, clearhead as ch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    ...                                      num_attention_heads=8, num_key_value_heads=2)).eval()
    >>> inputs = {"input_ids": torch.arange(10)[None]}
    >>> found = ch.models.sweep(model, lambda layer, head: ch.edits.Ablate(layer, head), inputs,
    ...                         ch.models.logit_difference(token=7, against=3), batch=8)
    >>> len(found), sorted(found[0])
    (16, ['effect', 'head', 'layer', 'value'])

    `make_edit`: a function of the cell's `layer`, `head` and `position`, whichever `over` names, as keywords; it gives
    an edit, or a list of edits. A layer is its number, or its name where the model has several stacks. `inputs`: as for
    `audit`. `metric`: a function of the model's output that gives a number, or one for each sequence, whose
    mean counts: `logit_difference`, `kl`, `next_token_loss`, or your own, which may have attributes `name` and `unit`.
    `over`: one or several of "layer", "head" and "position", a query's; layers and heads are those of the model's
    attention calls on these inputs.
    Runs of the model in other threads meanwhile are left alone.
    `batch`: how many cells run at once, as copies of the inputs side by side, each with its own edit. Tensors of the
    inputs whose first dimension is the number of sequences are repeated, and the outputs' are split again; what else
    the model gives, such as a loss or a cache, is None. So it is for models whose sequences do not act on each other,
    and whose attention calls all have as many sequences as the inputs.
    `folder`: a folder of this sweep alone, where results are kept, from which an interrupted sweep goes on. Then the
    cells, the inputs, the name of the metric, its number without an edit, and the text and the tensors of the edits
    that are done must be the same; and the run that had the largest effect is made again, and must give the same
    numbers. What a lambda does, and what a recording holds that an edit takes from, is compared by this run alone.
    Gives a `Sweep`, a `Table` with a row for each cell, which has `plain`, `values`, `grid` and `plot()`. Raises a
    `ClearheadError` for an edit that changed nothing, for a metric that gives no number, for one of the three that
    reads padding, by the attention mask of the inputs, for a folder of another sweep or with a changed line, and where
    the folder can't be written to.
    Cost: a run of the model for each cell, without gradients, or for each `batch` cells a run on so many copies.
    Source: Michel et al. 2019, "Are Sixteen Heads Really Better than One?"; Meng et al. 2022, "Locating and Editing
    Factual Associations in GPT".
    """
    sides = checked_sides(over, "sweep")
    batch = check_count(batch, 1, "sweep: batch")
    with watch_own(model) as seen:
        output = call_without_grad(model, inputs)
    refuse_padding(metric, model, inputs, output)
    plain = float(number_of(metric, output).detach())
    cells = list(cells_of(seen.calls, sides))
    kept = Kept(folder, cells, plain, metric, inputs)
    count = sequences_of(inputs, seen.calls) if max(batch, kept.together) > 1 else 1
    done = [edits_of(make_edit, cell, "sweep") for cell in cells[: len(kept.numbers)]]
    names = names_of(done)
    made = partial(measured, model, inputs=inputs, metric=metric, count=count)
    kept.check(done, made)
    with bar(len(cells), "cells", len(kept.numbers)) as shown:
        while len(kept.numbers) < len(cells):
            some = cells[len(kept.numbers) :][:batch]
            edits = [edits_of(make_edit, cell, "sweep") for cell in some]
            names |= names_of(edits)
            kept.add(edits, made)
            shown.update(len(some))
    rows = zip(cells, kept.numbers, strict=True)
    return sweep_of(({**cell, "value": value, "effect": value - plain} for cell, value in rows), plain, metric, names)


def names_of(edits: Iterable[Sequence[Edit]]) -> dict[str, None]:
    """The names of the classes of the edits of some cells, in order."""
    return dict.fromkeys(type(edit).__name__ for own in edits for edit in own)


def sweep_of(
    rows: Iterable[dict[str, Any]], plain: float, metric: Any, names: Iterable[str], estimated: bool = False
) -> Sweep:
    """A table of these rows. `metric`: may have a name and a unit, as attributes. `names`: of the classes of edits."""
    found = Sweep(rows)
    found.edited = " and ".join(names)
    found.plain, found.estimated = plain, estimated
    found.metric, found.unit = getattr(metric, "name", "metric"), getattr(metric, "unit", "")
    return found
