"""The settings of scores, masks and biases, validated where a class or an object sets them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, ClassVar

from clearhead.base.numbers import check_positive


class PartSettings:
    """A base class with attributes that a user-defined part may set, such as `softcap`."""

    _validators: ClassVar[Mapping[str, Callable[[Any, str], Any]]] = {}  # by setting, called with its value and name

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, validate in cls._validators.items():
            value = vars(cls).get(name)
            # what a property gives is known for an object alone
            is_descriptor = hasattr(type(value), "__get__") and not isinstance(value, FunctionType)
            if name in vars(cls) and not is_descriptor:
                validate(value, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._validators:
            self._validators[name](value, name)
        super().__setattr__(name, value)


def validate_softcap(value: Any, name: str) -> None:
    """Raise for a softcap that bounds nothing: engines would treat it differently."""
    if value is not None:
        check_positive(value, name)
