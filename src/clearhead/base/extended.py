"""Names of a base class that a class of the caller's may not take for something else.

Clearhead calls the methods of a score, a mask and a bias by their names. An attribute of one of these names would stand
in a method's place, and the call would fail far from the line that set it.
"""

from __future__ import annotations

import inspect
from functools import cached_property
from numbers import Real
from types import FunctionType
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from clearhead.base.errors import ClearheadError
from clearhead.base.numbers import check_positive

_BOOL = (bool, np.bool_)
# attributes of the base classes that a subclass may set, with what they may be
_SETTINGS: dict[str, tuple[tuple[type, ...], str]] = {
    "positional": (_BOOL, "says whether positions matter, and is a bool"),
    "product": (_BOOL, "says whether tile() is a product of matrices, and is a bool"),
    "softcap": ((Real, type(None)), "bounds the scores, and is a number or None"),
}
_FREE = ("forward", "plot", "_repr_html_")  # clearhead calls none of these


class Extended:
    """A base of classes that callers extend: it refuses other things under the names that clearhead uses."""

    _reserved: ClassVar[dict[str, str]] = {}  # by name: the class of clearhead's that has it

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if cls.__module__.startswith("clearhead."):
            own = [name for name, value in vars(cls).items() if _is_called(name, value) or name in _SETTINGS]
            cls._reserved = {**cls._reserved, **dict.fromkeys(own, cls.__name__)}
            return
        for name, value in vars(cls).items():
            if name in cls._reserved:
                _check_in_class(cls, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._reserved:
            _check_on_object(self, name, value)
        super().__setattr__(name, value)


def _is_called(name: str, value: Any) -> bool:
    """Whether clearhead calls a method of its own by this name; of class methods, which make objects, it is one."""
    free = name in _FREE or name.startswith("__") or (isinstance(value, classmethod) and name != "example")
    return _is_method(value) and not free


def _is_method(value: Any) -> bool:
    return isinstance(value, FunctionType | classmethod | staticmethod)


def _check_on_object(thing: Any, name: str, value: Any) -> None:
    """Raise where an attribute of an object takes a method's place, or is no value of this setting."""
    fits = isinstance(value, _SETTINGS[name][0]) if name in _SETTINGS else _may_be_called(value)
    if not fits:
        raise _taken(type(thing), f"sets {name} to a {type(value).__name__}", name)
    _check_number(name, value)


def _check_number(name: str, value: Any) -> None:
    """Raise for a softcap that bounds nothing: engines would differ in what they make of it."""
    if name == "softcap" and isinstance(value, Real):
        check_positive(value, name)


def _may_be_called(value: Any) -> bool:
    """Whether a value does as a method: a module would be registered beside the method, and never be found."""
    return callable(value) and not isinstance(value, nn.Module | Tensor)


def _check_in_class(cls: Any, name: str, value: Any) -> None:
    """Raise where a class has something else under a name of its base class, or a method of other arguments.

    A descriptor, such as a `functools.partialmethod`, may stand there: what it gives is not known here. A property may
    stand for a setting alone, since few properties give a function.
    """
    gives = hasattr(type(value), "__get__")
    if name in _SETTINGS:
        fits = isinstance(value, _SETTINGS[name][0]) or (gives and not _is_method(value))
    else:
        fits = _may_be_called(value) or (gives and not isinstance(value, property | cached_property))
    if not fits:
        raise _taken(cls, f"has {name}, a {type(value).__name__}", name)
    _check_number(name, value)
    if name not in _SETTINGS and _is_method(value) and not _takes(value, len(_arguments(_of_base(cls, name)))):
        raise _taken(cls, f"has {name}{_signature(value)}", name)


def _of_base(cls: Any, name: str) -> Any:
    """The method of clearhead's that a class overrides."""
    return next(
        vars(base)[name] for base in cls.__mro__ if base.__module__.startswith("clearhead.") and name in vars(base)
    )


def _signature(method: Any) -> inspect.Signature:
    """The arguments of the function itself: a decorator's may take others than the function that it wraps."""
    return inspect.signature(getattr(method, "__func__", method), follow_wrapped=False)


def _arguments(method: Any) -> list[str]:
    """The arguments that a method may be given by position, without the object or the class."""
    parameters = [*_signature(method).parameters.values()]
    own = parameters if isinstance(method, staticmethod) else parameters[1:]
    return [one.name for one in own if one.kind is one.POSITIONAL_OR_KEYWORD]


def _takes(method: Any, count: int) -> bool:
    """Whether a method can be called with so many arguments by position."""
    given = [None] * (count + (not isinstance(method, staticmethod)))
    try:
        signature = _signature(method)
    except ValueError:  # of a function of C++, such as torch.matmul
        return True
    try:
        signature.bind(*given)
    except TypeError:
        return False
    return True


def _taken(cls: Any, what: str, name: str) -> ClearheadError:
    if name in _SETTINGS:
        there = f"{name} {_SETTINGS[name][1]}"
    else:
        there = f"{name}({', '.join(_arguments(_of_base(cls, name)))}) is a method, which clearhead calls"
    return ClearheadError(
        f"{cls.__name__} {what}, and in {cls._reserved[name]} {there}.\nGive your own another name: my_{name}."
    )
