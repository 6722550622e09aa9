"""A handler is given each attention call of a running model, before the call is computed and after."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from clearhead.base.errors import UnsupportedError
from clearhead.base.output.text import listed
from clearhead.base.torch_state.mode import get_mode
from clearhead.base.torch_state.tensor_kind import has_no_values
from clearhead.models.interception.intercepted_call import InterceptedCall
from clearhead.models.interception.layers import Layers, Site
from clearhead.models.interception.masks import MaskStore
from clearhead.models.interception.modules import Kind, Running, Stack

# One of these words stands in the name of an attention module, or of its class.
ATTENTION = ("attention", "attn", "multihead", "mha")


class Handler(ABC):
    """A handler of intercepted calls: see `intercept`."""

    traced = False  # whether the compiler traces `before` in compiled code; else it runs in eager code there
    masks: MaskStore  # the masks of its calls, converted

    @abstractmethod
    def before(self, call: InterceptedCall) -> Any:
        """Look at a call before it is computed. Gives another result in place of the function's, or None."""

    def after(self, call: InterceptedCall, result: Any) -> Any:
        """Look at the result of a computed call. Gives the result that the model is given."""
        return result

    def begin(self, read: Callable[[], InterceptedCall]) -> InterceptedCall | None:
        """Read a call and give it to `before`. An error in it ends the model's run, unless the handler leaves such
        calls out, as a recorder does: then the call is None, or has no state."""
        call = read()
        call.instead = self.before(call)
        return call

    def compute(self, call: InterceptedCall | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of a call that has begun, by its function."""
        result = function(*args, **kwargs)
        return result if call is None else self.after(call, result)


class ModelHandler(Handler):
    """A handler that follows which modules of a model run. It is given each call once where two sources see it."""

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
        self.inside = Inside()
        self._lock = threading.Lock()

    def compute(self, call: InterceptedCall | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if call is not None and call.instead is not None:
            return call.instead
        self.inside.depth += 1  # not a `with`, which the compiler does not trace
        try:
            result = function(*args, **kwargs)
        finally:
            self.inside.depth -= 1
        return result if call is None else self.after(call, result)

    @property
    def idle(self) -> bool:
        """Whether no call is received now: no module is seen to run, the call is a part of a received call, or another
        thread makes it than the handler's."""
        return self._apart()

    def _apart(self) -> bool:
        return self.stack.over or self.stack.innermost is None or self.inside.depth > 0 or self.elsewhere

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
        called = [f"{name}." for name in self.modules]
        around = {name for name in self.own_code if any(one.startswith(f"{name}.") for one in called)}
        return {name: kind for name, kind in self.own_code.items() if name not in around}

    @property
    def modules(self) -> list[str]:
        """The names of the modules that made a call."""
        return list(dict.fromkeys(site.name for site in [*self.sites]))

    def site(self, call: InterceptedCall | None) -> Site:
        """Where a call that is received now is made; None: the innermost running module makes it."""
        kind = self.innermost.kind if call is None else self.kind(call.kind, call.query, call.key)
        site = self.layers.site(self.name(call), kind == "cross", self.stack.turns)
        self.sites[site] = None
        self.inside.site = site
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
            "modules computed it in their own code, by a softmax, flex_attention or a kernel of PyTorch's. To leave "
            f"them out without this warning, name the layers that are wanted: {instead}."
        )

    def name(self, call: InterceptedCall | None = None) -> str:
        """The name of the module that makes a call; None: the innermost running module makes it."""
        named = None if call is None else call.name or self.stack.names.get(id(call.module))
        return named or self.stack.names[id(self.innermost.module)]

    @property
    def innermost(self) -> Running:
        innermost = self.stack.innermost
        assert innermost is not None, "a source checks `idle` first"
        return innermost

    def check(self, query: Tensor, key: Tensor, call: InterceptedCall | None = None) -> None:
        """Raise for tensors that cannot be read: nested ones, and those of a transform of torch.func; and where the
        arguments of the modules that run could not be read, which say what is padding."""
        error = self.innermost.error
        if error is not None:
            what = f"{type(error).__name__}: {error}"
            raise UnsupportedError(f"{self.name(call)}: arguments of a module cannot be read: {what}") from error
        what = why_unreadable(query, key)
        if what:
            raise UnsupportedError(f"{self.name(call)} called attention {what}.")


def why_unreadable(query: Tensor, key: Tensor) -> str:
    """How a call was made whose tensors cannot be read, and what to do instead; "" for any other call."""
    if query.is_nested or key.is_nested:
        return "with nested tensors. Run the model on a padded batch and a mask"
    if has_no_values(query) or has_no_values(key):
        return "with tensors that have no values, of the meta device or fake. Load the model's weights on a device"
    if get_mode().transforms:
        return "inside a transform of torch.func (vmap, grad), whose tensors have no values. Run the model without one"
    return ""


class Inside(threading.local):
    """A context in which a call of this thread runs: calls inside of it are parts of it."""

    depth = 0
    site: Site | None = None  # of the call that is read now, once it is known

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1
