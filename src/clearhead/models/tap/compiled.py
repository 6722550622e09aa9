"""The attention interface of transformers in compiled code: each call of a backend has an operation beside it.

The operation records the call when the code runs, as eager code does: its arguments then have their values. It writes
nothing, but declares that it writes to its module's mark, so that the compiler neither drops nor repeats it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from clearhead.base.errors import UnsupportedError
from clearhead.base.tracing import compiling, some_compiling
from clearhead.models.tap.interface import BackendCall, Given, Marks, Subscriber, read, subscribed
from clearhead.models.tap.modules import Running
from clearhead.models.tap.padding import Told
from clearhead.models.tap.receiver import Receiver

# Of transformers' own backends, only FlashAttention and those that choose keys read these keywords.
UNREAD = ("indices", "block_indices", "cu_seq_lens_q", "cu_seq_lens_k")


class Interface(Subscriber):
    """The attention interface, which is wrapped before a model is compiled.

    A pass is recorded by the receiver that `recording` has given its thread; without a receiver nothing is done.
    """

    def __init__(self, model: nn.Module) -> None:
        self.marks = Marks(model)

    @contextmanager
    def installed(self) -> Iterator[None]:
        with self.marks.put(), subscribed(self):
            yield

    @contextmanager
    def recording(self, receiver: Receiver) -> Iterator[None]:
        """A context in which a pass of the model runs in this thread and is recorded by the receiver."""
        number = self.marks.number
        _here.open[number] = self, receiver
        try:
            yield
        finally:
            del _here.open[number]

    def meets(self, backend: str) -> bool:
        return self.marks.number in _here.open or (some_compiling() and compiling())

    def called(self, call: BackendCall) -> Any:
        if not compiling():
            return Given(_here.open[self.marks.number][1], inside_compiled_code=False).called(call)
        mark = getattr(call.module, self.marks.attribute, None)
        if mark is not None:
            _observe(call, mark)
        return call.run()


class _Here(threading.local):
    def __init__(self) -> None:
        self.open: dict[int, tuple[Interface, Receiver]] = {}  # by the number of the interface


_here = _Here()


def _observe(call: BackendCall, mark: Tensor) -> None:
    given, name = call.keywords, type(call.module).__name__
    unread = [word for word in UNREAD if given.get(word) is not None and call.backend not in ("eager", "sdpa")]
    mask = call.mask if isinstance(call.mask, Tensor) else None
    message = call.unread(name)
    if not message and (unread or mask is not call.mask):
        what = repr(unread[0]) if unread else f"attention_mask of type {type(call.mask).__name__}"
        message = (
            f"{name} called the attention backend {call.backend!r} with {what}, which cannot be read in compiled code. "
            "Monitor the model without compiling it."
        )
    observe(
        call.query.detach(),
        call.key.detach(),
        mask,
        given.get("position_bias"),
        given.get("s_aux"),
        given.get("position_ids"),
        given.get("scaling"),
        given.get("softcap"),
        given.get("is_causal"),
        given.get("sliding_window"),
        call.backend,
        call.own,
        message,
        mark,
    )


def _refuse(message: str) -> NoReturn:
    raise UnsupportedError(message)


# parts of the names that models of transformers give to the cross attention of a decoder
CROSS = ("cross", "encoder_attn", "encdec")


def _part(receiver: Receiver, module: nn.Module) -> Running:
    """The attention module as a running module. Compiled code does not show which modules run around it.

    So whether a module belongs to the encoder or to the decoder, and whether a decoder's attention is self or cross, is
    read from its name. The padding of a decoder's queries is the decoder's in both cases.
    """
    around = receiver.stack.innermost
    assert around is not None, "asked for while a pass runs"
    parts = receiver.stack.names[id(module)].split(".")
    if "decoder" in parts:
        inside = ".".join(parts[parts.index("decoder") + 1 :]).lower()
        return Running(module, "cross" if any(word in inside for word in CROSS) else "self", around.told)
    if "encoder" in parts and around.told.source is not None:
        return Running(module, "self", Told(around.told.source))
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
    message: str,
    mark: Tensor,
) -> None:
    """Record this call, if the pass that makes it is recorded. `message`: why it cannot be, "" where it can."""
    if not _here.open:
        return
    interface, module = mark.tolist()
    if interface not in _here.open:
        return
    here, receiver = _here.open[interface]
    if receiver.idle:  # a checkpoint runs the call again in the backward pass
        return
    kwargs = {"position_bias": position_bias, "s_aux": sinks, "position_ids": position_ids, "scaling": scaling}
    kwargs |= {"softcap": softcap, "is_causal": is_causal, "sliding_window": sliding_window}
    running = here.marks.modules[module]
    call = BackendCall(running, query, key, None, mask, kwargs, backend, own, NotImplemented)  # it has run
    receiver.masks.counted = False  # compiled code may write the masks of two layers to one memory
    with receiver.stack.inside(_part(receiver, running)):
        if message:
            receiver.read(lambda: _refuse(message), receiver.stack.names[id(running)])
        else:
            read(receiver, call)


@observe.register_fake
def _(*_: Any) -> None:
    return None
