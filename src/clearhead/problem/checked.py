"""Checks of a problem that `make_problem` did not make: its parts must fit its sizes.

`make_problem` checks the arguments of `attention`. An edit, an engine, a file, a pickle or a call of the compiled
operator may make a problem without checks, so it passes through `checked` before an engine reads it.
"""

from __future__ import annotations

from typing import Any

import torch

from clearhead.base.arrays import FLOATS, check_memory, is_dense, shown
from clearhead.base.dropout import check_dropout
from clearhead.base.errors import ClearheadError, ShapeError, columns
from clearhead.base.numbers import check_number, check_positive
from clearhead.biases.base import check_added
from clearhead.masks.base import check_spans
from clearhead.problem.problem import Problem
from clearhead.problem.summary import KEYS
from clearhead.problem.visible import visible
from clearhead.scores.base import Pairwise


def ours(thing: Any) -> bool:
    """Return whether clearhead defines the class of an object, so that its results need no check."""
    return type(thing).__module__.startswith("clearhead.")


def checked(problem: Any, who: str, like: Problem | None = None) -> Problem:
    """Return the problem if every part fits its sizes, and derive again the values that follow from its mask.

    Args:
        problem: The problem.
        who: The source of the problem, the first words of an error.
        like: The problem that it replaces, of the same sizes, dtype, device and value width.

    Cost:
        O(Lq) for a mask, O(1) for all other parts.
    """
    if not isinstance(problem, Problem):
        raise ClearheadError(f"{who} gave a {type(problem).__name__}; expected a Problem: problem._replace(…).")
    sizes = problem.sizes
    _check_operands(problem, who)
    if like is not None and _describe(problem) != _describe(like):
        raise ShapeError(
            f"{who} gave a problem of {_describe(problem)}; expected {_describe(like)}, as the call has.\n"
            "Replace tensors by tensors of the same shape, dtype and device."
        )
    mask = problem.visible
    if mask is not None and (like is None or mask is not like.visible):
        mask = visible(check_spans(mask.spans, sizes, who), sizes, who)
    bias = problem.bias
    if bias is not None and (like is None or bias is not like.bias):
        bias = check_added(bias, sizes, who)
    if problem.sinks is not None:
        _check(problem.sinks, "sinks", (sizes.heads,), problem, who, FLOATS)
    check_dropout(problem.dropout_p, f"{who} gave a problem whose dropout_p")
    if problem.seed is not None or problem.dropout_p:
        _check(problem.seed, "dropout seed", (), problem, who, (torch.int64,))
    return problem._replace(sizes=sizes if like is None else like.sizes, visible=mask, bias=bias)


def checked_from(thing: Any, problem: Problem, method: str) -> Problem:
    """Return the problem that a method of an object returned, checked if the class is user-defined."""
    return problem if ours(thing) else checked(problem, f"{type(thing).__name__}.{method}")


def _describe(problem: Problem) -> str:
    """Return the sizes, the dtype and the device that determine the output of a problem, as text."""
    width = None if problem.value is None else problem.value.shape[-1]
    sizes = problem.sizes
    return f"(B, H, Lq, Lk) = {sizes.shape}, values of width {width}, {problem.query.dtype} on {sizes.device}"


def _check_operands(problem: Problem, who: str) -> None:
    scores, sizes = problem.scores, problem.sizes
    width = _width(scores.query)
    _check(scores.query, "query", (sizes.batch, sizes.heads, sizes.queries, width), problem, who, FLOATS)
    key_heads = scores.key.shape[1] if is_dense(scores.key) and scores.key.ndim == 4 else 1
    key_width = width if isinstance(scores, Pairwise) else _width(scores.key)
    of_query = (scores.query.dtype,)
    _check(scores.key, "key", (sizes.batch, key_heads, sizes.keys, key_width), problem, who, of_query)
    if (sizes.heads % key_heads if key_heads else sizes.heads) or (key_heads and not sizes.heads):
        raise ShapeError(
            f"{who} gave {sizes.heads} query heads and {key_heads} key heads; expected a number of key heads that "
            "divides them.\n" + columns({"query": scores.query.shape, "key": scores.key.shape}, -3)
        )
    if problem.value is not None:
        shape = (sizes.batch, key_heads, sizes.keys, _width(problem.value))
        _check(problem.value, "value", shape, problem, who, of_query)
    if isinstance(scores, Pairwise) and scores.weight is not None:
        _check(scores.weight, "weight", (width,), problem, who, FLOATS)
    check_number(scores.scale, f"{who} gave scores whose scale")
    if scores.softcap is not None:
        check_positive(scores.softcap, f"{who} gave scores whose softcap")


def _width(tensor: Any) -> int:
    return tensor.shape[-1] if is_dense(tensor) and tensor.ndim else 1


def _check(
    tensor: Any, name: str, shape: tuple[int, ...], problem: Problem, who: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Raise unless the tensor is dense, and has the shape, one of the dtypes, and the device of the problem."""
    device = problem.sizes.device
    if not is_dense(tensor) or tuple(tensor.shape) != shape or tensor.dtype not in dtypes or tensor.device != device:
        raise ShapeError(
            f"{who} gave a {name} {shown(tensor)}; expected {shape} of {' or '.join(map(str, dtypes))} on {device}, "
            f"for scores (B, H, Lq, Lk) = {problem.sizes.shape}."
        )
    check_memory(tensor, f"the {name} that {who} gave")


def check_result(tensor: Any, name: str, shape: tuple[int, ...], problem: Problem, who: str) -> None:
    """Raise unless an engine's result has the shape and the device, and is floating-point (int64 for keys)."""
    if problem.mode.compiled:
        return
    dtype = is_dense(tensor) and (tensor.dtype == torch.int64 if name.endswith(KEYS) else tensor.dtype in FLOATS)
    if not dtype or tuple(tensor.shape) != shape or tensor.device != problem.sizes.device:
        kind = "int64" if name.endswith(KEYS) else "floating-point numbers"
        raise ShapeError(
            f"{who} gave {name} {shown(tensor)}; expected {kind} {shape} on {problem.sizes.device}, for scores "
            f"(B, H, Lq, Lk) = {problem.sizes.shape}."
        )
