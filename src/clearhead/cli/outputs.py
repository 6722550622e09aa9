"""A check of the files that a command writes, before the command begins."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from clearhead.base.errors import ClearheadError
from clearhead.base.written import check_writable


def check_outputs(options: argparse.Namespace, outputs: Mapping[str, str | None], text: str | None = None) -> None:
    """Raise an error for an output that cannot be written, or that is another file which the command reads or writes.

    `outputs`: the outputs by the names of their options, None where one is not given. `text`: the file of the text.
    """
    others: dict[Path, str] = {}
    for name, given in outputs.items():
        if given is None:
            continue
        path = check_writable(given)
        others |= {} if others else _read(options, text)
        if path in others:
            raise ClearheadError(f"{name} is {given!r:.300}, which is the file of {others[path]}: pass another path.")
        if not path.exists() or path.is_file():  # several outputs may go to one pipe
            others[path] = name


def _read(options: argparse.Namespace, text: str | None) -> dict[Path, str]:
    """The files that the command reads, each with the option that names it."""
    try:
        files = {"--file": [] if text in (None, "-") else [Path(str(text))]}
        files["--model"] = [] if options.model is None else list(Path(options.model).glob("*"))
        return {path.resolve(): name for name, paths in files.items() for path in paths if path.is_file()}
    except (OSError, ValueError, RuntimeError):  # a file that cannot be read is an error when it is read
        return {}
