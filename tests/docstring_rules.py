"""Whether public docstrings have the sections that a reader needs, in Google style.

.venv/bin/python tests/docstring_rules.py [PART]      # what is missing, of the names whose module contains PART
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from public_api import list_public_names

MOST_LINES = 60
ERRORS = ("check_", "validate_", "_check", "_validate")  # functions that raise an error for a wrong argument
RETURNS_NOTHING = ("None", "Never", "NoReturn")


def list_documented() -> Iterator[tuple[str, Any, type | None]]:
    """Yield each public name, each method and property that a public class defines, and the class around it."""
    done: set[int] = set()
    for name, value in list_public_names():
        if not callable(value) or id(value) in done:  # some names have two homes
            continue
        done.add(id(value))
        yield name, value, None
        for member in sorted(vars(value)) if inspect.isclass(value) else ():
            found = inspect.getattr_static(value, member)
            found = found.__func__ if isinstance(found, classmethod | staticmethod) else found
            is_method = inspect.isfunction(found) and found.__module__.startswith("clearhead.")
            if not member.startswith("_") and (is_method or isinstance(found, property)):
                yield f"{name}.{member}", found, value


def find_faults(value: Any, owner: type | None) -> Iterator[str]:
    """Yield what the docstring of a public object lacks."""
    doc = inspect.cleandoc(value.__doc__ or "") or (_inherit_doc(value, owner) if owner else "")
    if not doc:
        yield "no docstring"
        return
    lines = doc.splitlines()
    if not lines[0].endswith((".", "?")) or (len(lines) > 1 and lines[1]):
        yield "the first line is no sentence of its own"
    if len(lines) > MOST_LINES:
        yield f"{len(lines)} lines; at most {MOST_LINES}"
    if isinstance(value, property):
        return
    sections = split_sections(doc)
    fields = getattr(value, "_fields", None) or getattr(value, "__dataclass_fields__", None)
    if inspect.isclass(value) and fields:
        yield from _find_unnamed("Attributes", [field for field in fields if not field.startswith("_")], sections, {})
        return
    function = value if not inspect.isclass(value) else vars(value).get("__init__")
    if not inspect.isfunction(function) or not function.__module__.startswith("clearhead."):
        return
    parameters = inspect.signature(function).parameters
    names = [
        name
        for name, parameter in parameters.items()
        if name not in ("self", "cls") and not name.startswith("_") and parameter.kind is not parameter.VAR_KEYWORD
    ]
    yield from _find_unnamed("Args", names, sections, {name: str(parameters[name].annotation) for name in names})
    result = str(function.__annotations__.get("return", "None"))
    if not inspect.isclass(value) and result not in RETURNS_NOTHING and not {"Returns", "Yields"} & {*sections}:
        yield "no section Returns"
    if _raises(function) and "Raises" not in sections:
        yield "no section Raises"


def split_sections(doc: str) -> dict[str, str]:
    """Split a docstring by its headings, such as `Args:`, each with its indented text."""
    return {name: textwrap.dedent(text) for name, text in re.findall(r"^([A-Z]\w+):\n((?:(?: +.*)?\n?)+)", doc, re.M)}


def _find_unnamed(
    section: str, names: list[str], sections: dict[str, str], annotations: dict[str, str]
) -> Iterator[str]:
    """Yield the parameters that a section does not name, and tensors without a shape."""
    entry = r"^\*{0,2}(\w+)(?: \(.*?\))?: ?(.*\n?(?:(?: +.*)?\n)*(?: +.*)?)"
    entries = dict(re.findall(entry, sections.get(section, ""), re.M))
    for name in names:
        if name not in entries:
            yield f"{section} does not name {name}"
        elif re.search(r"\b(Tensor|Array)\b", annotations.get(name, "")) and "(" not in entries[name]:
            yield f"{section}: {name} has no shape"


def _raises(function: Any) -> bool:
    """Whether a function raises an error itself, or by a check of its arguments."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except OSError:  # written by dataclass or NamedTuple
        return False
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    called = (getattr(call, "attr", getattr(call, "id", "")) for call in calls)
    return any(isinstance(node, ast.Raise) for node in ast.walk(tree)) or any(n.startswith(ERRORS) for n in called)


def _inherit_doc(value: Any, owner: type) -> str:
    """The docstring of the method that this one overrides."""
    name = getattr(value, "__name__", None) or value.fget.__name__
    found = (vars(parent).get(name) for parent in owner.__mro__[1:])
    return next((inspect.cleandoc(one.__doc__) for one in found if getattr(one, "__doc__", None)), "")


if __name__ == "__main__":
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    count = 0
    for name, value, owner in list_documented():
        where = getattr(value, "__module__", None) or value.fget.__module__
        if part in where:
            faults = list(find_faults(value, owner))
            count += bool(faults)
            print(*[f"{where}: {name}: {fault}" for fault in faults], sep="\n", end="\n" if faults else "")
    print(f"{count} names with faults")
