"""The changes of edits to one call, and the result with these changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clearhead.base.arrays import check_memory, is_dense
from clearhead.base.errors import ClearheadError, ShapeError, UnsupportedError
from clearhead.base.numbers import check_number
from clearhead.base.torch_state.contexts import without_autocast, without_function_modes
from clearhead.base.torch_state.versions import Versions
from clearhead.engines import operation
from clearhead.engines.choose import choose
from clearhead.engines.tiled import tiles
from clearhead.masks.base import dense
from clearhead.models.edits.base import Edit
from clearhead.models.edits.patch import Patch
from clearhead.models.edits.spot import Spot, without_keys
from clearhead.models.interception.choice import runs_of
from clearhead.models.interception.place import Place
from clearhead.problem.checked import checked, ours
from clearhead.problem.guard import guard
from clearhead.problem.packing import operands, packed
from clearhead.problem.partial import log_sum_exp
from clearhead.problem.problem import Problem
from clearhead.problem.region import Region
from clearhead.problem.regions import cut
from clearhead.scores.base import Pairwise

Part = tuple[list[Edit], slice, tuple[int, ...], np.ndarray]  # edits, sequences, heads, rows of queries, bool (Lq,)


class Change(NamedTuple):
    """A call, its place in the sequence, and its changed parts.

    `inside`: a context that is entered while edits are called, since an edit of the caller's own may compute attention,
    which is not a call of the model.
    """

    problem: Problem
    spot: Spot
    regions: list[Part]
    inside: AbstractContextManager[None]


def changed(change: Change, place: Place, result: Any) -> Any:
    """The result of a call with its edits."""
    with computing(change):
        tensor = place.tensor(result)
        for part in changes(change):
            tensor = place.changed(tensor, *part)
        return place.result(result, tensor)


@contextmanager
def computing(change: Change) -> Iterator[None]:
    """A context for the computations that are not the model's own."""
    with change.inside, without_function_modes(), without_autocast(change.problem.sizes.device):
        yield


class Rows(NamedTuple):
    """The queries that edits change: `hull`, the rows from the first to the last of them; `within`, their places (q,)
    in it; and the `spot` with their positions."""

    hull: slice
    within: Tensor
    spot: Spot

    @property
    def queries(self) -> Tensor:
        """Their numbers among the queries of the call, (q,)."""
        return self.within.add(self.hull.start)


def rows_of(queries: np.ndarray, spot: Spot, problem: Problem) -> Rows:
    """The rows `queries`, bool (Lq,), of a problem of the spot's heads."""
    rows = np.flatnonzero(queries)
    hull = slice(int(rows[0]), int(rows[-1]) + 1)
    within = torch.from_numpy(rows - hull.start).to(problem.sizes.device)
    return Rows(hull, within, spot._replace(rows=tuple(spot.queries[row] for row in rows.tolist())))


def parts_of(change: Change) -> Iterator[tuple[list[Edit], slice, slice, Rows]]:
    """The parts of a call: edits, sequences, neighbouring heads, and rows."""
    for edits, batch, numbers, queries in change.regions:
        for heads in runs_of(numbers):
            yield edits, batch, heads, rows_of(queries, change.spot.of_heads(heads, batch), change.problem)


def changes(change: Change) -> Iterator[tuple[slice, slice, Tensor, Callable[[], Tensor], Tensor]]:
    """The changed parts of the output: sequences, heads and queries (q,), the old output and the new (b, h, q, Ev).

    The old output is a function, since not every place of an output needs it.
    """
    problem = change.problem
    for edits, batch, heads, rows in parts_of(change):
        edited = before(cut(problem, Region(batch, heads)), edits, rows.spot)
        new = after(_output(edited, edits, rows), edits, rows.spot)
        region = Region(batch, heads, rows.hull)
        old = lambda: _attended(cut(problem, region))[:, :, rows.within]  # noqa: B023, E731 - called at once
        yield batch, heads, rows.queries, old, new


def changed_weights(change: Change) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """The changed parts of the weights: sequences, heads and queries (q,), and the new weights (b, h, q, Lk)."""
    problem = change.problem
    for edits, batch, heads, rows in parts_of(change):
        own = cut(problem, Region(batch, heads))
        check_steady(own, edits, rows.spot, "the model")
        weights = weights_after(before(own, edits, rows.spot), edits, rows, "the model")
        yield batch, heads, rows.queries, weights * factors_of(edits, rows.spot, weights).unsqueeze(-1)


def before(problem: Problem, edits: Sequence[Edit], spot: Spot) -> Problem:
    """The problem of some heads, with the changes of their edits before the softmax."""
    for one in edits:
        given = {} if ours(one) else operands(problem)._asdict()
        tensors = [(name, tensor) for name, tensor in given.items() if tensor is not None]
        read = Versions(tensors)
        new = one.before(problem, spot)
        if (written := read.changed(tensors)) is not None:
            who = f"{type(one).__name__}.before"
            raise ClearheadError(f"{who} wrote to the model's {written[0]}: give another one, problem._replace(…).")
        # an engine reads memory by these sizes, and the new output must fit in the place of the old
        problem = new if new is problem else checked(new, f"{type(one).__name__}.before", problem)
    return problem


def gone(edits: Sequence[Edit], spot: Spot) -> np.ndarray:
    """The keys, bool (Lk,), whose weights these edits set to 0 after the softmax."""
    found = np.zeros(len(spot.keys), dtype=bool)
    for one in edits:
        if (keys := one.removed(spot)) is not None:
            found |= keys
    return found


def factor_of(edits: Sequence[Edit]) -> float:
    """The factor by which these edits multiply the output."""
    return math.prod(check_number(one.factor, f"{type(one).__name__}: factor") for one in edits)


def factors_of(edits: Sequence[Edit], spot: Spot, like: Tensor) -> Tensor:
    """The factors of the rows `spot.rows`, (B or 1, h or 1, q or 1), with those of a source whose weights are taken."""
    factor = like.new_full((1, 1, 1), factor_of(edits))
    for one in edits:
        frozen = one.frozen_factor(spot) if isinstance(one, Patch) else None
        factor = factor if frozen is None else factor * frozen
    return factor


def maps(one: Edit) -> bool:
    """Whether an edit changes the weights after the softmax by a function of them."""
    return type(one).weights is not Edit.weights


def weights_after(problem: Problem, edits: Sequence[Edit], rows: Rows, recorded: str | None = None) -> Tensor:
    """The weights (B, h, q, Lk) of some rows with the changes that edits make after the softmax, but for factors.

    `recorded`: the name of the call, where the weights are for a record of it. Then a function that gives other weights
    each time is an error.
    """
    part = guard(cut(problem, Region(queries=rows.hull)))
    scores = choose(part._replace(value=None), None).scores(part)
    found = (tiles.weights(part, scores) if part.sizes.keys else scores)[:, :, rows.within]
    hidden = None if part.spans is None else ~dense(part.spans, part.sizes)[:, :, rows.within]
    for one in edits:
        removed = gone([one], rows.spot)
        if removed.any():
            found = found.masked_fill(torch.from_numpy(removed).to(found.device), 0.0)
        if not maps(one):
            continue
        who = "MapWeights: function" if ours(one) else f"{type(one).__name__}.weights"
        old, given = found, found.clone() if found.requires_grad or recorded else found  # it may write to them
        new = one.weights(given, rows.spot)
        _check_same(new, old, who, "weights", "(B, h, q, Lk)")
        if recorded and not same(new, one.weights(old.clone(), rows.spot)):
            raise _unsteady(recorded, one)
        found = new if hidden is None else new.masked_fill(hidden, 0.0)
    return found


def _output(problem: Problem, edits: list[Edit], rows: Rows) -> Tensor:
    """The output of some rows, with the changes that edits make to weights after the softmax."""
    part = cut(problem, Region(queries=rows.hull))
    if any(map(maps, edits)):
        weights, value = weights_after(problem, edits, rows), guard(part).value
        assert value is not None
        by_head = value.repeat_interleave(part.groups, 1).to(weights.dtype)
        return (weights @ by_head).to(value.dtype)
    removed = gone(edits, rows.spot)
    if not removed.any():
        output = _attended(part)
    else:  # the output of the other keys times their share of the whole softmax
        rest = without_keys(part, removed)
        some, every = (operation.partial(each, choose(each, None)) for each in (rest, part))
        sums = [log_sum_exp(each.maximum, each.log_sum) for each in (some, every)]  # type: ignore[arg-type]
        share = (sums[0] - sums[1]).masked_fill(sums[0] == -torch.inf, -torch.inf).exp()
        output = some.output * share.unsqueeze(-1)
    return output[:, :, rows.within]


def after(output: Tensor, edits: Sequence[Edit], spot: Spot) -> Tensor:
    """The output (B, h, q, Ev) with the changes of its edits, in their order."""
    for one in edits:
        factor = factor_of([one])
        output = output if factor == 1.0 else output * factor
        new = one.after(output, spot)
        if new is not output and not ours(one):
            _check_same(new, output, f"{type(one).__name__}.after", "an output", "(B, h, q, Ev)")
        output = new
    return output


def _check_same(new: Any, old: Tensor, who: str, what: str, axes: str) -> None:
    """Raise an error unless a tensor can stand in the place of another one."""
    fits = isinstance(new, Tensor) and is_dense(new)
    if not (fits and (new.shape, new.dtype, new.device) == (old.shape, old.dtype, old.device)):
        got = f"{tuple(new.shape)} of {new.dtype} on {new.device}" if fits else f"a {type(new).__name__}"
        raise ShapeError(f"{who} gave {got}; expected {what} {tuple(old.shape)} {axes} of {old.dtype} on {old.device}.")
    check_memory(new, f"the tensor that {who} gave")


def _attended(problem: Problem) -> Tensor:
    return operation.run(problem, choose(problem, None))


def check_steady(problem: Problem, edits: Sequence[Edit], spot: Spot, name: str) -> None:
    """Raise an error where an edit gives two answers for one problem, as an edit that draws random numbers does."""
    for one in edits:
        if ours(one):
            continue
        answers = ((before(problem, [one], spot), gone([one], spot), factor_of([one])) for _ in range(2))
        problems, removed, factors = zip(*answers, strict=True)
        if not (_same_problem(*problems) and np.array_equal(*removed) and factors[0] == factors[1]):
            raise _unsteady(name, one)


def _unsteady(name: str, one: Edit) -> UnsupportedError:
    return UnsupportedError(
        f"{name}: {type(one).__name__} gives other results each time it is called, so a record would not be of the "
        "call that ran. Draw random numbers once, or look at the model outside of the edit's `with`."
    )


def _same_problem(one: Problem, other: Problem) -> bool:
    """Whether two problems have the same numbers, but for those that a user-defined score reads."""
    if one is other:
        return True
    shared: Any = {name: None for name in ("visible", "bias") if getattr(one, name) is getattr(other, name)}
    return all(map(same, *(_numbers_of(problem._replace(**shared)) for problem in (one, other))))


def _numbers_of(problem: Problem) -> list[Any]:
    if problem.lowered is None:
        problem = problem._replace(scores=Pairwise("mul", problem.query, problem.key))
    tensors, numbers = packed(problem)
    return [*tensors, *numbers]


def same(one: Any, other: Any) -> bool:
    """Whether two tensors, or two numbers, are the same."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return bool(one == other)
    if one is other or one.shape != other.shape:
        return one is other
    return bool(((one == other) | ((one != one) & (other != other))).all())
