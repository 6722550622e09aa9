"""sweep(): one edit for each layer, head or position, and what each changes."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from clearhead.base.errors import ClearheadError
from clearhead.base.numbers import check_count
from clearhead.base.pages import write_page
from clearhead.base.pictures import Panel, Side, Style, draw
from clearhead.base.selected import items_of
from clearhead.base.text import listed
from clearhead.base.torch_private import tree_map_only
from clearhead.models.attention_call import AttentionCall
from clearhead.models.checks import run
from clearhead.models.table import Table
from clearhead.models.use.edits.base import Edit
from clearhead.models.use.edits.edit import edit
from clearhead.models.use.surveys.run import bar
from clearhead.models.watch import watch

HEADER = "clearhead sweep"
PLAIN = (Tensor, int, float, str, type(None), torch.dtype, torch.device)  # inputs that can be repeated, or shared
Over = Literal["layer", "head", "position"]
Cell = dict[str, int | str]


class Sweep(Table):
    """A row for each cell of a sweep: its layer, head or position, the `value` of the metric, and the `effect`.

    `sweep` gives it. `plain`: the metric without an edit. The effect is value − plain. `values`, (layers, heads): the
    effects as a tensor, whose meaning `name`, `unit` and `sentence` say, for a picture of every head.
    """

    plain: float
    metric: str = "metric"  # its name
    unit: str = ""

    @property
    def name(self) -> str:
        return f"effect on the {self.metric}"

    @property
    def sentence(self) -> str:
        plain = f"{self.plain:.4g} {self.unit}".rstrip()
        return f"The change of the {self.metric} when this head alone is edited; without an edit it is {plain}."

    @property
    def values(self) -> Tensor:
        """The effects, float64 (layers, heads), layers in the order of the table; NaN where there is no such head."""
        sides = [side for side in get_args(Over) if self and side in self[0]]
        if sides != ["layer", "head"]:
            raise ClearheadError(
                f"values has a number for each layer and head, and this sweep is over {listed(sides)}. "
                'Sweep over ("layer", "head"), or use grid(rows, columns).'
            )
        return torch.from_numpy(self.grid("layer", "head")[0])

    def grid(self, rows: Over, columns: Over) -> tuple[np.ndarray, list[int | str], list[int | str]]:
        """The effects as a matrix, with the names of its rows and of its columns; NaN where there is no cell."""
        names = [list(dict.fromkeys(row[side] for row in self)) for side in (rows, columns)]
        found = np.full((len(names[0]), len(names[1])), np.nan)
        for row in self:
            found[names[0].index(row[rows]), names[1].index(row[columns])] = row["effect"]
        return found, names[0], names[1]

    def plot(self, *, title: str | None = None, cmap: Any = "RdBu", ax: Any = None, bar: bool = True) -> Any:
        """A picture of the effects, with layers in rows: blue where the metric grows, red where it falls.

        `title`, `cmap`, `ax`, `bar`: as for `Weights.plot`. Needs matplotlib. Gives the axes.
        """
        sides: list[Over] = [side for side in get_args(Over) if self and side in self[0]]
        if len(sides) > 2:
            raise ClearheadError("plot() draws two sides: choose some rows of the sweep, or use grid(rows, columns).")
        if len(sides) == 1:
            names, effects = [row[sides[0]] for row in self], np.array([[row["effect"]] for row in self])
            across = Side("effect", 1)
        else:
            effects, names, others = self.grid(*sides)
            across = Side(sides[1], len(others), [str(name) for name in others])
        down = Side(sides[0], len(names), [str(name) for name in names])
        meaning = f"change of the {self.metric}, {self.plain:.4g} without an edit"
        style = Style(title, cmap, "signed", ax, bar)
        return draw([Panel(effects, np.isnan(effects))], down, across, style, meaning)


def sweep(
    model: nn.Module,
    make_edit: Callable[..., Edit | Sequence[Edit]],
    inputs: Any,
    metric: Callable[[Any], Any],
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
    `assert_attends`. `metric`: a function of the model's output that gives a number, or one for each sequence, whose
    mean counts: `logit_difference`, `kl`, `next_token_loss`, or your own, which may have attributes `name` and `unit`.
    `over`: one or several of "layer", "head" and "position", a query's; layers and heads are those of the model's
    attention calls on these inputs.
    `batch`: how many cells run at once, as copies of the inputs side by side, each with its own edit. Tensors of the
    inputs whose first dimension is the number of sequences are repeated, and the outputs' are split again; what else
    the model gives, such as a loss or a cache, is None. So it is for models whose sequences do not act on each other,
    and whose attention calls all have as many sequences as the inputs. `folder`: a folder where results are kept, from
    which an interrupted sweep goes on; it belongs to one model, inputs and edit.
    Gives a `Sweep`, a `Table` with a row for each cell, which has `plain`, `values`, `grid` and `plot()`. Raises a
    `ClearheadError` for an edit that changed nothing, and for a metric that gives no number.
    Cost: a run of the model for each cell, without gradients, or for each `batch` cells a run on so many copies.
    Source: Michel et al. 2019, "Are Sixteen Heads Really Better than One?"; Meng et al. 2022, "Locating and Editing
    Factual Associations in GPT".
    """
    sides = items_of(over)
    known = [side for side in sides if isinstance(side, str) and side in get_args(Over)]
    if not sides or len(set(known)) != len(sides):
        raise ClearheadError(f"sweep: over is {over!r:.60}; expected one or several of {listed(get_args(Over))}.")
    if not callable(make_edit) or not callable(metric):
        raise ClearheadError(
            "sweep: make_edit and metric are functions, such as lambda layer, head: ch.edits.Ablate(layer, head) and "
            "ch.models.logit_difference(token)."
        )
    batch = check_count(batch, 1, "sweep: batch")
    with watch(model) as seen:
        plain = _number(metric, run(model, inputs))
    cells = list(_cells(seen.calls, sides))
    kept = _Kept(folder, cells, plain)
    count = _sequences(inputs, seen.calls) if batch > 1 else 1
    with bar(len(cells), "cells", len(kept.values)) as shown:
        while len(kept.values) < len(cells):
            some = cells[len(kept.values) :][:batch]
            kept.add(_values(model, make_edit, inputs, metric, some, count))
            shown.update(len(some))
    rows = zip(cells, kept.values, strict=True)
    found = Sweep({**cell, "value": value, "effect": value - plain} for cell, value in rows)
    found.plain, found.metric, found.unit = plain, *_said(metric)
    return found


def _said(metric: Any) -> tuple[str, str]:
    """The name and the unit of a metric: its attributes, where it has them."""
    name, unit = getattr(metric, "name", None), getattr(metric, "unit", None)
    return name if isinstance(name, str) else "metric", unit if isinstance(unit, str) else ""


def _cells(calls: Sequence[AttentionCall], sides: Sequence[Over]) -> Iterator[Cell]:
    """Every cell of these sides, for each layer that made a call."""
    if not calls:
        raise ClearheadError("sweep: the model made no attention call that is recognised.")
    known: dict[tuple[Any, ...], None] = {}
    for call in calls:
        every = {"layer": [call.layer.column], "head": range(call.shape[1]), "position": range(call.shape[2])}
        for cell in itertools.product(*(every[side] for side in sides)):
            known[cell] = None
    return (dict(zip(sides, cell, strict=True)) for cell in known)


def _values(
    model: nn.Module, make_edit: Callable[..., Any], inputs: Any, metric: Any, cells: list[Cell], count: int
) -> list[float]:
    """The metric of each cell, of a run of them all."""
    edits = []
    for place, cell in enumerate(cells):
        made = make_edit(**cell)
        own = [made] if isinstance(made, Edit) else made
        if not isinstance(own, Sequence) or not own or not all(isinstance(one, Edit) for one in own):
            raise ClearheadError(
                f"sweep: make_edit gave {made!r:.60} for {cell}; expected an edit, such as ch.edits.Ablate(layer, "
                "head)."
            )
        for one in own:
            mine = copy(one)  # an edit may be given for several cells
            mine.sequences = slice(place * count, (place + 1) * count) if len(cells) > 1 else slice(None)
            edits.append(mine)
    with edit(model, *edits):
        output = run(model, inputs if len(cells) == 1 else _repeated(inputs, count, len(cells)))
    if len(cells) == 1:
        return [_number(metric, output)]
    return [_number(metric, _split(output, count, len(cells), place)) for place in range(len(cells))]


def _number(metric: Callable[[Any], Any], output: Any) -> float:
    """The metric of an output: a number, or the mean of one for each sequence."""
    found = metric(output)
    try:
        numbers = torch.as_tensor(found, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        numbers = torch.empty(0, dtype=torch.float64, device="cpu")
    if numbers.ndim > 1 or not numbers.numel():
        what = tuple(found.shape) if isinstance(found, Tensor) else repr(found)[:60]
        raise ClearheadError(
            f"sweep: the metric gave {what}; expected a number, or one for each sequence, (B,). With batch > 1, parts "
            "of the output without a dimension of sequences, such as a loss, are None."
        )
    return float(numbers.mean())


def _sequences(inputs: Any, calls: Sequence[AttentionCall]) -> int:
    """How many sequences the inputs hold: those of every attention call, and the first dimension of a tensor."""
    leaves: list[Any] = []
    tree_map_only(object, leaves.append, dict(inputs) if isinstance(inputs, Mapping) else inputs)
    for one in leaves:
        if not isinstance(one, PLAIN):
            raise ClearheadError(f"sweep: the inputs hold a {type(one).__name__}, which is not repeated. Pass batch=1.")
    shapes = [tuple(one.shape) for one in leaves if isinstance(one, Tensor)]
    counts = {call.shape[0] for call in calls}
    if len(counts) != 1 or not counts <= {shape[0] for shape in shapes if shape}:
        raise ClearheadError(
            f"sweep: the inputs are tensors of the shapes {', '.join(map(str, shapes))}, and the model's attention "
            f"calls have {' or '.join(map(str, sorted(counts)))} sequences. Copies of the inputs side by side are told "
            "apart where both are the same number. Pass batch=1."
        )
    return counts.pop()


def _repeated(inputs: Any, count: int, times: int) -> Any:
    """The inputs several times, side by side: a dict, not a tokenizer's class, since its tensors are repeated."""

    def more(one: Tensor) -> Tensor:
        if one.ndim and one.shape[0] == count:
            return one.repeat(times, *[1] * (one.ndim - 1))
        return one

    return tree_map_only(Tensor, more, dict(inputs) if isinstance(inputs, Mapping) else inputs)


def _split(output: Any, count: int, times: int, place: int) -> Any:
    """The part of one cell in an output of several: None where the output has no dimension of sequences."""

    def own(one: Tensor) -> Tensor | None:
        if one.ndim and one.shape[0] == count * times:
            return one[place * count : (place + 1) * count]
        return None  # of all cells together

    if isinstance(output, Mapping):  # an output of transformers has its fields as attributes too
        return type(output)(**{name: tree_map_only(Tensor, own, value) for name, value in output.items()})
    return tree_map_only(Tensor, own, output)


class _Kept:
    """The values of the cells that are done, in a file where a folder is given: a line for each run of the model."""

    def __init__(self, folder: Any, cells: list[Cell], plain: float) -> None:
        self.values: list[float] = []
        self._path: Path | None = None
        if folder is None:
            return
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._path = Path(folder) / "sweep.jsonl"
            lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        except (OSError, TypeError, ValueError) as error:
            raise ClearheadError(
                f"sweep: folder is {folder!r:.200}, which is no folder to write to ({error})."
            ) from error
        header = {HEADER: 1, "cells": cells, "plain": plain}
        if not lines:
            self._write(header)
            return
        found, *rest = (_line(line) for line in lines)
        same = isinstance(found, dict) and found.get(HEADER) == 1 and found.get("cells") == cells
        before = found.get("plain") if same else None
        same = isinstance(before, float) and (
            math.isclose(before, plain, rel_tol=1e-4, abs_tol=1e-6) or (math.isnan(before) and math.isnan(plain))
        )
        if not same:
            raise ClearheadError(
                f"sweep: {self._path} is of another sweep: of other cells, or of a model or inputs on which the metric "
                "is another. Pass a folder that only this sweep uses."
            )
        whole = 1  # the lines before one that was interrupted
        for values in rest:
            if not isinstance(values, list) or not all(isinstance(value, float) for value in values):
                break
            self.values += values
            whole += 1
        if whole < len(lines):
            write_page(self._path, "".join(f"{line}\n" for line in lines[:whole]), "sweep")
        self.values = self.values[: len(cells)]

    def add(self, values: list[float]) -> None:
        self.values += values
        if self._path is not None:
            self._write(values)

    def _write(self, line: Any) -> None:
        assert self._path is not None
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _line(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
