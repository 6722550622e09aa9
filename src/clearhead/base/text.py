"""Text that a person or a model wrote, made fit to be shown."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from clearhead.base.tracing import freed

KEPT = "\N{NO-BREAK SPACE}"


def printable(text: str) -> str:
    """The text in one line. Characters that a terminal does not print are written as Python writes them."""
    return "".join(c if c.isprintable() or c == KEPT else repr(c)[1:-1] for c in text)


def said(of: object, make: Callable[[], str]) -> str:
    """The words that `make` gives for an object; the name of its class where `make` fails, as one's own class may."""
    try:
        return str(make())
    except Exception:  # a repr raises nothing
        return f"{type(of).__name__}()"


def brief(thing: Any, most: int = 60) -> str:
    """The first characters of an object's repr, for an error that names a wrong argument.

    A tensor whose memory was freed, alone or in a list, is named by its shape: PyTorch's repr of it ends the process.
    """
    for part in thing if isinstance(thing, list | tuple) else (thing,):
        if isinstance(part, Tensor) and freed(part):
            said = f"a tensor of {part.dtype}, shape {tuple(part.shape)}, that has no memory"
            return said if part is thing else f"a {type(thing).__name__} with {said}"
    return f"{thing!r:.{most}}"


def escaped(text: str, lines: bool = False) -> str:
    """Text that HTML shows as it is. Characters that print nothing, or reverse a line, are written out."""
    shown = "\n".join(map(printable, text.split("\n"))) if lines else printable(text)
    # Notebooks typeset text between dollars and in \( \)
    return html.escape(shown).replace("$", "&#36;").replace("\\", "&#92;")


def listed(names: Iterable[str]) -> str:
    """The first names of some, quoted."""
    every = list(names)
    return (", ".join(map(repr, every[:6])) + (", …" if len(every) > 6 else "")) or "none"
