"""The context managers that the public functions for a `with` statement give."""

from __future__ import annotations

import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from clearhead.base.errors import ClearheadError

Given = TypeVar("Given")
_PACKAGE = str(Path(__file__).parents[1]) + os.sep  # the folder of clearhead


class Delayed(AbstractContextManager[None]):
    """Inside it an interrupt (Ctrl-C) waits: its handler runs at the end. Python runs handlers in the main thread."""

    def __init__(self) -> None:
        self._handler: Any = None
        self._came: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> None:
        if threading.get_ident() == threading.main_thread().ident:
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, lambda *given: self._came.append(given))

    def __exit__(self, *error: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._came:
                self._handler(*self._came[0])


class Uninterrupted(AbstractContextManager[Given]):
    """A context manager that calls `make` when it is entered, and that no interrupt finds half entered or half ended.

    Where an interrupt comes while it is entered, it is ended again. An interrupt at the very beginning of `__exit__`
    comes before any line here can run: then `make`'s generator is closed when the object is no longer referenced.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[Given]]) -> None:
        self._make = make
        self._inside: AbstractContextManager[Given] | None = None  # while it is entered

    def __enter__(self) -> Given:
        try:
            with Delayed():
                inside = self._make()
                found = inside.__enter__()
                self._inside = inside
            return found
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(self, *error: Any) -> bool | None:
        with Delayed():
            inside, self._inside = self._inside, None
            return None if inside is None else inside.__exit__(*error)


class Managed(Uninterrupted[Given]):
    """A context manager that calls `make` when it is entered. It can be entered once."""

    def __init__(self, call: str, make: Callable[[], AbstractContextManager[Given]]) -> None:
        super().__init__(make)
        self._call, self._used = call, False

    def __enter__(self) -> Given:
        if self._used:
            raise ClearheadError(
                f"this {self._call} was entered before, and can be entered once: write `with ch.{self._call}:` each "
                "time."
            )
        self._used = True
        return super().__enter__()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"{self._call} has no {name!r}: it begins in a `with` statement, and gives its result there. Write "
            f"`with ch.{self._call} as seen:`, and ask `seen` for it."
        )

    def __repr__(self) -> str:
        begins = f"nothing is switched on. It begins in a with statement: `with ch.{self._call}:`"
        return f"ch.{self._call}: {'used' if self._used else begins}"


class Line(NamedTuple):
    """A line of code outside of this package."""

    file: str
    number: int

    def warn(self, message: str) -> None:
        """Warn as if the line did."""
        warnings.warn_explicit(message, UserWarning, self.file, self.number)


def caller() -> Line:
    """Find the innermost line of the stack that is outside of this package."""
    # warnings.warn has skip_file_prefixes since Python 3.12
    stack = traceback.StackSummary.extract(traceback.walk_stack(None), lookup_lines=False)
    outside = [frame for frame in stack if not frame.filename.startswith(_PACKAGE)]  # an interrupt leaves no generator
    frame = outside[0] if outside else stack[-1]
    return Line(frame.filename, frame.lineno or 0)
