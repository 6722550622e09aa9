"""The first source: the attention interface of transformers."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from clearhead._errors import UnsupportedError
from clearhead.masks.causal import Causal
from clearhead.models import _flash
from clearhead.models._masks import Recorded
from clearhead.models._patch import replaced
from clearhead.models.recorder import Recorder

# What changes the weights, and has no place in a record yet.
UNREAD = ("cache", "sinks")


@contextmanager
def source(recorder: Recorder) -> Iterator[None]:
    """Wrap whatever attention function transformers hands out, while a model is watched.

    Its models ask `AttentionInterface.get_interface` at each call for the function of their backend. It is given the
    module, the key heads before they are repeated, the mask and the scaling.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:  # no model of transformers can exist
        yield
        return

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
            function = original(self, attn_implementation, default)
            backend = "eager" if function is default else str(attn_implementation)
            return _recorded(recorder, function, backend)

        return get_interface

    with replaced(modeling.AttentionInterface, "get_interface", wrap):
        yield


def _recorded(recorder: Recorder, function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if recorder.idle:  # another model, in another thread or of another's own
            return function(module, query, key, value, attention_mask, *args, **kwargs)
        if args:  # by position: give every argument its name
            bound = inspect.signature(function).bind_partial(module, query, key, value, attention_mask, *args)
            kwargs = {**dict(list(bound.arguments.items())[5:]), **kwargs}
        name = recorder.stack.names.get(id(module))
        _check(name or type(module).__name__, attention_mask, backend, kwargs)
        filled = key
        if "flash" in backend and attention_mask is not None:
            filled = key[:, :, : attention_mask.shape[1]]  # of a static cache
        masks = _masks(recorder, module, query, filled, attention_mask, backend, kwargs)
        recorder.record(
            query,
            filled,
            name=name,
            masks=masks,
            scale=kwargs.get("scaling"),
            softcap=kwargs.get("softcap"),
            sinks=kwargs.get("s_aux"),
            backend=backend,
        )
        with recorder.inside():
            return function(module, query, key, value, attention_mask, **kwargs)

    return attention


def _check(name: str, mask: Any, backend: str, kwargs: dict[str, Any]) -> None:
    """Refuse what would be recorded wrong."""
    unread = [argument for argument in UNREAD if kwargs.get(argument) is not None]
    if mask is not None and not isinstance(mask, Tensor):
        unread.append(f"attention_mask of type {type(mask).__name__}")
    if unread:
        raise UnsupportedError(
            f"{name} was called on the backend {backend!r} with {' and '.join(unread)}, which watch() cannot record. "
            "Load the model with attn_implementation='sdpa' or 'eager', and run it without continuous batching."
        )


def _masks(
    recorder: Recorder,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    backend: str,
    kwargs: dict[str, Any],
) -> Recorded:
    is_causal = kwargs.get("is_causal")
    is_causal = bool(getattr(module, "is_causal", True)) if is_causal is None else bool(is_causal)
    if "flash" in backend:
        return _flash.masks(recorder, query, key, mask, is_causal, kwargs)
    masks = recorder.masks.convert(mask, kwargs.get("position_bias"))
    # the causal mask that other backends apply by themselves, where they are given none
    if is_causal and mask is None and backend != "eager" and query.shape[2] > 1:
        masks = masks.plus(Recorded(Causal(align="upper_left")))
    return masks
