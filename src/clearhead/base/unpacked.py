"""An output that the caller unpacks into two names, as torch's (output, weights).

A tensor whose first size is 2 unpacks without an error: the names would hold its two sequences.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import types
from typing import Any

from torch import Tensor, nn

from clearhead.base.arrays import Array, shape_shown
from clearhead.base.closures import attribute
from clearhead.base.errors import ClearheadError
from clearhead.base.torch_private import may_change_output
from clearhead.base.tracing import compiling

# the modules whose frames stand between what is called and its caller, and pass the output on; the last is of `watch`
_BETWEEN = (
    "clearhead.base.unpacked",
    "clearhead._attention",
    "clearhead.nn.",
    "torch.nn.modules.",
    "clearhead.models.tap.modules",
)
_UNPACK, _CACHE = (dis.opmap.get(name, -1) for name in ("UNPACK_SEQUENCE", "CACHE"))
_VARIABLES = ("LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT")
_OF_CALLS = ("CACHE", "PUSH_NULL", "EXTENDED_ARG", "PRECALL", "KW_NAMES", "LOAD_CONST")


def refuse_unpacking(
    called: Any, output: Array, write: str = "module(…)", weights: str = "module.attention_weights"
) -> None:
    """Raise where the caller's next instruction unpacks this output into two.

    `called`: a module, or a function; `write`: how a call of it is written; `weights`: what gives its weights.
    Both are read from the caller's bytecode: what it calls, which must be this module by its name, since a call such as
    `list(map(module, ...))` gives other things; and the instruction after the call. This costs a microsecond, and for a
    first size of 2 alone. Compiled code is not looked at, nor a module with forward hooks, which may give a tuple.
    """
    count = output.size(0) if isinstance(output, Tensor) else output.shape[0]  # a nested tensor may have no shape
    if compiling() or type(count) is not int or count != 2:
        return
    module = isinstance(called, nn.Module)
    if module and may_change_output(called):
        return
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        frame = frame.f_back
    if frame is None or not _unpacks(frame.f_code.co_code, frame.f_lasti) or not calls(frame, called):
        return
    rest = "output.unbind(0)" if isinstance(output, Tensor) else "list(output)"
    name = type(called).__name__ if module else called.__name__
    raise ClearheadError(
        f"{name} returns the output alone, and this call unpacks it into two: the names would get the first and the "
        f"second of its 2 sequences, {shape_shown(output)}, not (output, weights).\nWrite output = {write}; the "
        f"weights are {weights}. For the two sequences write first, second = {rest}."
    )


def _unpacks(code: bytes, call: int) -> bool:
    """Whether the instruction after the call at this place unpacks into two."""
    after = call + 2
    while after < len(code) and code[after] == _CACHE:
        after += 2
    return code[after : after + 2] == bytes((_UNPACK, 2)) if _UNPACK >= 0 else False


def calls(frame: types.FrameType, module: Any) -> bool:
    """Whether the instruction at which a frame stands calls this module, or a method of it, or this function.

    The instructions that look up what is called begin where the call begins in the source: a variable, then attributes
    and items. Anything else, such as the result of another call, is not known, and so not the module.
    """
    steps = [step for step in dis.get_instructions(frame.f_code) if step.offset <= frame.f_lasti]
    call = steps.pop()
    if not call.opname.startswith("CALL") or call.positions is None or call.positions.col_offset is None:
        return False
    begin, owner, found = call.positions[0:3:2], None, None
    for step in steps:
        at = step.positions
        if at is None or at[0:3:2] != begin or at == call.positions or step.opname in _OF_CALLS:
            continue
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            owner, found = found, attribute(found, step.argval)
        elif step.opname == "BINARY_SUBSCR" and isinstance(found, nn.ModuleList | list | tuple):
            found = module if any(one is module for one in found) else None
        elif step.opname.startswith("CALL") and isinstance(found, type) and isinstance(module, found):
            found = module  # which has just been built
        elif step.opname.startswith(_VARIABLES) and isinstance(step.argval, str):
            owner, found = None, _variable(frame, step.argval)
        else:
            owner = found = None
    while isinstance(found, functools.partial):
        found = found.func
    method = owner is module and isinstance(found, types.FunctionType)
    return found is module or method or getattr(found, "__self__", None) is module


def looked_into(frame: types.FrameType) -> bool:
    """Whether the code that reads an attribute, at the instruction at which a frame stands, goes on to an attribute or
    an item of what it gets: an instruction after it begins where it begins in the source."""
    steps = [step for step in dis.get_instructions(frame.f_code) if step.offset >= frame.f_lasti]
    read = steps[0]
    if not read.opname.startswith("LOAD_ATTR") or read.positions is None or read.positions.col_offset is None:
        return False
    begin = read.positions[0:3:2]
    inner = [step for step in steps[1:] if step.positions is not None and step.positions[0:3:2] == begin]
    looks = ("LOAD_ATTR", "LOAD_METHOD", "BINARY_SUBSCR", "BINARY_SLICE")
    return any(step.opname.startswith(looks) or step.argrepr == "[]" for step in inner)


def _variable(frame: types.FrameType, name: str) -> Any:
    for variables in (frame.f_locals, frame.f_globals, vars(builtins)):
        if name in variables:
            return variables[name]
    return None
