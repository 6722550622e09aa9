"""Compiled models, whose calls are not made one by one; and compiled functions inside of models, whose calls are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from clearhead._errors import UnsupportedError


def refuse_compiled(model: nn.Module) -> None:
    """Raise where torch.compile() has been put on the model or on a module inside it."""
    for name, module in model.named_modules():
        shown = f"{type(model).__name__}.{name}" if name else "the model"
        if "_orig_mod" in module._modules:
            remedy = "Watch what was compiled" + (": watch(model._orig_mod)." if module is model else ".")
        elif module._compiled_call_impl is not None:
            remedy = "Watch a copy, which is not compiled: watch(copy.deepcopy(model))."
        elif hasattr(module.forward, "_torchdynamo_orig_callable"):
            remedy = "Put its own forward back: del module.forward."
        else:
            continue
        raise UnsupportedError(
            f"{shown} is compiled: torch.compile() merges the calls that watch() records, and the outputs of the model "
            f"would not stay what they are.\n{remedy} Both have the same weights, and so the same attention."
        )


def fill_tables() -> None:
    """PyTorch and its compiler list functions once, when they first need to, and keep the list: not with ours in it.

    With a stand-in for scaled_dot_product_attention on it, no compiled code would show a call to a function mode.
    """
    torch.overrides.get_overridable_functions()
    if "torch._dynamo" in sys.modules:
        with suppress(ImportError, AttributeError):  # a private name
            from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

            TorchInGraphFunctionVariable._get_handlers()


def traced_only(function: Any) -> None:
    """Let the compiler follow a function inside of others, and not compile it by itself.

    It would tell the functions that a mode is given by where they are in memory; those that read a tensor's attributes
    are new ones each time, in the same place: what was compiled for `.shape` would run for `.device`.
    """
    if "torch._dynamo" in sys.modules:
        with suppress(ImportError):  # private, as above
            from torch._dynamo.eval_frame import skip_code

            skip_code(function.__code__)


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, for which compiled functions pause: traced, a record would be made while compiling, or never."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled; to ask for the compiler would load it
        return function
    reason = "watch() records this attention call in eager code; compile with fullgraph=False"
    apart: Callable[..., Any] = torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]
    return apart
