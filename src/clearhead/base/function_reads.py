"""What a user's function reads besides its arguments, found by the names in its code. The function is not run."""

from __future__ import annotations

import builtins
import functools
import inspect
import operator
import re
import sys
import types
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.base.torch_private import parts_of, uncounted
from clearhead.base.torch_state import any_autocast, dispatch_modes, function_modes
from clearhead.base.versions import Versions

DEPTH = 8  # of functions, attributes and containers inside each other
_PLAIN = int, float, complex, bool, str, bytes, type(None), type(...), torch.dtype, torch.device
_STATEFUL = re.compile(  # random numbers, uninitialized memory, settings, and builtins that reach any variable
    "rand|bernoulli|normal|multinomial|poisson|exponential|cauchy|dropout|uniform|seed|generator|rng|empty|enabled|get_"
    "|^(eval|exec|compile|globals|locals|vars|dir|open|input|id|__import__)$"
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
        self._values: list[Any] = [torch.get_default_dtype(), any_autocast()]
        self._visited: dict[tuple[Any, ...], Any] = {}
        self._visit("the function", function, (), DEPTH)
        self._versions = Versions(("the function", tensor) for tensor in self.tensors)

    def is_same(self, other: FunctionReads) -> bool:
        """Whether both hold the same objects, and no tensor was written to in between."""
        same = len(self._values) == len(other._values) and all(map(operator.is_, self._values, other._values))
        return same and self._versions.changed(("the function", tensor) for tensor in other.tensors) is None

    def _visit(self, name: str, value: Any, names: tuple[str, ...], depth: int, owner: Any = None) -> None:
        """Visit a value that code with these names reads. `owner`: the object to which a function is bound."""
        place = id(value), id(owner), names
        self._values.append(value)
        if depth < 0 or _is_of_library(value, owner) or place in self._visited:
            return
        self._visited[place] = value
        if isinstance(value, Tensor):
            self.tensors += [] if any(value is tensor for tensor in self.tensors) else [value]
            self.unknown = self.unknown or (f"reads {name}, made in inference mode" if uncounted(value) else None)
        elif type(value) not in _PLAIN:
            if depth < DEPTH and type(value) is not tuple:
                self.unknown = self.unknown or f"reads {name}, a {type(value).__name__}"
            for part, of, bound in self._find_parts(value, names, owner):
                with suppress(ReferenceError):  # a weak reference whose object is gone
                    self._visit(*part, of, depth - 1, bound)

    def _find_parts(
        self, value: Any, names: tuple[str, ...], owner: Any
    ) -> Iterator[tuple[tuple[str, Any], tuple[str, ...], Any]]:
        """What a value holds, as (name, part), the names of the code that reads it, and its owner."""
        is_module = isinstance(value, nn.Module)
        if isinstance(value, types.FunctionType):
            names = _names_of(value)
            yield from ((pair, names, None) for pair in (*self._look_up(value, names).items(), ("self", owner)))
            yield ("a function", vars(value).get("__wrapped__")), (), owner
        elif isinstance(value, types.MethodType):
            yield ("a function", value.__func__), (), value.__self__
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                yield ("an argument", part), _names_of(value.func), None
        elif isinstance(value, list | tuple | set | frozenset | dict):
            for part in value.values() if isinstance(value, dict) else value:
                yield ("an entry", part), names, None
        elif is_module and type(value).__module__.startswith("torch."):
            yield from ((("a parameter", part), names, None) for part in (*value.parameters(), *value.buffers()))
        else:
            called = getattr(type(value), "forward" if is_module else "__call__", None)
            yield ("a method", called if isinstance(called, types.FunctionType) else None), (), value
            held = {key: part for of in parts_of(value) for key, part in of.items()} if is_module else {}
            for name in names:
                found = held.get(name, inspect.getattr_static(value, name, None))  # no code is run to find it
                found = found.__func__ if isinstance(found, staticmethod | classmethod) else found
                found = found.fget if isinstance(found, property) else found
                yield (name, found), names, value

    def _look_up(self, function: types.FunctionType, names: tuple[str, ...]) -> dict[str, Any]:
        """The values of a function's names, and its defaults."""
        found: dict[str, Any] = {}
        for name in filter(_STATEFUL.search, names):
            self.unknown = self.unknown or f"may draw random numbers or read a setting ({name})"
        for place in (sys.modules, vars(builtins), function.__globals__):  # sys.modules: imports inside it
            found |= {name: place[name] for name in names if name in place}
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # a variable that has no value yet
                found[name] = cell.cell_contents
        self._values += [function.__code__, *found]
        return {"its defaults": function.__defaults__ or (), **(function.__kwdefaults__ or {}), **found}


def _is_of_library(value: Any, owner: Any) -> bool:
    """Whether a module, a class or a function belongs to torch, math, Python's builtins or this package."""
    home = ""
    if isinstance(value, types.FunctionType):  # functools.wraps copies __module__
        home = "" if value.__closure__ else value.__globals__.get("__name__", "")
    elif isinstance(value, types.ModuleType | types.BuiltinFunctionType | type):
        home = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return str(home).partition(".")[0] in ("torch", "math", "builtins", *(["clearhead"] if owner is None else []))


def _names_of(function: Any) -> tuple[str, ...]:
    return _names_in(function.__code__) if isinstance(function, types.FunctionType) else ()


@functools.lru_cache(maxsize=256)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """The names in a code object and in all code objects inside it."""
    nested = (_names_in(one) for one in code.co_consts if isinstance(one, types.CodeType))
    return tuple(sorted({*code.co_names, *code.co_freevars}.union(*nested)))
