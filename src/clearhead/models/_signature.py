"""The names of a module's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any


def parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the parameters of `module.forward`, but for `self`."""
    method = getattr(forward, "__func__", None)
    if method is not None and getattr(type(forward.__self__), "forward", None) is method:  # type: ignore[attr-defined]
        return _of_class(method)[1:]
    return _names(forward)  # set on one module: what is remembered of it would keep the module alive


def _names(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # TorchScript's forward has no signature
        return ()


_of_class = lru_cache(maxsize=1024)(_names)
