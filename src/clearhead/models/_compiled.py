"""Compiled models, whose calls are not made one by one."""

from __future__ import annotations

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
