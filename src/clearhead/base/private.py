"""Looking up private names of other packages. The files with `private` or `torch_state` in their names do so."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from clearhead.base.errors import UnsupportedError

RAISES = "an UnsupportedError where it is used"
ABSENT: Any = object()
TESTED = {"PyTorch": ("torch", "2.12 to 2.15"), "transformers": ("transformers", "5.1 to 5.23")}


class Part(NamedTuple):
    """A row of a table. `serves`: what clearhead needs the name for. `without`: what happens where it is missing."""

    serves: str
    without: str


def look(name: str) -> Any:
    """The object of this dotted name, or `ABSENT`. Modules are imported for it. "X()" is a new instance of X."""
    first, *steps = name.split(".")
    found: Any = importlib.import_module(first)
    for step in steps:
        plain = step.removesuffix("()")
        inner = getattr(found, plain, ABSENT)
        if inner is ABSENT and isinstance(found, ModuleType):
            try:
                inner = importlib.import_module(f"{found.__name__}.{plain}")
            except ImportError:
                return ABSENT
        if inner is ABSENT:
            return ABSENT
        found = inner() if plain != step else inner
    return found


def missing(name: str, serves: str, library: str) -> UnsupportedError:
    """The error of a use that needs a private name that is missing."""
    module, tested = TESTED[library]
    version = getattr(sys.modules.get(module), "__version__", "")
    return UnsupportedError(
        f"{library} {version} has no {name}, which clearhead needs {serves}. Install a version of {library} that "
        f"clearhead was tested with: {tested}."
    )


# The names of PyTorch's: each is looked up where its row is written.
PARTS: dict[str, Part] = {}


def refusing(name: str) -> Callable[..., Any]:
    """A function that stands in for a missing name, and raises."""

    def refused(*args: Any, **given: Any) -> Any:
        raise missing(name, PARTS[name].serves, "PyTorch")

    return refused


def part(name: str, serves: str, without: str = RAISES, instead: Any = ABSENT) -> Any:
    """The object of this name; where it is missing, `instead`, or a function that raises."""
    PARTS[name] = Part(serves, without)
    found = look(name)
    if found is not ABSENT:
        return found
    return refusing(name) if instead is ABSENT else instead


def there(name: str, serves: str, without: str) -> bool:
    """Whether something has this name, such as an attribute of every module."""
    PARTS[name] = Part(serves, without)
    return look(name) is not ABSENT


def first_missing(serves: str, without: str, *names: str) -> str:
    """The first of these attributes that a module does not have, or ""."""
    every = [f"torch.nn.Module().{name}" for name in names]
    known = [there(name, serves, without) for name in every]
    return "" if all(known) else every[known.index(False)]


def later(name: str, serves: str, without: str) -> Callable[[], Any]:
    """A function that gives the object of this name, or None. The object's module is imported when it is asked for."""
    PARTS[name] = Part(serves, without)

    def found() -> Any:
        known = look(name)
        return None if known is ABSENT else known

    return found
