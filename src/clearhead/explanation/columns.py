"""Text in the columns of a terminal, whatever words it holds."""

from __future__ import annotations

import textwrap
import unicodedata

from clearhead.base.text import KEPT as KEPT
from clearhead.base.text import printable as printable

FILLER = "\0"  # stands behind each character that is two columns wide, so that a length is a width


def width(text: str) -> int:
    """How many columns it takes: a character of East Asia two, an accent that is put on another one none."""
    return len(_filled(text)) - sum(unicodedata.category(c) in ("Mn", "Me") for c in text)


def cut(word: str, most: int) -> str:
    """A name, in so many columns at most."""
    shown = printable(word)
    if width(shown) <= most:
        return shown
    filled = _filled(shown) + " "
    return _plain(filled[: most - 1 - (filled[most - 1] == FILLER)]) + "…"


def left(word: str, columns: int) -> str:
    """The word, then spaces up to so many columns."""
    return word + " " * (columns - width(word))


def right(word: str, columns: int) -> str:
    """The word after spaces, in so many columns."""
    return " " * (columns - width(word)) + word


def wrapped(text: str, indent: str, columns: int) -> list[str]:
    """Lines of at most so many columns, the first indented so far, the others by two more."""
    filled = _filled(printable(text))
    lines = textwrap.wrap(
        filled, columns, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
    )
    return [_plain(line).replace(KEPT, " ").rstrip() for line in lines]


def _filled(text: str) -> str:
    return "".join(c + FILLER * (unicodedata.east_asian_width(c) in "WF") for c in text)


def _plain(text: str) -> str:
    return text.replace(FILLER, "")
