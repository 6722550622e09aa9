"""Calls of a model with a mapping of keywords, a tuple of arguments, or one argument."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.base.errors import ClearheadError
from clearhead.base.output.text import brief
from clearhead.base.torch_state.torch_private import tree_map_only


@torch.no_grad()
def call_without_grad(model: nn.Module, inputs: Any) -> Any:
    """The model's output on these inputs, without gradients."""
    return call_model(model, inputs)


def call_model(model: nn.Module, inputs: Any, copies_tensors: bool = False) -> Any:
    """The model's output on a mapping of keywords, a tuple of arguments, or one argument, which are not written to.

    `copies_tensors`: for a model that may write to its tensors too.
    """

    def own(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.clone() if copies_tensors else value
        return deepcopy(value)  # such as a key/value cache

    if isinstance(inputs, Mapping):
        return model(**{name: own(value) for name, value in inputs.items()})
    try:
        return model(*map(own, inputs)) if isinstance(inputs, tuple) else model(own(inputs))
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        first = inputs[0] if isinstance(inputs, list | tuple) and inputs else inputs
        if not isinstance(first, str | bytes | int | list):  # a text, or tokens in the place of tensors
            raise
        raise ClearheadError(
            f"inputs is {brief(inputs)}, a text or tokens: pass what the tokenizer makes of it, "
            'tokenizer(text, return_tensors="pt"), or the ids as a tensor (B, L).'
        ) from error


def outside_inference(inputs: Any) -> Any:
    """The inputs for a run with gradients: copies of tensors of inference mode, which autograd does not keep."""
    given = dict(inputs) if isinstance(inputs, Mapping) else inputs
    return tree_map_only(Tensor, lambda tensor: tensor.clone() if tensor.is_inference() else tensor, given)
