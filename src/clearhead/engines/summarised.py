"""The statistics of a problem's weights as an operation of autograd, by an engine's fused pass and `backward`.

If an engine fuses no statistics, and for higher derivatives, blocks of PyTorch's operations compute them, and autograd
differentiates these. docs/maths/statistics.md derives the gradient of each statistic.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from clearhead.base.arrays import in_memory_still
from clearhead.base.torch_state.batched import Gradients, unbatched
from clearhead.base.torch_state.contexts import without_autocast
from clearhead.base.torch_state.tensor_kind import has_own_dispatch, is_on_host, is_readable, materialize_zeros
from clearhead.engines.base import Engine, through_operations, usable_in_backward
from clearhead.engines.tiled.engine import PLAIN
from clearhead.problem.packing import in_dtypes, operands, with_operands, without_operands
from clearhead.problem.partial import Rows, rows_of, sinks_gradient
from clearhead.problem.problem import Problem
from clearhead.problem.summary import Found, Sent, Summary, of_heads
from clearhead.problem.unseen import finite

_CONSTANT = ("maximum", "best_key", "indices", "scores", "peak")  # results without a gradient


def summarised(problem: Problem, engine: Engine, summary: Summary) -> Found:
    """Compute the statistics that `summary` requests, differentiable if the problem needs gradients."""
    if not summary.output or problem.value is None:
        problem = problem._replace(value=None)
    elif summary != Summary(output=True) and problem.visible is not None and _known_not_finite(problem.value):
        # a NaN value makes the outputs of queries that may attend to it NaN, but not their weights
        alone = summarised(problem, engine, Summary(output=True)).output
        return summarised(problem, engine, summary._replace(output=False))._replace(output=alone)
    if problem.mode.compiled:
        return PLAIN.summarise(problem, summary)  # the compiler differentiates PyTorch's operations
    if problem.needs_grad and not engine.transparent(problem):
        for able in (engine, PLAIN):  # a graph of blocks takes more memory than an explicit backward pass
            if able.fuses(problem, summary) and not able.transparent(problem):
                return Found(*_Summarise.apply(able, problem, summary, *operands(problem)))  # type: ignore[no-untyped-call]
    return engine.summarise(problem, summary)


def _known_not_finite(value: Tensor) -> bool:
    return is_readable(value) and is_on_host(value) and not finite(value)


class _Summarise(torch.autograd.Function):
    """The tensors of `Found`, differentiable in the operands of a lowered problem."""

    @staticmethod
    def forward(ctx: Any, engine: Engine, problem: Problem, summary: Summary, *tensors: Tensor | None) -> Any:
        found = engine.summarise(problem, summary._replace(rows=True))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *found[:-1], summary.groups, summary.distance, summary.factors)
        ctx.engine, ctx.problem, ctx.reads = engine, without_operands(problem), problem.reads()
        ctx.summary, ctx.finite = summary._replace(groups=None, distance=None, factors=None), found.finite
        given = found if summary.rows else found._replace(maximum=None, log_sum=None)
        ctx.mark_non_differentiable(*(t for name in _CONSTANT if (t := getattr(given, name)) is not None))
        return given[:-1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.reads.check()
        wanted, saved = ctx.needs_input_grad[3:], in_memory_still(ctx.saved_tensors)
        problem, kept = with_operands(ctx.problem, saved[: len(wanted)]), saved[len(wanted) :]
        found = Found(*kept[:-3])._replace(finite=ctx.finite)
        groups, distance, factors = kept[-3:]
        summary = ctx.summary._replace(groups=groups, distance=distance, factors=factors)
        again = torch.is_grad_enabled()  # True for create_graph=True

        def compute(*grads: Tensor | None) -> Gradients:
            given = Found(*(None if g is None else materialize_zeros(g) for g in grads))  # type: ignore[arg-type]
            here = problem._refresh_mode()
            engine = usable_in_backward(ctx.engine, here, PLAIN)
            return _gradients(engine, here, summary, found, given, wanted)

        with without_autocast(problem.sizes.device):  # a caller may run backward under autocast
            if again or any(g is not None and has_own_dispatch(g) for g in grads):
                blocks = partial(PLAIN.summarise, summary=summary)
                here = problem._refresh_mode()
                return (None, None, None, *through_operations(blocks, here, wanted, (*grads, None), again))
            return (None, None, None, *unbatched(compute, *grads))


def _gradients(
    engine: Engine, problem: Problem, summary: Summary, found: Found, grads: Found, wanted: tuple[bool, ...]
) -> Gradients:
    """Compute the gradients of the operands by the engine's backward pass, each in the dtype of its operand."""
    maximum, log_sum = rows_of(found)
    problem = problem if found.finite else engine.guarded(problem)
    delta = torch.zeros_like(log_sum)
    if grads.log_sum is not None:
        delta = delta - grads.log_sum
    for name in ("output", "groups", "values", "entropy", "distance"):
        grad, value = getattr(grads, name), getattr(found, name)
        if grad is not None and value is not None:
            delta = delta + (grad * value if grad.ndim == delta.ndim else (grad * value).sum(-1))
    sent = _sent(summary, found, grads)
    value, grad = _joined(problem, summary, grads)
    problem = problem._replace(value=value)
    rows = Rows(maximum, log_sum, delta)
    if sent.maps:
        of_maps = Sent(received=sent.received, mean=sent.mean, cell=sent.cell, factors=sent.factors)
        by_query = engine.contributions(problem._replace(value=None), rows, None, of_maps, by_key=False)
        rows = rows._replace(delta=delta + by_query)
    asked = (*wanted[:2], wanted[2] and grads.output is not None, *wanted[3:])
    gradients = engine.backward(problem, rows, grad, asked, sent)
    if gradients.value is not None and grads.output is not None:
        gradients = gradients._replace(value=gradients.value[..., : grads.output.shape[-1]])
    if problem.sinks is not None and wanted[-1]:
        gradients = gradients._replace(sinks=sinks_gradient(problem.sinks, rows))
    return in_dtypes(gradients, operands(problem))


def _sent(summary: Summary, found: Found, grads: Found) -> Sent:
    """Return the gradients that each statistic sends to the weights; terms that are equal for all keys are in δ."""
    values = indices = None
    if grads.values is not None and found.indices is not None:
        indices, order = found.indices.sort(dim=-1)
        values = grads.values.gather(-1, order)
    maps = grads.received is not None or grads.mean is not None
    return Sent(
        log_weight=None if grads.entropy is None else -grads.entropy,
        distance=grads.distance,
        position=None if grads.distance is None else summary.distance,
        best=grads.best,
        best_key=None if grads.best is None else found.best_key,
        values=values,
        indices=indices,
        received=grads.received,
        mean=grads.mean,
        cell=summary.mean or (1, 1),
        factors=summary.factors if maps else None,
    )


def _joined(problem: Problem, summary: Summary, grads: Found) -> tuple[Tensor | None, Tensor | None]:
    """Return the value with the groups as further columns, and the gradient of its output.

    Both have only columns with a gradient.
    """
    parts: list[tuple[Tensor, Tensor]] = []
    if grads.output is not None and problem.value is not None:
        parts.append((problem.value, grads.output))
    if grads.groups is not None and summary.groups is not None:
        parts.append((of_heads(summary.groups, problem), grads.groups))
    if not parts:
        return None, None
    if len(parts) == 1:
        return parts[0]
    return torch.cat([v for v, _ in parts], -1), torch.cat([g for _, g in parts], -1)
