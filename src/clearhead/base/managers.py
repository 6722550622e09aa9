"""The context managers that the public functions for a `with` statement give."""

from __future__ import annotations

import dis
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from types import FrameType, TracebackType
from typing import Any, Generic, TypeVar

from clearhead.base.errors import ClearheadError

Given = TypeVar("Given")
_PACKAGE = __name__.partition(".")[0]


class Managed(AbstractContextManager[Given], ContextDecorator, Generic[Given]):
    """A context manager that calls `make` when it is entered. It can be entered once.

    One that is dropped without having been entered has done nothing: it warns, at the line that made it. As a
    decorator it is entered at each call of the function.
    """

    def __init__(self, call: str, make: Callable[[], AbstractContextManager[Given]]) -> None:
        self._call, self._make, self._line = call, make, caller()
        self._lock, self._used = threading.Lock(), False
        self._inside: Any = None

    def __enter__(self) -> Given:
        with self._lock:
            if self._used:
                raise ClearheadError(
                    f"this {self._call} was entered before, and can be entered once: write `with ch.{self._call}:` "
                    "each time."
                )
            self._used = True
        self._inside = self._make()
        return self._inside.__enter__()  # type: ignore[no-any-return]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        inside, self._inside = self._inside, None
        return inside.__exit__(kind, error, trace)  # type: ignore[no-any-return]

    def __call__(self, function: Any) -> Any:
        self._used = True
        return super().__call__(function)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"{self._call} has no {name!r}: it begins in a `with` statement, and gives its result there. Write "
            f"`with ch.{self._call} as seen:`, and ask `seen` for it."
        )

    def _recreate_cm(self) -> Managed[Given]:
        return Managed(self._call, self._make)

    def __repr__(self) -> str:
        return f"ch.{self._call}, for a with statement"

    def __del__(self) -> None:
        if not getattr(self, "_used", True):  # without `_used`, __init__ has failed
            warn_unused(f"{self._call} was never entered, so it did nothing: write `with ch.{self._call}:`", self._line)


Line = tuple[str, int, str]


def caller() -> Line:
    """File, line and module of the code outside of this package that called it."""
    frame = _outside()
    return frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", "")


def _outside() -> FrameType:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        frame = frame.f_back
    return frame


def in_with_statement() -> bool:
    """Whether the present call, made outside of this package, is the `expression` of a `with expression:`. Python
    reports that a result is no context manager only after the call."""
    frame = _outside()
    after = [step.opname for step in dis.get_instructions(frame.f_code) if step.offset > frame.f_lasti][:2]
    return "BEFORE_WITH" in after[:1] or after == ["COPY", "LOAD_SPECIAL"]  # the latter from Python 3.14 on


def warn_unused(message: str, line: Line) -> None:
    """Warn, from a `__del__`, of an object that was not used, unless the interpreter ends or an error is handled."""
    if sys is None or sys.is_finalizing() or sys.exception() is not None:
        return
    warnings.warn_explicit(message, UserWarning, *line)
