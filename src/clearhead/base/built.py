"""Keywords that a constructor does not take: the error says what to write instead, or what it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import Any, ClassVar, TypeVar

from clearhead.base.errors import ClearheadError

Init = TypeVar("Init", bound=Callable[..., None])


def refuse(
    who: str, called: str, said: Mapping[str, str], why: str, more: str = "", takes: tuple[str, ...] = ()
) -> None:
    """Raise an error with what to pass for each keyword; Python's TypeError where one has nothing to say.

    `takes`: the names that there are, which the TypeError says too, the nearest first.
    """
    for name, instead in said.items():
        if not instead:
            near = get_close_matches(name, takes, len(takes)) if takes else []
            names = ", ".join(dict.fromkeys((*near, *takes)))
            own = f"; it takes {names}" if takes else ""
            raise TypeError(f"{called}() got an unexpected keyword argument {name!r}{own}")
    lines = "".join(f"\n  - for {name}: {instead}" for name, instead in said.items())
    raise ClearheadError(f"{who} takes no {', '.join(said)}: {why}. Pass instead:{lines}{more}")


def built_with(
    said: Mapping[str, str], older: tuple[str, str] | None = None, by_position: Callable[..., str] | None = None
) -> Callable[[Init], Init]:
    """A decorator of `__init__`: keywords that it does not have are an error; those of `said` say what to write.

    `older`: the arguments by position that older code gives, which are more than there are, and what to write for them.
    `by_position`: gives the words of the TypeError where such arguments are given to a constructor that takes names.
    The error comes before Python's own, which names what is missing and not what was meant.
    """

    def decorate(init: Init) -> Init:
        who, own = init.__qualname__.partition(".")[0], tuple(signature(init).parameters)[1:]
        kinds = signature(init).parameters
        placed = [name for name in own if kinds[name].kind is kinds[name].POSITIONAL_OR_KEYWORD]

        @wraps(init)
        def checked(self: Any, *args: Any, **given: Any) -> None:
            if any(name not in own for name in given):
                told = {name: said.get(name, "") for name in given if name not in own}
                refuse(who, f"{who}.__init__", told, "it is built with other names", takes=own)
            if by_position is not None and len(args) > len(placed):
                raise TypeError(by_position(*args))
            if older is not None and len(args) > len(placed):
                raise ClearheadError(
                    f"{who} takes {len(placed)} arguments by position, ({', '.join(placed)}), and got {len(args)}.\n"
                    f"If they are ({older[0]}), write {older[1]}."
                )
            init(self, *args, **given)

        return checked  # type: ignore[return-value]

    return decorate


Class = TypeVar("Class", bound=type)


def told(cls: Class) -> Class:
    """A decorator of a class whose own `__init__`, such as that of a dataclass, says what it takes."""
    init: Any = vars(cls).get("__init__")
    named = init is not None and not hasattr(init, "__wrapped__")
    if named and all(one.kind is not one.VAR_KEYWORD for one in signature(init).parameters.values()):
        names, by_position = (cls.other_names, cls.by_position) if issubclass(cls, Told) else ({}, None)
        checked: Any = built_with(names, by_position=by_position)(init)
        cls.__init__ = checked  # type: ignore[misc]
    return cls


class Told:
    """A base of clearhead's parts: the constructors of its subclasses in clearhead say what they take.

    `other_names`: of keywords with which others build the same, what to write here. `by_position`: of a constructor
    that takes names alone, the words of its TypeError for arguments by position.
    """

    other_names: ClassVar[Mapping[str, str]] = {}
    by_position: ClassVar[Callable[..., str] | None] = None

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if cls.__module__.startswith("clearhead."):
            told(cls)
