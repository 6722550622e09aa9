"""Whether the tensors that were read are still as they were, and which tensors a function reads."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from clearhead._errors import ClearheadError
from clearhead._values import compiling, transformed


class Versions:
    """How often each tensor had been written to when it was read.

    Tensors made in inference mode do not count their writes: where one of them is read, `known` is False.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.known = not compiling() and not transformed()
        self._seen: list[tuple[Tensor, int]] = []
        for tensor in tensors if self.known else ():
            if tensor.is_inference():
                self.known = False
            else:
                self._seen.append((tensor, tensor._version))

    @property
    def same(self) -> bool:
        """Whether nothing has been written to since."""
        return all(tensor._version == version for tensor, version in self._seen)

    def check(self) -> None:
        """Raise where a backward pass would compute with other numbers than the forward did."""
        for tensor, version in self._seen:
            if tensor._version != version:
                raise ClearheadError(
                    f"a tensor that a mask or a score of attention() reads, {tensor.dtype}, shape "
                    f"{tuple(tensor.shape)}, was modified in place after the forward pass, and the backward pass needs "
                    "it as it was. Pass a copy: tensor.clone()."
                )


def read_by(function: Any, depth: int = 3) -> Iterator[Tensor]:
    """The tensors that a function is seen to read: in its closure, its defaults, its globals, and `self.name` of each.

    Functions that it calls are followed a few steps. What is reached in other ways (`getattr`, a file) is not seen.
    """
    if isinstance(function, functools.partial):
        yield from _held([*function.args, *function.keywords.values()], (), depth)
        yield from read_by(function.func, depth)
        return
    if isinstance(function, types.MethodType):
        holder, function = [function.__self__], function.__func__
    elif isinstance(function, types.FunctionType):
        holder = []
    else:  # an object that can be called
        method = "forward" if isinstance(function, nn.Module) else "__call__"
        holder, function = [function], getattr(type(function), method, None)
    code = getattr(function, "__code__", None)
    if code is None:
        return
    names = _names(code)
    held: list[Any] = [*holder, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    held += [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
    held += [function.__globals__[name] for name in names if name in function.__globals__]
    yield from _held(held, names, depth)


def _held(things: Iterable[Any], names: Iterable[str], depth: int) -> Iterator[Tensor]:
    for thing in things:
        if isinstance(thing, Tensor):
            yield thing
        elif isinstance(thing, list | tuple | set | dict):
            parts = thing.values() if isinstance(thing, dict) else thing
            yield from (part for part in parts if isinstance(part, Tensor))
        elif isinstance(thing, types.FunctionType | types.MethodType | functools.partial):
            if depth:
                yield from read_by(thing, depth - 1)
        elif not isinstance(thing, type | types.ModuleType | types.BuiltinFunctionType):
            parts = [_attribute(thing, name) for name in names]
            yield from (part for part in parts if isinstance(part, Tensor))


def _attribute(thing: Any, name: str) -> Any:
    """An attribute as it is stored, without running a property."""
    own = getattr(thing, "__dict__", {})
    if isinstance(thing, nn.Module):
        own = {**own, **thing._parameters, **thing._buffers}
    return own.get(name)


def _names(code: types.CodeType) -> set[str]:
    """The names that the code looks up, those of functions inside it included."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return False
    return True
