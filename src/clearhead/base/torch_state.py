"""The private names of PyTorch that say what is active: transforms, derivatives, tracing, casts and modes.

See `torch_private.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from clearhead.base.private import find_private, requires

# ---------------------------------------------------------------------------------------- the transforms of torch.func

_WHICH = "to see which transforms of torch.func are active"
_stack = find_private("torch._C._functorch.get_interpreter_stack", _WHICH)
# the innermost transform, or None
interpreter: Callable[[], Any] = find_private(
    "torch._C._functorch.peek_interpreter_stack", "to see whether torch.func.vmap, grad or jvp is active"
)
_KINDS = [f"torch._C._functorch.TransformType.{name}" for name in ("Grad", "Jvp", "Vmap")]
GRAD, JVP, VMAP = (find_private(name, _WHICH) for name in _KINDS)


@requires(_WHICH, *_KINDS)
def transforms() -> list[Any]:
    """The kinds of the active transforms of `torch.func`: `GRAD`, `JVP`, `VMAP`, …"""
    return [transform.key() for transform in _stack() or ()]


is_wrapped: Callable[[Tensor], bool] = find_private(
    "torch._C._functorch.is_functorch_wrapped_tensor", "to see whether a transform of torch.func has wrapped a tensor"
)
is_batched: Callable[[Tensor], bool] = find_private(
    "torch._C._functorch.is_batchedtensor", "to see whether torch.func.vmap has hidden a dimension of a tensor"
)
get_unwrapped: Callable[[Tensor], Tensor] = find_private(
    "torch._C._functorch.get_unwrapped", "to read a tensor below the transforms of torch.func"
)
without_transforms: Callable[[], Any] = find_private(
    "torch._C._DisableFuncTorch", "to read values on the host inside a transform of torch.func"
)

# ------------------------------------------------------------ a batch of losses: torch.autograd.grad(is_grads_batched)

_LOSSES = "to compute the gradients of a batch of losses (is_grads_batched=True)"
_enter = find_private("torch._C._vmapmode_increment_nesting", _LOSSES)
_leave = find_private("torch._C._vmapmode_decrement_nesting", _LOSSES)
remove_batch_dim: Callable[..., Tensor] = find_private("torch._remove_batch_dim", _LOSSES)
add_batch_dim: Callable[..., Tensor] = find_private("torch._add_batch_dim", _LOSSES)


@requires(_LOSSES, "torch._C._vmapmode_increment_nesting", "torch._C._vmapmode_decrement_nesting")
def batches_of_losses() -> int:
    """How many batches of losses are around here."""
    level: int = _enter() - 1
    _leave()
    return level


is_batch_of_losses: Callable[[Tensor], bool] = find_private("torch._C._functorch.is_legacy_batchedtensor", _LOSSES)

# ------------------------------------------------------------------------------------------- derivatives, forward mode

# the level of forward mode, -1 outside of it
dual_level: Callable[[], int] = requires(
    "to see whether torch.autograd.forward_ad is active", "torch.autograd.forward_ad._current_level"
)(partial(getattr, forward_ad, "_current_level"))
# the number of the backward pass that runs in this thread, or -1
backward_task: Callable[[], int] = find_private(
    "torch._C._current_graph_task_id", "to see whether a backward pass repeats a call"
)
functions_hidden: Callable[[], bool] = find_private(
    "torch._C._is_torch_function_all_disabled",
    "to see whether function modes are hidden, of which FlexAttention needs one",
)

# ------------------------------------------------------------------------------------------ compiling, tracing, casts

any_autocast: Callable[[], bool] = find_private(
    "torch._C._is_any_autocast_enabled", "to see whether torch.autocast is active"
)
jit_state: Callable[[], Any] = find_private("torch._C._get_tracing_state", "to see whether torch.jit.trace is active")
tracing_context: Callable[[], Any] = find_private(
    "torch._guards.TracingContext.try_get", "to see whether this thread or another one compiles"
)
FakeTensor: Any = find_private("torch._subclasses.fake_tensor.FakeTensor", "to see whether a tensor has a shape alone")
dispatch_modes: Callable[[], int] = find_private(
    "torch._C._len_torch_dispatch_stack", "to see whether a mode follows each operation (make_fx, fake tensors)"
)
_FOLLOWS = "to see whether fake tensors, make_fx or functionalization follow each operation"
_MODES = [f"torch._C._TorchDispatchModeKey.{name}" for name in ("FAKE", "PROXY", "FUNCTIONAL")]
_tracers = [find_private(name, _FOLLOWS) for name in _MODES]
_mode_of = requires(_FOLLOWS, *_MODES)(find_private("torch._C._get_dispatch_mode", _FOLLOWS))


def fake_mode() -> Any:
    """The mode of fake tensors that is at work, or None. To be asked where a dispatch mode is at work."""
    return _mode_of(_tracers[0])


def tracing_modes() -> Iterator[Any]:
    """The modes that follow each operation, None for a mode that is not at work. To be asked as `fake_mode` is."""
    return (_mode_of(key) for key in _tracers)


def recording_modes() -> Iterator[Any]:
    """The modes that record each operation, as `tracing_modes`: those without the mode of fake tensors."""
    return (_mode_of(key) for key in _tracers[1:])


function_modes: Callable[[], int] = find_private(
    "torch._C._len_torch_function_stack", "to see whether a function mode may change what a function computes"
)
