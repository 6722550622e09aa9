"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from clearhead.base.errors import ClearheadError
from clearhead.base.output.ended import unfinished

FOLDER = "Pass a file in a folder that exists and that you may write to."


@contextmanager
def replacing(path: Any, what: str) -> Iterator[Path]:
    """Give a path beside `path` to write to. Where the block ends without error, that file takes the place of `path`.

    Until then, and where the block raises, an old file at `path` stays as it was. A link is followed. For a pipe or a
    device, `path` itself is given. Raises a `ClearheadError` for a path that cannot be written, and for every
    OSError of the block.
    """
    there = check_writable(path, what)  # an old file that may not be written to is not replaced
    try:
        if there.exists() and not there.is_file():
            yield there
            return
        with beside(there) as part:
            yield part
            if there.exists():
                shutil.copymode(there, part)
            part.replace(there)
    except OSError as error:
        raise _unwritable(path, what, error) from error


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A new name in the same folder; a file of that name is removed at the end, by a signal too."""
    name = os.fsencode(path.name)[:100].decode(errors="ignore")  # a name has at most 255 bytes
    part = path.with_name(f".{name}.{os.getpid()}.{secrets.token_hex(4)}.part")
    unfinished.add(str(part))
    try:
        yield part
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        unfinished.discard(str(part))


def check_writable(path: Any, what: str = "report") -> Path:
    """Raise the error that `replacing` would raise, before any file is written. Gives the path without links."""
    try:
        there = Path(path).resolve()
        if there.is_file() or there.is_dir():
            os.close(os.open(there, os.O_WRONLY))
        if there.is_file() or not there.exists():
            with beside(there) as part, part.open("xb"):
                pass
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        # ValueError: a NUL in the path; TypeError: no path at all; RuntimeError: links in a circle
        raise _unwritable(path, what, error) from error
    return there


def _unwritable(path: Any, what: str, error: Exception) -> ClearheadError:
    why = getattr(error, "strerror", None) or error
    return ClearheadError(f"cannot write the {what} to {str(path)!r:.300}: {why}. {FOLDER}")


def ending_of(path: Any, endings: Sequence[str], what: str) -> str:
    """The ending of a path, which says the form that is written. Raises a `ClearheadError` for another one."""
    ending = Path(path).suffix.lower() if isinstance(path, str | os.PathLike) else ""
    if ending not in endings:
        raise ClearheadError(
            f"cannot write the {what} to {str(path)!r:.300}: the ending says the form. Pass a path that ends in "
            f"{', '.join(endings[:-1])}{' or ' * (len(endings) > 1)}{endings[-1]}."
        )
    return ending


def check_page_ending(path: Any) -> None:
    """Raise a `ClearheadError` for a report whose ending is that of another form. A pipe, for one, has no ending."""
    if isinstance(path, str | os.PathLike) and Path(path).suffix:
        ending_of(path, [".html", ".htm"], "report")
