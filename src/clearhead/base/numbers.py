"""Checks of numbers (whole, finite, positive) and of flags."""

from __future__ import annotations

import operator
import sys
from typing import Any

import numpy as np
from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.base.output.text import brief

_LARGEST = sys.float_info.max
MOST = 2**40  # of a size, a count or a position: larger ones exceed any memory


def check_count(number: Any, least: int, name: str, most: float = MOST) -> int:
    """A whole number, Python's or NumPy's, of at least `least` and at most `most`."""
    try:
        if isinstance(number, bool | np.bool_ | np.ma.MaskedArray):
            raise TypeError
        # in compiled code a number that changes between calls stays a symbol: index() would make it a constant
        count = number if type(number) is int else operator.index(number)
    except (TypeError, RuntimeError):  # torch.vmap gives a RuntimeError for a number that differs by sample
        count = least - 1
    if count < least:
        raise ClearheadError(f"{name} is {brief(number)}; expected a whole number, {least} or more.")
    if count > most:
        raise ClearheadError(f"{name} is {count:,}; expected {most:,} at most.")
    return count


def check_flag(flag: Any, name: str) -> bool:
    """True or False, Python's or NumPy's."""
    if not isinstance(flag, bool | np.bool_):
        raise ClearheadError(f"{name} is {brief(flag)}; expected True or False.")
    return bool(flag)


def check_number(value: Any, name: str) -> float:
    """A finite number, Python's or NumPy's."""
    number = not isinstance(value, bool | Tensor) and isinstance(value, int | float | np.integer | np.floating)
    # compiled code compares a number that changes between calls, and cannot ask math.isfinite about it
    if not number or not abs(value) <= _LARGEST:
        raise ClearheadError(f"{name} is {brief(value)}; expected a finite number.")
    return float(value)


def check_positive(value: Any, name: str) -> float:
    """A finite number above 0, whose square is finite and above 0 too."""
    number = check_number(value, name)
    if not number > 0 or not 0 < number * number < np.inf:
        raise ClearheadError(f"{name} is {brief(value)}; expected a number above 0 whose square is finite and above 0.")
    return number
