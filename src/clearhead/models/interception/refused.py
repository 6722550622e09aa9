"""Compiled models are refused; in compiled functions inside models, attention runs in eager code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from clearhead.base.errors import ClearheadError, UnsupportedError
from clearhead.base.torch_state.contexts import has_compiled_code
from clearhead.base.torch_state.torch_private import (
    compiled_call,
    compiler_here,
    forward_is_compiled,
    skip_code,
    wraps_compiled,
)

Function = TypeVar("Function", bound=Callable[..., Any])


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile() has been put on this module."""
    return wraps_compiled(module) or compiled_call(module) is not None or forward_is_compiled(module)


def validate_model(model: Any, who: str) -> None:
    """Raise for anything but a module, and where torch.compile() has been put on it or on a module inside it."""
    if not isinstance(model, nn.Module):
        raise ClearheadError(f"{who} takes a torch.nn.Module; got a {type(model).__name__}.")
    for name, module in model.named_modules():
        if is_compiled(module):
            shown = f"{type(model).__name__}.{name}" if name else "the model"
            raise UnsupportedError(
                f"{shown} is compiled: torch.compile() merges the calls that {who}() reads. Pass the model that was "
                f"compiled, {who}(model._orig_mod); after model.compile() a copy, {who}(copy.deepcopy(model)); and put "
                "back a compiled forward: del module.forward."
            )


def refuse_compiled_code(model: nn.Module) -> None:
    """Raise where code of the model's classes has been compiled before: it would run for this model too."""
    for name, module in model.named_modules():
        function: Any = type(module).forward
        while function is not None:  # the compiler sees the outermost decorator
            if has_compiled_code(function):
                raise UnsupportedError(
                    f"{type(module).__name__}.forward{f' (of {name})' if name else ''} has been compiled already, for "
                    "this model or for another of its class, and this code would be used again, without a monitor.\n"
                    "Call torch.compiler.reset() first, then monitor the model, then run it: it is compiled anew."
                )
            function = getattr(function, "__wrapped__", None)


def prepare_compiler(mode: Any) -> None:
    """Prepare the compiler before a watch replaces PyTorch's functions. `mode`: its mode's `__torch_function__`.

    PyTorch and its compiler make tables of PyTorch's functions when they first need them, and keep them. A table that
    is made during a watch would hold the stand-in for scaled_dot_product_attention, and compiled code would show calls
    of the real function to no function mode.

    The compiler may inline `mode`, but must not compile it by itself. It would choose the code by the addresses of the
    functions that `mode` is given; and getters of a tensor's attributes are made anew each time, at the same address:
    the code for `.shape` would run for `.device`.
    """
    torch.overrides.get_overridable_functions()
    skip_code(mode.__code__)


def is_compiled_here() -> bool:
    """Whether this code is compiled, or may be: the compiler is at work in this thread."""
    return is_dynamo_compiling() or compiler_here() is not None


WATCHED = "watch() records this attention call in eager code; compile with fullgraph=False"


def uncompiled(function: Function, reason: str = WATCHED) -> Function:
    """The function, which always runs in eager code: if the compiler traced it, it would record while compiling."""
    apart: Function = torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]
    return apart
