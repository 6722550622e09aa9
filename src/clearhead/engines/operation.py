"""The output of a problem as an operation of autograd: one for eager code, one for compiled and exported code.

Both use an engine's `forward` and `backward`. Autograd saves all tensors for the backward pass, so a checkpoint can
free them, hooks can move them, and writes to them are detected. Higher derivatives are computed in blocks of PyTorch's
operations.

In compiled code a problem in normal form is a list of tensors and numbers, so it can be one operation. It runs as eager
code does: it reads the spans when it runs, and skips the pairs outside of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead.base.arrays import accumulated, in_memory_still
from clearhead.base.errors import ClearheadError, UnsupportedError
from clearhead.base.torch_state.active import GRAD
from clearhead.base.torch_state.batched import Gradients, unbatched
from clearhead.base.torch_state.contexts import with_autograd, without_autocast
from clearhead.base.torch_state.mode import any_thread_compiles, get_mode
from clearhead.base.torch_state.tensor_kind import has_own_dispatch, materialize_zeros
from clearhead.engines import forward_mode
from clearhead.engines.base import Engine, by_autograd, gradients_of, usable_in_backward
from clearhead.engines.choose import choose
from clearhead.engines.summarised import summarised
from clearhead.engines.tiled import tiles
from clearhead.engines.tiled.engine import PLAIN, Tiled
from clearhead.problem import packing
from clearhead.problem.checked import checked
from clearhead.problem.packing import Operands, operands, packed, unpacked, with_operands, without_operands
from clearhead.problem.partial import Partial
from clearhead.problem.problem import Problem
from clearhead.problem.summary import Summary


def run(problem: Problem, chosen: Engine, asked: str | Engine | None = None) -> Tensor:
    """Compute the output, (B, H, Lq, Ev), in the dtype of the value.

    Args:
        problem: The problem.
        chosen: The engine that computes it.
        asked: The argument `engine` of the call.
    """
    if any_thread_compiles():  # the compiler may have skipped the frame that computed the mode, and compile this one
        problem = problem._refresh_mode()
    assert problem.value is not None
    mode = problem.mode
    if mode.compiled:
        transparent = chosen.transparent(problem)
        output = chosen.forward(problem).output if transparent else _operation(problem, chosen, asked, rows=False)[0]
    elif 0 in problem.sizes[:4]:
        return tiles.no_keys(problem, problem.query)
    elif mode.operations_only and isinstance(getattr(chosen, "engine", chosen), Tiled) and forward_mode.serves(problem):
        given = PLAIN, without_operands(problem), *operands(problem)
        output = _AttendInForwardMode.apply(*given)[0]  # type: ignore[no-untyped-call]
    elif not problem.needs_grad or chosen.transparent(problem):
        output = chosen.forward(problem).output
    else:
        _refuse_what_is_not_seen(problem, chosen)
        output = _Attend.apply(chosen, problem, *operands(problem))  # type: ignore[no-untyped-call]
    return output if output.dtype is problem.value.dtype else output.to(problem.value.dtype)


class _Attend(torch.autograd.Function):
    """The output, in float32 or float64, differentiable in the operands of a lowered problem."""

    @staticmethod
    def forward(ctx: Any, engine: Engine, problem: Problem, *tensors: Tensor | None) -> Tensor:
        found = engine.forward(problem, rows=True)
        if found.maximum is None or found.log_sum is None:
            raise ClearheadError(f"{engine.name!r}: forward(problem, rows=True) gave no maximum and log_sum.")
        ctx.save_for_backward(*tensors, *found[:3])
        ctx.engine, ctx.problem, ctx.reads = engine, without_operands(problem), problem.reads()
        ctx.finite = found.finite
        return found.output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.reads.check()
        wanted, grad = ctx.needs_input_grad[2:], grads[0]
        saved = in_memory_still(ctx.saved_tensors)  # read once: with a checkpoint, a second access raises
        problem, kept = with_operands(ctx.problem, saved[: len(wanted)]), saved[len(wanted) :]
        again = torch.is_grad_enabled()  # True for create_graph=True
        found = Partial(kept[0], kept[1], kept[2], ctx.finite)

        def compute(grad: Tensor) -> Gradients:
            here = problem._refresh_mode()
            engine = usable_in_backward(ctx.engine, here, PLAIN)
            return gradients_of(engine, here, found, materialize_zeros(grad), wanted)

        with without_autocast(problem.sizes.device):  # a caller may run backward under autocast
            if again or has_own_dispatch(grad):
                problem = problem._refresh_mode()
                return (None, None, *by_autograd(PLAIN, problem, wanted, grad, create_graph=again))
            return (None, None, *unbatched(compute, grad))


class _AttendInForwardMode(_Attend):
    """The output by `tiled`, with its tangent and its gradients."""

    @staticmethod
    def forward(engine: Engine, problem: Problem, *tensors: Tensor | None) -> Any:  # type: ignore[override]
        return tuple(engine.forward(with_operands(problem, tensors), rows=True)[:3])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.engine, ctx.problem, *tensors = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors)
        ctx.mark_non_differentiable(*output[1:])
        ctx.reads, ctx.finite = ctx.problem.reads(), False

    @staticmethod
    def jvp(ctx: Any, _: Any, __: Any, *tangents: Tensor | None) -> Any:
        ctx.reads.check()
        given = ctx.problem, len(tangents), *ctx.saved_for_forward

        def along(*tangents: Tensor | None) -> Gradients:
            return (forward_mode.Tangent.apply(*given, *tangents),)  # type: ignore[no-untyped-call]

        return *unbatched(along, *tangents), None, None


def partial(problem: Problem, chosen: Engine, asked: str | Engine | None = None) -> Partial:
    """Compute the output, in float32 or float64, and its rows, differentiable in output and log_sum."""
    if problem.mode.compiled and not chosen.transparent(problem):
        return Partial(*_operation(problem, chosen, asked, rows=True))
    found = summarised(problem, chosen, Summary(output=True, rows=True))
    assert found.output is not None
    return Partial(found.output, found.maximum, found.log_sum)


def _refuse_what_is_not_seen(problem: Problem, engine: Engine) -> None:
    """Raise if the `backward` of a user-defined engine would miss derivatives.

    clearhead's engines object to such problems, or are transparent.
    """
    why = None
    if problem.mode.forward or GRAD in problem.mode.transforms:
        why = "torch.func and forward mode bypass its backward pass"
    elif problem.lowered is None or problem.by_function:
        why = "its backward pass gives no gradient to parameters of a score by tile(), or of a bias by a function"
    if why is not None:
        raise UnsupportedError(f"the engine {engine.name!r} can't run this:\n  - {why}; it should object to it")


# ---------------------------------------------------------------------------------------- compiled and exported code


def _operation(
    problem: Problem, chosen: Engine, asked: str | Engine | None, rows: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute output, maximum and log_sum by one operation, the last two if they are needed."""
    if isinstance(asked, Engine):
        raise UnsupportedError(
            f"the engine {chosen.name!r} is an object with a backward pass, which compiled code calls by name alone. "
            "Call attention() outside of the compiled function, or leave engine=None."
        )
    tensors, numbers = packed(problem)
    grads = torch.is_grad_enabled()
    expected = [grads and t is not None and t.requires_grad for t in operands(problem)]
    found: tuple[Tensor, Tensor, Tensor] = attend(*tensors, *numbers, asked, expected, rows)
    return found


# A packed problem; then the argument `engine` of the call, which operands required grad at compile time, and whether
# the call needs maximum and log_sum.
ARGUMENTS = f"{packing.SCHEMA}, str? engine, bool[] expected, bool rows"


@torch.library.custom_op("clearhead::attend", mutates_args=(), schema=f"({ARGUMENTS}) -> (Tensor, Tensor, Tensor)")
def attend(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a problem in normal form by the named engine, or by the first that can: see `Partial`.

    All results are float32 or float64. If no operand requires grad, maximum and log_sum are computed only for `rows`; a
    backward pass then computes them itself.
    """
    if get_mode().forward_level >= 0:
        raise UnsupportedError("attention() in compiled or exported code has no derivatives in forward mode.")
    query, expected, rows = arguments[0], *arguments[-2:]
    problem, chosen = _chosen(arguments, expected)
    with torch.no_grad():
        none = 0 in problem.sizes.shape
        found = Partial(tiles.no_keys(problem, query)) if none else chosen.forward(problem, rows or any(expected))
    output = found.output.to(accumulated(query.dtype)).contiguous()
    maximum, log_sum = (output.new_zeros(output.shape[:3]) if t is None else t.contiguous() for t in found[1:3])
    return output, maximum, log_sum.fill_(torch.inf) if none else log_sum


@attend.register_fake
def room_for_results(query, key, value, *_):  # type: ignore[no-untyped-def]
    """Return tensors of the shapes of output, maximum and log_sum, for the first arguments of a packed problem."""
    lead, dtype = query.shape[:3], accumulated(query.dtype)
    return (value.new_empty(*lead, value.shape[-1], dtype=dtype), *(value.new_empty(lead, dtype=dtype) for _ in "ml"))


@torch.library.custom_op(
    "clearhead::attend_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor to_log_sum, Tensor output, Tensor maximum, Tensor log_sum, {ARGUMENTS}, "
    "bool[] wanted) -> Tensor[]",
)
def attend_backward(
    grad: Tensor, to_log_sum: Tensor, output: Tensor, maximum: Tensor, log_sum: Tensor, *arguments: Any
) -> list[Tensor]:
    """Compute the gradients of the operands, each empty if it is not wanted."""
    expected, rows, wanted = arguments[-3:]
    known = any(expected)
    in_memory_still((grad, to_log_sum, output, maximum, log_sum, *arguments[: packing.TENSORS]))
    problem, chosen = _chosen(arguments[:-1], expected if known else wanted)
    if 0 in problem.sizes.shape:
        found = tuple(None if t is None else torch.zeros_like(t) for t in operands(problem))
    elif chosen.transparent(problem):
        with with_autograd():
            found = by_autograd(chosen, problem, wanted, grad, False, to_log_sum if rows else None)
    else:
        with torch.no_grad():
            kept = Partial(output, maximum, log_sum) if known else chosen.forward(problem, rows=True)
            found = gradients_of(chosen, problem, kept, grad, tuple(wanted), to_log_sum if rows else None)
    each = zip(found, wanted, strict=True)
    return [gradient.contiguous() if want and gradient is not None else grad.new_empty(0) for gradient, want in each]


@attend_backward.register_fake
def _(grad, to_log_sum, output, maximum, log_sum, *arguments):  # type: ignore[no-untyped-def]
    return room_for_gradients(grad, arguments[: len(Operands._fields)], arguments[-1])


def room_for_gradients(grad: Tensor, tensors: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor]:
    """Return tensors of the shapes of these tensors' gradients, each empty if it is not wanted."""
    return [
        torch.empty_like(t, memory_format=torch.contiguous_format) if t is not None and want else grad.new_empty(0)
        for t, want in zip(tensors, wanted, strict=True)
    ]


def save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    """Save the results of an operation on a packed problem, and its arguments, for the backward pass."""
    ctx.save_for_backward(*output, *inputs[: packing.TENSORS])
    ctx.options = inputs[packing.TENSORS :]


def _backward(ctx, grad, _, to_log_sum):  # type: ignore[no-untyped-def]
    wanted = [bool(need) for need in ctx.needs_input_grad[:7]]
    found = attend_backward(grad, to_log_sum, *ctx.saved_tensors, *ctx.options, wanted)
    return (*(g if want else None for g, want in zip(found, wanted, strict=True)), *(None,) * 13)


attend.register_autograd(_backward, setup_context=save)


def _chosen(arguments: Sequence[Any], needs: list[bool]) -> tuple[Problem, Engine]:
    """Return the packed problem of these arguments, and the engine that eager code would choose for it."""
    *numbers, engine, _, rows = arguments[packing.TENSORS :]
    problem = unpacked(arguments[: packing.TENSORS], tuple(numbers), needs)  # checks the mask
    problem = checked(problem._replace(visible=None), packing.PACKED)._replace(visible=problem.visible)._refresh_mode()
    with torch.set_grad_enabled(any(needs)):
        return problem, choose(problem, engine, rows)
