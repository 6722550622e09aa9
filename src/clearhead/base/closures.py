"""Which tensors a function reads, found in its bytecode without running it."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from clearhead.base.torch_private import parts_of

DEPTH = 3  # how many levels of calls are followed
Chain = tuple[str, ...]  # a variable, and the attributes looked up on it: ("self", "rule", "ids")
LISTS = nn.ParameterList | nn.ParameterDict | nn.ModuleList | nn.ModuleDict | nn.Sequential
_ABSENT = object()


def read_by(function: Any, depth: int = DEPTH) -> Iterator[Tensor]:
    """The tensors that a function's bytecode reads.

    They are found in variables of its closure, its defaults, its globals and `self`, and in attributes looked up on
    these; in lists, tuples and dicts of such tensors and functions, and in all of PyTorch's own lists of parameters and
    of modules; and in the same places of the functions that it calls. Tensors that are reached in other ways
    (`getattr`, an attribute of a call's result) are not found.
    """
    if isinstance(function, functools.partial):
        for given in (*function.args, *function.keywords.values()):
            yield from _held(given, depth)
        yield from read_by(function.func, depth)
        return
    if isinstance(function, types.MethodType):
        if isinstance(function.__func__, types.FunctionType):
            yield from _through(function.__func__, function.__self__, depth)
    elif isinstance(function, types.FunctionType):
        yield from _through(function, _ABSENT, depth)
    elif not isinstance(function, type):  # an object that can be called
        method = getattr(type(function), "forward" if isinstance(function, nn.Module) else "__call__", None)
        while isinstance(method, types.FunctionType):
            yield from _through(method, function, depth)
            method = getattr(method, "__wrapped__", None)  # a watch wraps the `forward` of its model's classes


def _through(function: types.FunctionType, owner: Any, depth: int) -> Iterator[Tensor]:
    """The tensors that a function reads. `owner` is the object that its first argument is bound to."""
    code = function.__code__
    defaults = function.__defaults__ or ()
    known = dict(zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True))
    known |= function.__kwdefaults__ or {}
    if owner is not _ABSENT and code.co_argcount:
        known[code.co_varnames[0]] = owner
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a variable that has no value yet
            known[name] = cell.cell_contents
    for chain in _chains(code):
        thing = known.get(chain[0], function.__globals__.get(chain[0], _ABSENT))
        with suppress(ReferenceError):  # a weak reference whose object is gone
            yield from _followed(thing, chain[1:], depth)


def _followed(thing: Any, attributes: Chain, depth: int) -> Iterator[Tensor]:
    """The tensors that a chain of attributes leads to; a tensor on the way ends the chain."""
    for name in attributes:
        if thing is _ABSENT or isinstance(thing, Tensor):
            break
        owner, thing = thing, attribute(thing, name)
        if isinstance(thing, types.FunctionType) and not isinstance(owner, type | types.ModuleType):
            thing = types.MethodType(thing, owner)
        elif isinstance(thing, property) and thing.fget is not None:
            thing = types.MethodType(thing.fget, owner)
    yield from _held(thing, depth)


def _held(thing: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, LISTS):
        yield from thing.parameters()
        yield from thing.buffers()
    elif isinstance(thing, list | tuple | set | dict):
        for part in thing.values() if isinstance(thing, dict) else thing:
            if isinstance(part, Tensor) or (depth and not isinstance(part, str | int | float)):
                yield from _held(part, depth - 1)
    elif depth and isinstance(thing, types.FunctionType | types.MethodType | functools.partial | nn.Module):
        yield from read_by(thing, depth - 1)


def attribute(thing: Any, name: str) -> Any:
    """An attribute as it is stored: no code is run to find it."""
    if isinstance(thing, nn.Module):
        for inside in parts_of(thing):
            if name in inside:
                return inside[name]
    found = inspect.getattr_static(thing, name, _ABSENT)
    return found.__func__ if isinstance(found, staticmethod | classmethod) else found


@functools.lru_cache(maxsize=256)
def _chains(code: types.CodeType) -> tuple[Chain, ...]:
    """The variables that the code looks up, each with the attributes that are looked up on it."""
    found: dict[Chain, None] = {}
    chain: Chain = ()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain = (*chain, step.argval)
            continue
        if step.opname in ("CACHE", "PUSH_NULL"):
            continue
        if chain:
            found[chain] = None
        variable = step.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_CLASSDEREF"))
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        found.update(dict.fromkeys((name,) for name in names[:-1] if variable))
        chain = (names[-1],) if variable else ()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):  # a function inside it
            found.update(dict.fromkeys(_chains(constant)))
    return tuple(found)
