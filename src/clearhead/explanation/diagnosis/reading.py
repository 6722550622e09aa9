"""The arguments of a call as a case."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead._attention import Arguments
from clearhead.base.arrays import to_tensor, to_tensor_float
from clearhead.base.errors import UnsupportedError
from clearhead.base.shapes import Sizes, as_inputs, fit
from clearhead.base.tracing import compiling, readable, transformed
from clearhead.biases.base import Bias
from clearhead.biases.dense import DenseBias
from clearhead.explanation.diagnosis.case import Case
from clearhead.masks.base import Mask
from clearhead.masks.dense import DenseMask
from clearhead.problem.problem import Problem, only_zeros_and_ones

LIKELY = {"keys": "lower_right", "queries": "upper_left"}  # the alignment, where none is given, by what is longer
FILL = -1e4  # what is added that is less than this hides a key: exp(−10⁴) is 0 in every dtype


@torch.no_grad()
def case_of(call: Arguments, bias_name: str = "bias") -> Case:
    """The call as checks look at it. Raises what `attention` raises, but for faults that a check finds.

    A float mask that hides is taken apart into a mask and what is left of it, so that checks see whom it hides.
    `bias_name`: what the caller calls the bias; another name than "bias" says that it was given as a mask.
    """
    call = Arguments(*map(_detached, call))._replace(dropout_p=0.0)  # which would draw a seed
    added = _floats(call, bias_name)
    as_mask = frozenset(name for name in added if name != "bias")
    refused = "mask" in added and only_zeros_and_ones(added["mask"])
    if refused:
        call = call._replace(mask=None)
    unaligned = _unaligned(call)
    if unaligned:
        call = call._replace(align=LIKELY[unaligned])
    problem = call.problem()
    if refused:
        fit(added["mask"], problem.sizes, "mask")
    inputs = _inputs(call, problem)
    if not all(map(readable, [*inputs.values(), *added.values()])) or compiling() or transformed():
        raise UnsupportedError(
            f"diagnose reads the numbers of its inputs, and query {tuple(problem.query.shape)} has none here: they are "
            "meta or fake tensors, or inside a transform of torch.func or torch.compile. Call it in eager code."
        )
    problem, blind = _taken_apart(call, problem, bias_name)
    return Case(
        problem=problem._replace(value=None),
        inputs=inputs,
        added=added,
        as_mask=as_mask,
        mask=call.mask if isinstance(call.mask, Mask) else None,
        blind=blind,
        unaligned=bool(unaligned),
    )


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


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


def _unaligned(call: Arguments) -> str:
    """Where something depends on positions, and nothing says where query 0 stands: which is longer; else empty."""
    positional = [part.positional for part in (call.mask, call.bias) if isinstance(part, Mask | Bias)]
    inside = isinstance(call.mask, Mask) and call.mask.counts_inside
    shapes = [tuple(getattr(array, "shape", ())) for array in (call.query, call.key)]
    if call.align is not None or not any(positional) or inside or min(map(len, shapes)) < 2:
        return ""
    queries, keys = (shape[-2] for shape in shapes)
    return "keys" if queries < keys else "queries" if queries > keys else ""


def _inputs(call: Arguments, problem: Problem) -> dict[str, Tensor]:
    """Query, key and value as given, (B, H, L, E), of the dtype that they are computed in."""
    dtype = problem.query.dtype
    query, key, value = (to_tensor_float(t, "input").to(dtype) for t in (call.query, call.key, call.value))
    query, key, value_, _ = as_inputs(query, key, value)
    assert value_ is not None
    return {"query": query, "key": key, "value": value_}


def _taken_apart(call: Arguments, problem: Problem, bias_name: str) -> tuple[Problem, Tensor | None]:
    """The same problem, what float tensors hide of it as its mask; and the queries to which they allow nothing."""
    sizes = problem.sizes
    masks: list[Mask] = []
    if isinstance(call.mask, Mask):
        masks.append(call.mask)
    elif call.mask is not None and to_tensor(call.mask, "mask").dtype == torch.bool:
        masks.append(DenseMask(call.mask))
    biases: list[Bias] = []
    if isinstance(call.bias, Bias) and not isinstance(call.bias, DenseBias):
        biases.append(call.bias)
    floats = _floats(call, bias_name)
    blind, hides = None, False
    for name, tensor in floats.items():
        keep, rest, none_left = _split(tensor)
        if keep is not None:
            masks.append(DenseMask(keep))
            hides = True
        if bool((rest != 0).any()):
            biases.append(DenseBias(rest))
        if bool(none_left.any()):
            found = _rows(none_left, sizes, name)
            blind = found if blind is None else blind | found
    if not hides:
        return problem, blind
    whole = call._replace(mask=_joined(masks), bias=_joined_biases(biases))
    return whole.problem(), blind


def _split(tensor: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    """Whom a float tensor lets see (None: all), what it adds to these, and the rows that are filled as a whole."""
    keep = ~(tensor <= FILL)
    if bool(keep.all()):
        return None, tensor, torch.zeros((), dtype=torch.bool, device=tensor.device)
    possible = tensor > -torch.inf
    blind = ~keep.any(-1, keepdim=True) & possible.any(-1, keepdim=True)
    keep = torch.where(blind, possible, keep)
    rest = tensor.masked_fill(~keep | blind, 0.0)
    return keep, rest, blind


def _rows(blind: Tensor, sizes: Sizes, name: str) -> Tensor:
    """(B or 1, H or 1, Lq or 1) of a tensor whose last dimension is 1."""
    found: Tensor = fit(blind, sizes, name)[..., 0]
    return found


def _joined(masks: list[Mask]) -> Mask | None:
    found: Mask | None = None
    for mask in masks:
        found = mask if found is None else found & mask
    return found


def _joined_biases(biases: list[Bias]) -> Bias | None:
    found: Bias | None = None
    for bias in biases:
        found = bias if found is None else found + bias
    return found
