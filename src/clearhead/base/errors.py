"""The errors of clearhead, and the one way to import an optional package."""

import importlib
import math
from collections.abc import Mapping, Sequence
from types import ModuleType


class ClearheadError(ValueError, RuntimeError):
    """The error for input that clearhead refuses. The message says what disagreed, why, and what to pass instead.

    It is a RuntimeError too, because PyTorch's functions, whose place clearhead's can take, raise that class.
    """


class ShapeError(ClearheadError):
    """The error for sizes that disagree. Its message shows the shapes in aligned columns."""


class UnsupportedError(ClearheadError):
    """The error for a request that is well formed, but that the chosen engine or this version cannot do."""


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Import an optional package, or say which extra installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        raise ClearheadError(
            f"{purpose} needs the package {module.partition('.')[0]!r}, which could not be imported "
            f"({missing}).\nInstall it with:  pip install 'clearhead[{extra}]'"
        ) from missing


def columns(rows: Mapping[str, Sequence[object]], mark: int | None = None) -> str:
    """Shapes under each other, aligned on the last dimension. `mark`, a negative number, is a column to point at."""
    cells = {name: [str(size) for size in shape] for name, shape in rows.items()}
    depth = max(len(row) for row in cells.values())
    padded = {name: [""] * (depth - len(row)) + row for name, row in cells.items()}
    widths = [max(len(row[i]) for row in padded.values()) for i in range(depth)]
    label = max(len(name) for name in padded)
    lines = []
    for name, row in padded.items():
        text = "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append(f"    {name.ljust(label)}   {text}")
    if mark is not None and -depth <= mark < 0:
        before = sum(width + 2 for width in widths[: depth + mark])
        lines.append(" " * (4 + label + 3 + before) + "^" * widths[depth + mark])
    return "\n".join(lines)


def human_bytes(count: int) -> str:
    if count < 1024:
        return f"{count} bytes"
    power = min(int(math.log2(count) // 10), 4)
    return f"{count / 1024**power:.3g} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"
