"""PyTorch's own attention functions, called by its modules or by any code: the second source of calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from clearhead.base.torch_state.mode import any_thread_compiles, get_mode
from clearhead.base.torch_state.torch_private import (
    FUSED_OPERATIONS,
    OWN_SDPA,
    PRIVATE_SOFTMAX,
    SOFTMAX_OPERATIONS,
    encoder_layer,
    function_mode_stack,
    native_attention,
    pop_function_mode,
    validate_intercepted,
)
from clearhead.masks.causal import Causal, causal_alignment
from clearhead.models.interception import flex, multihead
from clearhead.models.interception.handler import ModelHandler
from clearhead.models.interception.intercepted_call import InterceptedCall, is_sdpa_foreign
from clearhead.models.interception.masks import Recorded
from clearhead.models.interception.patch import original, replaced, restored, wrap_anew
from clearhead.models.interception.place import Place
from clearhead.models.interception.refused import is_compiled_here, prepare_compiler, uncompiled


def read(
    handler: ModelHandler,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> InterceptedCall:
    """Read a call of F.scaled_dot_product_attention. The arguments are those of the function."""
    handler.check(query, key)
    align = None if attn_mask is None else causal_alignment(attn_mask)
    if align is not None:
        attn_mask = None
    leading = query.shape[:-2]
    if not enable_gqa:
        leading = torch.broadcast_shapes(leading, key.shape[:-2])  # type: ignore[no-untyped-call]
    elif query.ndim == key.ndim == 3:  # (H, L, E): the heads come third from the last
        query, key, value = query[None], key[None], value[None]
    if max(query.ndim, key.ndim) != 4:
        query, key, value, attn_mask = _four(query, key, value, attn_mask, leading)
        shape = (*query.shape[:3], value.shape[-1])
    else:
        shape = (leading[:-1].numel(), leading[-1], query.shape[2], value.shape[-1])

    def read_masks() -> Recorded:
        masks = handler.masks.convert(attn_mask)
        return masks.plus(Recorded(Causal(), align=align or "upper_left")) if is_causal or align is not None else masks

    place = Place(lambda t: t.reshape(shape), lambda output: output.reshape(*leading, *shape[2:]))
    call = InterceptedCall(query, key, value, "sdpa", read_masks, place, scale=scale, dropout_p=dropout_p)
    call.function = original(F, "scaled_dot_product_attention")
    return call


def _four(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, leading: torch.Size
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Query, key, value (B, H, L, E) and the mask. The batch is all dimensions but the last three, or, without heads,
    but the last two."""
    batch, heads = (leading[:-1], leading[-1:]) if len(leading) > 2 else (leading, (1,))
    if mask is not None and mask.ndim > 2:
        mask = mask.expand(*leading, -1, -1).reshape(-1, *heads, *mask.shape[-2:])
    whole = (t.expand(*leading, -1, -1) for t in (query, key, value))
    query, key, value = (t.reshape(batch.numel(), *heads, *t.shape[-2:]) for t in whole)
    return query, key, value, mask


# Each function of PyTorch's that a module may call, and the function that reads its arguments.
READERS: dict[Any, Callable[..., InterceptedCall]] = {
    OWN_SDPA: read,
    F.multi_head_attention_forward: multihead.read,  # nn.MultiheadAttention
    native_attention: multihead.read_native,  # the fast path of nn.MultiheadAttention
    encoder_layer: multihead.read_layer,  # the fast path of nn.TransformerEncoderLayer
}


def _with_overloads(operations: Iterable[Any]) -> set[Any]:
    """Each of PyTorch's operations, and its overloads: code calls either."""
    return {form for op in operations for form in (op, *(getattr(op, name) for name in op.overloads()))}


# The operation under scaled_dot_product_attention. It is read in eager code alone: the compiler follows no set of
# operations.
OPERATIONS = _with_overloads([torch.ops.aten.scaled_dot_product_attention])
SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax, *PRIVATE_SOFTMAX}
SOFTMAX |= _with_overloads([torch.ops.aten.softmax, *SOFTMAX_OPERATIONS])
# The kernels that scaled_dot_product_attention calls. A module may call a kernel itself: its arguments are not read.
FUSED = _with_overloads(FUSED_OPERATIONS)


@contextmanager
def intercept_functions(handler: ModelHandler, innermost: bool = False) -> Iterator[None]:
    """Intercept every call of these functions, under whatever name they were imported.

    A function mode belongs to one thread: each thread enters it where it enters the model.
    """
    validate_intercepted()
    see = uncompiled(_see)

    def counted(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        foreign = is_sdpa_foreign()  # each function that takes the place is wrapped anew

        def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
            if handler.stack.beside:
                handler.unattributed.append(None)  # a list, because append is safe in threads and += is not
            if foreign:
                found: Tensor = see(handler, attend, args, kwargs)
                return found
            # PyTorch's own function is seen by the function mode, under whatever name it is called
            with _restore_name(()):
                return attend(*args, **kwargs)

        return scaled_dot_product_attention

    prepare_compiler(_Mode.__torch_function__)
    handler.stack.around = _Below(handler) if innermost else _Mode(handler)
    overlooking = replaced(torch.overrides, "has_torch_function", _overlooked)
    counting = replaced(F, "scaled_dot_product_attention", counted, innermost)
    try:
        with overlooking, flex.intercept_flex(handler, innermost), counting:
            yield
    except BaseException:
        _pop_left_modes(handler)
        raise
    finally:
        handler.stack.around = nullcontext()  # this breaks a reference cycle, which would keep the records alive


class _Mode(TorchFunctionMode):
    def __init__(self, handler: ModelHandler) -> None:
        super().__init__()
        self.handler = handler
        self.see = uncompiled(_see)

    def __enter__(self) -> _Mode:
        wrap_anew(F, "scaled_dot_product_attention")  # other code may have replaced it since
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler, kwargs = self.handler, kwargs or {}
        reads = func in READERS
        # this is asked first: the compiler could not look up every function in these sets
        if not reads and not is_dynamo_compiling() and not (any_thread_compiles() and get_mode().compiled):
            reads = func in OPERATIONS
            if func in SOFTMAX or func in FUSED:
                handler.softmax(func in FUSED)
        if not reads:
            return func(*args, **kwargs)
        with _restore_name(types):
            if is_compiled_here():
                return self.see(handler, func, args, kwargs)
            if handler.idle:
                return func(*args, **kwargs)
            call = handler.begin(lambda: READERS.get(func, read)(handler, *args, **kwargs))
            with handler.inside:  # not `handler.compute`, to be one frame less for each call
                result = func(*args, **kwargs)
            return result if call is None else handler.after(call, result)


def _restore_name(types: Any) -> AbstractContextManager[None]:
    """A context for a call of PyTorch's function: the subclasses of its arguments (`types`), and other code's function
    modes, may ask whether it is the function of PyTorch's name, which `source` has replaced."""
    if any_thread_compiles() or not (types or any(not isinstance(mode, _Mode) for mode in function_mode_stack())):
        return nullcontext()
    return restored(F, "scaled_dot_product_attention")


def _pop_left_modes(handler: ModelHandler) -> None:
    """Take the handler's modes off this thread's stack, after an error that may be an interrupt.

    An interrupt between PyTorch's own steps of entering or leaving a mode leaves the mode on the stack.
    """
    active: list[TorchFunctionMode] = function_mode_stack()
    others = [mode for mode in active if not (isinstance(mode, _Mode) and mode.handler is handler)]
    if len(others) < len(active):
        for mode in active:
            TorchFunctionMode.__exit__(mode, None, None, None)  # type: ignore[no-untyped-call]  # pops the last one
        for mode in others:
            TorchFunctionMode.__enter__(mode)  # type: ignore[no-untyped-call]


class _Below(threading.local, AbstractContextManager[None]):
    """A mode below all active modes of handlers, which are entered once more above it and see calls first."""

    def __init__(self, handler: ModelHandler) -> None:
        self._handler = handler
        self._entered: list[ExitStack] = []  # by this thread

    def __enter__(self) -> None:
        active: list[TorchFunctionMode] = function_mode_stack()
        above = [_Mode(mode.handler) for mode in active if isinstance(mode, _Mode)]
        with ExitStack() as stack:
            for mode in (_Mode(self._handler), *above):
                stack.enter_context(mode)
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


def _see(handler: ModelHandler, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if handler.idle:
        return func(*args, **kwargs)
    call = handler.begin(lambda: READERS.get(func, read)(handler, *args, **kwargs))
    return handler.compute(call, func, *args, **kwargs)


def _overlooked(has_torch_function: Callable[..., bool]) -> Callable[..., bool]:
    """Hide the modes of handlers from PyTorch's modules, which leave their fast path where a function mode is active.

    Without the fast path their outputs would change, by much where a batch has padding. A handler whose
    `keeps_fast_path` is False wants the change.
    """

    def asked(args: Any) -> bool:
        active: list[TorchFunctionMode] = function_mode_stack()
        if not active or not isinstance(active[-1], _Mode) or not active[-1].handler.keeps_fast_path:
            return has_torch_function(args)
        with pop_function_mode():
            return asked(args)

    return asked
