"""The attention interface of transformers, where the calls of its models are met: the first source of calls."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from clearhead.base.errors import UnsupportedError
from clearhead.base.tracing import constant
from clearhead.masks.causal import Causal
from clearhead.models.tap import flex, told
from clearhead.models.tap.foreign import is_foreign, is_sdpa_foreign
from clearhead.models.tap.keywords import MASKED, NAME, RANKS, unread_keywords
from clearhead.models.tap.masks import MaskStore, Recorded, compact, made_of
from clearhead.models.tap.patch import replaced
from clearhead.models.tap.place import Separate
from clearhead.models.tap.receiver import Answer, DotCall, Receiver
from clearhead.models.tap.refused import uncompiled

# A function of the interface gives (B, Lq, H, Ev), and weights or None.
BY_POSITION = Separate(lambda t: t.transpose(1, 2), lambda output: (output.transpose(1, 2).contiguous(), None))

# Functions of transformers' own that drop a keyword for which they have no parameter, and their modules.
HOMES = {"sdpa_attention_forward": "sdpa_attention", "flex_attention_forward": "flex_attention"}


class BackendCall(NamedTuple):
    """A call of a backend's function by a model of transformers.

    query (B, H, Lq, E), key and value (B, Hk, Lk, ·), the key heads before they are repeated. `mask`: the model's
    attention_mask, a tensor or FlexAttention's BlockMask. `keywords`: all other arguments, by name. `own`: the name of
    `function` where it is one of transformers' own functions, else "".
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor | None
    mask: Any
    keywords: dict[str, Any]
    backend: str
    own: str
    function: Callable[..., Any]

    def run(self, leave_out: str | None = None) -> Any:
        """The function's result: (B, Lq, H, Ev), and weights or None. `leave_out`: a keyword to drop."""
        keywords = self.keywords
        if leave_out is not None:
            keywords = {word: value for word, value in keywords.items() if word != leave_out}
        return self.function(self.module, self.query, self.key, self.value, self.mask, **keywords)

    @property
    def foreign(self) -> bool:
        """Whether a function of another project computes the call, by itself or inside of transformers' own."""
        return is_foreign(self.function) or (self.own == "sdpa_attention_forward" and is_sdpa_foreign())

    def check(self, name: str) -> None:
        """Raise for a call that would be read wrong. `name`: of the module."""
        message = self.unread(name)
        if message:
            raise UnsupportedError(message)

    def unread(self, name: str) -> str:
        """Of a call that would be read wrong; "" for any other call."""
        if self.backend == RANKS:
            return (
                f"{name} attends over the ranks of a layout, and each has a part of the queries and keys: a record "
                "would not be of the whole attention. Set it back (run_on_clearhead(model)), and watch it "
                "in one process."
            )
        if self.mask is not None and not isinstance(self.mask, Tensor) and not hasattr(self.mask, "mask_mod"):
            return (
                f"{name} was called on the backend {self.backend!r} with attention_mask of type "
                f"{type(self.mask).__name__}, which cannot be read. Load the model with attn_implementation='sdpa' or "
                "'eager'."
            )
        return unread_keywords(name, self.backend, self.keywords)

    def read(self, store: MaskStore) -> tuple[Tensor, Recorded, dict[str, Any]]:
        """The keys that the backend sees, its masks, and the keywords that it does not drop."""
        keywords, key, mask = applied(self.own, self.keywords), self.key, self.mask
        if (self.own == "flash_attention_forward" or "flash" in self.backend) and isinstance(mask, Tensor):
            key = key[:, :, : mask.shape[1]]  # of a static cache
        shape = (*self.query.shape[:3], key.shape[2])
        return key, _masks(store, self.module, shape, mask, self.backend, self.own, keywords), keywords


class Subscriber(ABC):
    """While it is `subscribed`, it is given the calls of each backend's function that transformers looks up."""

    def meets(self, backend: str) -> bool:
        """Whether the subscriber wants the calls of a function of this backend that is looked up now."""
        return True

    @abstractmethod
    def called(self, call: BackendCall) -> Any:
        """The result of a call: `call.run()`, unless the subscriber gives another result."""


@contextmanager
def subscribed(subscriber: Subscriber, innermost: bool = False) -> Iterator[None]:
    """The subscriber is given calls inside the `with`: before the subscribers that were there, or (`innermost`) after.

    Models of transformers call `AttentionInterface.get_interface` for the function of their backend, at each call.
    Where transformers has not been imported, none of its models can exist, and nothing is done.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        yield
        return
    if not hasattr(modeling.AttentionInterface, "get_interface"):
        raise UnsupportedError(
            f"transformers {sys.modules['transformers'].__version__} has no function by which its models look up their "
            "attention (AttentionInterface.get_interface), where clearhead sees their calls. transformers has it "
            "from 5.23 on:  pip install 'clearhead[models]'"
        )

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_interface(registry: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
            function: Callable[..., Any] = original(registry, attn_implementation, default)
            inner = inspect.unwrap(function) if isinstance(function, FunctionType) else function
            backend = "eager" if inner is default else str(attn_implementation)
            return _met(subscriber, function, backend) if subscriber.meets(backend) else function

        return get_interface

    with replaced(modeling.AttentionInterface, "get_interface", wrap, innermost):
        yield


def _met(subscriber: Subscriber, function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    own = own_name(function)

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if args:
            bound = inspect.signature(function).bind_partial(None, None, None, None, None, *args)
            kwargs = {**dict(list(bound.arguments.items())[5:]), **kwargs}
        return subscriber.called(BackendCall(module, query, key, value, attention_mask, kwargs, backend, own, function))

    # another subscriber around this one asks for the name of the function; a partial has no name
    return wraps(function)(attention) if isinstance(function, FunctionType) else attention


class Given(Subscriber):
    """A subscriber that gives the calls of a model to the model's receiver."""

    def __init__(self, receiver: Receiver, inside_compiled_code: bool = True) -> None:
        self._receiver = receiver
        self._read = uncompiled(read) if inside_compiled_code else read

    def called(self, call: BackendCall) -> Any:
        receiver = self._receiver
        if receiver.idle:  # the call is none of this model, or a part of a received call
            return call.run()
        return receiver.compute(self._read(receiver, call), call.run)


def read(receiver: Receiver, call: BackendCall) -> Answer:
    """Give a call of a backend to the receiver."""
    name = receiver.stack.names.get(id(call.module))
    return receiver.read(lambda: _read(receiver, call, name), name)


def _read(receiver: Receiver, call: BackendCall, name: str | None) -> Answer:
    call.check(name or type(call.module).__name__)
    receiver.check(call.query, call.key, name)
    key, masks, keywords = call.read(receiver.masks)
    sinks = keywords.get("s_aux")
    return receiver.dots(
        DotCall(
            call.query,
            key,
            None if call.value is None else call.value[:, :, : key.shape[2]],
            masks if sinks is None else masks.with_sinks(key.shape[2]),
            backend=NAME if call.backend == MASKED else call.backend,
            place=BY_POSITION,
            name=name,
            scale=keywords.get("scaling"),
            softcap=keywords.get("softcap"),
            sinks=sinks,
            dropout_p=keywords.get("dropout") or 0.0,
            foreign=call.foreign,
        )
    )


class Marks:
    """A mark in every module of a model, by which compiled code, copies and replicas of the module are recognised.

    `number`: of the model. `attribute`: the name under which a module has its mark, a tensor of the model's number and
    the module's. The mark is a tensor because layers share compiled code: a number would be a constant of the code, and
    each layer would be compiled anew. `of_none`: the mark of calls whose module is not known.
    """

    def __init__(self, model: nn.Module) -> None:
        self.number = next(_numbers)
        self.attribute = f"_clearhead_{self.number}"
        self.modules = list(model.modules())
        self.of_none = self._make(-1)

    @contextmanager
    def put(self) -> Iterator[None]:
        """The modules have their marks inside the `with`."""
        try:
            for number, module in enumerate(self.modules):
                module.__dict__[self.attribute] = self._make(number)
            yield
        finally:
            for module in self.modules:
                module.__dict__.pop(self.attribute, None)

    def _make(self, number: int) -> Tensor:
        with torch.inference_mode(False):  # an operation that writes takes no tensor made in inference mode
            return torch.tensor([self.number, number], device="cpu")

    def on(self, module: nn.Module) -> bool:
        """Whether a module has a mark: it belongs to the model, or to a copy of it."""
        return self.attribute in module.__dict__


_numbers = itertools.count(secrets.randbits(48))  # marks are saved with a model, and differ between processes


def applied(own: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords without those that the backend drops. `own`: as in `BackendCall`."""
    dropped = _dropped(own) if own in HOMES else ()
    return {word: value for word, value in kwargs.items() if word not in dropped} if dropped else kwargs


@constant
def _dropped(own: str) -> tuple[str, ...]:
    """The keywords for which this function of the installed version has no parameter, so that it ignores them."""
    return _without_parameter(own)


@functools.cache
def _without_parameter(own: str) -> tuple[str, ...]:
    function = getattr(importlib.import_module(f"transformers.integrations.{HOMES[own]}"), own)
    parameters = inspect.signature(function).parameters
    return tuple(word for word in ("softcap", "s_aux", "position_bias") if word not in parameters)


def own_name(function: Callable[..., Any]) -> str:
    """The name of a backend's function that is one of transformers' own; "" for any other function."""
    if not isinstance(function, FunctionType):  # a partial has no name, and the compiler cannot ask for it
        return ""
    return function.__name__ if str(function.__module__).startswith("transformers.integrations.") else ""


def _masks(
    store: MaskStore,
    module: nn.Module,
    shape: tuple[int, int, int, int],
    mask: Any,
    backend: str,
    own: str,
    kwargs: dict[str, Any],
) -> Recorded:
    """The mask and the keywords as this backend reads them. `shape`: (B, H, Lq, Lk)."""
    is_causal = kwargs.get("is_causal")
    is_causal = bool(getattr(module, "is_causal", True)) if is_causal is None else bool(is_causal)
    # for "eager" and "sdpa" the models put packed sequences and chosen keys into the mask; others read keywords
    read = not own and backend not in ("eager", "sdpa")
    if own == "msa_attention_forward" and kwargs.get("block_indices") is not None:
        raise UnsupportedError(
            f"the backend {backend!r} chooses blocks of keys in a kernel of its own, which does not read the model's "
            "mask; watch() cannot record its calls. Load the model with attn_implementation='sdpa'."
        )
    chosen = told.selected(module, kwargs, shape, masked=mask is not None) if read else None
    if read and mask is None and "flash" not in backend and backend not in (NAME, MASKED):
        told.check_unmasked(module, backend, shape, kwargs)
    if mask is not None and not isinstance(mask, Tensor):  # a BlockMask
        found = flex.masks_of(store, mask.mask_mod).plus(store.convert(None, kwargs.get("position_bias")))
    elif own == "flash_attention_forward" or "flash" in backend:
        found = told.masks(store, shape, mask, is_causal, kwargs)
    else:
        if own == "flex_attention_forward" and mask is not None:  # it adds the mask of the first head for all heads
            mask = mask[:, :1, :, : shape[3]].to(torch.float32 if mask.dtype == torch.bool else mask.dtype)
        if backend == "eager" and mask is not None and not mask.is_floating_point():
            mask = mask.float()  # transformers' eager functions add every mask, a bool one as 0 and 1
        bias = kwargs.get("position_bias")
        made = made_of(mask, shape) if backend in (NAME, MASKED) else None
        if made is not None and mask is not None:  # the normal form, which the backend runs on
            found = Recorded(made.mask(mask)).plus(store.convert(None, bias))
        else:
            found = store.convert(mask, bias)
        # without a mask, SDPA and most registered backends are causal by themselves; the ones named here are not
        alone = mask is None and backend not in ("eager", MASKED) and own != "flex_attention_forward"
        if alone and is_causal and shape[2] > 1 and kwargs.get("block_indices") is None:
            found = found.plus(Recorded(Causal(), align="upper_left"))
        if read:
            found = found.plus(Recorded(told.documents(kwargs, shape[0], *shape[2:])))
    return found if chosen is None else found.plus(Recorded(compact(chosen)))
