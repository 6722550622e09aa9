"""A model run on inputs as a person has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


@torch.no_grad()
def run(model: nn.Module, inputs: Any) -> Any:
    """The model's output on a mapping of keywords, a tuple of arguments, or one argument."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)
