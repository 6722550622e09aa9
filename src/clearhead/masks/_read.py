"""What is derived from a mask's own tensors, which its owner may write to, or replace."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from clearhead.base.tracing import compiling, readable, traced, transformed
from clearhead.base.versions import Versions

T = TypeVar("T")


def own(tensor: Tensor) -> Tensor:
    """A copy that counts the writes to it, made in inference mode too."""
    if compiling():
        return tensor.detach().clone()
    with torch.inference_mode(False):
        return tensor.detach().clone()


def derived(mask: Any, tensor: Tensor, derive: Callable[[Tensor], T]) -> T:
    """What a tensor of a mask gives: found once, and again when the tensor is another one or was written to.

    In compiled code it is what was found before.
    """
    before = getattr(mask, "_derived", None)
    if before is not None and (compiling() or _same(before[0], tensor)):
        found: T = before[1]
        return found
    found = derive(tensor)
    if not transformed() and not traced():  # what is made there is not valid outside
        mask._derived = None if compiling() else Versions([("the mask", tensor)]), found
    return found


def _same(versions: Versions | None, tensor: Tensor) -> bool:
    return versions is not None and versions.known and versions.changed([("the mask", tensor)]) is None


class Known(NamedTuple):
    """What is read of lengths."""

    values: Hashable | None  # their shape and all of them, where they are few
    longest: int | None  # None where there are none, or they cannot be read


def known(lengths: Tensor) -> Known:
    values = few_values(lengths)
    if values is not None:  # read at once
        return Known(values, max(values[1:], default=None))
    return Known(None, int(lengths.max()) if lengths.numel() and readable(lengths) else None)


def few_values(numbers: Tensor) -> tuple[Any, ...] | None:
    """The shape and the values of a small tensor, read once, for `Mask.signature`; None for a larger one."""
    if numbers.numel() > 64 or not readable(numbers):
        return None
    return (tuple(numbers.shape), *numbers.flatten().tolist())
