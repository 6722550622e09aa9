"""Text that a person or a model wrote, made fit to be shown."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable

KEPT = "\N{NO-BREAK SPACE}"


def printable(text: str) -> str:
    """In one line, of characters that a terminal prints as they are; others as Python writes them."""
    return "".join(c if c.isprintable() or c == KEPT else repr(c)[1:-1] for c in text)


def said(of: object, make: Callable[[], str]) -> str:
    """What `make` says of an object; the name of its class where that fails, as it may for a class of one's own."""
    try:
        return str(make())
    except Exception:  # a repr raises nothing
        return f"{type(of).__name__}()"


def escaped(text: str, lines: bool = False) -> str:
    """Text that HTML shows as it is; what prints nothing, or turns a line around, is written out."""
    shown = "\n".join(map(printable, text.split("\n"))) if lines else printable(text)
    # Notebooks typeset what stands between dollars and in \( \)
    return html.escape(shown).replace("$", "&#36;").replace("\\", "&#92;")


def listed(names: Iterable[str]) -> str:
    """The first names of some, quoted."""
    every = list(names)
    return (", ".join(map(repr, every[:6])) + (", …" if len(every) > 6 else "")) or "none"
