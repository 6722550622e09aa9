"""attention() inside compiled and exported code.

A problem in normal form is a handful of tensors and numbers, so it can be one operation of PyTorch's, which runs as
eager code does: spans are read when it runs, and what they leave out is skipped. What is plain is left to the compiler,
and so are scores with `tile()` alone, which no operation can be given. A mask's residual has to be a tensor here, of
the size it broadcasts from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.base.errors import UnsupportedError
from clearhead.base.shapes import Sizes, part
from clearhead.base.tracing import followed, with_autograd
from clearhead.biases.base import Added
from clearhead.engines.base import Engine
from clearhead.engines.choose import choose
from clearhead.engines.differentiable import in_plain_operations
from clearhead.engines.native.engine import Native
from clearhead.engines.tiled.backward import Operands, operands, with_operands
from clearhead.engines.tiled.engine import gradients_of
from clearhead.masks.base import Spans
from clearhead.problem.problem import Problem, guard
from clearhead.problem.visible import visible
from clearhead.scores.base import Pairwise


def run(problem: Problem, engine: str | Engine | None) -> Tensor:
    """The output, (B, H, Lq, Ev)."""
    if followed() and engine != "reference":  # an operation of our own has no such derivatives
        if engine not in (None, "tiled"):
            raise UnsupportedError(f"torch.func and forward mode inside compiled code do not run on engine={engine!r}.")
        return in_plain_operations(guard(problem))
    chosen = choose(problem, engine)
    lowered, value = problem.lowered, problem.value
    plain = problem.plain and chosen.name == "sdpa"
    if plain or lowered is None or value is None or isinstance(engine, Engine) or engine == "reference":
        return chosen.run(problem)
    spans, added = problem.spans, problem.bias or Added()
    keep = None
    if spans is not None and spans.residual is not None:
        every = slice(None)
        keep = spans.rest(every, every, every, every)
    result: Tensor = attend(
        lowered.query,
        lowered.key,
        value,
        lowered.weight,
        problem.sinks,
        added.dense,
        added.relative,
        None if spans is None else spans.start,
        None if spans is None else spans.stop,
        keep,
        problem.seed,
        lowered.phi,
        lowered.scale,
        lowered.softcap,
        problem.dropout_p,
        engine,
    )[0]
    return result


@torch.library.custom_op("clearhead::attend", mutates_args=())
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    sinks: Tensor | None,
    dense: Tensor | None,
    relative: Tensor | None,
    start: Tensor | None,
    stop: Tensor | None,
    keep: Tensor | None,
    seed: Tensor | None,
    phi: str,
    scale: float,
    softcap: float | None,
    dropout_p: float,
    engine: str | None,
) -> tuple[Tensor, Tensor]:
    """A problem in normal form, by the engine named or the first that can: (B, H, Lq, Ev).

    And (B, H, Lq, 2), which the compiled kernels' backward pass begins with; zeros from other engines.
    """
    tensors = (query, key, value, weight, sinks, dense, relative, start, stop, keep, seed)
    problem = _problem(tensors, phi, scale, softcap, dropout_p)
    chosen = choose(problem, engine)
    kept = chosen.run_kept(problem) if isinstance(chosen, Native) else None
    if kept is not None:
        return kept[0].contiguous(), kept[1]
    output = chosen.run(problem).contiguous()
    return output, output.new_zeros(*output.shape[:3], 2, dtype=torch.float32)


@attend.register_fake
def _(query, key, value, *_):  # type: ignore[no-untyped-def]
    lead = query.shape[:3]
    return value.new_empty(*lead, value.shape[-1]), value.new_empty(*lead, 2, dtype=torch.float32)


@torch.library.custom_op("clearhead::attend_backward", mutates_args=())
def attend_backward(
    grad: Tensor,
    output: Tensor,
    stats: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    sinks: Tensor | None,
    dense: Tensor | None,
    relative: Tensor | None,
    start: Tensor | None,
    stop: Tensor | None,
    keep: Tensor | None,
    seed: Tensor | None,
    phi: str,
    scale: float,
    softcap: float | None,
    dropout_p: float,
    engine: str | None,
    wanted: list[bool],
) -> list[Tensor]:
    """The gradients to the first seven tensors, empty where not wanted."""
    tensors = (query, key, value, weight, sinks, dense, relative, start, stop, keep, seed)
    problem = _problem(tensors, phi, scale, softcap, dropout_p)
    chosen = choose(problem, engine)
    found = None
    if isinstance(chosen, Native):
        found = chosen.gradients_kept(problem, tuple(wanted), grad, output, stats)
    elif chosen.name == "tiled" or any(wanted[3:]):  # written out, for what is learnt too
        found = gradients_of(problem, tuple(wanted), grad)
    if found is None:
        found = _differentiated(chosen, problem, wanted, grad)
    return [grad.new_empty(0) if gradient is None else gradient.contiguous() for gradient in found]


@attend_backward.register_fake
def _(grad, output, stats, *arguments):  # type: ignore[no-untyped-def]
    tensors, wanted = arguments[:7], arguments[-1]
    return [
        torch.empty_like(t, memory_format=torch.contiguous_format) if t is not None and want else grad.new_empty(0)
        for t, want in zip(tensors, wanted, strict=True)
    ]


def _differentiated(engine: Engine, problem: Problem, wanted: list[bool], grad: Tensor) -> Operands:
    """By autograd, from the engine's own forward pass, which runs once more."""
    with with_autograd():
        leaves = [
            t if t is None else t.detach().requires_grad_(w) for t, w in zip(operands(problem), wanted, strict=True)
        ]
        output = engine.run(with_operands(problem, tuple(leaves)))
        some = [t for t, want in zip(leaves, wanted, strict=True) if want and t is not None]
        found = iter(torch.autograd.grad(output, some, grad))
    return tuple(next(found) if want else None for want in wanted)


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*output, *inputs[:11])
    ctx.options = inputs[11:]


def _backward(ctx, grad, _):  # type: ignore[no-untyped-def]
    wanted = [bool(need) for need in ctx.needs_input_grad[:7]]
    found = attend_backward(grad, *ctx.saved_tensors, *ctx.options, wanted)
    return (*(g if want else None for g, want in zip(found, wanted, strict=True)), *(None,) * 9)


attend.register_autograd(_backward, setup_context=_setup)


def _problem(
    tensors: tuple[Tensor | None, ...], phi: str, scale: float, softcap: float | None, dropout_p: float
) -> Problem:
    """The problem that these are the parts of."""
    query, key, value, weight, sinks, dense, relative, start, stop, keep, seed = (
        None if t is None else t.detach() for t in tensors
    )
    assert query is not None and key is not None and value is not None
    scores = Pairwise(phi, query, key, weight, scale, softcap)  # type: ignore[arg-type]
    sizes = Sizes(query.shape[0], query.shape[1], query.shape[2], key.shape[2], query.device)
    allowed = None
    if start is not None and stop is not None:
        residual = None if keep is None else lambda *sides: part(keep, *sides)
        allowed = visible(Spans(start, stop, residual), sizes)
    bias = Added(dense, relative) if dense is not None or relative is not None else None
    return Problem(scores, value, sizes, allowed, bias, sinks, dropout_p, seed)
