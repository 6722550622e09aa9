"""The arguments of a call as a case."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from clearhead._attention import Arguments
from clearhead.base.arrays import to_tensor, to_tensor_float
from clearhead.base.errors import UnsupportedError
from clearhead.base.shapes import as_inputs, fit
from clearhead.base.torch_state.tensor_kind import is_readable
from clearhead.base.torch_state.torch_private import whole_of
from clearhead.biases.base import Bias
from clearhead.biases.dense import DenseBias
from clearhead.explanation.diagnosis.case import Case
from clearhead.masks.base import Mask
from clearhead.problem.fills import taken_apart
from clearhead.problem.problem import Problem, only_zeros_and_ones
from clearhead.scores.base import Pairwise


@torch.no_grad()
def case_of(call: Arguments, bias_name: str = "bias") -> Case:
    """The call as a case. Raises the errors of `attention`, except for faults that a check finds.

    `bias_name`: the caller's name for the bias; another name than "bias" says that it was given as a mask.
    """
    memory = _memory(call)
    call = Arguments(*map(_detached, call))._replace(dropout_p=0.0)  # dropout would draw a seed
    added = _floats(call, bias_name)
    refused = "mask" in added and only_zeros_and_ones(added["mask"])
    if refused:
        call = call._replace(mask=None)
    likely = _likely_alignment(call)
    if likely:
        call = call._replace(align=likely)
    problem = call.problem()
    if refused:
        fit(added["mask"], problem.sizes, "mask")
    inputs = _inputs(call, problem)
    if (
        not all(map(is_readable, [*inputs.values(), *added.values()]))
        or problem.mode.compiled
        or problem.mode.transforms
    ):
        raise UnsupportedError(
            f"diagnose reads the numbers of its inputs, and query {tuple(problem.query.shape)} has none here: they are "
            "meta or fake tensors, or inside a transform of torch.func or torch.compile. Call it in eager code."
        )
    problem, blind = taken_apart(problem)
    learnt, factors = parameters_of(call.score, problem)
    return Case(
        problem=problem._replace(value=None),
        inputs=inputs,
        memory=memory,
        added=added,
        mask=call.mask if isinstance(call.mask, Mask) else None,
        blind=blind,
        unaligned=bool(likely),
        parameters=learnt,
        factors=factors,
        given_finite=all(bool(tensor.isfinite().all()) for tensor in inputs.values()),
    )


def parameters_of(score: Any, problem: Problem) -> tuple[dict[str, Tensor], frozenset[str]]:
    """The parameters of a score, and the names of those in which −∞ is never right: those of a normal form multiply or
    are multiplied; what a score with `tile()` alone does with its own is not known."""
    given = score.named_parameters() if isinstance(score, nn.Module) else ()
    found = {f"score.{name}": p.detach() for name, p in given if not is_lazy(p) and is_readable(p)}
    return found, frozenset(found if isinstance(problem.scores, Pairwise) else ())


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _memory(call: Arguments) -> dict[str, tuple[int, ...]]:
    """The shape of the tensor that each input is a view of, where both have the same numbers in the same order."""
    given = {"query": call.query, "key": call.key, "value": call.value}
    found = {}
    for name, tensor in given.items():
        if isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.is_contiguous():
            whole = whole_of(tensor)
            if whole is not tensor and whole.numel() == tensor.numel() and whole.is_contiguous():
                found[name] = tuple(whole.shape)
    return found


def _floats(call: Arguments, bias_name: str) -> dict[str, Tensor]:
    """The float tensors among mask and bias, by name."""
    found = {}
    for name, value in (("mask", call.mask), (bias_name, call.bias)):
        value = value.tensor.detach() if isinstance(value, DenseBias) else value
        if isinstance(value, Tensor | np.ndarray):
            tensor = to_tensor(value, name)
            if tensor.is_floating_point() and tensor.layout == torch.strided and not tensor.is_nested:
                found[name] = tensor
    return found


def _likely_alignment(call: Arguments) -> str:
    """The alignment that is likely meant, where positions are needed and none is given; else empty."""
    positional = [part.positional for part in (call.mask, call.bias) if isinstance(part, Mask | Bias)]
    inside = isinstance(call.mask, Mask) and call.mask._document_edges is not None
    if any(getattr(array, "is_nested", False) for array in (call.query, call.key)):
        return ""  # lengths that vary have no order; the problem's checks refuse them
    shapes = [tuple(getattr(array, "shape", ())) for array in (call.query, call.key)]
    if call.align is not None or not any(positional) or inside or min(map(len, shapes)) < 2:
        return ""
    queries, keys = (shape[-2] for shape in shapes)
    return "lower_right" if queries < keys else "upper_left" if queries > keys else ""


def _inputs(call: Arguments, problem: Problem) -> dict[str, Tensor]:
    """Query, key and value as given, (B, H, L, E), of the dtype that they are computed in."""
    dtype = problem.query.dtype
    query, key, value = (to_tensor_float(t, "input").to(dtype) for t in (call.query, call.key, call.value))
    query, key, value_, _ = as_inputs(query, key, value)
    assert value_ is not None
    return {"query": query, "key": key, "value": value_}
