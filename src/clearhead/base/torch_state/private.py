"""Looking up private names of PyTorch and transformers, once each.

`torch_private.py`, `active.py` and `models/interception/transformers_private.py` do so. A private name begins with `_`,
or is reached through one that does; another version of its package may lack it. `import clearhead` works without it,
and each use raises an `UnsupportedError` that names the tested versions.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

from clearhead.base.errors import UnsupportedError

Function = TypeVar("Function", bound=Callable[..., Any])
TESTED = {"PyTorch": ("torch", "2.13 to 2.15"), "transformers": ("transformers", "5.23")}
ABSENT: Any = object()
PURPOSES: dict[str, str] = {}  # by private name of PyTorch: what clearhead needs it for


def missing_name(name: str, purpose: str, library: str = "PyTorch") -> UnsupportedError:
    """Make the error for the use of a private name that is missing."""
    module, tested = TESTED[library]
    version = getattr(sys.modules.get(module), "__version__", "")
    return UnsupportedError(
        f"{library} {version} has no {name}, which clearhead needs {purpose}. Install a version of {library} that "
        f"clearhead was tested with: {tested}."
    )


class MissingName:
    """Stands for a private name of PyTorch that is missing: a call, a comparison and an `isinstance` raise."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _raise(self, *args: Any, **kwargs: Any) -> Any:
        raise missing_name(self.name, PURPOSES[self.name])

    __call__ = __eq__ = __instancecheck__ = _raise
    __hash__ = object.__hash__


def find_private(name: str, purpose: str) -> Any:
    """Find the object of a dotted private name of PyTorch, or make a `MissingName`.

    Modules are imported for it. "X()" in the name is a new instance of X.
    """
    PURPOSES[name] = purpose
    first, *steps = name.split(".")
    found: Any = importlib.import_module(first)
    for step in steps:
        plain = step.removesuffix("()")
        inner = getattr(found, plain, ABSENT)
        if inner is ABSENT and isinstance(found, ModuleType):
            with contextlib.suppress(ImportError):
                inner = importlib.import_module(f"{found.__name__}.{plain}")
        if inner is ABSENT:
            return MissingName(name)
        found = inner() if plain != step else inner
    return found


def find_private_later(name: str, purpose: str) -> Callable[[], Any]:
    """Make a function that finds the name at its first call, since the import of its module takes seconds."""
    PURPOSES[name] = purpose
    return functools.cache(lambda: find_private(name, purpose))


def requires(purpose: str, *names: str) -> Callable[[Function], Function]:
    """Make a decorator of a function that reads these private names: without one of them its calls raise."""
    found = [find_private(name, purpose) for name in names]
    missing: Any = next((one for one in found if isinstance(one, MissingName)), None)
    return lambda function: function if missing is None else missing
