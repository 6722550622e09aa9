"""The attention interface of transformers, where the calls of its models are intercepted: the first source of calls."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.base.errors import UnsupportedError
from clearhead.base.torch_state.mode import assume_constant
from clearhead.base.torch_state.private import missing_name
from clearhead.masks.causal import Causal
from clearhead.models.interception import flex
from clearhead.models.interception.handler import Handler, ModelHandler
from clearhead.models.interception.intercepted_call import InterceptedCall
from clearhead.models.interception.keywords import MASKED, NAME, check_unmasked, documents, read_flash_masks, selected
from clearhead.models.interception.masks import MaskStore, Recorded, Shape, compact, made_of
from clearhead.models.interception.patch import replaced
from clearhead.models.interception.place import Place
from clearhead.models.interception.refused import uncompiled

# A function of the interface gives (B, Lq, H, Ev), and weights or None.
BY_POSITION = Place(lambda t: t.transpose(1, 2), lambda output: (output.transpose(1, 2).contiguous(), None))


@contextmanager
def intercept_backends(handler_of: Callable[[str], Handler | None], innermost: bool = False) -> Iterator[None]:
    """Intercept the calls of backends' functions that transformers looks up inside the `with`.

    `handler_of`: gives the handler of a call of a backend, given by its name, that is about to be made; None: the call
    is not intercepted. The handler is given a call before the handlers that were there, or (`innermost`) after them.
    Models of transformers call `AttentionInterface.get_interface` for the function of their backend, at each call.
    Where transformers has not been imported, none of its models can exist, and nothing is done.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        yield
        return
    if not hasattr(modeling.AttentionInterface, "get_interface"):
        raise missing_name("AttentionInterface.get_interface", "to see the calls of its models", "transformers")
    begin = uncompiled(begin_backend)

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_interface(registry: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
            function: Callable[..., Any] = original(registry, attn_implementation, default)
            inner = inspect.unwrap(function) if isinstance(function, FunctionType) else function
            backend = "eager" if inner is default else str(attn_implementation)
            handler = handler_of(backend)
            return function if handler is None else _intercepted(handler, function, backend, begin)

        return get_interface

    with replaced(modeling.AttentionInterface, "get_interface", wrap, innermost):
        yield


def _intercepted(
    handler: Handler, function: Callable[..., Any], backend: str, begin: Callable[..., Any]
) -> Callable[..., Any]:
    plain = isinstance(function, FunctionType)  # a partial has no name, and the compiler cannot ask for it
    own = function.__name__ if plain and str(function.__module__).startswith("transformers.integrations.") else ""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if args:
            bound = inspect.signature(function).bind_partial(None, None, None, None, None, *args)
            kwargs = {**dict(list(bound.arguments.items())[5:]), **kwargs}
        call = InterceptedCall(query, key, value, backend, function=function, module=module, keywords=kwargs, own=own)
        call.mask = attention_mask
        begun = handler.begin(lambda: call) if handler.traced else begin(handler, call)
        return handler.compute(begun, function, module, query, key, value, attention_mask, **kwargs)

    # another handler around this one asks for the name of the function
    return wraps(function)(attention) if plain else attention


def begin_backend(handler: ModelHandler, call: InterceptedCall) -> InterceptedCall | None:
    """Give a call of a backend to the handler."""

    def read() -> InterceptedCall:
        call.check(handler.name(call))
        handler.check(call.query, call.key, call)
        return read_keywords(call, handler.masks)

    return handler.begin(read)


def read_keywords(call: InterceptedCall, store: MaskStore) -> InterceptedCall:
    """The call with what its mask and its keywords say, as its backend reads them."""
    keywords = applied(call.own, call.keywords)
    if (call.own == "flash_attention_forward" or "flash" in call.backend) and isinstance(call.mask, Tensor):
        call.key = call.key[:, :, : call.mask.shape[1]]  # of a static cache
    if call.value is not None:
        call.value = call.value[:, :, : call.key.shape[2]]
    call.place = BY_POSITION
    call.scale, call.softcap, call.sinks = (keywords.get(word) for word in ("scaling", "softcap", "s_aux"))
    call.dropout_p = keywords.get("dropout") or 0.0
    shape = (*call.query.shape[:3], call.key.shape[2])
    # not a closure over the call, which would hold the call in a cycle
    read_masks = partial(_masks, store, call.module, shape, call.mask, call.backend, call.own, keywords)
    sinks, keys = call.sinks, shape[3]
    call.read_masks = read_masks if sinks is None else lambda: read_masks().with_sinks(keys)
    return call


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


_numbers = itertools.count(secrets.randbits(48))  # marks are saved with a model, and differ between processes


def applied(own: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords without those that the backend drops. `own`: as in `InterceptedCall`."""
    dropped = _dropped() if own == "sdpa_attention_forward" else ()
    return {word: value for word, value in kwargs.items() if word not in dropped} if dropped else kwargs


@assume_constant
def _dropped() -> tuple[str, ...]:
    """The keywords for which the installed version's function for SDPA has no parameter, so that it ignores them."""
    return _without_parameter()


@functools.cache
def _without_parameter() -> tuple[str, ...]:
    function = importlib.import_module("transformers.integrations.sdpa_attention").sdpa_attention_forward
    parameters = inspect.signature(function).parameters
    return tuple(word for word in ("softcap", "s_aux") if word not in parameters)


def _masks(
    store: MaskStore, module: Any, shape: Shape, mask: Any, backend: str, own: str, kwargs: dict[str, Any]
) -> Recorded:
    """The mask and the keywords as this backend reads them. `shape`: (B, H, Lq, Lk)."""
    is_causal = kwargs.get("is_causal")
    is_causal = bool(getattr(module, "is_causal", True)) if is_causal is None else bool(is_causal)
    # for "eager" and "sdpa" the models put packed sequences and chosen keys into the mask; others read keywords
    read = not own and backend not in ("eager", "sdpa")
    if own == "msa_attention_forward" and kwargs.get("block_indices") is not None:
        raise UnsupportedError(
            f"the backend {backend!r} chooses blocks of keys in its kernel, which does not read the model's mask: "
            "such calls cannot be read. Load the model with attn_implementation='sdpa'."
        )
    chosen = selected(module, kwargs, shape, masked=mask is not None) if read else None
    if read and mask is None and "flash" not in backend and backend not in (NAME, MASKED):
        check_unmasked(module, backend, shape, kwargs)
    if mask is not None and not isinstance(mask, Tensor):  # a BlockMask
        found = flex.masks_of(store, mask.mask_mod).plus(store.convert(None, kwargs.get("position_bias")))
    elif own == "flash_attention_forward" or "flash" in backend:
        found = read_flash_masks(store, shape, mask, is_causal, kwargs)
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
            found = found.plus(Recorded(documents(kwargs, shape[0], *shape[2:])))
    return found if chosen is None else found.plus(Recorded(compact(chosen)))
