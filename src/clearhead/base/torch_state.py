"""The private names of PyTorch's that say what is at work: transforms, derivatives, tracing, casts and modes.

See `torch_private.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from clearhead.base.private import ABSENT, RAISES, part, refusing, there

# ---------------------------------------------------------------------------------------- the transforms of torch.func

_SEES = "to see whether torch.func.vmap, grad or jvp is at work"
_WHICH = "to see which transforms of torch.func are at work"
_stack = part("torch._C._functorch.get_interpreter_stack", _WHICH, "an UnsupportedError inside a transform", None)
# the innermost transform, or None
interpreter: Callable[[], Any] = part(
    "torch._C._functorch.peek_interpreter_stack", _SEES, "all of the stack is asked for", _stack or ABSENT
)
_kinds = [
    part(f"torch._C._functorch.TransformType.{name}", _WHICH, "transforms are compared by their names", None)
    for name in ("Grad", "Jvp", "Vmap")
]
GRAD, JVP, VMAP = _kinds if all(kind is not None for kind in _kinds) else ("Grad", "Jvp", "Vmap")
_named = isinstance(GRAD, str)


def _of_no_transform() -> None:
    if interpreter() is not None:
        refusing("torch._C._functorch.get_interpreter_stack")()


_interpreters: Callable[[], Any] = _stack or _of_no_transform


def transforms() -> list[Any]:
    """The kinds of the transforms of `torch.func` that are at work: `GRAD`, `JVP`, `VMAP`, …"""
    return [i.key().name if _named else i.key() for i in _interpreters() or ()]


def _wrapped_by_none(tensor: Tensor) -> bool:
    return interpreter() is not None and bool(refusing("torch._C._functorch.is_functorch_wrapped_tensor")())


is_wrapped: Callable[[Tensor], bool] = part(
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "to see whether a transform of torch.func has wrapped a tensor",
    "an UnsupportedError inside a transform",
    _wrapped_by_none,
)
is_batched: Callable[[Tensor], bool] = part(
    "torch._C._functorch.is_batchedtensor", "to see whether torch.func.vmap has hidden a dimension of a tensor"
)
get_unwrapped: Callable[[Tensor], Tensor] = part(
    "torch._C._functorch.get_unwrapped", "to read a tensor below the transforms of torch.func"
)
without_transforms: Callable[[], Any] = part(
    "torch._C._DisableFuncTorch", "to read values on the host inside a transform of torch.func"
)

# ------------------------------------------------------------ a batch of losses: torch.autograd.grad(is_grads_batched)

_LOSSES = "to compute the gradients of a batch of losses (is_grads_batched=True)"
_enter = part("torch._C._vmapmode_increment_nesting", _LOSSES)
_leave = part("torch._C._vmapmode_decrement_nesting", _LOSSES, RAISES, None)
remove_batch_dim: Callable[..., Tensor] = part("torch._remove_batch_dim", _LOSSES)
add_batch_dim: Callable[..., Tensor] = part("torch._add_batch_dim", _LOSSES)


def batches_of_losses() -> int:
    """How many batches of losses are around here."""
    if _leave is None:
        refusing("torch._C._vmapmode_decrement_nesting")()
    level: int = _enter() - 1
    _leave()
    return level


def _of_no_batch(tensor: Tensor) -> bool:
    return batches_of_losses() > 0 and bool(refusing("torch._C._functorch.is_legacy_batchedtensor")())


is_batch_of_losses: Callable[[Tensor], bool] = part(
    "torch._C._functorch.is_legacy_batchedtensor", _LOSSES, "an UnsupportedError for a batch of losses", _of_no_batch
)

# ------------------------------------------------------------------------------------------- derivatives, forward mode


def _tried_level() -> int:
    zero = torch.zeros((), dtype=torch.float32, device="cpu")
    try:
        forward_ad.make_dual(zero, zero)  # type: ignore[no-untyped-call]
    except RuntimeError:  # there is no level
        return -1
    return 0


# the level of forward mode, -1 outside of it
dual_level: Callable[[], int] = (
    partial(getattr, forward_ad, "_current_level")
    if there(
        "torch.autograd.forward_ad._current_level",
        "to see whether torch.autograd.forward_ad is at work",
        "a dual number is made, which fails outside of forward mode",
    )
    else _tried_level
)
_node = part(
    "torch._C._current_autograd_node",
    "to see whether a backward pass runs, where the number of its task is missing",
    "nothing where the number of the task is there; else an UnsupportedError",
    None,
)


def _task_by_node() -> int:
    if _node is None:
        refusing("torch._C._current_graph_task_id")()
    return -1 if _node() is None else 0


# the number of the backward pass that runs in this thread, or -1
backward_task: Callable[[], int] = part(
    "torch._C._current_graph_task_id",
    "to see whether a backward pass repeats a call",
    "the operation that the backward pass computes now is asked for",
    _task_by_node,
)

functions_hidden: Callable[[], bool] = part(
    "torch._C._is_torch_function_all_disabled",
    "to see whether function modes are hidden, of which FlexAttention needs one",
    "the engine flex declines, and tiled runs",
    lambda: True,
)

# ------------------------------------------------------------------------------- what compiles, traces, casts, follows


def _autocast_of_any() -> bool:
    kinds = ("cpu", "cuda", "xpu", "mps")
    return any(torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) for kind in kinds)


def _traced_state() -> Any:
    return True if torch.jit.is_tracing() else None  # type: ignore[attr-defined, no-untyped-call]


any_autocast: Callable[[], bool] = part(
    "torch._C._is_any_autocast_enabled",
    "to see whether torch.autocast is at work",
    "each kind of device that PyTorch itself names is asked",
    _autocast_of_any,
)
jit_state: Callable[[], Any] = part(
    "torch._C._get_tracing_state",
    "to see whether torch.jit.trace is at work",
    "torch.jit.is_tracing() is asked",
    _traced_state,
)


class _Unknown:
    @staticmethod
    def try_get() -> Any:
        return True


TracingContext: Any = part(
    "torch._guards.TracingContext",
    "to see whether this thread or another one compiles",
    "while one thread compiles, code in the others is taken for compiled too",
    _Unknown,
)


class _ByName(type):
    def __instancecheck__(cls, thing: Any) -> bool:
        return any(kind.__name__ == "FakeTensor" for kind in type(thing).__mro__)


class _Fake(metaclass=_ByName):
    pass


FakeTensor: Any = part(
    "torch._subclasses.fake_tensor.FakeTensor",
    "to see whether a tensor has a shape alone",
    "a fake tensor is known by the name of its class",
    _Fake,
)
_modes = part(
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    "to count the modes that follow operations, where their number is missing",
    "nothing where the number is there; else an UnsupportedError",
)


dispatch_modes: Callable[[], int] = part(
    "torch._C._len_torch_dispatch_stack",
    "to see whether a mode follows each operation (make_fx, fake tensors)",
    "the modes are listed",
    lambda: len(_modes()),
)
_FOLLOWS = "to see whether fake tensors, make_fx or functionalization follow each operation"
_WITHIN = "an UnsupportedError inside a mode that follows operations"
_keys = [f"torch._C._TorchDispatchModeKey.{name}" for name in ("FAKE", "PROXY", "FUNCTIONAL")]
_tracers = [part(name, _FOLLOWS, _WITHIN, None) for name in _keys]
_unknown = [name for name, key in zip(_keys, _tracers, strict=True) if key is None]
_mode_of = part("torch._C._get_dispatch_mode", _FOLLOWS, _WITHIN)
if _unknown:
    _mode_of = refusing(_unknown[0])


def fake_mode() -> Any:
    """The mode of fake tensors that is at work, or None. To be asked where a dispatch mode is at work."""
    return _mode_of(_tracers[0])


def tracing_modes() -> Iterator[Any]:
    """The modes that follow each operation, None for a mode that is not at work. To be asked as `fake_mode` is."""
    return (_mode_of(key) for key in _tracers)


def recording_modes() -> Iterator[Any]:
    """The modes that record each operation, as `tracing_modes`: those without the mode of fake tensors."""
    return (_mode_of(key) for key in _tracers[1:])


function_modes: Callable[[], int] = part(
    "torch._C._len_torch_function_stack",
    "to see whether a function mode may change what a function computes",
    "one is taken to be at work, so that results of mask functions are not kept",
    lambda: 1,
)
