"""Which numbers a selector means: a number, a negative one from the end, a slice, or a list of these."""

from __future__ import annotations

import operator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.base.output.text import brief
from clearhead.base.torch_state.tensor_kind import is_freed, is_readable

LISTS = (list, tuple, range)


def items_of(selector: Any) -> tuple[Any, ...]:
    """The parts of a selector: whole numbers as Python's, slices, and whatever else stands in it, as it is. Arrays of
    NumPy and tensors are lists of their numbers."""
    numbers = isinstance(selector, Tensor) and selector.layout == torch.strided and is_readable(selector)
    numbers = numbers and not is_freed(selector)
    if numbers or isinstance(selector, np.ndarray):
        selector = selector.tolist()
    return tuple(map(_plain, selector if isinstance(selector, LISTS) else (selector,)))


def _plain(item: Any) -> Any:
    if isinstance(item, bool | np.bool_ | Tensor | np.ndarray):
        return item
    try:
        return operator.index(item)
    except TypeError:
        return item


def is_number(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def is_slice(item: Any) -> bool:
    """Whether it is a slice of whole numbers."""
    if not isinstance(item, slice):
        return False
    try:
        range(0)[item]
    except (TypeError, ValueError):  # ends that are no numbers, and a step of 0
        return False
    return True


def checked_numbers(selector: Any, name: str) -> tuple[int | slice, ...]:
    """The parts of a selector of numbers. `name`: what it is called."""
    items = items_of(selector)
    if not items or not all(is_number(item) or is_slice(item) for item in items):
        raise ClearheadError(f"{name} is {brief(selector)}; expected a number, a slice, a list of these, or None.")
    return items


def numbers_of(selector: Any, count: int, name: str, of: str) -> tuple[int, ...]:
    """The numbers of `count` that are meant, in the order of the selector; None is all. `name`: what the selector is
    called. `of`: what has so many, such as "layers.3 has 8 heads"."""
    if selector is None:
        return tuple(range(count))
    found: list[int] = []
    for item in checked_numbers(selector, name):
        found += range(count)[item] if isinstance(item, slice) else [item]
    if not found or not all(-count <= number < count for number in found):
        raise ClearheadError(f"{name} is {brief(selector)}, and {of}, numbered from 0.")
    return tuple(number % count for number in found)


def as_index(selector: Any, count: int, name: str) -> Any:
    """A list of numbers as a number or a slice, for indices that take these alone; anything else as it is."""
    if not isinstance(selector, (*LISTS, Tensor, np.ndarray)):
        return selector
    found = numbers_of(selector, count, name, f"there are {count}")
    steps = {later - one for one, later in pairwise(found)}
    if len(found) == 1:
        return found[0]
    if len(steps) > 1 or min(steps) < 1:
        raise ClearheadError(f"{name} is {brief(selector)}; expected a number, a slice, or a list with even steps.")
    return slice(found[0], found[-1] + 1, steps.pop())
