"""Which module of the model is running, and whether its keys come from elsewhere."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, Literal

from torch import Tensor, nn

from clearhead.models._patch import replaced

Kind = Literal["self", "cross"]

# What models call the sequence that the keys of cross attention come from.
SOURCES = ("key_value_states", "encoder_hidden_states", "cross_attention_states", "context", "memory")


class Stack:
    """The modules being run, outermost first, each thread its own.

    They are seen through `nn.Module.__call__`. Hooks would not do: PyTorch's Transformer layers leave their fast path
    where a module inside has one, and their outputs move.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(module): name or type(model).__name__ for name, module in model.named_modules()}
        self._model = model  # so that the ids stay theirs
        self._running = _Running()

    def entered(self) -> AbstractContextManager[None]:
        return replaced(nn.Module, "__call__", self._watched)

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if id(module) not in self.names:
                return call(module, *args, **kwargs)
            self._running.stack.append((module, _kind(module, args, kwargs)))
            try:
                return call(module, *args, **kwargs)
            finally:
                self._running.stack.pop()

        return __call__

    @property
    def innermost(self) -> tuple[nn.Module, Kind] | None:
        """The innermost module running, and the kind of attention its inputs speak for."""
        return self._running.stack[-1] if self._running.stack else None


class _Running(threading.local):
    def __init__(self) -> None:
        self.stack: list[tuple[nn.Module, Kind]] = []


def _kind(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind:
    """Cross, if the module was given a second sequence."""
    named = dict(kwargs)
    if len(args) > 1:
        with suppress(ValueError):  # TorchScript's forward has no signature
            named.update(zip(inspect.signature(module.forward).parameters, args, strict=False))
    return "cross" if any(isinstance(named.get(source), Tensor) for source in SOURCES) else "self"
