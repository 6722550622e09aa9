"""Functions of other packages are replaced while a model is watched, then restored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

_lock = threading.Lock()
_active: dict[tuple[int, str], tuple[Callable[..., Any], list[Wrap]]] = {}
_restored: list[tuple[int, str]] = []  # once for each `restored` that is entered now


@contextmanager
def replaced(owner: Any, name: str, wrap: Wrap, innermost: bool = False) -> Iterator[None]:
    """Inside the `with`, `owner.name` is `wrap(owner.name)`, around all wrappers that are there; or `innermost`.

    Two watches may end in another order than they began, in two threads: each end wraps the original anew, with the
    wrappers that remain.
    """
    key = (id(owner), name)
    with _lock:
        _, wraps = _active.setdefault(key, (getattr(owner, name), []))
        wraps.insert(0 if innermost else len(wraps), wrap)
        _set(owner, name)
    try:
        yield
    finally:
        with _lock:
            wraps.remove(wrap)
            _set(owner, name)
            if not wraps:
                del _active[key]


def original(owner: Any, name: str) -> Callable[..., Any]:
    """`owner.name` as it is without the wrappers that are there now."""
    with _lock:
        found: Callable[..., Any] = _active.get((id(owner), name), (getattr(owner, name),))[0]
        return found


@contextmanager
def restored(owner: Any, name: str) -> Iterator[None]:
    """Inside the `with`, `owner.name` is the original function, for code that compares a function with it."""
    with _lock:
        _restored.append((id(owner), name))
        _set(owner, name)
    try:
        yield
    finally:
        with _lock:
            _restored.remove((id(owner), name))
            _set(owner, name)


def replacing() -> bool:
    """Whether some thread holds the lock now: code that the garbage collector runs must not wait for it."""
    return _lock.locked()


def wrappers() -> int:
    """The largest number of wrappers that a function has now: above 1 where several receivers look at calls."""
    with _lock:
        return max((len(wraps) for _, wraps in _active.values()), default=0)


def _set(owner: Any, name: str) -> None:
    """Set `owner.name` to the original function in its wrappers, or to the original where it is restored."""
    key = (id(owner), name)
    if key in _active:
        function, wraps = _active[key]
        setattr(owner, name, function if key in _restored else _wrapped(function, wraps))


def _wrapped(function: Callable[..., Any], wraps: list[Wrap]) -> Callable[..., Any]:
    for wrap in wraps:
        function = wrap(function)
    return function
