"""The private names of PyTorch that say what is active: transforms, derivatives, tracing, casts and modes.

See `torch_private.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from clearhead.base.torch_state.private import find_private, requires

_ACTIVE = "to see what is active here: transforms, derivatives, tracing, casts or modes"

# ---------------------------------------------------------------------------------------- the transforms of torch.func

_stack = find_private("torch._C._functorch.get_interpreter_stack", _ACTIVE)
# the innermost transform, or None
interpreter: Callable[[], Any] = find_private("torch._C._functorch.peek_interpreter_stack", _ACTIVE)
_KINDS = [f"torch._C._functorch.TransformType.{name}" for name in ("Grad", "Jvp", "Vmap")]
GRAD, JVP, VMAP = (find_private(name, _ACTIVE) for name in _KINDS)


@requires(_ACTIVE, *_KINDS)
def transforms() -> list[Any]:
    """The kinds of the active transforms of `torch.func`: `GRAD`, `JVP`, `VMAP`, …"""
    return [transform.key() for transform in _stack() or ()]


is_wrapped: Callable[[Tensor], bool] = find_private("torch._C._functorch.is_functorch_wrapped_tensor", _ACTIVE)
is_batched: Callable[[Tensor], bool] = find_private("torch._C._functorch.is_batchedtensor", _ACTIVE)
get_unwrapped: Callable[[Tensor], Tensor] = find_private("torch._C._functorch.get_unwrapped", _ACTIVE)
without_transforms: Callable[[], Any] = find_private("torch._C._DisableFuncTorch", _ACTIVE)

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
dual_level: Callable[[], int] = requires(_ACTIVE, "torch.autograd.forward_ad._current_level")(
    partial(getattr, forward_ad, "_current_level")
)
# the number of the backward pass that runs in this thread, or -1
backward_task: Callable[[], int] = find_private("torch._C._current_graph_task_id", _ACTIVE)
functions_hidden: Callable[[], bool] = find_private("torch._C._is_torch_function_all_disabled", _ACTIVE)

# ------------------------------------------------------------------------------------------ compiling, tracing, casts

any_autocast: Callable[[], bool] = find_private("torch._C._is_any_autocast_enabled", _ACTIVE)
jit_state: Callable[[], Any] = find_private("torch._C._get_tracing_state", _ACTIVE)
tracing_context: Callable[[], Any] = find_private("torch._guards.TracingContext.try_get", _ACTIVE)
FakeTensor: Any = find_private("torch._subclasses.fake_tensor.FakeTensor", _ACTIVE)
dispatch_modes: Callable[[], int] = find_private("torch._C._len_torch_dispatch_stack", _ACTIVE)
_MODES = [f"torch._C._TorchDispatchModeKey.{name}" for name in ("FAKE", "PROXY", "FUNCTIONAL")]
_tracers = [find_private(name, _ACTIVE) for name in _MODES]
_mode_of = requires(_ACTIVE, *_MODES)(find_private("torch._C._get_dispatch_mode", _ACTIVE))


def tracing_modes() -> list[Any]:
    """The modes of fake tensors, of make_fx and of functionalization, None for each that is not active."""
    return [_mode_of(key) if dispatch_modes() else None for key in _tracers]


function_modes: Callable[[], int] = find_private("torch._C._len_torch_function_stack", _ACTIVE)
