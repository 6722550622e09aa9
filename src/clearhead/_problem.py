"""The one thing an engine sees: validated once, lowered once, frozen."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clearhead._errors import ClearheadError, UnsupportedError
from clearhead._shapes import Sizes, as_inputs, to_tensor, unflatten
from clearhead.masks.base import Mask, Spans
from clearhead.masks.dense import DenseMask, check_keep, fit
from clearhead.scores.base import Pairwise, Score, to_tensor_float
from clearhead.scores.dot import Dot
from clearhead.scores.function import Function

_DOT = Dot()


class Problem(NamedTuple):
    """One attention, in normal form. Tensors are (B, H, L, E); key and value may have fewer heads (grouped).

    scores = score(query, key) + bias, −∞ outside the spans and their residual; weights = softmax over keys;
    output = weights · value.
    """

    query: Tensor
    key: Tensor
    value: Tensor | None  # None: only the weights are wanted
    sizes: Sizes
    score: Score  # gives any tile of the scores
    lowered: Pairwise | None  # the same score as the kernels take it, where it has that form
    spans: Spans | None  # None: every query sees every key
    bias: Tensor | None  # (B or 1, H or 1, Lq or 1, Lk or 1)
    edges: tuple[np.ndarray, np.ndarray] | None = None  # the spans' starts and stops on the host
    dropout_p: float = 0.0
    poison: tuple[Tensor, Tensor] | None = None  # see `guard`: (B, H, Lq, 1) and (B, Hk, 1, Lk)

    @property
    def groups(self) -> int:
        """Query heads to a key head."""
        return self.sizes.heads // self.key.shape[1] if self.key.shape[1] else 1

    @property
    def needs_grad(self) -> bool:
        tensors = (self.query, self.key, self.value, self.bias, *self.score.parameters())
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def make_problem(
    query: Any,
    key: Any,
    value: Any = None,
    *,
    score: Score | Callable[[Tensor, Tensor], Tensor] | None = None,
    mask: Any = None,
    bias: Any = None,
    dropout_p: float = 0.0,
) -> Problem:
    """Check everything, and bring it to normal form. Nothing that was passed is written to."""
    if not 0.0 <= dropout_p < 1.0:
        raise ClearheadError(f"dropout_p is {dropout_p}; expected a probability: 0 ≤ dropout_p < 1.")
    if dropout_p:
        raise UnsupportedError("dropout_p above 0 is not supported yet; pass dropout_p=0.0.")
    query, key = to_tensor_float(query, "query"), to_tensor_float(key, "key")
    if value is not None:
        value = to_tensor_float(value, "value")
    query, key, value, sizes = as_inputs(query, key, value)
    score = _as_score(score)
    score.check(query, key)
    if mask is None and bias is None:
        return Problem(query, key, value, sizes, score, score.lower(query, key), None, None)
    allowed, added = _as_mask(mask, sizes, query.dtype)
    bias = added if bias is None else fit(bias, sizes, "bias")
    if allowed is None:
        return Problem(query, key, value, sizes, score, score.lower(query, key), None, bias)
    if not allowed.all_seen:
        query, key, value = _without_unseen(query, key, value, allowed.spans, sizes)
    lowered = score.lower(query, key)
    return Problem(query, key, value, sizes, score, lowered, allowed.spans, bias, allowed.edges)


def _as_score(score: Any) -> Score:
    if score is None:
        return _DOT
    if isinstance(score, Score):
        return score
    if isinstance(score, type) and issubclass(score, Score):
        raise ClearheadError(f"score is the class {score.__name__}; pass an instance: {score.__name__}(...).")
    if callable(score):
        return Function(score)
    raise ClearheadError(
        f"score is a {type(score).__name__}; expected a Score, such as Dot(), or a function f(query_tile, key_tile)."
    )


class Allowed(NamedTuple):
    """A mask's spans, their edges on the host, and whether every key has a query that sees it and every query a key."""

    spans: Spans
    edges: tuple[np.ndarray, np.ndarray]
    all_seen: bool


_remembered: dict[Any, Allowed] = {}  # the spans of masks that are plain values: layer after layer asks for the same


def _resolve(mask: Mask, sizes: Sizes) -> Allowed:
    signature = mask.signature()
    if signature is not None and (signature, sizes) in _remembered:
        return _remembered[signature, sizes]
    spans = mask.resolve(sizes)
    edges = spans.host()
    allowed = Allowed(spans, edges, _every_key_seen(spans, *edges, sizes))
    if signature is not None and type(spans.start) is Tensor:
        if len(_remembered) >= 64:
            _remembered.clear()
        _remembered[signature, sizes] = allowed
    return allowed


def _as_mask(mask: Any, sizes: Sizes, dtype: torch.dtype) -> tuple[Allowed | None, Tensor | None]:
    """The spans of a mask, or the bias that a float tensor is."""
    if mask is None:
        return None, None
    if isinstance(mask, Mask):
        return _resolve(mask, sizes), None
    tensor = to_tensor(mask, "mask")
    if tensor.device != sizes.device:
        raise ClearheadError(f"mask is on {tensor.device}, the inputs on {sizes.device}; pass mask.to(query.device).")
    if not tensor.is_floating_point():
        return _resolve(DenseMask(check_keep(tensor, "mask")), sizes), None
    if tensor.dtype != dtype:
        raise ClearheadError(
            f"mask has dtype {tensor.dtype}, shape {tuple(tensor.shape)}, and is added to scores of {dtype}; "
            "pass mask.to(query.dtype), or a bool tensor if it only says who may attend."
        )
    return None, fit(tensor, sizes, "mask")


def _without_unseen(
    query: Tensor, key: Tensor, value: Tensor | None, spans: Spans, sizes: Sizes
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Zeros in place of keys that no query may see, and of queries that see nothing, where they are not finite.

    Padding may hold anything; times a weight of 0, NaN and infinity would still be NaN, in the output or a gradient.
    """
    if all(t is None or finite(t) for t in (query, key, value)):
        return query, key, value
    seen, sees = _seen(spans, sizes)
    if seen.shape[1] not in (1, key.shape[1]):
        seen = unflatten(seen, 1, key.shape[1], -1).any(2)
    query = zero_where(query, ~sees.unsqueeze(-1) & ~query.isfinite())
    key = zero_where(key, ~seen.unsqueeze(-1) & ~key.isfinite())
    return query, key, None if value is None else zero_where(value, ~seen.unsqueeze(-1) & ~value.isfinite())


def _seen(spans: Spans, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Which keys some query sees, (B or 1, H or 1, Lk), and which queries see some key, (B or 1, H or 1, Lq or 1)."""
    every, rows = slice(None), 256
    seen, sees = [], []
    for row in range(0, sizes.queries, rows):
        keep = spans.keep(every, every, slice(row, row + rows), every, sizes.keys)
        seen.append(keep.any(2))
        sees.append(keep.any(3))
        if keep.shape[2] == 1:  # the same for all queries
            break
    if not seen:
        nothing = torch.zeros(1, 1, 1, dtype=torch.bool, device=sizes.device)
        return nothing, nothing
    return torch.stack(seen).any(0), torch.cat(sees, -1)


def _every_key_seen(spans: Spans, start: np.ndarray, stop: np.ndarray, sizes: Sizes) -> bool:
    """Whether it is plain, at little cost, that every key has a query that sees it and every query sees a key."""
    if spans.residual is not None or not sizes.queries or not sizes.keys:
        return False
    if (stop <= start).any() or start[..., 0].any() or (stop[..., -1] < sizes.keys).any():
        return False
    # the first query sees the first key, the last the last: it remains that no gap lies between two queries' spans
    return not (start[..., 1:] > stop[..., :-1]).any()


def finite(tensor: Tensor) -> bool:
    """Whether every entry is finite. One pass: a sum is finite only if its terms are, but for overflow."""
    with torch.no_grad():
        return math.isfinite(float(tensor.sum())) or bool(tensor.isfinite().all())


def zero_where(tensor: Tensor, where: Tensor) -> Tensor:
    return tensor.masked_fill(where, 0.0)


def guard(problem: Problem) -> Problem:
    """The same problem with finite operands, and a poison that carries what was not finite.

    The poison is NaN for queries and keys (values) that are not finite, else 0. Added to the scores before the mask,
    it reaches whoever may see such a key, and nobody else: a masked NaN would otherwise pass through 0 · NaN.
    """
    lowered = problem.lowered
    queries, keys = [problem.query], [problem.key]
    if lowered is not None and lowered.key is not problem.key:
        keys.append(lowered.key)
    if lowered is not None and lowered.query is not problem.query:
        queries.append(lowered.query)
    values = [] if problem.value is None else [problem.value]
    if problem.spans is None or all(finite(t) for t in queries + keys + values):
        return problem
    clean = [zero_where(t, ~t.isfinite()) for t in (problem.query, problem.key)]
    if lowered is not None:
        same_query, same_key = lowered.query is problem.query, lowered.key is problem.key
        lowered = lowered._replace(
            query=clean[0] if same_query else zero_where(lowered.query, ~lowered.query.isfinite()),
            key=clean[1] if same_key else zero_where(lowered.key, ~lowered.key.isfinite()),
        )
    value = None if problem.value is None else zero_where(problem.value, ~problem.value.isfinite())
    return problem._replace(
        query=clean[0],
        key=clean[1],
        value=value,
        lowered=lowered,
        poison=(_poison(queries).unsqueeze(-1), _poison(keys + values).unsqueeze(-2)),
    )


def _poison(tensors: list[Tensor]) -> Tensor:
    """0 where all the vectors are finite, NaN elsewhere: (B, H, L)."""
    bad = torch.stack([~t.detach().isfinite().all(-1) for t in tensors]).any(0)
    return torch.zeros(bad.shape, device=bad.device).masked_fill(bad, math.nan)
