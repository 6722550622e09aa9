"""The state of PyTorch in which a call runs: eager, compiled, traced, transformed, differentiated forward, autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch.compiler import is_compiling, is_dynamo_compiling, is_exporting

from clearhead.base.torch_state import active, torch_private
from clearhead.base.torch_state.active import (
    GRAD,
    JVP,
    VMAP,
    any_autocast,
    dispatch_modes,
    dual_level,
    interpreter,
    jit_state,
)

Function = TypeVar("Function", bound=Callable[..., Any])


def assume_constant(function: Function) -> Function:
    """As `torch.compiler.assume_constant_result`, which would import the compiler to set this mark."""
    torch_private.mark_constant(function)
    return function


class Mode(NamedTuple):
    """The state of PyTorch in which a call runs. Each door computes it anew by `get_mode`; nothing stores it."""

    eager: bool = True  # nothing compiles, traces, transforms or differentiates forward; no dispatch mode is active
    compiled: bool = False  # this code is compiled or exported, and does not run; the other fields are False then, but
    exported: bool = False  # this, operations_only and autocast: an exported program keeps no object of Python's
    traced: bool = False  # make_fx or functionalization records each operation, or fake tensors compute shapes alone
    recorded: bool = False  # make_fx or functionalization records each operation, of tensors with or without values
    transforms: tuple[Any, ...] = ()  # of `torch.func`, the outermost first: GRAD, JVP, VMAP, …
    forward_level: int = -1  # of `torch.autograd.forward_ad`; -1: not active
    operations_only: bool = False  # a transform or forward mode differentiates PyTorch's operations, and nothing else
    autocast: bool = False  # `torch.autocast` is active, on any device
    backward: bool = False  # a backward pass runs in this thread: a call in it, as of a checkpoint, repeats a call

    @property
    def vectorized(self) -> bool:
        """Whether `torch.func.vmap` is active."""
        return VMAP in self.transforms

    @property
    def forward(self) -> bool:
        """Whether `torch.func.jvp` or `torch.autograd.forward_ad` computes derivatives in forward mode."""
        return self.forward_level >= 0 or JVP in self.transforms


# in eager code, by autocast and backward
_EAGER = (Mode(), Mode(backward=True)), (Mode(autocast=True), Mode(autocast=True, backward=True))


def get_mode() -> Mode:
    """Return the state of PyTorch here."""
    # No module of PyTorch is named in here: with it the compiler would compile this function by itself, where code
    # around it could not be compiled. `is_compiling` is one flag of the process: while one thread compiles, it is
    # True in all threads.
    if is_compiling() and (is_dynamo_compiling() or active.tracing_context() is not None):
        return Mode(
            eager=False,
            compiled=True,
            exported=is_exporting(),
            operations_only=_is_differentiated(),
            autocast=any_autocast(),
            backward=_is_in_backward(),
        )
    if interpreter() is None and not dispatch_modes() and dual_level() < 0 and jit_state() is None:
        return _EAGER[any_autocast()][active.backward_task() != -1]
    kinds, level, (fake, *recorders) = tuple(active.transforms()), dual_level(), active.tracing_modes()
    return Mode(
        eager=False,
        traced=fake is not None or any(recorders),
        recorded=any(recorders),
        transforms=kinds,
        forward_level=level,
        operations_only=bool(kinds) or level >= 0,
        autocast=any_autocast(),
        backward=active.backward_task() != -1,
    )


class _CurrentFields(type):
    def __getattr__(cls, name: str) -> Any:
        return getattr(get_mode(), name)

    def __repr__(cls) -> str:
        return "CURRENT"


class _CurrentMode(metaclass=_CurrentFields):
    """The mode of what is stored: each field is read from the state of PyTorch where it is asked for.

    It is a class, which copies and pickles leave as it is, and of which the compiler takes defaults of arguments.
    """


CURRENT = cast(Mode, _CurrentMode)


@assume_constant
def _is_differentiated() -> bool:
    """Whether `torch.func` or forward mode differentiates code that is compiled. The compiler bakes the answer in, and
    checks the level of both before it uses the code again."""
    kinds = active.transforms()
    return dual_level() >= 0 or GRAD in kinds or JVP in kinds


@assume_constant  # compiled code has no task of its own; PyTorch 2.12 takes the number for a value
def _is_in_backward() -> bool:
    return active.backward_task() != -1


def count_loss_batches() -> int:
    """How many batches of `torch.autograd`'s own are nested here (`vectorize=True`, `is_grads_batched=True`)."""
    return 0 if get_mode().compiled else active.batches_of_losses()


@assume_constant
def is_inside_transform() -> bool:
    """Whether, in code that is being compiled, `torch.func` or forward mode is at work: the answer is compiled in."""
    return dual_level() >= 0 or bool(active.transforms())


def is_capturing_graph() -> bool:
    """Whether a CUDA graph is captured: memory that is made meanwhile is the graph's, and is kept nowhere else."""
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return started and torch.cuda.is_current_stream_capturing()


any_thread_compiles = is_compiling  # whether any thread compiles
