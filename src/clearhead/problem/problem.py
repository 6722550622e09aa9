"""The one thing an engine sees: validated once, lowered once, frozen."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clearhead.base.arrays import to_tensor, to_tensor_float
from clearhead.base.dropout import check_dropout, draw_seed
from clearhead.base.errors import ClearheadError, ShapeError, UnsupportedError
from clearhead.base.positions import check_one_alignment
from clearhead.base.shapes import Sizes, apart, as_inputs, fit
from clearhead.base.tracing import (
    any_autocast,
    autocast,
    autocasting,
    batched,
    compiling,
    readable,
    refuse_jit,
    traced,
    transformed,
    unwrapped,
)
from clearhead.base.versions import Versions
from clearhead.biases.base import Added, Bias, check_added
from clearhead.biases.dense import DenseBias
from clearhead.masks.base import Mask, Spans, check_spans
from clearhead.masks.dense import DenseMask, check_keep
from clearhead.problem.reads import tensors_in
from clearhead.problem.unseen import Unseen, finite, group, seen, where_unseen, zero
from clearhead.scores.base import Pairwise, Score, check_pairwise
from clearhead.scores.dot import Dot
from clearhead.scores.score_function import ScoreFunction

_DOT = Dot()
_ABSENT = object()  # no value: only the weights are wanted


class Problem(NamedTuple):
    """One attention, in normal form. Tensors are (B, H, L, E); key and value may have fewer heads (grouped).

    scores = score(query, key) + bias, −∞ outside the spans and their residual; weights = softmax over keys;
    output = dropout(weights) · value. With sinks, the softmax has one more term in its denominator.
    """

    query: Tensor
    key: Tensor
    value: Tensor | None  # None: only the weights are wanted
    sizes: Sizes
    score: Score  # gives any tile of the scores
    lowered: Pairwise | None  # the same score as the kernels take it, where it has that form
    spans: Spans | None  # None: every query sees every key
    edges: tuple[np.ndarray, np.ndarray] | None  # the spans' starts and stops on the host
    bias: Added | None = None
    unseen: Unseen = "none"
    dropout_p: float = 0.0
    seed: Tensor | None = None  # of the dropout
    poison: tuple[Tensor, Tensor] | None = None  # see `guard`: (B, H, Lq, 1) and (B, Hk, 1, Lk)

    @property
    def groups(self) -> int:
        """Query heads to a key head."""
        return self.sizes.heads // self.key.shape[1] if self.key.shape[1] else 1

    @property
    def added(self) -> tuple[Tensor, ...]:
        """The tensors of the bias."""
        return () if self.bias is None else self.bias.tensors

    @property
    def sinks(self) -> Tensor | None:
        return None if self.lowered is None else self.lowered.sinks

    @property
    def plain(self) -> bool:
        """Nothing but scores and their softmax over every key."""
        return self.spans is None and self.bias is None and not self.dropout_p and self.sinks is None

    @property
    def needs_grad(self) -> bool:
        if not torch.is_grad_enabled():
            return False
        low = self.lowered
        if low is None:  # a score with tile() alone may close over anything
            return True
        tensors = (low.query, low.key, low.weight, low.sinks, self.value, *self.added)
        return any(t is not None and t.requires_grad for t in tensors)

    def reads(self) -> Versions:
        """What a backward pass reads again and autograd does not save: what the mask and a score by `tile()` hold."""
        found = () if self.spans is None else self.spans.reads
        return Versions(found if self.lowered is not None else (*found, *tensors_in(self.score)))


def make_problem(
    query: Any,
    key: Any,
    value: Any = _ABSENT,
    *,
    score: Score | Callable[[Tensor, Tensor], Tensor] | None = None,
    mask: Any = None,
    bias: Any = None,
    dropout_p: float = 0.0,
) -> Problem:
    """Check everything, and bring it to normal form. Nothing that was passed is written to."""
    refuse_jit()
    query, key = to_tensor_float(query, "query"), to_tensor_float(key, "key")
    value = None if value is _ABSENT else to_tensor_float(value, "value")
    if any_autocast():
        query, key, value = autocast(query), autocast(key), None if value is None else autocast(value)
    query, key, value, sizes = as_inputs(query, key, value)
    if query.element_size() < 4:
        query, key, value = apart(query), apart(key), None if value is None else apart(value)
    score = _as_score(score)
    score.check(query, key)
    if 0 in sizes.shape and not compiling():  # no pairs: what they hold is not to meet a projection's gradient
        query, key = (t.masked_fill(~t.isfinite(), 0.0) for t in (query, key))
    if mask is None and bias is None and type(dropout_p) in (float, int) and not dropout_p:
        return Problem(query, key, value, sizes, score, _lower(score, query, key), None, None)
    _refuse_distributed({"query": query, "key": key, "value": value})
    dropout_p = check_dropout(dropout_p, "dropout_p")
    seed = draw_seed(sizes.device) if dropout_p else None
    allowed, float_mask = _as_mask(mask, sizes, query.dtype)
    added = _as_bias(bias, mask, sizes)
    if float_mask is not None:
        added = Added(dense=float_mask) if added is None else added.plus(Added(dense=float_mask))
    if allowed is None:
        lowered = _lower(score, query, key)
        return Problem(query, key, value, sizes, score, lowered, None, None, added, "none", dropout_p, seed)
    hidden = compiling() and not any(True for _ in score.parameters())  # then the engine is early enough
    if allowed.unseen != "none" and not hidden and not all(t is None or finite(t) for t in (query, key, value)):
        # before the score's own projections, whose gradients would meet what is not finite
        keys, queries = seen(allowed.spans, sizes)
        keys = group(keys, key.shape[1])
        query, key = zero(query, queries, only_not_finite=True), zero(key, keys, only_not_finite=True)
        value = None if value is None else zero(value, keys, only_not_finite=True)
    lowered = _lower(score, query, key)
    return Problem(query, key, value, sizes, score, lowered, *allowed[:2], added, allowed.unseen, dropout_p, seed)


def _refuse_distributed(inputs: dict[str, Tensor | None]) -> None:
    module = sys.modules.get("torch.distributed.tensor")  # None: no DTensor can exist
    for name, tensor in inputs.items():
        if module is not None and type(tensor) is not Tensor and isinstance(tensor, module.DTensor):
            raise UnsupportedError(
                f"{name} is a DTensor, shape {tuple(tensor.shape)}; masks, biases and dropout are plain tensors, "
                f"which PyTorch does not mix with it. Pass {name}.to_local() and each rank's part of the mask, or "
                f"{name}.full_tensor()."
            )


def _lower(score: Score, query: Tensor, key: Tensor) -> Pairwise | None:
    """A score's normal form; under autocast, which may have widened what it projected, of the inputs' dtype."""
    lowered = score.lower(query, key)
    if lowered is None:
        return None
    if any_autocast():
        lowered = lowered._replace(query=lowered.query.to(query.dtype), key=lowered.key.to(query.dtype))
    return check_pairwise(lowered, query, key, type(score).__name__)


def _as_bias(bias: Any, mask: Any, sizes: Sizes) -> Added | None:
    """The normal form of what was passed as bias."""
    if bias is None:
        return None
    if isinstance(bias, Tensor | np.ndarray):
        bias = DenseBias(bias)
    if not isinstance(bias, Bias):
        what = f"the class {bias.__name__}" if isinstance(bias, type) else f"{bias!r:.60}"
        raise ClearheadError(f"bias is {what}; expected a Bias, such as ALiBi(num_heads), or a float tensor.")
    check_one_alignment([*(mask.offsets(sizes) if isinstance(mask, Mask) else ()), *bias.offsets(sizes)])
    return check_added(bias.lower(sizes), sizes, type(bias).__name__)


def _as_score(score: Any) -> Score:
    if score is None:
        return _DOT
    if isinstance(score, Score):
        return score
    if isinstance(score, type):
        raise ClearheadError(f"score is the class {score.__name__}; pass an instance: {score.__name__}(...).")
    if callable(score):
        return ScoreFunction(score)
    raise ClearheadError(
        f"score is a {type(score).__name__}; expected a Score, such as Dot(), or a function f(query_tile, key_tile)."
    )


class Allowed(NamedTuple):
    """A mask's spans, their edges on the host (None while compiling), and whether some key is seen by nobody."""

    spans: Spans
    edges: tuple[np.ndarray, np.ndarray] | None
    unseen: Unseen


_remembered: dict[Any, Allowed] = {}  # the spans of masks that are plain values: layer after layer asks for the same


def _resolve(mask: Mask, sizes: Sizes) -> Allowed:
    if compiling():
        return Allowed(check_spans(mask.resolve(sizes), sizes, mask), None, "inside")
    signature = None if traced() else mask.signature()
    if signature is not None and (signature, sizes) in _remembered:
        return _remembered[signature, sizes]
    if signature is None or transformed():  # tensors made inside a transform end with it
        return _edged(check_spans(mask.resolve(sizes), sizes, mask), sizes)
    with torch.inference_mode(False):  # what is remembered may be used where gradients are wanted
        allowed = _edged(check_spans(mask.resolve(sizes), sizes, mask), sizes)
    if len(_remembered) >= 64:
        _remembered.clear()
    _remembered[signature, sizes] = allowed
    return allowed


def _edged(spans: Spans, sizes: Sizes) -> Allowed:
    edges = [unwrapped(edge) for edge in (spans.start, spans.stop)]
    if any(batched(edge) for edge in edges):
        raise UnsupportedError(
            "the mask differs along a dimension that torch.func.vmap has hidden, and engines must read it. Give the "
            "mask a batch dimension, and call attention() on the whole batch."
        )
    spans = spans._replace(start=edges[0], stop=edges[1])
    if not all(map(readable, edges)):  # shapes alone: there is nothing to skip by
        return Allowed(spans, None, "inside")
    start, stop = spans.host()
    if start.size and stop.size and (start.min() < 0 or stop.max() > sizes.keys):
        raise ShapeError(
            f"the spans of a mask reach from {start.min()} to {stop.max()}, and there are {sizes.keys} keys: lower() "
            "must give 0 ≤ start and stop ≤ Lk."
        )
    return Allowed(spans, (start, stop), where_unseen(spans, start, stop, sizes))


def with_edges(problem: Problem, spans: Spans) -> Problem:
    """The same problem under a mask given as spans."""
    allowed = _edged(spans, problem.sizes)
    return problem._replace(spans=spans, edges=allowed.edges, unseen=allowed.unseen)


def _as_mask(mask: Any, sizes: Sizes, dtype: torch.dtype) -> tuple[Allowed | None, Tensor | None]:
    """The spans of a mask, or the bias that a float tensor is."""
    if mask is None:
        return None, None
    if isinstance(mask, Mask):
        return _resolve(mask, sizes), None
    if not isinstance(mask, Tensor | np.ndarray):
        what = f"the class {mask.__name__}" if isinstance(mask, type) else f"{mask!r:.60}"
        raise ClearheadError(
            f"mask is {what}; expected a Mask, such as Causal(), a bool tensor (True: may attend), or a float tensor."
        )
    tensor = to_tensor(mask, "mask")
    if tensor.device != sizes.device:
        raise ClearheadError(f"mask is on {tensor.device}, the inputs on {sizes.device}; pass mask.to(query.device).")
    if not tensor.is_floating_point():
        return _resolve(DenseMask(check_keep(tensor, "mask")), sizes), None
    if tensor.dtype != dtype and not autocasting(tensor.device):  # which has changed the inputs' dtype, not the mask's
        raise ClearheadError(
            f"mask has dtype {tensor.dtype}, shape {tuple(tensor.shape)}, and is added to scores of {dtype}; "
            "pass mask.to(query.dtype), or a bool tensor if it only says who may attend."
        )
    return None, fit(tensor, sizes, "mask")


def zero_unseen(problem: Problem) -> Problem:
    """The same problem with zeros in place of keys that nobody sees and of queries that see nothing."""
    if problem.spans is None or problem.unseen == "none":
        return problem
    keys, queries = seen(problem.spans, problem.sizes)
    keys = group(keys, problem.key.shape[1])
    lowered = problem.lowered
    query, key = zero(problem.query, queries), zero(problem.key, keys)
    if lowered is not None:
        lowered = lowered._replace(
            query=query if lowered.query is problem.query else zero(lowered.query, queries),
            key=key if lowered.key is problem.key else zero(lowered.key, keys),
        )
    value = None if problem.value is None else zero(problem.value, keys)
    return problem._replace(query=query, key=key, value=value, lowered=lowered, unseen="none")


def guard(problem: Problem) -> Problem:
    """The same problem with finite operands, and a poison that carries what was not finite.

    The poison is NaN for queries and keys (values) that are not finite, else 0. Added to the scores before the mask,
    it reaches whoever may see such a key, and nobody else: a masked NaN would otherwise pass through 0 · NaN.
    """
    problem = zero_unseen(problem)
    lowered = problem.lowered
    queries, keys = [problem.query], [problem.key]
    if lowered is not None and lowered.key is not problem.key:
        keys.append(lowered.key)
    if lowered is not None and lowered.query is not problem.query:
        queries.append(lowered.query)
    values = [] if problem.value is None else [problem.value]
    if problem.spans is None or all(finite(t) for t in queries + keys + values):
        return problem
    clean = [_finite_part(t) for t in (problem.query, problem.key)]
    if lowered is not None:
        same_query, same_key = lowered.query is problem.query, lowered.key is problem.key
        lowered = lowered._replace(
            query=clean[0] if same_query else _finite_part(lowered.query),
            key=clean[1] if same_key else _finite_part(lowered.key),
        )
    value = None if problem.value is None else _finite_part(problem.value)
    return problem._replace(
        query=clean[0],
        key=clean[1],
        value=value,
        lowered=lowered,
        poison=(_poison(queries).unsqueeze(-1), _poison(keys + values).unsqueeze(-2)),
    )


def _finite_part(tensor: Tensor) -> Tensor:
    return tensor.masked_fill(~tensor.isfinite(), 0.0)


def _poison(tensors: list[Tensor]) -> Tensor:
    """0 where all the vectors are finite, NaN elsewhere: (B, H, L)."""
    bad = torch.stack([~t.detach().isfinite().all(-1) for t in tensors]).any(0)
    return torch.zeros(bad.shape, dtype=torch.float32, device=bad.device).masked_fill(bad, math.nan)
