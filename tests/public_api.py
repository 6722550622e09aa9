"""The public API as one text: every public name with its signature, and the public members of each class.

.venv/bin/python tests/public_api.py --write      # into docs/public_api.txt
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import clearhead as ch

FILE = Path(__file__).parents[1] / "docs" / "public_api.txt"


def list_public_names() -> Iterator[tuple[str, Any]]:
    """Yield the public names of the package and of its namespaces, each with its object."""
    for name in ch.__all__:
        value = getattr(ch, name)
        if not inspect.ismodule(value):
            yield name, value
            continue
        for inner in sorted(getattr(value, "__all__", vars(value))):
            found = getattr(value, inner)
            is_ours = getattr(found, "__module__", "").startswith("clearhead.") and not inspect.ismodule(found)
            if is_ours and not inner.startswith("_") and (name != "testing" or inner.startswith("check_")):
                yield f"{name}.{inner}", found


def format_api() -> str:
    """Return the text of the API, sorted by name. A class lists the members that its public parents do not have."""
    names = {value: name for name, value in list_public_names() if inspect.isclass(value)}
    lines: list[str] = []
    for name, value in sorted(list_public_names(), key=lambda pair: pair[0]):
        lines.append(f"{name}{_format_signature(value)}")
        if inspect.isclass(value):
            parents = [parent for parent in value.__mro__[1:] if parent in names]
            if parents:
                lines[-1] += f"  extends {names[parents[0]]}"
            lines += [f"    {line}" for line in _list_members(value, parents)]
    return "\n".join([*lines, ""])


def _list_members(cls: type, parents: list[type]) -> Iterator[str]:
    """Yield the public members that a class has and its public parents have not, or have otherwise, one line each."""
    owners = [owner for owner in cls.__mro__ if owner.__module__.startswith("clearhead.")]
    found = {name for owner in owners for name in vars(owner) if not name.startswith("_")}
    for name in sorted(found - {*getattr(cls, "_fields", ())}):
        member = inspect.getattr_static(cls, name)
        line = name  # of a property, or of a setting of the class
        if isinstance(member, classmethod | staticmethod):
            line = f"{name}{_format_signature(getattr(cls, name))}  {type(member).__name__}"
        elif callable(member):
            line = f"{name}{_format_signature(member)}"
        if not any(line in _list_members(parent, []) for parent in parents):
            yield line


def _format_signature(value: Any) -> str:
    """Return the parameters and the result of a callable as text."""
    if inspect.isclass(value) and issubclass(value, Exception):
        return ""  # an exception has the arguments of Python's own
    signature = inspect.signature(value)
    parameters = [
        one.replace(default=_Named(one.default)) if " at 0x" in repr(one.default) else one
        for one in signature.parameters.values()
    ]
    signature = signature.replace(parameters=parameters)
    if inspect.isclass(value):
        signature = signature.replace(return_annotation=inspect.Signature.empty)
    text = str(signature).replace("'", "").replace("clearhead.", "")
    return re.sub(r"ForwardRef\(((?:[^()]|\([^()]*\))*)\)", r"\1", text)  # of a named tuple's fields


class _Named:
    """A default whose own text holds an address, which differs in each process."""

    def __init__(self, default: Any) -> None:
        self.name = getattr(default, "__qualname__", type(default).__qualname__)

    def __repr__(self) -> str:
        return self.name


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        FILE.write_text(format_api(), encoding="utf-8")
    else:
        print(format_api(), end="")
