"""The public names of the namespaces, and the error for a name that no namespace has."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from typing import Any

from clearhead.base.keyword_hints import add_keyword_hints

SPACES = "nn models reductions edits extend explanation results testing distributed exercises"
NAMESPACES = ("clearhead", *(f"clearhead.{space}" for space in SPACES.split()))


def publish(namespace: dict[str, Any]) -> list[str]:
    """Return the `__all__` of a module that only imports.

    Unknown names of the module raise `unknown_name`, and unknown keywords of its classes what to write instead.
    """

    def __getattr__(name: str) -> object:
        raise unknown_name(namespace["__name__"], name)

    public = sorted(name for name, value in namespace.items() if name[0] != "_" and hasattr(value, "__module__"))
    add_keyword_hints(namespace)
    namespace["__getattr__"] = __getattr__
    return public


def unknown_name(owner: str, name: str) -> AttributeError:
    """Make the error for a name that a namespace lacks, with the nearest public name of any namespace.

    Python's own suggestion shows neither in notebooks nor names of other namespaces.
    """
    message = f"module {owner!r} has no attribute {name!r}"
    if not name.startswith("_"):
        known: dict[str, str] = {}  # the first namespace that has it, the owner before all
        for space in (owner, *NAMESPACES):
            for public in getattr(import_module(space), "__all__", ()):
                known.setdefault(_fold(public), f"{space}.{public}")
        nearest = get_close_matches(_fold(name), known, 1, 0.7)
        message += f". Did you mean {known[nearest[0]]}?" if nearest else ""
    return AttributeError(message)


def _fold(name: str) -> str:
    return name.lower().replace("_", "")
