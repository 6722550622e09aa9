"""Looking up private names of other packages: `torch_private.py` and `transformers_private.py` have the tables."""

from __future__ import annotations

import importlib
import sys
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
