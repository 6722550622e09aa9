"""The first source: the attention interface of transformers."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.base.errors import UnsupportedError
from clearhead.base.tracing import constant
from clearhead.masks.causal import Causal
from clearhead.models.tap import told as flash
from clearhead.models.tap.keywords import MASKED, NAME, RANKS, check_keywords
from clearhead.models.tap.masks import MaskStore, Recorded, compact
from clearhead.models.tap.patch import interface_replaced
from clearhead.models.tap.place import Separate
from clearhead.models.tap.receiver import Answer, DotCall, Receiver
from clearhead.models.tap.refused import uncompiled
from clearhead.models.tap.told import documents, selected

# the interface gives (B, Lq, H, Ev), and weights or None
BY_POSITION = Separate(lambda t: t.transpose(1, 2), lambda output: (output.transpose(1, 2).contiguous(), None))

# transformers' own functions that drop a keyword for which they have no parameter, and their modules
HOMES = {"sdpa_attention_forward": "sdpa_attention", "flex_attention_forward": "flex_attention"}


@contextmanager
def source(receiver: Receiver, innermost: bool = False) -> Iterator[None]:
    """Wrap every attention function that transformers looks up, while a model is watched.

    Its models call `AttentionInterface.get_interface` each time for the function of their backend, which takes the
    module, the key heads before they are repeated, the mask and the scaling.
    """

    eager = uncompiled(read)

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
            function = original(self, attn_implementation, default)
            backend = "eager" if inspect.unwrap(function) is default else str(attn_implementation)
            return recorded(receiver, function, backend, eager)

        return get_interface

    with interface_replaced(wrap, innermost):
        yield


def recorded(
    receiver: Receiver, function: Callable[..., Any], backend: str, give: Callable[..., Answer]
) -> Callable[..., Any]:
    """The function of a backend, and `give`, which is `read`, before it."""

    @wraps(function)  # another watch around this one asks whose function it is
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if receiver.idle:  # not a call of this model, or part of one that is recorded
            return function(module, query, key, value, attention_mask, *args, **kwargs)
        kwargs = named(function, args, kwargs)
        check(receiver.stack.names.get(id(module)) or type(module).__name__, attention_mask, backend, kwargs)
        answer = give(receiver, module, query, key, value, attention_mask, backend, own_name(function), kwargs)
        return receiver.compute(answer, function, module, query, key, value, attention_mask, **kwargs)

    return attention


def named(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a backend is given after query, key, value and mask, by name."""
    if not args:
        return kwargs
    bound = inspect.signature(function).bind_partial(None, None, None, None, None, *args)
    return {**dict(list(bound.arguments.items())[5:]), **kwargs}


def read(
    receiver: Receiver,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    mask: Tensor | None,
    backend: str,
    own: str,
    kwargs: dict[str, Any],
) -> Answer:
    """Give a call of a backend to the receiver. `own`: the name of its function, if that is transformers' own."""
    receiver.check(query, key, receiver.stack.names.get(id(module)))
    kwargs = applied(own, kwargs)
    filled, masks = masked(receiver.masks, own, backend, module, query, key, mask, kwargs)
    sinks = kwargs.get("s_aux")
    return receiver.dots(
        DotCall(
            query,
            filled,
            None if value is None else value[:, :, : filled.shape[2]],
            masks if sinks is None else masks.with_sinks(filled.shape[2]),
            backend=NAME if backend == MASKED else backend,
            place=BY_POSITION,
            name=receiver.stack.names.get(id(module)),
            scale=kwargs.get("scaling"),
            softcap=kwargs.get("softcap"),
            sinks=sinks,
            dropout_p=kwargs.get("dropout") or 0.0,
        )
    )


def applied(own: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords without those that the backend drops. `own`: as in `read`."""
    dropped = _dropped(own) if own in HOMES else ()
    return {word: value for word, value in kwargs.items() if word not in dropped} if dropped else kwargs


@constant
def _dropped(own: str) -> tuple[str, ...]:
    """What this function of the installed version has no parameter for, and so leaves out of the softmax."""
    return _without_parameter(own)


@functools.cache
def _without_parameter(own: str) -> tuple[str, ...]:
    function = getattr(importlib.import_module(f"transformers.integrations.{HOMES[own]}"), own)
    parameters = inspect.signature(function).parameters
    return tuple(word for word in ("softcap", "s_aux", "position_bias") if word not in parameters)


def masked(
    store: MaskStore,
    own: str,
    backend: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Recorded]:
    """The keys that a backend sees, and its masks. `own`: the name of its function, if that is transformers' own."""
    if (own == "flash_attention_forward" or "flash" in backend) and mask is not None:
        key = key[:, :, : mask.shape[1]]  # of a static cache
    return key, _masks(store, module, (*query.shape[:3], key.shape[2]), mask, backend, own, kwargs)


def check(name: str, mask: Any, backend: str, kwargs: dict[str, Any]) -> None:
    """Refuse what would be recorded wrong."""
    if backend == RANKS:
        raise UnsupportedError(
            f"{name} attends over the ranks of a layout, and each has a part of its queries and keys: what is recorded "
            "would be no attention of the whole. Set it back (use_in_transformers(model)), and watch it in one process."
        )
    check_keywords(name, backend, kwargs)
    if mask is not None and not isinstance(mask, Tensor):
        raise UnsupportedError(
            f"{name} was called on the backend {backend!r} with attention_mask of type {type(mask).__name__}, which "
            "cannot be read. Load the model with attn_implementation='sdpa' or 'eager'."
        )


def own_name(function: Callable[..., Any]) -> str:
    """The name of a backend's function that is one of transformers' own; "" for any other."""
    if not isinstance(function, FunctionType):  # a partial has no name, and the compiler finds none to ask for
        return ""
    return function.__name__ if str(function.__module__).startswith("transformers.integrations.") else ""


def _masks(
    store: MaskStore,
    module: nn.Module,
    shape: tuple[int, int, int, int],
    mask: Tensor | None,
    backend: str,
    own: str,
    kwargs: dict[str, Any],
) -> Recorded:
    """The mask and the keywords as this backend reads them. `shape`: (B, H, Lq, Lk)."""
    is_causal = kwargs.get("is_causal")
    is_causal = bool(getattr(module, "is_causal", True)) if is_causal is None else bool(is_causal)
    # for these two the models put into the mask what other backends must read from keywords
    read = not own and backend not in ("eager", "sdpa")
    if own == "msa_attention_forward" and kwargs.get("block_indices") is not None:
        raise UnsupportedError(
            f"the backend {backend!r} chooses blocks of keys in a kernel of its own, which leaves the model's mask "
            "unread; watch() cannot record that. Load the model with attn_implementation='sdpa'."
        )
    chosen = selected(module, kwargs, shape, masked=mask is not None) if read else None
    if own == "flash_attention_forward" or "flash" in backend:
        found = flash.masks(store, shape, mask, is_causal, kwargs)
    else:
        if own == "flex_attention_forward" and mask is not None:  # it adds the mask, that of the first head for all
            mask = mask[:, :1, :, : shape[3]].to(torch.float32 if mask.dtype == torch.bool else mask.dtype)
        bias = kwargs.get("position_bias")
        if backend in (NAME, MASKED) and hasattr(mask, "clearhead"):  # the normal form that it runs on
            found = Recorded(mask.clearhead).plus(store.convert(None, bias))  # type: ignore[union-attr]
        else:
            found = store.convert(mask, bias)
        # without a mask, SDPA and most registered backends are causal by themselves; these are not
        alone = mask is None and backend not in ("eager", MASKED) and own != "flex_attention_forward"
        if alone and is_causal and shape[2] > 1 and kwargs.get("block_indices") is None:
            found = found.plus(Recorded(Causal(), align="upper_left"))
        if read:
            found = found.plus(Recorded(documents(kwargs, shape[0], *shape[2:])))
    return found if chosen is None else found.plus(Recorded(compact(chosen)))
