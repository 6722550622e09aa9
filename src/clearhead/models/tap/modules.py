"""Which module of the model is running, and whether its keys come from elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor, nn

from clearhead.base.torch_private import call_of_modules
from clearhead.models.tap.padding import Given, given, parameters
from clearhead.models.tap.patch import replaced

Kind = Literal["self", "cross"]

# The names of the arguments that the keys of cross attention come from.
SOURCES = ("key_value_states", "encoder_hidden_states", "cross_attention_states", "context", "memory")


class Notes(Protocol):
    """What a receiver notes of the layers around an attention call; the objects that it makes are its own."""

    def begun(self, kwargs: dict[str, Any]) -> Any:
        """A module has been called with these keywords: what is noted of the layers inside it."""

    def ended(
        self, around: Any, inside: Any, module: nn.Module, args: tuple[Any, ...], kwargs: Any, result: Any, name: str
    ) -> None:
        """A module has run: add it to what is noted of the module around it, in which it has this name."""

    def projected(self, inputs: Sequence[Tensor], weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Any:
        """The origin of a query, key and value that a function of torch has projected from these inputs."""


class Running(NamedTuple):
    """A module that runs; by its inputs the kind of attention, the padding, and the cache of keys before."""

    module: nn.Module
    kind: Kind
    told: Given
    cache: Any = None
    noted: Any = None  # what the receiver has noted of the layers in it

    @property
    def tokens(self) -> int | None:
        """How many tokens the cache of this layer holds or held, with those of this call; None: unknown."""
        cache, layer = self.cache, getattr(self.module, "layer_idx", None)
        if cache is None or layer is None or not hasattr(cache, "get_seq_length"):
            return None
        try:
            total = cache.get_seq_length(layer)
        except (ValueError, IndexError):  # a layer that has another one's keys: all that come before have counted this
            layers = (one for one in getattr(cache, "layers", ()) if hasattr(one, "get_seq_length"))
            total = max((int(one.get_seq_length()) for one in layers), default=0)
        return int(total) or None


class Stack:
    """The modules being run, outermost first, each thread its own.

    They are seen through `nn.Module._call_impl`. Hooks would not do: PyTorch's Transformer layers leave their fast path
    where a module inside has one, and their outputs move. Nor would `__call__`: while a thread traces, PyTorch
    replaces it in all threads by a function of its own, which calls the one that was there when PyTorch was imported.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(module): name or type(model).__name__ for name, module in model.named_modules()}
        self.classes = {name: type(module).__name__ for name, module in model.named_modules() if name}
        self.model = model  # keeps the modules alive, so that their ids are not reused
        self._running = _Running()
        self._lock = threading.Lock()
        self._threads = 0
        self._entries = 0
        self.around: AbstractContextManager[Any] = nullcontext()  # entered while a thread runs the model
        self.notes: Notes | None = None  # what takes note of each module's layers

    def entered(self) -> AbstractContextManager[None]:
        # innermost: so that of two function modes (`around`) the later one is on top, and sees a call first
        return replaced(nn.Module, call_of_modules(), self._watched, innermost=True)

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def _call_impl(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            running = self._running
            if id(module) not in self.names:
                running.others += 1
                try:
                    return call(module, *args, **kwargs)
                finally:
                    running.others -= 1
            stack = running.stack
            if not stack:
                with self.running(module, args, kwargs):
                    return call(module, *args, **kwargs)
            # as `running` does, at less cost: each module comes by
            around = stack[-1]  # read before: `monitor` may close an interrupted pass inside
            stack.append(self._entered(module, args, kwargs, stack))
            try:
                result = call(module, *args, **kwargs)
            finally:
                inside = stack.pop().noted
            if self.notes is not None and around.noted is not None and inside is not None:
                name = self.names[id(module)].removeprefix(f"{self.names[id(around.module)]}.")
                self.notes.ended(around.noted, inside, module, args, kwargs, result, name)
            return result

        return _call_impl

    @contextmanager
    def running(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """While this module of the model runs in this thread, called with these arguments."""
        stack = self._running.stack
        with (
            nullcontext() if stack else self._outermost(module),
            self.inside(self._entered(module, args, kwargs, stack)),
        ):
            yield

    @contextmanager
    def inside(self, running: Running) -> Iterator[None]:
        """While this runs, in this thread, inside what runs already."""
        stack = self._running.stack
        stack.append(running)
        try:
            yield
        finally:
            stack.pop()

    def _entered(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], stack: list[Running]
    ) -> Running:
        entered = _entered(module, args, kwargs, stack)
        return entered if self.notes is None else entered._replace(noted=self.notes.begun(kwargs))

    @contextmanager
    def _outermost(self, module: nn.Module) -> Iterator[None]:
        """The context of this thread's outermost call of the model, or of a module of it."""
        with self._lock:
            if module is self.model or not self._threads:  # else a part of what another thread runs
                self._entries += 1
            self._running.entry = self._entries
            self._threads += 1
        try:
            with self.around:
                yield
        finally:
            with self._lock:
                self._threads -= 1

    @property
    def beside(self) -> bool:
        """This thread runs no module, while another one runs the model: it may be a worker thread of that one."""
        return not self._running.stack and not self._running.others and self._threads > 0

    @property
    def entry(self) -> int:
        """The number of this thread's outermost call; a module that another thread calls meanwhile is a part of it."""
        return self._running.entry

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that run in this thread, innermost first."""
        return [running.module for running in reversed(self._running.stack)]

    @property
    def innermost(self) -> Running | None:
        """The innermost module running."""
        return self._running.stack[-1] if self._running.stack else None


class _Running(threading.local):
    def __init__(self) -> None:
        self.stack: list[Running] = []
        self.others = 0  # modules running that are not the model's
        self.entry = 0


def _entered(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], stack: list[Running]) -> Running:
    """The module with its kind, cross if it is called with a second sequence, and its padding."""
    if len(args) <= 1 and not kwargs:  # nothing that is read below
        return Running(module, "self", stack[-1].told if stack else Given())
    named = dict(kwargs)
    if len(args) > 1:
        named.update(zip(parameters(module.forward), args, strict=False))
    second = any(isinstance(named.get(source), Tensor) for source in SOURCES)
    if isinstance(module, nn.MultiheadAttention) or getattr(type(module), "projects_inputs", False):
        second = named.get("key") is not named.get("query")
    kind: Kind = "cross" if second else "self"
    told = given(module.forward, named, stack[-1].told if stack else Given())
    return Running(module, kind, told, named.get("past_key_values"))
