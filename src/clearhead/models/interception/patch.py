"""Functions of other packages are replaced while a model is watched, then restored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass
class _Replacement:
    """`function`: the original. `now`: it in its wrappers, or as it is where it is restored, as it was last set."""

    function: Callable[..., Any]
    now: Callable[..., Any]
    wraps: list[Wrap] = field(default_factory=list)


_lock = threading.Lock()
_active: dict[tuple[int, str], _Replacement] = {}
_restored: list[tuple[int, str]] = []  # once for each `restored` that is entered now


@contextmanager
def replaced(owner: Any, name: str, wrap: Wrap, innermost: bool = False) -> Iterator[None]:
    """Inside the `with`, `owner.name` is `wrap(owner.name)`, around all wrappers that are there; or `innermost`.

    Two watches may end in another order than they began, in two threads: each end wraps the original anew, with the
    wrappers that remain. A function that other code puts there meanwhile stays, and is the original from then on.
    """
    key = (id(owner), name)
    with _lock:
        found = getattr(owner, name)
        wraps = _active.setdefault(key, _Replacement(found, found)).wraps
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
    """`owner.name` as it is without the wrappers that are there now. A wrapper may call this while it is made."""
    known = _active.get((id(owner), name))
    found: Callable[..., Any] = getattr(owner, name) if known is None else known.function
    return found


def wrap_anew(owner: Any, name: str) -> None:
    """Put the wrappers around a function that other code has put in the place of `owner.name`, if it has."""
    with _lock:
        known = _active.get((id(owner), name))
        if known is not None and getattr(owner, name) is not known.now:
            _set(owner, name)


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
    """The largest number of wrappers that a function has now: above 1 where several handlers look at calls."""
    with _lock:
        return max((len(known.wraps) for known in _active.values()), default=0)


def _set(owner: Any, name: str) -> None:
    """Set `owner.name` to the original function in its wrappers, or to the original where it is restored."""
    key = (id(owner), name)
    known = _active.get(key)
    if known is None:
        return
    found = getattr(owner, name, known.now)
    other = found is not known.now
    if other:
        known.function = found
    known.now = known.function
    if key not in _restored:
        for wrap in known.wraps:
            known.now = wrap(known.now)
    if known.wraps or not other:
        setattr(owner, name, known.now)
