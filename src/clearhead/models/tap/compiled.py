"""The attention interface of transformers in compiled code: each call of a backend has an operation beside it.

The operation records the call when the code runs, as eager code does; what it was given, values and all, is there.
It writes nothing; it says that it writes to its module's mark, so that the compiler neither drops nor repeats it.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.base.errors import UnsupportedError
from clearhead.base.tracing import compiling
from clearhead.models.tap import interface as transformers
from clearhead.models.tap.modules import Running
from clearhead.models.tap.padding import Given
from clearhead.models.tap.patch import interface_replaced
from clearhead.models.tap.receiver import Receiver

# Read by no backend of transformers' own but FlashAttention's and those that choose keys.
UNREAD = ("indices", "block_indices", "cu_seq_lens_q", "cu_seq_lens_k")

_numbers = itertools.count(secrets.randbits(48))  # marks are saved with a model: those of another process are others


class Interface:
    """The attention interface, wrapped from before a model is compiled.

    A pass is recorded by the receiver that `recording` has put in its thread; where there is none, nothing is done.
    A mark is a tensor, the number of the interface and that of the module, since layers share compiled code, and a
    number that is a constant of the code would make each layer compile anew.
    """

    def __init__(self, model: nn.Module) -> None:
        self.number = next(_numbers)
        self.attribute = f"_clearhead_monitor_{self.number}"
        self.modules = list(model.modules())

    @contextmanager
    def installed(self) -> Iterator[None]:
        with torch.inference_mode(False):  # what is made in it cannot be given to an operation that writes
            for number, module in enumerate(self.modules):
                module.__dict__[self.attribute] = torch.tensor([self.number, number], device="cpu")
        try:
            with interface_replaced(self._wrap):
                yield
        finally:
            for module in self.modules:
                module.__dict__.pop(self.attribute, None)

    @contextmanager
    def recording(self, receiver: Receiver) -> Iterator[None]:
        """While a pass runs in this thread."""
        _here.open[self.number] = self, receiver
        try:
            yield
        finally:
            del _here.open[self.number]

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        number, attribute = self.number, self.attribute

        def get_interface(registry: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
            function: Callable[..., Any] = original(registry, attn_implementation, default)
            backend = "eager" if function is default else str(attn_implementation)
            if compiling():
                return _observed(attribute, function, backend)
            if number not in _here.open:
                return function
            return transformers.recorded(_here.open[number][1], function, backend, transformers.read)

        return get_interface


class _Here(threading.local):
    def __init__(self) -> None:
        self.open: dict[int, tuple[Interface, Receiver]] = {}  # by the number of the interface


_here = _Here()


def _observed(attribute: str, function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    own = transformers.own_name(function)

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> Any:
        mark = getattr(module, attribute, None)
        if mark is not None:
            transformers.check(type(module).__name__, attention_mask, backend, kwargs)
            unread = [word for word in UNREAD if kwargs.get(word) is not None and backend not in ("eager", "sdpa")]
            if unread:
                raise UnsupportedError(
                    f"{type(module).__name__} called the attention backend {backend!r} with {unread[0]!r}, which "
                    "cannot be read in compiled code. Monitor the model without compiling it."
                )
            observe(
                query.detach(),
                key.detach(),
                attention_mask,
                kwargs.get("position_bias"),
                kwargs.get("s_aux"),
                kwargs.get("position_ids"),
                kwargs.get("scaling"),
                kwargs.get("softcap"),
                kwargs.get("is_causal"),
                kwargs.get("sliding_window"),
                backend,
                own,
                mark,
            )
        return function(module, query, key, value, attention_mask, **kwargs)

    return attention


def _part(receiver: Receiver, module: nn.Module) -> Running:
    """The attention module as running. Which modules run around it compiled code does not show.

    So the side of an encoder–decoder is read from its name; attention of a decoder may be self or cross, and the
    padding of its queries is the decoder's in both.
    """
    around = receiver.stack.innermost
    assert around is not None, "asked for while a pass runs"
    parts = receiver.stack.names[id(module)].split(".")
    if "decoder" in parts:
        return Running(module, "cross", around.told)
    if "encoder" in parts and around.told.source is not None:
        return Running(module, "self", Given(around.told.source))
    return Running(module, around.kind, around.told)


@torch.library.custom_op(
    "clearhead::observe", mutates_args=("mark",), tags=(torch.Tag.cudagraph_unsafe,)
)  # a recorded CUDA graph would not run it again
def observe(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    position_bias: Tensor | None,
    sinks: Tensor | None,
    position_ids: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    is_causal: bool | None,
    sliding_window: int | None,
    backend: str,
    own: str,
    mark: Tensor,
) -> None:
    """Record this call, where the pass that makes it is recorded."""
    if not _here.open:
        return
    interface, module = mark.tolist()
    if interface not in _here.open:
        return
    here, receiver = _here.open[interface]
    if receiver.idle:  # a checkpoint runs it again in the backward pass
        return
    kwargs = {"position_bias": position_bias, "s_aux": sinks, "position_ids": position_ids, "scaling": scaling}
    kwargs |= {"softcap": softcap, "is_causal": is_causal, "sliding_window": sliding_window}
    running = here.modules[module]
    receiver.masks.counted = False  # compiled code writes one layer's mask over another one's
    with receiver.stack.inside(_part(receiver, running)):
        transformers.read(receiver, running, query, key, None, mask, backend, own, kwargs)


@observe.register_fake
def _(*_: Any) -> None:
    return None
