"""Compiled models are refused; in compiled functions inside models, attention runs in eager code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from clearhead.base.contexts import has_compiled_code
from clearhead.base.errors import UnsupportedError
from clearhead.base.torch_private import compiled_call, compiler_here, forward_is_compiled, skip_code, wraps_compiled


def refuse_compiled(model: nn.Module, purpose: str = "watch", what: str = "records") -> None:
    """Raise where torch.compile() has been put on the model or on a module inside it.

    `purpose`: the function that was called. `what`: its verb for the model's attention calls, such as "records".
    """
    for name, module in model.named_modules():
        if wraps_compiled(module):
            remedy = "Pass the model that was compiled" + (f": {purpose}(model._orig_mod)." if module is model else ".")
        elif compiled_call(module) is not None:
            remedy = f"Pass a copy, which is not compiled: {purpose}(copy.deepcopy(model))."
        elif forward_is_compiled(module):
            remedy = "Put its own forward back: del module.forward."
        else:
            continue
        shown = f"{type(model).__name__}.{name}" if name else "the model"
        raise UnsupportedError(
            f"{shown} is compiled: torch.compile() merges the calls that {purpose}() {what}, and the outputs of the "
            f"model would change.\n{remedy} Both have the same weights, and so the same attention."
        )


def compiled_inside(model: nn.Module) -> bool:
    """Whether torch.compile() has been put on the model or on a module inside it."""
    return any(
        wraps_compiled(module) or compiled_call(module) is not None or forward_is_compiled(module)
        for module in model.modules()
    )


def refuse_compiled_code(model: nn.Module) -> None:
    """Raise where code of the model's classes has been compiled before: it would run for this model too."""
    for name, module in model.named_modules():
        function: Any = type(module).forward
        while function is not None:  # the compiler sees the outermost decorator
            if has_compiled_code(function):
                raise UnsupportedError(
                    f"{type(module).__name__}.forward{f' (of {name})' if name else ''} has been compiled already, for "
                    "this model or for another of its class, and this code would be used again, without a monitor's "
                    "operations.\nCall torch.compiler.reset() first, then monitor the model, then run it: it is "
                    "compiled anew."
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


def uncompiled(function: Callable[..., Any], reason: str = WATCHED) -> Callable[..., Any]:
    """The function, which always runs in eager code: if the compiler traced it, it would record while compiling."""
    apart: Callable[..., Any] = torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]
    return apart
