"""The modules of a model that are running, and whether their keys come from another sequence."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from math import prod
from types import FunctionType, MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, cast

from torch import Tensor, nn

from clearhead.base.torch_state.probing import is_probing
from clearhead.base.torch_state.tensor_kind import get_address
from clearhead.base.torch_state.torch_private import call_of_modules
from clearhead.models.interception.padding import Told, given, given_to_torch, parameters
from clearhead.models.interception.patch import replaced, restored

Kind = Literal["self", "cross"]
Tensors = Sequence[Tensor]
Projection = tuple[Tensor, Tensor | None]  # weight and bias

# The names of the arguments from which the keys of cross attention come.
SOURCES = frozenset(("key_value_states", "encoder_hidden_states", "cross_attention_states", "context", "memory"))

POSITIONS = ("cache_position", "position_ids")  # arguments with the positions of the queries

# Modules whose masks of padding are named and meant as those of nn.Transformer.
OF_TORCH = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.TransformerDecoder, nn.TransformerDecoderLayer)


class Notes(Protocol):
    """The notes that a handler takes of the layers around an attention call; the noted objects are its own."""

    def begun(self, kwargs: dict[str, Any]) -> Any:
        """A module has been called with these keywords. Gives the object that takes notes of the layers inside it."""

    def ended(self, around: Any, inside: Running, result: Any, name: str) -> None:
        """A module has run: add it to the notes of the module around it, in which it has this name."""

    def projected(self, inputs: Tensors, weights: Tensors, biases: Sequence[Tensor | None], last: Projection) -> Any:
        """The origin of a query, key and value that a function of PyTorch's has projected from these inputs. `last`:
        weight and bias of its projection of the heads."""


class Running(NamedTuple):
    """A module that runs. Its inputs say the kind of attention, the padding, and the cache of earlier keys."""

    module: nn.Module
    kind: Kind
    told: Told
    cache: Any = None
    noted: Any = None  # the handler's notes of the layers in it
    ids: Any = None  # the tokens that it was given, or a module around it
    error: Exception | None = None  # why its arguments, or those of a module around it, cannot be read
    positions: Any = None  # the positions of the tokens, likewise
    # the arguments of this call, read where attention is called: every module passes here, few attend
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = MappingProxyType({})

    @property
    def batch(self) -> int | None:
        """How many sequences, or pictures, the module was given, (B, L, E) or (B, H, W, E); None where they are others,
        such as tokens."""
        given = [*self.args, *(one for name, one in self.kwargs.items() if "mask" not in name)]
        first = next((one for one in given if isinstance(one, Tensor)), None)
        if first is None or first.is_nested or first.ndim not in (3, 4) or not first.is_floating_point():
            return None
        return first.shape[0]

    @property
    def tokens(self) -> int | None:
        """How many tokens the cache of this layer has counted, with those of this call; None: unknown."""
        cache, layer = self.cache, getattr(self.module, "layer_idx", None)
        if cache is None or layer is None or not hasattr(cache, "get_seq_length"):
            return None
        try:
            total = cache.get_seq_length(layer)
        except (ValueError, IndexError):  # the layer shares the keys of a layer before it, which has counted them
            layers = (one for one in getattr(cache, "layers", ()) if hasattr(one, "get_seq_length"))
            total = max((int(one.get_seq_length()) for one in layers), default=0)
        return int(total) or None

    def reached(self, queries: int) -> int:
        """The position after the last query, by the positions that the model was given; 0: unknown."""
        positions = self.positions
        if type(positions) is not Tensor or positions.is_floating_point() or positions.ndim > 2:
            return 0
        return int(positions.max()) + 1 if positions.numel() and positions.shape[-1] == queries else 0

    def reads(self, key: Tensor) -> bool:
        """Whether the module was given the sequence of these keys, (B, Lk, E) or (Lk, B, E), and no cache.

        `key`: (B, Hk, Lk, E), or (B · H, 1, Lk, E) where the module makes a batch of the heads.
        """
        if self.cache is not None:
            return False
        inputs = [x for x in (*self.args, *self.kwargs.values()) if isinstance(x, Tensor)]
        given = [x.shape for x in inputs if x.is_floating_point() and not x.is_nested]
        # masks and caches have other axes than the sequences, of which one is the first argument
        sequences = [shape for shape in given if 2 <= len(shape) == len(given[0])]
        batch, heads, keys, _ = key.shape
        sides = [side for shape in sequences for side in ((prod(shape[:-2]), shape[-2]), (prod(shape[1:-1]), shape[0]))]
        counts = [count for count, length in sides if length == keys]
        return any(count == batch or (heads == 1 and count > 0 and batch % count == 0) for count in counts)


class Stack:
    """The modules of a model that run in each thread, outermost first.

    They are seen through `nn.Module._call_impl`. Hooks cannot serve: PyTorch's Transformer layers leave their fast path
    where a module inside has a hook, and their outputs change. `__call__` cannot serve either: while a thread traces,
    PyTorch replaces it in all threads by a function that calls the `__call__` of the time when PyTorch was imported.
    Code that calls a module's `forward` itself passes by all of these, so each class's `forward` is wrapped as well.
    """

    def __init__(self, model: nn.Module) -> None:
        named = list(model.named_modules())
        self._modules = [module for _, module in named]
        self.names = {id(module): name or type(model).__name__ for name, module in named}
        self.classes = {name: type(module).__name__ for name, module in named if name}
        self._generates = {id(one) for _, one in named if callable(getattr(type(one), "generate", None))}
        self.model = model  # keeps the modules alive, so that their ids are not reused
        self._running = _Running()
        self._lock = threading.Lock()
        self._threads = 0  # that run the model
        self._entries = 0
        self.over = False  # whether modules are seen no more: another thread may be in the middle of the model then
        self.around: AbstractContextManager[Any] = nullcontext()  # entered while a thread runs the model
        self.notes: Notes | None = None  # takes notes of each module's layers

    @contextmanager
    def entered(self) -> Iterator[None]:
        # innermost: of two function modes (`around`), the later one is then on top, and sees a call first
        with ExitStack() as wrapped:
            wrapped.enter_context(replaced(nn.Module, call_of_modules(), self._watched, innermost=True))
            for owner in _owners_of_forward(self._modules):
                wrapped.enter_context(replaced(owner, "forward", partial(self._entering, owner), innermost=True))
            self.over = False
            try:
                yield
            finally:
                self.over = True

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def _call_impl(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            running = self._running
            if id(module) not in self.names or is_probing():
                running.others += 1
                try:
                    return call(module, *args, **kwargs)
                finally:
                    running.others -= 1
            stack = running.stack
            if not stack:
                with self.running(module, args, kwargs):
                    return call(module, *args, **kwargs)
            if id(module) in self._generates:
                self._called(module)
            # the same as `running`, at less cost, because every module passes here
            around = stack[-1]  # read before the call: `monitor` may close an interrupted pass inside
            stack.append(self._entered(module, args, kwargs, stack))
            try:
                result = call(module, *args, **kwargs)
            finally:
                inside = stack.pop()
            if self.notes is not None and around.noted is not None and inside.noted is not None:
                name = self.names[id(module)].removeprefix(f"{self.names[id(around.module)]}.")
                self.notes.ended(around.noted, inside, result, name)
            return result

        return _call_impl

    def _entering(self, owner: nn.Module | type[nn.Module], forward: Callable[..., Any]) -> Callable[..., Any]:
        """A `forward` of the owner that enters its module, unless the module has been called and runs already."""
        of_class = isinstance(owner, type)
        call: Callable[..., Any] = forward if of_class else lambda _, *args, **kwargs: forward(*args, **kwargs)
        watched = self._watched(call)

        @wraps(forward)
        def entering(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            stack = self._running.stack
            inside = id(module) not in self.names or (stack and stack[-1].module is module)
            run = call if inside else watched
            if not (of_class and getattr(module, "gradient_checkpointing", False)):
                return run(module, *args, **kwargs)
            # a layer of transformers checkpoints where its class's `forward` is the function that it runs
            with restored(owner, "forward"):
                return run(module, *args, **kwargs)

        bound: Callable[..., Any] = partial(cast(Callable[..., Any], entering), owner)
        return entering if of_class else wraps(forward)(bound)

    @contextmanager
    def running(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """A context in which this module of the model runs in this thread, called with these arguments."""
        stack = self._running.stack
        around = nullcontext() if stack else self._outermost(module)
        with around, self.inside(self._entered(module, args, kwargs, stack)):
            yield

    @contextmanager
    def inside(self, running: Running) -> Iterator[None]:
        """A context in which this module runs in this thread, inside the modules that run already."""
        stack = self._running.stack
        stack.append(running)
        try:
            yield
        finally:
            stack.pop()

    def _entered(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], stack: list[Running]
    ) -> Running:
        try:
            entered = _entered(module, args, kwargs, stack)
        except Exception as error:  # it would end the model's run: a handler raises it where a call is made
            entered = Running(module, "self", Told(), error=error)
        return entered if self.notes is None else entered._replace(noted=self.notes.begun(kwargs))

    @contextmanager
    def _outermost(self, module: nn.Module) -> Iterator[None]:
        """The context of this thread's outermost call of the model or of a module of it."""
        self._begin_run()
        self._running.called = {id(module)}
        with self._lock:
            self._threads += 1
        try:
            with self.around:
                yield
        finally:
            with self._lock:
                self._threads -= 1

    def _begin_run(self) -> None:
        with self._lock:
            self._entries += 1
            self._running.entry, self._running.turns = self._entries, {}

    def _called(self, module: nn.Module) -> None:
        """Note a call of a generating model inside another module: a second one is a run of its own, such as a step."""
        running = self._running
        if id(module) in running.called and all(one.module is not module for one in running.stack):
            self._begin_run()
            running.called = set()
        running.called.add(id(module))

    @property
    def beside(self) -> bool:
        """Whether this thread runs no module while another one runs the model: it may be a worker of the other."""
        return not self._running.stack and not self._running.others and self._threads > 0

    @property
    def entry(self) -> int:
        """The number of this thread's run: of its outermost call, or of a later call of a generating model inside."""
        return self._running.entry

    @property
    def turns(self) -> dict[str, int]:
        """How many calls each module, given by its name, has made in this run in this thread: other threads may run the
        same modules meanwhile."""
        return self._running.turns

    def windows_of(self, batch: int) -> int | None:
        """Of how many longer sequences those of a call are windows; None where they are whole.

        In windows a layer is given fewer sequences than the attention module inside it.
        """
        counts = [running.batch for running in reversed(self._running.stack)]
        given = [count for count in counts if count is not None]
        if not given or given[0] != batch:
            return None
        return next((count for count in given if 0 < count < batch and batch % count == 0), None)

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that run in this thread, innermost first."""
        return [running.module for running in reversed(self._running.stack)]

    @property
    def projecting(self) -> Running:
        """The innermost module running that has weights, and so may have made queries and keys; else the innermost."""
        stack = self._running.stack
        return next((one for one in reversed(stack) if next(one.module.parameters(), None) is not None), stack[-1])

    @property
    def innermost(self) -> Running | None:
        """The innermost module running."""
        return self._running.stack[-1] if self._running.stack else None


class _Running(threading.local):
    def __init__(self) -> None:
        self.stack: list[Running] = []
        self.others = 0  # modules running that are not the model's
        self.entry = 0
        self.turns: dict[str, int] = {}
        self.called: set[int] = set()  # the generating models that were called in this run


def _owners_of_forward(modules: Sequence[nn.Module]) -> Iterator[nn.Module | type[nn.Module]]:
    """The modules that have a `forward` of their own, and the classes that define the others'."""
    yield from (module for module in modules if "forward" in vars(module))
    kinds = dict.fromkeys(map(type, modules))
    owners = (next(one for one in kind.__mro__ if "forward" in vars(one)) for kind in kinds)
    for owner in dict.fromkeys(owners):
        if owner is not nn.Module and isinstance(vars(owner)["forward"], FunctionType):  # else TorchScript's
            yield owner


def kind_of(query: Tensor | None, key: Tensor | None) -> Kind:
    """The kind is self if both are one tensor, or the same view of one, else cross."""
    if query is key:
        return "self"
    if not (isinstance(query, Tensor) and isinstance(key, Tensor)) or query.is_nested or key.is_nested:
        return "cross"
    views = [(get_address(t), t.shape, t.stride()) for t in (query, key)]
    return "self" if views[0] == views[1] and views[0][0] else "cross"


def _entered(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], stack: list[Running]) -> Running:
    """The module with its padding and its kind: cross if it is called with a second sequence."""
    around = stack[-1] if stack else Running(module, "self", Told())
    told, ids, error, positions = around.told, around.ids, around.error, around.positions
    if len(args) <= 1 and not kwargs:  # no argument that is read below
        return Running(module, "self", told, ids=ids, error=error, positions=positions, args=args)
    named = dict(kwargs)
    if len(args) > 1:
        named.update(zip(parameters(module.forward), args, strict=False))
    second = not SOURCES.isdisjoint(named) and any(isinstance(named.get(source), Tensor) for source in SOURCES)
    attends = isinstance(module, nn.MultiheadAttention) or getattr(type(module), "projects_inputs", False)
    if attends:
        second = kind_of(named.get("query"), named.get("key")) == "cross"
    kind: Kind = "cross" if second else "self"
    told = given(module.forward, named, told)
    if isinstance(module, OF_TORCH) or attends:
        told = given_to_torch(named, kind, told)
    ids = ids if named.get("input_ids") is None else named["input_ids"]
    positions = next((named[name] for name in POSITIONS if named.get(name) is not None), positions)
    return Running(module, kind, told, _cache_of(args, kwargs), None, ids, error, positions, args, kwargs)


def _cache_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The cache that a module is given, by whatever name; None without one."""
    named = kwargs.get("past_key_values")
    if named is not None:
        return named
    return next((one for one in (*args, *kwargs.values()) if _is_cache(type(one))), None)


def _is_cache(kind: type) -> bool:
    """Whether a class is that of a cache, one of transformers, which counts tokens, or clearhead's own."""
    return hasattr(kind, "get_seq_length") or (hasattr(kind, "reorder") and hasattr(kind, "crop"))
