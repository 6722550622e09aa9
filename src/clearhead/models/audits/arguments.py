"""The types of an audit's arguments, and their checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, get_args

import torch
from torch import Tensor

from clearhead.base.arrays import Array, check_memory
from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.numbers import check_count
from clearhead.base.output.text import brief
from clearhead.base.torch_state.tensor_kind import is_readable
from clearhead.models.audits.audit_report import Level

Model = Callable[..., object]
OutputPicker = Callable[[Any], Tensor]  # picks the outputs (B, L, ...) from what a model returns


class AuditOptions(TypedDict, total=False):
    """The keywords of `audit`."""

    padding: Array | None
    level: Level
    inputs: str | None
    output: OutputPicker | None
    seed: int
    expect: Sequence[str]


def validate_level(level: Any) -> None:
    """Raise an error for a level that is none."""
    if not isinstance(level, str) or level not in get_args(Level):
        raise ClearheadError(f'audit: level is {brief(level)}; expected "outputs", "layers" or "all".')


def validate_labels(expect: Any) -> tuple[str, ...]:
    """The labels of known findings. Raises an error for a single text, whose letters would be labels."""
    if not isinstance(expect, list | tuple) or not all(isinstance(label, str) for label in expect):
        raise ClearheadError(f'audit: expect is {brief(expect)}; expected labels, such as ["layers.3: documents-mix"].')
    return tuple(expect)


def validate_arguments(model: Any, batch: Any, inputs: Any, output: Any, seed: Any) -> None:
    """Raise an error for what is no model, no name of an input, no function of the output, or no seed."""
    if isinstance(model, type) or not callable(model):
        raise ClearheadError(f"audit: model is {brief(model)}; expected a module, or a function of the batch.")
    if inputs is not None and not (isinstance(batch, Mapping) and isinstance(inputs, str) and inputs in batch):
        raise ClearheadError(f"audit: inputs is {brief(inputs)}; expected the name of an input of the batch.")
    if output is not None and not callable(output):
        raise ClearheadError(f"audit: output is {brief(output)}; expected a function of what the model returns.")
    check_count(seed, 0, "audit: seed")


def validate_input(tensor: Any) -> Tensor:
    """The tensor of a batch that is changed. Raises an error where it has no numbers or no positions."""
    if not isinstance(tensor, Tensor):
        raise ClearheadError(f"audit: the input is {brief(tensor)}; expected a tensor of ids or vectors.")
    shape = tuple(check_memory(tensor, "the input").shape)
    if tensor.layout != torch.strided or not is_readable(tensor):
        raise ClearheadError(f"audit: the input, {shape}, holds no numbers to change; expected a dense tensor.")
    if len(shape) < 2 or 0 in shape:
        raise ShapeError(f"audit: the input has shape {shape}; expected (B, L) or more, and at least one position.")
    return tensor
