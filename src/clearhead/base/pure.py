"""The values that decide a function's results beside its arguments, where its bytecode shows all of them.

No code is run and no attribute is looked up. An instruction that is not known to be harmless makes the answer "not
known".
"""

from __future__ import annotations

import dis
import functools
import inspect
import math
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.base.arrays import check_memory
from clearhead.base.torch_state import any_autocast, dispatch_modes, function_modes
from clearhead.base.tracing import plain

DEPTH = 4  # how many levels of calls are followed
LARGEST = 2**26  # bytes of tensors that are compared at each use
# all that a rule of indices needs; none writes, draws random numbers, reads the surroundings or gives raw memory
_METHODS = """
    abs all any argmax argmin bitwise_and bitwise_not bitwise_or bitwise_xor bool ceil clamp cos count_nonzero cumsum
    device diff div dim double dtype eq exp expand flatten flip float floor floor_divide fmod gather ge gt index_select
    int isfinite isnan le log log2 logical_and logical_not logical_or logical_xor long lt mT masked_fill max maximum
    mean min minimum movedim mul ndim ne neg nonzero numel permute pow prod remainder repeat_interleave reshape roll
    round shape sigmoid sign sin size sqrt square squeeze sub sum T take tanh to transpose tril triu trunc unsqueeze
    view where
"""
_FUNCTIONS = """
    abs add all any bitwise_and bitwise_not bitwise_or bitwise_xor bucketize cat ceil clamp cos div eq exp floor
    floor_divide fmod ge gt isin le log log2 logical_and logical_not logical_or logical_xor lt maximum minimum mul ne
    neg ones_like pow remainder round searchsorted sign sin sqrt square stack sub sum take tanh tril triu trunc where
    zeros_like
"""
_BUILTINS = (abs, bool, divmod, float, int, len, max, min, pow, round, sum, tuple)
_CONVERSIONS = "abs pos bool int float index complex len iter round divmod rdivmod"
_SIGNS = "add sub mul truediv floordiv mod pow and or xor lshift rshift matmul"
_OPERATORS = [f"__{prefix}{sign}__" for sign in _SIGNS.split() for prefix in ("", "r")]
_OPERATORS += ["__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__neg__", "__invert__", "__getitem__"]
_OPERATORS += [f"__{name}__" for name in _CONVERSIONS.split()]
_OF_C = types.MethodDescriptorType, types.GetSetDescriptorType, types.WrapperDescriptorType


def _of_tensor(name: str) -> Any:
    return getattr(Tensor, name, None)


# as they are when this is imported: a function that is replaced later is not known
_OWN_METHODS = {name: found for name in _METHODS.split() if isinstance(found := _of_tensor(name), _OF_C)}
_OWN_OPERATORS: list[tuple[Any, str, Any]] = [(Tensor, name, _of_tensor(name)) for name in _OPERATORS]
_OWN_OPERATORS += [  # names that operators written in Python look up
    (owner, name, getattr(owner, name))
    for operator in {inspect.unwrap(found) for _, _, found in _OWN_OPERATORS if isinstance(found, types.FunctionType)}
    if isinstance(operator, types.FunctionType)
    for name in operator.__code__.co_names
    for owner in (torch, Tensor)
    if name in dir(owner)
]
_OWN_FUNCTIONS = {
    id(found): found  # held, so that no other object gets its id
    for name in _FUNCTIONS.split()
    if isinstance(found := getattr(torch, name), types.BuiltinFunctionType)
}
_OWN_MATH = {id(found): found for found in vars(math).values() if isinstance(found, types.BuiltinFunctionType)}
_PLAIN = (int, float, bool, str, type(None), type(...), torch.dtype, torch.device)
_SINGLE = (None, True, False, ...)
_STEPS = """
    RESUME NOP CACHE EXTENDED_ARG PRECALL PUSH_NULL COPY SWAP POP_TOP COPY_FREE_VARS NOT_TAKEN LOAD_CONST LOAD_SMALL_INT
    RETURN_VALUE RETURN_CONST CALL CALL_KW KW_NAMES TO_BOOL COMPARE_OP IS_OP UNARY_NEGATIVE UNARY_NOT UNARY_INVERT
    UNARY_POSITIVE BINARY_OP BINARY_SUBSCR BINARY_SLICE BUILD_TUPLE BUILD_SLICE LOAD_ATTR LOAD_METHOD UNPACK_SEQUENCE
"""
_KNOWN = {*_STEPS.split()}
_BEGINNINGS = ("LOAD_FAST", "STORE_FAST", "LOAD_GLOBAL", "LOAD_DEREF", "POP_JUMP", "JUMP_FORWARD", "JUMP_IF")
_OF_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class NotKnown(Exception):
    """The reason why a function's reads are not known, as the end of a sentence that begins with "it"."""


class Looked(NamedTuple):
    """The names that code looks up: variables that are not its arguments, each with the attribute of a module that
    follows, and attributes of values that it computes."""

    variables: tuple[tuple[str, str | None], ...]
    attributes: tuple[str, ...]


class State:
    """The present values of all that a function reads. Raises `NotKnown`."""

    def __init__(self, function: Any) -> None:
        self.things: list[Any] = []  # compared by identity, or plain values in words
        self.tensors: list[Tensor] = []
        if function_modes() or dispatch_modes():
            raise NotKnown("is called under a mode of PyTorch's, which may change what it computes")
        # a quotient of integers has the default dtype
        self.things += [torch.get_default_dtype(), any_autocast()]
        for owner, name, own in _OWN_OPERATORS:
            if getattr(owner, name, None) is not own:
                where = "torch" if owner is torch else "torch.Tensor"
                raise NotKnown(f"computes with {where}.{name}, which was replaced")
        self._function(function, DEPTH)
        if sum(t.numel() * t.element_size() for t in self.tensors) > LARGEST:
            raise NotKnown("reads tensors that are too large to be compared at each call")

    def copied(self) -> State:
        """The same state, with copies of the tensors."""
        with torch.inference_mode(False), torch.no_grad():
            self.tensors = [t.detach().clone() for t in self.tensors]
        return self

    def same(self, other: State) -> bool:
        """Whether all values are those of another state."""
        if len(self.things) != len(other.things) or len(self.tensors) != len(other.tensors):
            return False
        pairs = zip(self.things, other.things, strict=True)
        if any(a is not b and not (type(a) is type(b) is str and a == b) for a, b in pairs):
            return False
        both = zip(self.tensors, other.tensors, strict=True)
        with torch.no_grad():
            return all(a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b)) for a, b in both)

    def _function(self, function: Any, depth: int) -> None:
        if type(function) is not types.FunctionType:
            raise NotKnown(f"is, or calls, a {type(function).__name__}, whose code is not read")
        if not depth:
            raise NotKnown(f"calls functions in more than {DEPTH} levels")
        code = function.__code__
        where = type(function.__globals__), type(getattr(function, "__builtins__", None))
        if where != (dict, dict):
            raise NotKnown("has globals that are no dict")
        if vars(function):
            raise NotKnown("has attributes of its own, as compiled or decorated functions have")
        looked = looked_up(code)
        self.things.append(code)
        self._value(function.__defaults__ or (), "a default", depth)
        for name, given in sorted((function.__kwdefaults__ or {}).items()):
            self.things.append(name)
            self._value(given, name, depth)
        for name in looked.attributes:
            if name not in _OWN_METHODS or _of_tensor(name) is not _OWN_METHODS[name]:
                raise NotKnown(f"asks for .{name}")
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        for name, attribute in looked.variables:
            self._variable(function, cells, name, attribute, depth)

    def _variable(self, function: Any, cells: Any, name: str, attribute: str | None, depth: int) -> None:
        if name in cells:
            try:
                found = cells[name].cell_contents
            except ValueError:
                raise NotKnown(f"reads {name}, which has no value") from None
        elif name in function.__globals__:
            found = function.__globals__[name]
        elif name in function.__builtins__:
            found = function.__builtins__[name]
        else:
            raise NotKnown(f"reads {name}, which is not there")
        if found is torch or found is math:
            if attribute is None or attribute not in vars(found):
                raise NotKnown(f"reads {name}, a module")
            self._value(vars(found)[attribute], f"{name}.{attribute}", depth)
        elif attribute is not None and not (type(found) in (Tensor, torch.nn.Parameter) and attribute in _OWN_METHODS):
            raise NotKnown(f"reads {name}.{attribute}, an attribute of a {type(found).__name__}")
        else:
            if attribute is not None and _of_tensor(attribute) is not _OWN_METHODS[attribute]:
                raise NotKnown(f"asks for .{attribute}")
            self._value(found, name, depth)

    def _value(self, found: Any, name: str, depth: int) -> None:
        if type(found) in _PLAIN:
            exact = found.hex() if isinstance(found, float) else found
            self.things.append(f"{type(found).__name__} {exact}")
        elif type(found) is tuple and depth:
            self.things.append(f"tuple of {len(found)}")
            for part in found:
                self._value(part, name, depth - 1)
        elif type(found) in (Tensor, torch.nn.Parameter) and plain(found) and not found.is_quantized:
            self.things.append("tensor")
            self.tensors.append(check_memory(found, name))
        elif type(found) is types.FunctionType:
            self.things.append(found)  # by identity: a rule may compare functions
            self._function(found, depth - 1)
        elif id(found) in _OWN_FUNCTIONS or id(found) in _OWN_MATH or any(found is own for own in _BUILTINS):
            self.things.append(found)
        else:
            raise NotKnown(f"reads {name}, a {type(found).__name__}")


@functools.lru_cache(maxsize=256)
def _looked_up(code: types.CodeType) -> Looked | str:
    if code.co_flags & _OF_GENERATORS:
        return "is a generator or a coroutine"
    if any(word in ("out", "inplace") for constant in code.co_consts for word in _words(constant)):
        return "may write to a tensor that it is given"
    variables: dict[tuple[str, str | None], None] = {}
    attributes: dict[str, None] = {}
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "PUSH_NULL", "EXTENDED_ARG")]
    variable: str | None = None
    before: dis.Instruction | None = None
    for step in steps:
        name = step.opname
        if name not in _KNOWN and not name.startswith(_BEGINNINGS):
            return f"does more than compute with its arguments ({name})"
        if name == "IS_OP" and not (
            before is not None and before.opname == "LOAD_CONST" and any(before.argval is one for one in _SINGLE)
        ):
            return "asks whether two things are the same object"
        before = step
        if name == "BINARY_OP" and step.argrepr.endswith("="):
            return f"writes in place ({step.argrepr})"
        if name in ("LOAD_ATTR", "LOAD_METHOD"):
            if variable is None:
                attributes[step.argval] = None
            else:
                variables[variable, step.argval] = None
            variable = None
            continue
        if variable is not None:
            variables[variable, None] = None
        variable = step.argval if name.startswith(("LOAD_GLOBAL", "LOAD_DEREF")) else None
    return Looked(tuple(variables), tuple(attributes))


def _bits(tensor: Tensor) -> Tensor:
    """A tensor's numbers as bytes: 0.0 equals -0.0, but a rule may tell them apart."""
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        yield from (word for word in value if isinstance(word, str))


def looked_up(code: types.CodeType) -> Looked:
    """The names that code looks up. Raises `NotKnown` where the code does anything but compute."""
    found = _looked_up(code)
    if isinstance(found, str):
        raise NotKnown(found)
    return found


def holds(function: Any, state: State) -> bool:
    """Whether a function still reads the values of this state."""
    try:
        return state.same(State(function))
    except NotKnown:
        return False
