"""A bar of the texts that were read."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any


class _NoBar:
    def __enter__(self) -> _NoBar:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, count: int) -> None:
        pass


def bar_of(texts: Any, number: int) -> Any:
    """tqdm's bar of texts, on the first rank, if it is installed; it shows itself on a terminal alone."""
    try:
        tqdm = import_module("tqdm").tqdm
    except ImportError:
        return _NoBar()
    total: float
    try:
        total = len(texts)
    except TypeError:
        total = math.inf
    return tqdm(total=total, unit=" texts", disable=True if number else None)
