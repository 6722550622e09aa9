"""Which module of the model is running, and whether its keys come from elsewhere."""

from __future__ import annotations

import inspect
from typing import Any, Literal

from torch import Tensor, nn

# What models call the sequence that the keys of cross attention come from.
SOURCES = ("key_value_states", "encoder_hidden_states", "cross_attention_states", "context")


class Stack:
    """The modules being run, outermost first, kept by hooks that touch neither inputs nor outputs."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(module): name or type(model).__name__ for name, module in model.named_modules()}
        self._running: list[tuple[nn.Module, Literal["self", "cross"]]] = []
        self._handles: list[Any] = []
        self._model = model

    def __enter__(self) -> Stack:
        for module in self._model.modules():
            self._handles.append(module.register_forward_pre_hook(self._push, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._pop, always_call=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _push(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._running.append((module, _kind(module, args, kwargs)))

    def _pop(self, module: nn.Module, *_: Any) -> None:
        while self._running and self._running.pop()[0] is not module:
            pass

    def innermost(self) -> tuple[str, Literal["self", "cross"]] | None:
        """The name of the innermost module running, and the kind of attention its inputs speak for."""
        if not self._running:
            return None
        module, kind = self._running[-1]
        return self.names[id(module)], kind


def _kind(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Literal["self", "cross"]:
    """Cross, if the module was given a second sequence."""
    named = dict(kwargs)
    if len(args) > 1:
        names = list(inspect.signature(module.forward).parameters)
        named.update(zip(names, args, strict=False))
    return "cross" if any(isinstance(named.get(source), Tensor) for source in SOURCES) else "self"
