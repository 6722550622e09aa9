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
from clearhead.models.recorder import Recorder


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
    interface = modeling.AttentionInterface
    original = interface.get_interface

    def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = original(self, attn_implementation, default)
        backend = "eager" if function is default else str(attn_implementation)
        return _recorded(recorder, function, backend)

    interface.get_interface = get_interface
    try:
        yield
    finally:
        interface.get_interface = original


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
        if id(module) not in recorder.stack.names:  # another model, in another thread or of another's own
            return function(module, query, key, value, attention_mask, *args, **kwargs)
        if kwargs.get("s_aux") is not None:
            raise UnsupportedError(f"{recorder.stack.names[id(module)]} has attention sinks, not supported yet.")
        if args:  # by position: give every argument its name
            bound = inspect.signature(function).bind_partial(module, query, key, value, attention_mask, *args)
            kwargs = {**dict(list(bound.arguments.items())[5:]), **kwargs}
            args = ()
        recorder.record(
            query,
            key,
            name=recorder.stack.names[id(module)],
            mask=attention_mask,
            bias=kwargs.get("position_bias"),
            causal=_causal(module, query, attention_mask, backend, kwargs.get("is_causal")),
            scale=kwargs.get("scaling"),
            softcap=kwargs.get("softcap"),
            backend=backend,
        )
        with recorder.inside():
            return function(module, query, key, value, attention_mask, *args, **kwargs)

    return attention


def _causal(
    module: nn.Module, query: Tensor, mask: Tensor | None, backend: str, is_causal: bool | None
) -> Causal | None:
    """The causal mask that a backend applies by itself, where it is given no other."""
    if backend == "eager" or mask is not None or query.shape[2] == 1:
        return None
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    if not is_causal:
        return None
    return Causal(align="lower_right" if "flash" in backend else "upper_left")
