"""A receiver is given each attention call of a running model by the sources."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from clearhead._attention import Arguments, Ran
from clearhead.base.errors import UnsupportedError
from clearhead.base.text import listed
from clearhead.base.tracing import empty_of_values, transformed
from clearhead.models.tap.layers import Layers, Site
from clearhead.models.tap.masks import MaskStore, Recorded
from clearhead.models.tap.modules import Kind, Running, Stack
from clearhead.models.tap.place import Place
from clearhead.problem.problem import Problem
from clearhead.scores.base import ChangeOfPair
from clearhead.scores.dot import Dot

# One of these words stands in the name of an attention module, or of its class.
ATTENTION = ("attention", "attn", "multihead", "mha")

After = Callable[[Any], Any]  # is given the result of the function that was called, and gives the result of the call


class Instead(NamedTuple):
    """A result in place of the function, which is not called."""

    result: Any


class Changing(NamedTuple):
    """How an edit changes a result (`after`), and the problem that then was computed (`ran`)."""

    after: After
    ran: Ran

    def __call__(self, result: Any) -> Any:
        return self.after(result)


Answer = After | Changing | Instead | None  # None: the function's result stays as it is


class DotCall(NamedTuple):
    """A call of dot products as its source reads it, before it is computed.

    query (B, H, Lq, E), key (B, Hk, Lk, E), value (B, Hk, Lk, Ev), or None where the receiver reads no values. `masks`:
    the call's masks, converted by the receiver's store; where there are sinks, they are those of `with_sinks`. `place`:
    where the output is in the result, if it can be found. `origin`: the layers that made query, key and value, as the
    receiver's notes hold them; None means the layers of the running module. `name`, `kind`: None means the name and the
    kind of the innermost running module. `foreign`: whether a function of another project computes the call.
    `change`: of the scores, as `Score.then` takes it.
    """

    query: Tensor
    key: Tensor
    value: Tensor | None
    masks: Recorded
    backend: str
    place: Place | None = None
    name: str | None = None
    kind: Kind | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    origin: Any = None
    foreign: bool = False
    change: ChangeOfPair | None = None

    @property
    def score(self) -> Dot:
        score = Dot(scale=self.scale, softcap=self.softcap)
        return score if self.change is None else score.then(self.change)

    def one_dtype(self) -> DotCall:
        """The same with query, key and value of one dtype: under autocast they may differ."""
        if self.query.dtype == self.key.dtype and (self.value is None or self.value.dtype == self.key.dtype):
            return self
        dtype = torch.promote_types(self.query.dtype, self.key.dtype)
        query, key = (tensor.to(dtype) for tensor in (self.query, self.key))
        return self._replace(query=query, key=key, value=None if self.value is None else self.value.to(dtype))

    def detached(self) -> DotCall:
        """The same without its value and without autograd."""
        sinks = None if self.sinks is None else self.sinks.detach().clone()
        return self._replace(query=self.query.detach(), key=self.key.detach(), value=None, sinks=sinks).one_dtype()

    def problem(self, score: Dot | None = None) -> Problem:
        """The call in its normal form, with its value where there is one. `score`: the call's, if it is there."""
        return self.masks.problem(self.query, self.key, score or self.score, self.sinks, self.value)


class Receiver(ABC):
    """A receiver is given each call, once where two sources see it: see `inside`."""

    values = False  # whether it reads the values of calls, which a source may have to project
    differentiable = False  # whether gradients flow through its own computations on a call
    thread: int | None = None  # the thread whose calls alone are received; None: those of every thread
    keeps_fast_path = True  # whether PyTorch's Transformer layers keep their fast path, else they call their modules

    def __init__(self, model: nn.Module) -> None:
        self.stack = Stack(model)
        self.masks = MaskStore(self.differentiable)
        self.sites: dict[Site, None] = {}  # where calls were made, in order
        self.layers = Layers(self.stack.classes)
        self.unattributed: list[None] = []  # one for each call in a thread that runs no module
        self.own_code: dict[str, str] = {}  # modules that computed attention outside of any call, with their classes
        self._inside = _Inside()
        self._lock = threading.Lock()

    @abstractmethod
    def dots(self, call: DotCall) -> Answer:
        """A call of dot products, before it is computed."""

    @abstractmethod
    def own(self, problem: Problem, call: Arguments, backend: str) -> Answer:
        """A call of clearhead's own attention; the result that it is given is (B, H, Lq, Ev)."""

    def read(self, reading: Callable[[], Answer], name: str | None = None) -> Answer:
        """The answer that `reading` gives to the call that is met now: every source reads a call inside of this.

        An error in it ends the model's run, unless the receiver leaves such calls out, as a recorder does. `name`: of
        the module that calls; None means the innermost running module.
        """
        return reading()

    def compute(self, answer: Answer, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of a received call's function."""
        if isinstance(answer, Instead):
            return answer.result
        self._inside.depth += 1  # the same as `inside`, at less cost
        try:
            result = function(*args, **kwargs)
        finally:
            self._inside.depth -= 1
        return result if answer is None else answer(result)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """A context in which a received call runs: calls inside it are parts of it."""
        self._inside.depth += 1
        try:
            yield
        finally:
            self._inside.depth -= 1

    @property
    def idle(self) -> bool:
        """Whether no call is received now: no module is seen to run, the call is a part of a received call, or another
        thread makes it than the receiver's."""
        return self._apart()

    def _apart(self) -> bool:
        return self.stack.over or self.stack.innermost is None or self._inside.depth > 0 or self.elsewhere

    @property
    def elsewhere(self) -> bool:
        """Whether this thread is not the one whose calls alone are received."""
        return self.thread is not None and self.thread != threading.get_ident()

    def softmax(self, attends: bool = False) -> None:
        """Note a softmax outside of any call: an attention module may have computed its attention in its own code.

        `attends`: the computation is known to be attention, whatever the module's name.
        """
        if self._apart():
            return
        for module in self.stack.modules:
            kind, name = type(module).__name__, self.stack.names[id(module)]
            names = kind.lower(), name.rpartition(".")[2].lower()
            if attends or any(word in one for word in ATTENTION for one in names):
                self.own_code[name] = kind
                return

    @property
    def unread(self) -> dict[str, str]:
        """Attention modules, with their classes, that made no call and computed attention in their own code."""
        called = self.modules
        return {
            name: kind
            for name, kind in self.own_code.items()
            if not any(one == name or one.startswith(f"{name}.") for one in called)
        }

    @property
    def modules(self) -> list[str]:
        """The names of the modules that made a call."""
        return list(dict.fromkeys(site.name for site in [*self.sites]))

    def site(self, name: str | None, kind: Kind | None, query: Tensor | None = None, key: Tensor | None = None) -> Site:
        """Where the call that is received now is made. `name`, `kind`: None means the innermost running module's."""
        if query is not None and key is not None:
            kind = self.kind(kind, query, key)
        site = self.layers.site(self.name(name), (kind or self.innermost.kind) == "cross", self.stack.turns)
        self.sites[site] = None
        self._inside.site = site
        return site

    def kind(self, given: Kind | None, query: Tensor, key: Tensor) -> Kind:
        """The kind of a call: `given`, or that of the innermost running module."""
        queries, keys = query.shape[2], key.shape[2]
        if given is None and queries > keys:  # no cache leaves a sequence fewer keys than queries
            return "cross"
        # fewer queries are the last ones of a sequence in a cache, or they read another sequence, which is given whole
        if given is None and queries < keys and self.stack.projecting.reads(key):
            return "cross"
        return given or self.innermost.kind

    def told_of_unread(self, missing: str, instead: str) -> str:
        """A warning about the modules in `unread`. `missing`: completes "their attention is not", as
        "in the record" does. `instead`: code that names layers."""
        unread = self.unread
        return (
            f"the attention of {listed(unread)} ({', '.join(dict.fromkeys(unread.values()))}) is not {missing}: these "
            "modules computed it in their own code, by a softmax, by flex_attention or by a kernel of PyTorch's, whose "
            "calls cannot be read. To leave these modules out without this warning, name the layers that are wanted: "
            f"{instead}."
        )

    def name(self, given: str | None) -> str:
        """The name of the module that calls: `given`, or that of the innermost running module."""
        return given or self.stack.names[id(self.innermost.module)]

    @property
    def innermost(self) -> Running:
        innermost = self.stack.innermost
        assert innermost is not None, "a source checks `idle` first"
        return innermost

    def check(self, query: Tensor, key: Tensor, name: str | None = None) -> None:
        """Raise for tensors that cannot be read: nested ones, and those of a transform of torch.func; and where the
        arguments of the modules that run could not be read, which say what is padding."""
        name, error = self.name(name), self.innermost.error
        if error is not None:
            raise UnsupportedError(
                f"{name} runs in a module whose arguments cannot be read: {type(error).__name__}: {error}"
            ) from error
        if query.is_nested or key.is_nested:
            raise UnsupportedError(
                f"{name} called attention with nested tensors; they can be read in torch.nn.TransformerEncoder alone. "
                "Run the model on a padded batch and a mask."
            )
        if empty_of_values(query) or empty_of_values(key):
            raise UnsupportedError(
                f"{name} called attention with tensors that have no values to read, of the meta device or PyTorch's "
                "fake tensors. Run the model on a device: load its weights there."
            )
        if transformed():
            raise UnsupportedError(
                f"{name} was called inside a transform of torch.func (vmap, grad), whose tensors have no values of "
                "their own to read. Call the model without one."
            )


class _Inside(threading.local):
    depth = 0
    site: Site | None = None  # of the call that is read now, once it is known
