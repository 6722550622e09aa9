"""What every page is made with: one HTML file with its data, its style and its program inside, and no requests."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from clearhead.base.errors import ClearheadError

# The program that computes the steps of an explanation from their code.
ARITHMETIC = ("numbers.js", "language.js", "terms.js", "shapes.js", "operations.js")


def source(package: str, name: str) -> str:
    """A file of a package's folder `front`, with the line ends that a browser hashes."""
    text = files(package).joinpath("front", name).read_text(encoding="utf-8")
    return text.replace("\r\n", "\n")


def program_of(*scripts: str) -> str:
    """Scripts joined into one function, `program`: they share their names with each other and with nothing else.

    Lines that are comments alone are left out: they begin with // or /*, or with the star that continues one.
    """
    comment = ("//", "/*", "* ", "*/")
    code = "\n".join(line for line in "".join(scripts).splitlines() if not line.lstrip().startswith(comment))
    return f'(function program() {{\n"use strict";\n{code}\n}})();\n'


def module_of(name: str, exports: Sequence[str], *scripts: str) -> str:
    """Scripts joined into one object, which has these of their names; the others are known to them alone."""
    return f"const {name} = (() => {{\n{''.join(scripts)}return {{ {', '.join(exports)} }};\n}})();\n"


def embedded(value: Any) -> str:
    """JSON that cannot end the element it stands in, whatever the strings hold."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def policy(styles: Sequence[str], *scripts: str, worker: bool = False) -> str:
    """The content security policy: the page's own scripts and styles by hash, and nothing else.

    `worker`: whether they may start a worker, from a text of theirs.
    """
    allowed, styled = (" ".join(map(_hash, texts)) for texts in (scripts, styles))
    workers = "worker-src blob:; " if worker else ""
    return (
        f"default-src 'none'; script-src {allowed}; style-src {styled}; "
        f"{workers}img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def filled(template: str, parts: Mapping[str, str]) -> str:
    """The page: each `{{name}}` of the template replaced by that part."""
    page = "".join(filled_parts(template, parts))
    return page.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate cannot be written


def filled_parts(template: str, parts: Mapping[str, str | Iterable[str]]) -> Iterator[str]:
    """The same, a part after another: one that is made of several is not joined."""
    at = 0
    for found in re.finditer(r"\{\{(\w+)\}\}", template):
        yield template[at : found.start()]
        part = parts[found[1]]
        yield from (part,) if isinstance(part, str) else part
        at = found.end()
    yield template[at:]


def write_page(path: Any, page: str, what: str = "report") -> Path:
    """Write a page, or say why it cannot be written."""
    return write_parts(path, (page,), what)


def write_parts(path: Any, parts: Iterable[str], what: str = "report") -> Path:
    """Write a page that is given in parts. A file that is there is as it was until all of the new one is written."""
    try:
        target = Path(path)
        there = target.resolve()
        check_writable(there, what)  # an old file that may not be written to is not replaced
        beside = there.with_name(f".{there.name[:100]}.{os.getpid()}.{secrets.token_hex(4)}.part")
    except ClearheadError:
        raise
    except (OSError, ValueError, TypeError) as error:  # ValueError: a NUL in the path; TypeError: no path at all
        raise _unwritable(path, what, error) from error
    try:
        if there.exists() and not there.is_file():  # a pipe, or the like
            _write(there, parts)
            return target
        try:
            _write(beside, parts)
            if there.exists():
                shutil.copymode(there, beside)
            beside.replace(there)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(path, what, error) from error
    return target


def _write(path: Path, parts: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8", errors="replace", newline="\n") as file:
        for part in parts:
            file.write(part)


def check_writable(path: Any, what: str = "report") -> None:
    """Raise what `write_page` would, before there is a page. A file that is there keeps what it holds."""
    try:
        target = Path(path)
        new = not target.exists()
        if new or target.is_file() or target.is_dir():
            with target.open("ab"):
                pass
        if new:
            target.unlink()
    except (OSError, ValueError, TypeError) as error:
        raise _unwritable(path, what, error) from error


def _unwritable(path: Any, what: str, error: Exception) -> ClearheadError:
    return ClearheadError(
        f"cannot write the {what} to {str(path)!r}: {getattr(error, 'strerror', None) or error}. Pass a file in a "
        "folder that exists and that you may write to."
    )
