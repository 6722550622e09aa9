"""Attention calls in compiled code: of transformers' backends, and of clearhead's own modules.

Each call has an operation beside it. The operation records the call when the code runs, as eager code does: its
arguments then have their values. It writes nothing, but declares that it writes to its module's mark, so that the
compiler neither drops nor repeats it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from clearhead import _attention
from clearhead._attention import Arguments, Attended
from clearhead.base.errors import UnsupportedError
from clearhead.base.torch_state.mode import any_thread_compiles, get_mode, is_inside_transform
from clearhead.models.interception.handler import Handler, ModelHandler
from clearhead.models.interception.intercepted_call import InterceptedCall
from clearhead.models.interception.interface import Marks, begin_backend, intercept_backends
from clearhead.models.interception.modules import Running
from clearhead.models.interception.padding import Told
from clearhead.models.interception.patch import replaced
from clearhead.problem.packing import SCHEMA, TENSORS, Operands, packed, unpacked
from clearhead.problem.padded import get_nested_edges
from clearhead.problem.problem import Problem

# The keywords that `observe` is given, in the order of its arguments.
KEYWORDS = ("position_bias", "s_aux", "position_ids", "scaling", "softcap", "is_causal", "sliding_window")
# Of transformers' own backends, only FlashAttention and those that choose keys read these keywords.
UNREAD = ("indices", "block_indices", "cu_seq_lens_q", "cu_seq_lens_k")
UNREADABLE = "which cannot be read in compiled code. Monitor the model without compiling it."


class CompiledCalls(Handler):
    """The attention interface and clearhead's own attention, which are wrapped before a model is compiled.

    A pass is recorded by the handler that `recording` has given its thread; without a handler nothing is done.
    """

    traced = True

    def __init__(self, model: nn.Module) -> None:
        self.marks = Marks(model)

    @contextmanager
    def installed(self) -> Iterator[None]:
        own = replaced(_attention, "attend_for", self._wrap)
        with self.marks.put(), intercept_backends(self._handler_now), own:
            yield

    @contextmanager
    def recording(self, handler: ModelHandler, compiled: bool) -> Iterator[None]:
        """A context in which a pass of the model runs in this thread and is recorded by the handler. `compiled`:
        whether some of it is compiled code; otherwise `intercept_own` gives the handler the calls of clearhead's
        own."""
        number = self.marks.number
        _here.open[number] = handler, compiled, self.marks.modules
        try:
            yield
        finally:
            del _here.open[number]

    def _handler_now(self, backend: str) -> Handler | None:
        if any_thread_compiles() and get_mode().compiled:
            return self
        handler, *_ = _here.open.get(self.marks.number, (None,))
        return None if handler is None or handler.idle else handler

    def before(self, call: InterceptedCall) -> None:
        mark = getattr(call.module, self.marks.attribute, None)
        if mark is not None:
            _observe(call, mark.data)  # a checkpoint saves the mark, and raises where a counted write has changed it

    def _wrap(self, attend_for: Callable[..., Attended]) -> Callable[..., Attended]:
        """`attend_for`, with an operation beside each call in compiled code."""

        def observed(module: Any, call: Arguments, cross: bool = False) -> Attended:
            found = attend_for(module, call, cross)
            mark = self.marks.of_none if module is None else getattr(module, self.marks.attribute, None)
            if mark is None:
                return found
            if get_mode().compiled:
                _observe_own(module, call, found.problem, cross, mark.data)
            elif self.marks.number in _here.open:  # a part of the model that is not compiled, beside compiled parts
                _receive_own(mark, cross, lambda: found.problem, _unread(module, call, found.problem))
            return found

        return observed


class _Here(threading.local):
    """The passes that are recorded in this thread, by the number of the model: each with its handler, whether some of
    it is compiled code, and the modules of the model."""

    def __init__(self) -> None:
        self.open: dict[int, tuple[ModelHandler, bool, list[nn.Module]]] = {}


_here = _Here()


def _observe(call: InterceptedCall, mark: Tensor) -> None:
    given, name = call.keywords, type(call.module).__name__
    unread = [word for word in UNREAD if given.get(word) is not None and call.backend not in ("eager", "sdpa")]
    mask = call.mask if isinstance(call.mask, Tensor) else None
    message = call.unread(name)
    if not message and (unread or mask is not call.mask):
        what = repr(unread[0]) if unread else f"attention_mask of type {type(call.mask).__name__}"
        message = f"{name} called the attention backend {call.backend!r} with {what}, {UNREADABLE}"
    values = [given.get(word) for word in KEYWORDS]
    observe(call.query.detach(), call.key.detach(), mask, *values, call.backend, call.own, message, mark)


def _refuse(message: str) -> NoReturn:
    raise UnsupportedError(message)


# parts of the names that models of transformers give to the cross attention of a decoder
CROSS = ("cross", "encoder_attn", "encdec")


def _part(handler: ModelHandler, module: nn.Module) -> Running:
    """The attention module as a running module. Compiled code does not show which modules run around it.

    So whether a module belongs to the encoder or to the decoder, and whether a decoder's attention is self or cross, is
    read from its name. The padding of a decoder's queries is the decoder's in both cases.
    """
    around = handler.innermost
    parts = handler.stack.names[id(module)].split(".")
    if "decoder" in parts:
        inside = ".".join(parts[parts.index("decoder") + 1 :]).lower()
        return Running(module, "cross" if any(word in inside for word in CROSS) else "self", around.told)
    if "encoder" in parts and around.told.source is not None:
        return Running(module, "self", Told(around.told.source))
    return Running(module, around.kind, around.told)


@torch.library.custom_op(
    "clearhead::observe",
    mutates_args=("mark",),
    schema="(Tensor query, Tensor key, Tensor? mask, Tensor? position_bias, Tensor? sinks, Tensor? position_ids, "
    "float? scaling, float? softcap, bool? is_causal, int? sliding_window, str backend, str own, str message, "
    "Tensor(a!) mark) -> ()",
    tags=(torch.Tag.cudagraph_unsafe,),  # a recorded CUDA graph would not run it again
)
def observe(query: Tensor, key: Tensor, mask: Tensor | None, *arguments: Any) -> None:
    """Record this call, if the pass that makes it is recorded. `message`: why it cannot be, "" where it can."""
    *values, backend, own, message, mark = arguments
    found = _find_pass(mark)
    if found is None:
        return
    handler, _, module = found
    keywords = dict(zip(KEYWORDS, values, strict=True))
    call = InterceptedCall(query, key, None, backend, module=module, mask=mask, keywords=keywords, own=own)
    handler.masks.counted = False  # compiled code may write the masks of two layers to one memory
    with handler.stack.inside(_part(handler, module)):
        if message:
            handler.begin(lambda: _refuse(message))
        else:
            begin_backend(handler, call)


observe.register_fake(lambda *_: None)


def _find_pass(mark: Tensor) -> tuple[ModelHandler, bool, nn.Module] | None:
    """The pass that records the call beside which this mark stands: its handler, whether some of it is compiled code,
    and the module that calls, or the model, if it is not known. None where the call is not recorded."""
    if not _here.open:
        return None
    number, module = mark.tolist()
    handler, compiled, modules = _here.open.get(number, (None, False, []))
    if handler is None or handler.idle:  # idle: a checkpoint runs the call again in the backward pass
        return None
    return handler, compiled, modules[max(module, 0)]


def _unread(module: Any, call: Arguments, problem: Problem) -> str:
    """Why a call of clearhead's own attention cannot be read in compiled code; "" where it can."""
    name = type(module).__name__
    if module is None:
        return "compiled code does not show which module calls ch.attention. Call its own ch.nn.DotProductAttention()."
    if is_inside_transform():
        what = "inside a transform of torch.func (vmap, grad)"
    elif get_nested_edges(call.mask) is not None:
        what = "with nested tensors"
    elif problem.lowered is None:
        what = f"with the score {type(call.score).__name__}, which is a function"
    else:
        return ""
    return f"{name} was called {what}, {UNREADABLE}"


def _observe_own(module: Any, call: Arguments, problem: Problem, cross: bool, mark: Tensor) -> None:
    message = _unread(module, call, problem)
    if message:  # the call's tensors may be of a transform, for which the operation has no rule
        none = torch.empty(0, dtype=torch.float32, device="cpu")
        observe_own(none, none, none, *[None] * (TENSORS - 3), "mul", 1.0, None, 0.0, cross, message, mark)
        return
    tensors, numbers = packed(problem)
    observe_own(*[None if t is None else t.detach() for t in tensors], *numbers, cross, message, mark)


def _receive_own(mark: Tensor, cross: bool, make: Callable[[], Problem], message: str) -> None:
    """Give a call of clearhead's own attention to the handler, if the pass that makes it is recorded."""
    found = _find_pass(mark)
    if found is None:
        return
    handler, compiled, module = found
    if not compiled:
        return

    def read() -> InterceptedCall:
        if message:
            _refuse(message)
        problem = make()
        arguments = Arguments(problem.query, problem.key, None)
        return InterceptedCall(*arguments[:2], problem.value, "clearhead", problem=problem, arguments=arguments)

    with handler.stack.inside(Running(module, "cross" if cross else "self", handler.innermost.told)):
        handler.begin(read)


@torch.library.custom_op(
    "clearhead::observe_own",
    mutates_args=("mark",),
    schema=f"({SCHEMA}, bool cross, str message, Tensor(a!) mark) -> ()",
    tags=(torch.Tag.cudagraph_unsafe,),
)
def observe_own(*arguments: Any) -> None:
    """Record a call of clearhead's own attention, a packed problem. `message`: as for `observe`."""
    *numbers, cross, message, mark = arguments[TENSORS:]
    wanted = [False] * len(Operands._fields)
    _receive_own(mark, cross, lambda: unpacked(arguments[:TENSORS], tuple(numbers), wanted), message)


observe_own.register_fake(lambda *_: None)
