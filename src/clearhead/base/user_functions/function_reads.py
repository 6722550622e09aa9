"""What a user's function reads besides its arguments, found by the names in its code. The function is not run."""

from __future__ import annotations

import builtins
import functools
import operator
import re
import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.base.torch_state.active import any_autocast, dispatch_modes, function_modes
from clearhead.base.torch_state.torch_private import parts_of, uncounted
from clearhead.base.torch_state.versions import Versions

DEPTH = 8  # of functions, attributes and containers inside each other
_PLAIN = int, float, complex, bool, str, bytes, type(None), type(...), torch.dtype, torch.device
_STATEFUL = re.compile(  # random numbers, uninitialized memory, settings, and builtins that reach any variable
    "rand|bernoulli|normal|multinomial|poisson|exponential|cauchy|geometric|gumbel|sample|dropout|uniform|seed|generator"
    "|rng|empty|enabled|get_|^(grad|eval|exec|compile|globals|locals|vars|dir|open|input|id|__import__)$"
)


class FunctionReads:
    """The tensors and values that a function reads now.

    `unknown`: Why other values may decide its results, as the end of a sentence that begins with "it"; None if not.
    """

    def __init__(self, function: Any) -> None:
        self.tensors: list[Tensor] = []
        self.unknown: str | None = None
        if type(function) is not types.FunctionType or vars(function) or type(function.__globals__) is not dict:
            self.unknown = f"is a {type(function).__name__} with values of its own"
        elif function_modes() or dispatch_modes():
            self.unknown = "is called under a mode of PyTorch, which may change what it computes"
        self.values: list[Any] = [torch.get_default_dtype(), any_autocast()]
        self._visited: dict[tuple[Any, ...], Any] = {}
        self._visit("the function", function, (), DEPTH)
        self._versions = Versions(("the function", tensor) for tensor in self.tensors)

    def is_same(self, other: FunctionReads) -> bool:
        """Whether both hold the same objects, and no tensor was written to in between."""
        same = len(self.values) == len(other.values) and all(map(operator.is_, self.values, other.values))
        return same and self._versions.changed(("the function", tensor) for tensor in other.tensors) is None

    def _visit(self, name: str, value: Any, names: tuple[str, ...], depth: int, owner: Any = None) -> None:
        """Visit a value that code with these names reads. `owner`: the object to which a function is bound."""
        place = id(value), id(owner), names
        self.values.append(value)
        if type(value) in _PLAIN or place in self._visited:
            return
        if _is_of_library(value, owner):
            self._check_names([value.__name__])  # `from torch import rand as draw`
            return
        self._visited[place] = value
        if isinstance(value, Tensor):
            self.tensors += [] if any(value is tensor for tensor in self.tensors) else [value]
            self.unknown = self.unknown or (f"reads {name}, made in inference mode" if uncounted(value) else None)
        elif depth < 0 or (depth < DEPTH and type(value) is not tuple):
            self.unknown = self.unknown or f"reads {name}, a {type(value).__name__}"
        if depth >= 0:
            for (part_name, part), of, bound in self._find_parts(value, names, owner):
                with suppress(ReferenceError):  # a weak reference whose object is gone
                    self._visit(part_name, part, of, depth - 1, bound)

    def _find_parts(self, value: Any, names: tuple[str, ...], owner: Any) -> Iterator[Any]:
        """What a value holds, as (name, part), the names of the code that reads it, and its owner."""
        is_module = isinstance(value, nn.Module)
        if isinstance(value, Tensor):
            yield from (((name, part), names, None) for name, part in vars(value).items() if name in names)
        elif isinstance(value, types.FunctionType):
            names = _names_of(value.__code__)
            yield from ((pair, names, None) for pair in self._look_up(value, names).items())
            yield from self._find_attributes(owner, names) if owner is not None else ()
            yield ("a function", vars(value).get("__wrapped__")), (), owner
        elif isinstance(value, types.MethodType):
            yield ("a function", value.__func__), (), value.__self__
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                yield ("an argument", part), _names_of(getattr(value.func, "__code__", None)), None
        elif isinstance(value, list | tuple | set | frozenset | dict):
            entries = value.values() if isinstance(value, dict) else value
            yield from ((("an entry", part), names, None) for part in entries if type(part) not in _PLAIN)
        elif is_module and type(value).__module__.startswith("torch."):
            held = (part for part in vars(value).values() if isinstance(part, Tensor))  # as weight norm sets one
            yield from ((("a parameter", part), names, None) for part in (*value.parameters(), *value.buffers(), *held))
        else:
            yield from self._find_attributes(value, (*names, "forward" if is_module else "__call__"))

    def _find_attributes(self, value: Any, names: tuple[str, ...]) -> Iterator[Any]:
        """The attributes of these names, as they are stored: no code is run to find them."""
        kinds = (value if isinstance(value, type) else type(value)).__mro__
        of_module = parts_of(value) if isinstance(value, nn.Module) else ()
        places = [*of_module, getattr(value, "__dict__", {}), *map(vars, kinds)]
        for name in (name for name in names if any(name in place for place in places)):
            found = next(place[name] for place in places if name in place)
            found = found.__func__ if isinstance(found, staticmethod | classmethod) else found
            yield (name, found.fget if isinstance(found, property) else found), names, value

    def _look_up(self, function: types.FunctionType, names: tuple[str, ...]) -> dict[str, Any]:
        """The values of a function's names, and its defaults."""
        found: dict[str, Any] = {}
        self._check_names(names)
        for place in (sys.modules, vars(builtins), function.__globals__):  # sys.modules: imports inside it
            found |= {name: place[name] for name in names if name in place}
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # a variable that has no value yet
                found[name] = cell.cell_contents
        self.values += [function.__code__, *found]
        return {"its defaults": function.__defaults__ or (), **(function.__kwdefaults__ or {}), **found}

    def _check_names(self, names: Iterable[str]) -> None:
        for name in filter(_STATEFUL.search, names):
            self.unknown = self.unknown or f"may draw random numbers or read a setting ({name})"


def _is_of_library(value: Any, owner: Any) -> bool:
    """Whether a module, a class or a function belongs to torch, math, Python's builtins or this package."""
    home = value.__module__ if isinstance(value, types.BuiltinFunctionType | type) else ""
    if isinstance(value, types.ModuleType):
        home = value.__name__
    elif isinstance(value, types.FunctionType) and not value.__closure__:  # functools.wraps copies __module__
        home = value.__globals__.get("__name__", "")
    return str(home).partition(".")[0] in ("torch", "math", "builtins", *(["clearhead"] if owner is None else []))


@functools.lru_cache(maxsize=256)
def _names_of(code: Any) -> tuple[str, ...]:
    """The names in a code object and in all code objects inside it; none for anything else."""
    nested = [_names_of(one) for one in getattr(code, "co_consts", ()) if isinstance(one, types.CodeType)]
    return tuple(sorted({*getattr(code, "co_names", ()), *getattr(code, "co_freevars", ())}.union(*nested)))
