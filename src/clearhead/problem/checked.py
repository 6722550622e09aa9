"""Checks of a problem that did not come from `make_problem`: its parts are compared with its sizes.

`make_problem` checks the arguments of `attention`. An edit, an engine, a file, a pickle or a call of the compiled
operator may give a problem that nothing has checked. Each of them passes it here before an engine reads it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from clearhead.base.arrays import FLOATS, check_memory, is_dense, shown
from clearhead.base.dropout import check_dropout
from clearhead.base.errors import ClearheadError, ShapeError, columns
from clearhead.base.shapes import Sizes
from clearhead.biases.base import Added, check_added
from clearhead.masks.base import Spans, check_spans
from clearhead.problem.problem import Problem
from clearhead.problem.summary import KEYS, Summary
from clearhead.problem.visible import Visible, visible
from clearhead.scores.base import ByTile, Pairwise, Score
from clearhead.scores.pair_functions import PHIS


def ours(thing: Any) -> bool:
    """Whether an object is of a class of clearhead's own, whose results need no check."""
    return type(thing).__module__.startswith("clearhead.")


def checked(problem: Any, who: str, like: Problem | None = None) -> Problem:
    """The same problem, if every part fits its sizes. The values that follow from its mask are derived anew.

    `who`: the source of the problem, with which an error begins. `like`: the problem that it replaces, of the same
    sizes, dtype, device and value width. Cost: O(Lq) for a mask, O(1) for all other parts.
    """
    if not isinstance(problem, Problem):
        raise ClearheadError(f"{who} gave a {type(problem).__name__}; expected a Problem: problem._replace(…).")
    _check_types(problem, who)
    sizes = problem.sizes
    _check_operands(problem, who)
    if like is not None:
        _check_like(problem, like, who)
        sizes = like.sizes
    mask = problem.visible
    if mask is not None and (like is None or mask is not like.visible):
        mask = visible(check_spans(mask.spans, sizes, who), sizes, who)
    bias = problem.bias
    if bias is not None and (like is None or bias is not like.bias):
        bias = check_added(bias, sizes, who)
    if problem.sinks is not None:
        _check(problem.sinks, "sinks", (sizes.heads,), problem, who)
    _check_dropout(problem, who)
    _check_poison(problem, who)
    _check_origin(problem, who)
    return problem._replace(sizes=sizes, visible=mask, bias=bias)


def _check_types(problem: Problem, who: str) -> None:
    kinds: dict[str, Any] = {"scores": (Pairwise, ByTile), "sizes": Sizes}
    kinds |= {"visible": (Visible, type(None)), "bias": (Added, type(None))}
    for name, kind in kinds.items():
        part = getattr(problem, name)
        if not isinstance(part, kind):
            kind = kind[0] if isinstance(kind, tuple) else kind
            raise ClearheadError(f"{who} gave {name} that are a {type(part).__name__}; expected a {kind.__name__}.")
    if problem.visible is not None and not isinstance(problem.visible.spans, Spans):
        raise ClearheadError(f"{who} gave a mask of a {type(problem.visible.spans).__name__}; expected Spans.")
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in problem.sizes.shape):
        raise ClearheadError(f"{who} gave sizes {problem.sizes.shape}; expected whole numbers (B, H, Lq, Lk).")


def _check_operands(problem: Problem, who: str) -> None:
    scores, sizes = problem.scores, problem.sizes
    width = _width(scores.query)
    _check(scores.query, "query", (sizes.batch, sizes.heads, sizes.queries, width), problem, who)
    key_heads = scores.key.shape[1] if is_dense(scores.key) and scores.key.ndim == 4 else 1
    key_width = width if isinstance(scores, Pairwise) else _width(scores.key)
    _check(scores.key, "key", (sizes.batch, key_heads, sizes.keys, key_width), problem, who)
    if (sizes.heads % key_heads if key_heads else sizes.heads) or (key_heads and not sizes.heads):
        raise ShapeError(
            f"{who} gave {sizes.heads} query heads and {key_heads} key heads: the key heads must divide the query "
            "heads.\n" + columns({"query": scores.query.shape, "key": scores.key.shape}, -3)
        )
    if problem.value is not None:
        _check(problem.value, "value", (sizes.batch, key_heads, sizes.keys, _width(problem.value)), problem, who)
    if isinstance(scores, Pairwise):
        if scores.phi not in PHIS:
            raise ClearheadError(f"{who} gave scores of φ {scores.phi!r:.40}; expected one of {tuple(PHIS)}.")
        if scores.weight is not None:
            _check(scores.weight, "weight", (width,), problem, who, any_float=True)
    elif not isinstance(scores.score, Score):
        raise ClearheadError(f"{who} gave scores by a {type(scores.score).__name__}; expected a Score.")
    for name, number in (("scale", scores.scale), ("softcap", scores.softcap)):
        if name == "softcap" and number is None:
            continue
        right = isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number)
        if not right or (name == "softcap" and number <= 0):  # type: ignore[operator]
            raise ClearheadError(
                f"{who} gave scores whose {name} is {number!r:.60}; expected a finite number"
                + (" above 0, or None." if name == "softcap" else ". A scale that is a tensor goes into the query.")
            )


def _width(tensor: Any) -> int:
    return tensor.shape[-1] if is_dense(tensor) and tensor.ndim else 1


def _check(
    tensor: Any, name: str, shape: tuple[int, ...], problem: Problem, who: str, *, any_float: bool = False
) -> None:
    """Raise unless this is a dense tensor of the shape, on the problem's device, of the query's dtype."""
    sizes, query = problem.sizes, problem.scores.query
    shown = f"for scores (B, H, Lq, Lk) = {sizes.shape}"
    if not isinstance(tensor, Tensor):
        raise ShapeError(f"{who} gave a {type(tensor).__name__} as {name}; expected a tensor {shape} {shown}.")
    if not is_dense(tensor):
        raise ShapeError(f"{who} gave a {name} that is nested or not dense; expected one of shape {shape} {shown}.")
    if tuple(tensor.shape) != shape:
        raise ShapeError(f"{who} gave a {name} {tuple(tensor.shape)}; expected {shape} {shown}.")
    if tensor.dtype not in FLOATS or (name != "sinks" and not any_float and tensor.dtype != query.dtype):
        raise ClearheadError(
            f"{who} gave a {name} of {tensor.dtype}, shape {shape}, beside a query of {query.dtype}. Pass "
            f"{name}.to(query)."
        )
    if tensor.device != sizes.device:
        raise ClearheadError(
            f"{who} gave a {name} on {tensor.device}, shape {shape}; the problem is on {sizes.device}. Pass "
            f"{name}.to({str(sizes.device)!r})."
        )
    check_memory(tensor, f"the {name} that {who} gave")


def _check_like(problem: Problem, like: Problem, who: str) -> None:
    """Raise where one problem can't take the place of another, because its output would not fit."""
    if problem.sizes[:5] != like.sizes[:5]:
        raise ShapeError(
            f"{who} gave a problem of other sizes (B, H, Lq, Lk): replace tensors by others of their shapes.\n"
            + columns({"given": problem.sizes.shape, "the call's": like.sizes.shape})
        )
    if problem.query.dtype != like.query.dtype:
        raise ClearheadError(
            f"{who} gave query, key and value of {problem.query.dtype}, and the call's are {like.query.dtype}. Pass "
            "tensor.to(problem.query)."
        )
    widths = [None if p.value is None else p.value.shape[-1] for p in (problem, like)]
    if widths[0] != widths[1]:
        given = None if problem.value is None else tuple(problem.value.shape)
        raise ShapeError(
            f"{who} gave a value {given}, and the call's is {None if like.value is None else tuple(like.value.shape)}: "
            "its width is that of the output."
        )


def _check_dropout(problem: Problem, who: str) -> None:
    check_dropout(problem.dropout_p, f"{who} gave a problem whose dropout_p")
    seed = problem.seed
    if seed is None and not problem.dropout_p:
        return
    if not isinstance(seed, Tensor) or seed.dtype != torch.int64 or seed.ndim or seed.device != problem.sizes.device:
        raise ClearheadError(
            f"{who} gave a dropout's seed {shown(seed)}; expected an int64 tensor () on the problem's device."
        )


def _check_poison(problem: Problem, who: str) -> None:
    if problem.poison is None:
        return
    (batch, heads, queries, keys), key_heads = problem.sizes.shape, problem.key.shape[1]
    expected = (batch, heads, queries, 1), (batch, key_heads, 1, keys)
    pair = isinstance(problem.poison, tuple) and len(problem.poison) == 2
    got = tuple(tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__ for t in problem.poison) if pair else None
    if got != expected or any(not t.is_floating_point() or t.device != problem.sizes.device for t in problem.poison):
        raise ShapeError(f"{who} gave a poison {got}; expected two floating-point tensors {expected}.")


def _check_origin(problem: Problem, who: str) -> None:
    origin = problem.origin
    ranges = isinstance(origin, tuple) and all(isinstance(side, range) for side in origin)
    if origin is not None and (not ranges or tuple(map(len, origin)) != problem.sizes.shape):
        raise ShapeError(f"{who} gave an origin {origin!r:.80}; expected four ranges as long as {problem.sizes.shape}.")


def check_summary(summary: Any, problem: Problem, who: str) -> Summary:
    """Raise unless the statistics that a reduction names fit the problem."""
    if not isinstance(summary, Summary):
        raise ClearheadError(f"{who} gave a {type(summary).__name__}; expected a Summary, or None.")
    batch, heads, queries, keys = problem.sizes.shape
    groups = summary.groups
    last = groups.shape[-1] if isinstance(groups, Tensor) and groups.ndim else 1
    tensors = {
        "groups": (groups, (batch, keys, last), (0,), True),
        "distance": (summary.distance, (batch, 1, queries), (0,), False),
        "factors": (summary.factors, (batch, heads, queries), (0, 1), True),
    }
    for name, (tensor, shape, free, floats) in tensors.items():
        if tensor is None:
            continue
        fits = isinstance(tensor, Tensor) and tensor.ndim == len(shape)
        fits = fits and all(
            n == m or (n == 1 and i in free) for i, (n, m) in enumerate(zip(tensor.shape, shape, strict=True))
        )
        fits = fits and (tensor.is_floating_point() if floats else tensor.dtype == torch.int64)
        if not fits or tensor.device != problem.sizes.device:
            kind = "floating-point numbers" if floats else "int64"
            raise ShapeError(f"{who} gave {name} {shown(tensor)}; expected {kind} {shape} on {problem.sizes.device}.")
    if not _count(summary.top, 0) or summary.top > keys:
        raise ShapeError(f"{who} asks for the {summary.top!r:.40} largest weights, and there are {keys} keys.")
    for cell in (summary.mean, summary.peak):
        if cell is not None and not (isinstance(cell, tuple) and len(cell) == 2 and all(_count(n, 1) for n in cell)):
            raise ShapeError(
                f"{who} gave cells of {cell!r:.40}; expected (queries, keys), two whole numbers from 1 on."
            )
    return summary


def _count(number: Any, least: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= least


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
