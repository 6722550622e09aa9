"""What is kept of a call that is reduced when it happens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.inspection.reductions.base import Reduction
from clearhead.inspection.reductions.log_sum_exp import LogSumExp
from clearhead.inspection.reductions.topk import TopK
from clearhead.inspection.source import FromRecord
from clearhead.inspection.weights import Weights
from clearhead.models._padding import Real
from clearhead.models.attention_call import AttentionCall
from clearhead.models.padded import PaddedWeights
from clearhead.problem.region import Region
from clearhead.problem.regions import cut

Heads = int | slice | Sequence[int] | None


@dataclass(frozen=True, eq=False)
class ReducedCall:
    """An attention call of a model, of which what reductions found is kept, and no query and no key.

    `results`: those of `watch(keep=…)`, in their order, each (B, H, …); `TopK` gives weight 0 and key −1 where there
    are fewer keys than k. `shape`: (B, H, Lq, Lk), H the heads that were asked for. `name`, `kind`, `backend`,
    `padding`, `run`: as in `AttentionCall`. `counted`: which queries see a key and are no padding, bool (B, H, Lq):
    `means` are over them.
    """

    name: str
    kind: Literal["self", "cross"]
    backend: str
    shape: tuple[int, int, int, int]
    reductions: tuple[Reduction, ...]
    results: tuple[Any, ...]
    counted: Tensor
    padding: Real | None = None
    run: int = 0

    @property
    def weights(self) -> NoReturn:
        raise ClearheadError(
            f"{self.name} was watched with keep=…, so its query and key were not kept, and its weights cannot be "
            "computed. Name all that you need in keep, or watch without it."
        )

    @property
    def means(self) -> tuple[Tensor, ...]:
        """Each result's mean for a head, over the batch and the queries (or keys) that count: (H, …), float64.

        Of `TopK` the mean of its values. NaN where nothing counts.
        """
        return tuple(total / count for total, count in self.sums())

    def sums(self) -> list[tuple[Tensor, Tensor]]:
        """For each result its sum over all that counts, (H, …), and how many that are, (H, 1, …); float64."""
        return [self._sums(result, one) for result, one in zip(self.results, self.reductions, strict=True)]

    def _sums(self, result: Any, reduction: Reduction) -> tuple[Tensor, Tensor]:
        values: Tensor = (result[0] if isinstance(result, tuple) else result).double()
        batch, heads, _, keys = self.shape
        if reduction.along is None:
            return values.sum(0), values.new_full((heads,) + (1,) * (values.ndim - 2), float(batch))
        if reduction.along == "queries":
            counted = self.counted
        else:
            words = None if self.padding is None else self.padding.keys
            counted = values.new_ones((batch, 1, keys), dtype=torch.bool) if words is None else words.unsqueeze(1)
            counted = counted.expand(-1, heads, -1)
        counted = counted.reshape(*counted.shape, *(1,) * (values.ndim - 3))
        return values.masked_fill(~counted, 0.0).sum((0, 2)), counted.sum((0, 2)).double()

    def __repr__(self) -> str:
        kept = ", ".join(type(reduction).__name__ for reduction in self.reductions)
        return f"ReducedCall({self.name!r}, {self.kind}, {'×'.join(map(str, self.shape))}, {kept}, {self.backend})"


@torch.no_grad()
def reduced(call: AttentionCall, reductions: tuple[Reduction, ...], heads: Heads = None) -> ReducedCall:
    """Reduce the weights of a call: all heads in one pass over them, or each run of heads that is asked for."""
    problem, found = call.problem, []
    runs = _runs(heads, problem.sizes.heads, call.name)
    for run in runs:
        record = call.record._replace(problem=cut(problem, Region(heads=run)))
        source = FromRecord(record, {})
        weights = Weights(source) if call.padding is None else PaddedWeights(source, call.padding)
        few = (_of_keys(one, problem.sizes.keys) for one in reductions)
        found.append(weights.reduce(*few, LogSumExp()))
    *results, rows = (_together(parts) for parts in zip(*found, strict=True))
    results = [_filled(result, one) for result, one in zip(results, reductions, strict=True)]
    batch, _, queries, keys = problem.sizes.shape
    counted = rows != -torch.inf
    if call.padding is not None and call.padding.queries is not None:
        counted &= call.padding.queries.unsqueeze(1)
    shape = batch, rows.shape[1], queries, keys
    return ReducedCall(
        call.name, call.kind, call.backend, shape, reductions, tuple(results), counted, call.padding, call.run
    )


def _of_keys(reduction: Reduction, keys: int) -> Reduction:
    """The same for no more keys than there are: a text may be shorter than k."""
    return TopK(min(reduction.k, keys)) if isinstance(reduction, TopK) and keys else reduction


def _filled(result: Any, reduction: Reduction) -> Any:
    """The largest weights with 0, and key −1, where there are fewer keys than k."""
    if not isinstance(reduction, TopK):
        return result
    values, indices = result
    missing = reduction.k - values.shape[-1]
    return F.pad(values, (0, missing)), F.pad(indices, (0, missing), value=-1)


def _together(parts: Any) -> Any:
    """The results of runs of heads as one."""
    if isinstance(parts[0], tuple):
        return tuple(_together(each) for each in zip(*parts, strict=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _runs(heads: Heads, count: int, name: str) -> list[slice]:
    """The heads that are asked for, as slices."""
    if heads is None:
        return [slice(0, count)]
    if isinstance(heads, slice):
        found: Iterable[int] = range(count)[heads]
    else:
        found = [heads] if isinstance(heads, int) else heads
    numbers = list(found)
    if not numbers or not all(-count <= number < count for number in numbers):
        raise ClearheadError(f"watch: heads is {heads!r}, and {name} has {count} heads, numbered from 0.")
    numbers = [range(count)[number] for number in numbers]
    runs = [slice(numbers[0], numbers[0] + 1)]
    for number in numbers[1:]:
        if number == runs[-1].stop:
            runs[-1] = slice(runs[-1].start, number + 1)
        else:
            runs.append(slice(number, number + 1))
    return runs
