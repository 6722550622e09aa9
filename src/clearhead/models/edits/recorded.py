"""The edited problem of a call, for the record of the call that ran."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.base.errors import UnsupportedError
from clearhead.base.shapes import Sizes
from clearhead.base.torch_state.contexts import without_autocast, without_function_modes
from clearhead.biases.base import Added
from clearhead.engines.choose import choose
from clearhead.inspection.source import FromRecord
from clearhead.inspection.weights import Weights
from clearhead.masks.base import Mask, Spans
from clearhead.masks.first_keys import FirstKeys
from clearhead.masks.intervals import Intervals
from clearhead.models.edits.base import Edit
from clearhead.models.edits.changed import (
    Change,
    Rows,
    before,
    changed_weights,
    check_steady,
    factors_of,
    gone,
    maps,
    rows_of,
    same,
    weights_after,
)
from clearhead.models.edits.spot import of_weights, without_keys
from clearhead.models.interception.choice import runs_of
from clearhead.models.recordings.weights import weights_of
from clearhead.problem._recorded import RecordedMask
from clearhead.problem.guard import zero_unseen
from clearhead.problem.problem import Problem
from clearhead.problem.record import EVERY, Record, copied, now, record
from clearhead.problem.region import Region
from clearhead.problem.regions import cut
from clearhead.problem.visible import Visible, resolve
from clearhead.scores.base import Pairwise, Score
from clearhead.scores.dot import Dot


class Edited(NamedTuple):
    """A call after its edits.

    `problem`: without a value; the edits have changed its mask, bias and query. `factor` (B, H, Lq): the factor of each
    row of its softmax, where an edit changes weights or outputs after the softmax; None where all are 1. `query`: as
    the model gave it to attention, with the changes of the edits. `uniform`: as in `AttentionCall`. `value`: the value
    (B, Hk, Lk, Ev) where edits change it; None where they do not.
    """

    problem: Problem
    factor: Tensor | None
    query: Tensor
    uniform: Tensor | None
    value: Tensor | None = None


@torch.no_grad()
def edited(change: Change, score: Score, query: Tensor, uniform: Tensor | None, name: str, values: bool) -> Edited:
    """The call with its edits, inside of `change.inside`. `values`: whether its value is kept beside the weights."""
    problem, spot = change.problem, change.spot
    sizes = problem.sizes._replace(leading=None)
    found, value = problem._replace(value=None), problem.value
    factor = torch.ones(sizes.shape[:3], dtype=accumulated(problem.query.dtype), device=sizes.device)
    if any(batch != EVERY[0] for _, batch, _, _ in change.regions):
        raise UnsupportedError(f"{name}: a sweep of several cells at once is not recorded. Pass batch=1 to sweep.")
    parts = ((edits, run, rows) for edits, _, heads, rows in change.regions for run in runs_of(heads))
    for edits, run, rows in parts:
        here, own = spot.of_heads(run), cut(problem._replace(sizes=sizes), Region(heads=run))
        check_steady(own, edits, here, name)
        new = before(own, edits, here)
        if values and new.value is not own.value:
            value = _with_value(value, new.value, run, rows, problem, name)
        own, new = own._replace(value=None), new._replace(value=None)
        inside = torch.zeros(1, *sizes.shape[1:3], dtype=torch.bool, device=sizes.device)
        inside[:, run, torch.from_numpy(rows).to(sizes.device)] = True
        removed = gone(edits, here)
        times = factors_of(edits, here._replace(rows=tuple(here.queries)), factor)
        given = _given(new, edits, rows_of(rows, here, new), name) if any(map(maps, edits)) else None
        if given is not None:
            new, sums = of_weights(new, given), given.sum(-1)
            one = (sums - 1).abs() <= 32 * torch.finfo(sums.dtype).eps  # but for rounding
            times = times * sums.masked_fill(one, 1.0)
        ran = new
        if given is None and removed.any():
            new = without_keys(new, removed)
        if not same(new.sinks, own.sinks):
            new = new._replace(sinks=own.sinks)  # a record has one sink a head
        if new is not ran:  # the rows of the softmax that ran are those of the recorded one, times a factor
            some, every = (Weights(FromRecord(now(one), {})).logsumexp() for one in (new, ran))
            times = times * (some - every).masked_fill((some == -torch.inf) | (every == -torch.inf), -torch.inf).exp()
        factor = torch.where(inside, _among(times, run, sizes.heads), factor)
        if new.visible is not own.visible:
            seen = _of_all(new.visible, run, new.sizes, sizes)
            found = found._replace(visible=_where(inside, seen, _mask(found.visible, sizes), sizes))
        bias, pairs = new.bias, inside.unsqueeze(-1)
        if new.scores is not own.scores:
            if _another_query(score, own, new):
                scaled = _among(new.query * (new.scores.scale / own.scores.scale), run, sizes.heads)
                found = found._replace(scores=found.scores._replace(query=torch.where(pairs, scaled, found.query)))
                query = torch.where(pairs, scaled, query)
                if uniform is not None and here.unmasked is not None:
                    uniform = uniform & ~pairs  # the row sees the keys of another mask
            else:  # the bias of the row has all changes of its scores
                bias = Added(dense=_scores(new) - _scores(own._replace(bias=None)))
        if bias is not own.bias and bias is not None and bool(inside.all()):
            dense, relative = (None if t is None else copied(t) for t in (bias.dense, bias.relative))
            found = found._replace(bias=bias._replace(dense=dense, relative=relative))
        elif bias is not own.bias:
            added = _among(_dense(bias, new.sizes), run, sizes.heads)
            mixed = torch.where(pairs, added, _dense(found.bias, sizes))
            found = found._replace(bias=Added(dense=mixed.expand(-1, -1, sizes.queries, sizes.keys)))
    blind = factor == 0  # a row without weights sees nothing
    if bool(blind.any()):
        found = found._replace(visible=_where(blind, FirstKeys(0), _mask(found.visible, sizes), sizes))
        factor = factor.masked_fill(blind, 1.0)
    changed = None if value is problem.value else _of_groups(value, problem, name)
    return Edited(found, None if bool((factor == 1).all()) else factor, query, uniform, changed)


def _given(problem: Problem, edits: list[Edit], rows: Rows, name: str) -> Tensor:
    """The weights (B, h, Lq, Lk) of the changed rows where a function gives them, and 0 in the others."""
    weights = weights_after(problem, edits, rows, name)
    if bool((weights < 0).any()):
        raise UnsupportedError(
            f"{name}: an edit gives weights below 0, down to {float(weights.min()):.3g}, and a record has "
            "logarithms. Give numbers from 0 on, such as weights.clamp(min=0); or look outside of the edit's `with`."
        )
    return weights.new_zeros(problem.sizes.shape).index_copy(2, rows.queries, weights)


def _with_value(
    value: Tensor | None, new: Tensor | None, run: slice, rows: np.ndarray, problem: Problem, name: str
) -> Tensor:
    """The value of all query heads, (B, H, Lk, Ev), with that of an edited run of heads."""
    assert value is not None and new is not None
    if not rows.all():
        raise UnsupportedError(f"{name}: an edit replaces the value for some queries: watch without values=True.")
    heads = problem.sizes.heads
    value = value.repeat_interleave(heads // value.shape[1], 1) if value.shape[1] != heads else value.clone()
    value[:, run] = new.repeat_interleave((run.stop - run.start) // new.shape[1], 1)
    return value


def _of_groups(value: Tensor | None, problem: Problem, name: str) -> Tensor:
    """The value of the key heads, (B, Hk, Lk, Ev), of that of all query heads."""
    assert value is not None
    grouped = value.unflatten(1, (-1, problem.groups))  # type: ignore[no-untyped-call]
    if not torch.equal(grouped, grouped[:, :, :1].expand_as(grouped)):
        raise UnsupportedError(f"{name}: an edit replaces a value that other query heads share: edit these heads too.")
    return copied(grouped[:, :, 0])


def _another_query(score: Score, one: Problem, other: Problem) -> bool:
    """Whether the scores of two problems differ in their queries, or in a factor that a query can contain."""
    first, second = one.scores, other.scores
    if not (isinstance(score, Dot) and isinstance(first, Pairwise) and isinstance(second, Pairwise)):
        return False
    same = first.key is second.key and first.weight is None and second.weight is None
    return same and (first.phi, first.softcap) == (second.phi, second.softcap) and first.scale != 0


def _scores(problem: Problem) -> Tensor:
    """The scores of all pairs before the softmax, with the bias."""
    problem = zero_unseen(problem, only_not_finite=True)._replace(visible=None)
    return choose(problem, None).scores(problem)


def _dense(bias: Added | None, sizes: Sizes) -> Tensor:
    """The bias of each pair, as a copy to which nothing else writes."""
    if bias is None:
        return torch.zeros(1, 1, 1, 1, dtype=torch.float32, device=sizes.device)
    return copied(bias.tile(*EVERY, sizes))


def _among(tensor: Tensor, run: slice, heads: int) -> Tensor:
    """The tensor (B or 1, h or 1, …) of a run of heads with all heads: 0 for the others, unless one head is for all."""
    if tensor.shape[1] == 1 and run.stop - run.start != 1:
        return tensor
    found = tensor.new_zeros(tensor.shape[0], heads, *tensor.shape[2:])
    found[:, run] = tensor
    return found


def _of_all(visible: Visible | None, run: slice, some: Sizes, sizes: Sizes) -> Mask:
    """The mask of a run of heads with all heads, of which the others see nothing."""
    spans = _mask(visible, some).lower(some)
    start, stop = (_among(edge.expand(-1, some.heads, -1), run, sizes.heads) for edge in (spans.start, spans.stop))
    gaps = None
    if spans.gaps is not None:
        left, right = (_among(edge.expand(-1, some.heads, -1, -1), run, sizes.heads) for edge in spans.gaps)
        gaps = left, right

    def residual(batch: slice, heads: slice, queries: slice, keys: slice) -> Tensor:
        keep = spans.rest(batch, slice(0, some.heads), queries, keys)
        return _among(keep.expand(-1, some.heads, -1, -1), run, sizes.heads)[:, heads]

    function = None if spans.residual is None else residual
    return RecordedMask(Spans(start, stop, function, spans.reads, gaps), sizes)


def _where(rows: Tensor, one: Mask, other: Mask, sizes: Sizes) -> Visible:
    """The pairs that `one` allows in these rows, bool (B or 1, H, Lq), and `other` in the others."""
    stop = torch.where(rows, sizes.keys, 0)
    inside, outside = (Intervals(torch.zeros_like(stop), end) for end in (stop, sizes.keys - stop))
    return resolve((inside & one) | (outside & other), sizes, as_written=False)


def _mask(visible: Visible | None, sizes: Sizes) -> Mask:
    return FirstKeys(sizes.keys) if visible is None else RecordedMask(visible.spans, sizes)


def with_weights(change: Change, result: Any) -> Any:
    """A result (output, weights), whose weights (B, H, Lq, Lk), or their mean over heads, are the edited ones.

    One sequence may come without its batch dimension. Any other result stays the same. The changed rows have no
    gradient.
    """
    given = result[1] if isinstance(result, tuple) and len(result) > 1 else None
    batch, heads, queries, keys = change.problem.sizes.shape
    every, mean = torch.Size((batch, heads, queries, keys)), torch.Size((batch, queries, keys))
    shapes = [every, mean, every[1:], mean[1:]] if batch == 1 else [every, mean]
    if not isinstance(given, Tensor) or given.shape not in shapes:
        return result
    with torch.no_grad(), change.inside, without_function_modes(), without_autocast(given.device):
        inside = torch.zeros(batch, heads, queries, 1, dtype=torch.bool, device=given.device)
        new = inside.new_zeros(batch, heads, queries, keys, dtype=accumulated(change.problem.query.dtype))
        for sequences, run, rows, weights in changed_weights(change):
            inside[sequences, run].index_fill_(2, rows, True)
            new[sequences, run].index_copy_(2, rows, weights)
        if given.shape in (mean, mean[1:]):  # with one head, the weights and their mean are the same
            plain = change.problem._replace(value=None, sizes=change.problem.sizes._replace(leading=None))
            moved = torch.where(inside, new - Weights(FromRecord(now(plain), {})).dense(None), 0.0).mean(1)
            new, inside = given.view(moved.shape) + moved.to(given.dtype), inside.any(1)
    found = torch.where(inside, new.to(given.dtype), given.view(new.shape))
    return (result[0], found.view(given.shape), *result[2:])


class RanEdited:
    """The edits of a call of clearhead's own attention, for a module that returns its weights."""

    def __init__(self, change: Change) -> None:
        self._change = change

    def later(self, numpy: bool) -> Callable[[], Weights]:
        problem = self._change.problem
        value = None if problem.value is None else problem.value.detach()
        change = self._change._replace(problem=record(problem, fresh=True).problem._replace(value=value))

        def made() -> Weights:
            with torch.no_grad(), without_function_modes():
                return edited_weights(change, numpy, record)

        return made

    def returned(self, weights: Tensor) -> Tensor:
        found: Tensor = with_weights(self._change, (None, weights))[1]
        return found


def edited_weights(change: Change, numpy: bool = False, kept: Callable[[Problem], Record] = now) -> Weights:
    """The weights of a call with its edits, (B, H, Lq, Lk). `kept`: `record`, where the weights may be read later."""
    with change.inside:
        ran = edited(change, Dot(), change.problem.query, None, "the model", values=False)
    problem = ran.problem._replace(sizes=ran.problem.sizes._replace(leading=None))
    return weights_of(FromRecord(kept(problem), {}, numpy), None, ran.factor)
