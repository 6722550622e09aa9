"""The errors of clearhead, and the one way to import an optional package."""

import importlib
from types import ModuleType


class ClearheadError(ValueError):
    """Any input clearhead refuses. The message says what disagreed, why, and what to pass instead."""


class ShapeError(ClearheadError):
    """Sizes that disagree. The message shows the shapes in aligned columns."""


class UnsupportedError(ClearheadError):
    """A request that is well formed but that the engine asked for, or this version, cannot do."""


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Import an optional package, or say which extra installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        raise ClearheadError(
            f"{purpose} needs the package {module.partition('.')[0]!r}, which could not be imported "
            f"({missing}).\nInstall it with:  pip install 'clearhead[{extra}]'"
        ) from missing
