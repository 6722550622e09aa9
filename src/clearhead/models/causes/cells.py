"""The cells of a sweep: their edits, and the metric of runs with these edits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from clearhead.base.errors import ClearheadError
from clearhead.base.output.text import listed
from clearhead.base.selected import items_of
from clearhead.base.torch_state.torch_private import tree_map_only
from clearhead.models.edits.base import Edit
from clearhead.models.edits.edit import edit_own
from clearhead.models.model_calls import call_without_grad
from clearhead.models.recordings.attention_call import AttentionCall

PLAIN = (Tensor, int, float, str, type(None), torch.dtype, torch.device)  # inputs that can be repeated, or shared
Over = Literal["layer", "head", "position"]
Cell = dict[str, int | str]


def checked_sides(over: Any, who: str) -> tuple[Over, ...]:
    """The sides of the cells."""
    sides = items_of(over)
    known = [side for side in sides if isinstance(side, str) and side in get_args(Over)]
    if not sides or len(set(known)) != len(sides):
        raise ClearheadError(f"{who}: over is {over!r:.60}; expected one or several of {listed(get_args(Over))}.")
    return sides


def cells_of(calls: Sequence[AttentionCall], sides: Sequence[Over]) -> Iterator[Cell]:
    """Every cell of these sides, for each layer that made a call."""
    found: list[tuple[Any, ...]] = []
    for call in calls:
        every = {"layer": [call.layer.column], "head": range(call.shape[1]), "position": range(call.shape[2])}
        found += itertools.product(*(every[side] for side in sides))
    return (dict(zip(sides, cell, strict=True)) for cell in dict.fromkeys(found))


def edits_of(make_edit: Callable[..., Any], cell: Cell, who: str) -> list[Edit]:
    """The edits of a cell, checked."""
    made = make_edit(**cell)
    own = [made] if isinstance(made, Edit) else made
    if not isinstance(own, Sequence) or not own or not all(isinstance(one, Edit) for one in own):
        raise ClearheadError(f"{who}: make_edit gave {made!r:.60} for {cell}; expected an edit, or a list of edits.")
    return list(own)


def measured(model: nn.Module, cells: Sequence[Sequence[Edit]], inputs: Any, metric: Any, count: int) -> list[float]:
    """The metric of each cell, given by its edits, of one run of them all. `count`: the sequences of the inputs."""
    edits = []
    for place, own in enumerate(cells):
        for one in own:
            mine = copy(one)  # an edit may be given for several cells
            mine.sequences = slice(place * count, (place + 1) * count) if len(cells) > 1 else slice(None)
            edits.append(mine)
    with edit_own(model, edits):
        output = call_without_grad(model, inputs if len(cells) == 1 else _repeated(inputs, count, len(cells)))
    outputs = [output] if len(cells) == 1 else (_split(output, count, len(cells), n) for n in range(len(cells)))
    return [float(number_of(metric, one).detach()) for one in outputs]


def number_of(metric: Callable[[Any], Any], output: Any) -> Tensor:
    """The metric of an output, a tensor () of float64: a number, or the mean of one for each sequence."""
    found = metric(output)
    try:
        numbers = torch.as_tensor(found, dtype=None if hasattr(found, "dtype") else torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        numbers = torch.empty(0, dtype=torch.float64, device="cpu")
    if numbers.ndim > 1 or not numbers.numel() or numbers.is_complex():
        what = f"{tuple(found.shape)} of {found.dtype}" if isinstance(found, Tensor) else repr(found)[:60]
        raise ClearheadError(
            f"sweep: the metric gave {what}; expected a number, or one for each sequence, (B,). With batch > 1, parts "
            "of the output without a dimension of sequences, such as a loss, are None."
        )
    return numbers.double().mean()


def sequences_of(inputs: Any, calls: Sequence[AttentionCall]) -> int:
    """How many sequences the inputs hold: those of every attention call, and the first dimension of a tensor."""
    leaves: list[Any] = []
    tree_map_only(object, leaves.append, dict(inputs) if isinstance(inputs, Mapping) else inputs)
    shapes = [tuple(one.shape) for one in leaves if isinstance(one, Tensor)]
    others = [type(one).__name__ for one in leaves if not isinstance(one, PLAIN)]
    counts = {call.shape[0] for call in calls}
    if others or len(counts) != 1 or not counts <= {shape[0] for shape in shapes if shape}:
        raise ClearheadError(
            f"sweep: copies of the inputs cannot run side by side: they hold tensors of the shapes {shapes}, others of "
            f"the types {others}, and the model's attention calls have {sorted(counts)} sequences. Pass batch=1."
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
