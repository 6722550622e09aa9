"""The tensors that a score, a mask or a bias reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from clearhead.base.torch_state.torch_private import parts_of
from clearhead.base.user_functions.function_reads import FunctionReads
from clearhead.biases.bias_function import BiasFunction
from clearhead.masks._read import KEPT
from clearhead.masks.base import Mask
from clearhead.masks.combined import leaves
from clearhead.scores.base import Score


def tensors_in(thing: Any) -> Iterator[Tensor]:
    """Yield the tensors that a user may write to, in a mask of any combination, a score, a bias, or a list of them."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, nn.Module):
        if any(parts_of(thing)):
            yield from thing.parameters()
            yield from thing.buffers()
        for value in vars(thing).values():
            parts = value if isinstance(value, list | tuple) else (value,)
            yield from (part for part in parts if isinstance(part, Tensor))
        if isinstance(thing, Score):
            yield from FunctionReads(thing.tile).tensors
            yield from FunctionReads(thing.changed_by).tensors
        for part in thing.modules():
            if isinstance(part, BiasFunction):
                yield from part.reads
                yield from FunctionReads(part.fn).tensors
    elif isinstance(thing, Mask):
        for mask in leaves(thing):
            yield from tensors_in([value for name, value in vars(mask).items() if not name.startswith(KEPT)])
    elif isinstance(thing, list | tuple):
        for part in thing:
            yield from tensors_in(part)
    elif callable(thing):
        yield from FunctionReads(thing).tensors
