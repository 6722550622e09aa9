"""Text that a person or a model wrote, made fit to be shown."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Shown = TypeVar("Shown", bound=type)
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
    from torch import Tensor  # here, since pages are made without torch

    from clearhead.base.torch_state.tensor_kind import is_freed

    for part in thing if isinstance(thing, list | tuple) else (thing,):
        if isinstance(part, Tensor) and is_freed(part):
            said = f"a tensor of {part.dtype}, shape {tuple(part.shape)}, that has no memory"
            return said if part is thing else f"a {type(thing).__name__} with {said}"
    return f"{thing!r:.{most}}"


def outlined(self: Any) -> str:
    """The repr of a dataclass or a named tuple that holds tensors: its fields without those at their defaults, tensors
    and arrays by shape and dtype, and other values by their first characters."""
    fields = getattr(self, "__dataclass_fields__", {})
    usual = getattr(self, "_field_defaults", {}) | {name: field.default for name, field in fields.items()}
    given = {name: getattr(self, name) for name in (fields or getattr(self, "_fields", ()))}
    shown = [f"{name}={_outline(one)}" for name, one in given.items() if name not in usual or one is not usual[name]]
    return f"{type(self).__name__}({', '.join(shown)})"


def with_outline(cls: Shown) -> Shown:
    """Give a class the repr of `outlined`."""
    cls.__repr__ = outlined  # type: ignore[method-assign, assignment]
    return cls


def _outline(one: Any) -> str:
    if hasattr(one, "shape") and hasattr(one, "dtype"):  # a tensor or an array
        return f"<{'×'.join(map(str, one.shape)) or 'scalar'} {str(one.dtype).removeprefix('torch.')}>"
    if hasattr(one, "_fields") or hasattr(one, "__dataclass_fields__"):
        return f"{type(one).__name__}(…)"
    if isinstance(one, list | tuple):
        inside = ", ".join(map(_outline, one[:3])) + ", …" * (len(one) > 3)
        return f"[{inside}]" if isinstance(one, list) else f"({inside}{',' * (len(one) == 1)})"
    if isinstance(one, dict):
        return "{" + ", ".join(f"{name!r:.30}: {_outline(each)}" for name, each in list(one.items())[:3]) + "}"
    if callable(one):
        return getattr(one, "__name__", type(one).__name__)
    return short(said(one, lambda: repr(one)).partition("\n")[0], 40)


def short(text: str, most: int = 120) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def escaped(text: str, lines: bool = False) -> str:
    """Text that HTML shows as it is. Characters that print nothing, or reverse a line, are written out."""
    shown = "\n".join(map(printable, text.split("\n"))) if lines else printable(text)
    # Notebooks typeset text between dollars and in \( \)
    return html.escape(shown).replace("$", "&#36;").replace("\\", "&#92;")


def listed(names: Iterable[str]) -> str:
    """The first names of some, quoted."""
    every = list(names)
    return (", ".join(map(repr, every[:6])) + (", …" if len(every) > 6 else "")) or "none"
