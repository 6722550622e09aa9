"""The results that are kept of a call that is reduced when it happens, and their running means over a corpus."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.output.text import brief, listed
from clearhead.inspection.reductions.base import Reduction, columns_of
from clearhead.inspection.reductions.by_query import LogSumExp, TopK
from clearhead.inspection.source import FromRecord
from clearhead.models.interception.choice import Heads, heads_of, runs_of
from clearhead.models.interception.layers import FIRST, LayerName
from clearhead.models.interception.modules import Kind
from clearhead.models.recordings.attention_call import AttentionCall
from clearhead.models.recordings.call import Call
from clearhead.models.recordings.calls import Calls
from clearhead.models.recordings.weights import weights_of
from clearhead.problem.problem import Problem
from clearhead.problem.record import now
from clearhead.problem.region import Region
from clearhead.problem.regions import cut
from clearhead.problem.unseen import seen
from clearhead.problem.words import ALL_WORDS, Words


@dataclass(frozen=True, eq=False)
class ReducedCall(Call):
    """An attention call of a model: the results of reductions are kept, and no query and no key.

    `results`: a tuple in the order of the reductions, also of one, each (B, H, …); `TopK` gives weight 0 and key −1
    where there are fewer keys than k. `shape`: (B, H, Lq, Lk), where H is the number of chosen heads; `heads`: their
    numbers. `name`, `kind`, `backend`, `padding`, `run`: as in `AttentionCall`. `queries`, bool (B, H, Lq): the queries
    that see a key and are no padding. `keys`, bool (B, H, Lk): the keys that are seen and are no padding; None unless a
    result has a number for each key. `means` are over these queries or keys.
    """

    name: str
    kind: Kind
    backend: str
    shape: tuple[int, int, int, int]
    reductions: tuple[Reduction[object], ...]
    results: tuple[Tensor | tuple[Tensor, ...], ...]
    heads: tuple[int, ...]
    queries: Tensor
    keys: Tensor | None = None
    padding: Words | None = None
    run: int = 0
    layer: LayerName = FIRST

    @property
    def weights(self) -> NoReturn:
        raise ClearheadError(f"{self.name} was reduced, not kept. Name all statistics that you need in reductions.")

    @property
    def unedited(self) -> NoReturn:
        raise ClearheadError(f"{self.name} was reduced by statistics(…), as edited; ch.watch(model) keeps unedited.")

    @property
    def means(self) -> tuple[Tensor, ...]:
        """The mean of each result for each head, over the batch and the `queries` or `keys`: (H, …), float64.

        A result of several tensors has the mean of the first: `TopK` that of its values. NaN where nothing is counted.
        """
        return tuple(total / count for total, count in self.sums())

    def sums(self) -> list[tuple[Tensor, Tensor]]:
        """For each result its sum over the `queries` or `keys`, (H, …), and their number, (H, 1, …), in float64."""
        return [self._sums(result, one) for result, one in zip(self.results, self.reductions, strict=True)]

    def _sums(self, result: Any, reduction: Reduction[Any]) -> tuple[Tensor, Tensor]:
        first: Tensor = result[0] if isinstance(result, tuple) else result
        values = first.to("cpu", torch.float64)
        if reduction.along is None:
            return values.sum(0), values.new_full((self.shape[1],) + (1,) * (values.ndim - 2), float(self.shape[0]))
        counted = self.queries if reduction.along == "queries" else self.keys
        assert counted is not None
        counted = counted.cpu().reshape(*counted.shape, *(1,) * (values.ndim - 3))
        return values.masked_fill(~counted, 0.0).sum((0, 2)), counted.sum((0, 2)).double()

    def _by_head(self) -> Mapping[str, Iterable[object]]:
        """The head, and each of `means` that is one number."""
        means = zip(columns_of(self.reductions), self.means, strict=True)
        numbers = {name: mean.flatten().tolist() for name, mean in means if mean.numel() == len(mean)}
        return {"head": self.heads, **numbers}

    def __repr__(self) -> str:
        kept = ", ".join(type(reduction).__name__ for reduction in self.reductions)
        return f"ReducedCall({self.name!r}, {self.kind}, {'×'.join(map(str, self.shape))}, {kept}, {self.backend})"


class Statistics(Calls[ReducedCall]):
    """The attention calls of a model that `clearhead.models.statistics` has reduced, each with its `results`.

    `table()` has a row for each call and head. Its columns: layer, run, module, kind, backend, queries, keys, head; and
    for each reduction whose mean is one number for a head, a column with the reduction's name.
    """


@torch.no_grad()
def reduced(call: AttentionCall, reductions: tuple[Reduction[Any], ...], heads: Heads = None) -> ReducedCall:
    """Reduce the weights of a call: all heads in one pass, or each run of neighbouring chosen heads in one pass."""
    problem, found = call.problem, []
    batch, count, queries, keys = problem.sizes.shape
    numbers = heads_of(heads, count, call.name, "statistics")
    # a text may have fewer keys than k; the log-sum-exp says which queries see a key
    wanted = [TopK(min(one.k, keys)) if type(one) is TopK and keys else one for one in (*reductions, LogSumExp())]
    for run in runs_of(numbers):
        source = FromRecord(now(cut(problem, Region(heads=run))), {})
        weights = weights_of(source, call.padding, None if call.factor is None else call.factor[:, run])
        found.append(weights.reduce(*wanted))
    *every, rows = (_together(parts) for parts in zip(*found, strict=True))
    results = [_filled(result, one) for result, one in zip(every, reductions, strict=True)]
    words = call.padding or ALL_WORDS
    counted = rows != -torch.inf
    if words.queries is not None:
        counted &= words.queries.unsqueeze(1)
    of_keys = _seen_keys(problem, words.keys, numbers) if any(one.along == "keys" for one in reductions) else None
    return ReducedCall(
        name=call.name,
        kind=call.kind,
        backend=call.backend,
        shape=(batch, len(numbers), queries, keys),
        reductions=reductions,
        results=tuple(results),
        heads=numbers,
        queries=counted,
        keys=of_keys,
        padding=call.padding,
        run=call.run,
        layer=call.layer,
    )


def _seen_keys(problem: Problem, words: Tensor | None, heads: tuple[int, ...]) -> Tensor:
    """The keys that some query sees and that are no padding, bool (B, H, Lk). A cache may have empty slots."""
    batch, _, _, keys = problem.sizes.shape
    counted = torch.ones(batch, 1, keys, dtype=torch.bool, device=problem.query.device)
    if problem.spans is not None:
        found, _ = seen(problem.spans, problem.sizes)
        counted = counted & (found if found.shape[1] == 1 else found[:, list(heads)])
    if words is not None:
        counted = counted & words.unsqueeze(1)
    return counted.expand(-1, len(heads), -1)


def _filled(result: Any, reduction: Reduction[Any]) -> Any:
    """The largest weights, filled up with weight 0 and key −1 where there are fewer keys than k."""
    if type(reduction) is not TopK or result[0].shape[-1] == reduction.k:
        return result
    values, indices = result
    missing = reduction.k - values.shape[-1]
    return F.pad(values, (0, missing)), F.pad(indices, (0, missing), value=-1)


def _together(parts: Any) -> Any:
    """The results of all runs of heads, joined along the heads."""
    if isinstance(parts[0], tuple):
        return tuple(_together(each) for each in zip(*parts, strict=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


_lock = threading.Lock()  # of all means, since a lock of their own could not be copied


class Means:
    """Means, for each head, of the results of `clearhead.models.statistics` over any number of calls.

    >>> import torch, clearhead as ch
    >>> block, means = ch.nn.DotProductAttention(), ch.models.Means()
    >>> for x in (torch.rand(1, 4, 10, 8), torch.rand(1, 4, 300, 8)):
    ...     with ch.models.statistics(block, [ch.reductions.Entropy()], merge=means):
    ...         output = block(x, x, x, mask=ch.Causal())
    >>> means["DotProductAttention"][0].shape, means.counts["DotProductAttention"][0].tolist()
    (torch.Size([4]), [310.0, 310.0, 310.0, 310.0])

    `means[name]`: the means of one module in the order of the reductions, each (H, …), float64. Every query that sees a
    key and is no padding weighs the same, whichever text it belongs to. In `Received` every key that is seen and is no
    padding weighs the same, and in `Pool` every sequence. For `TopK` the means are those of its values. Memory does not
    grow with the number of calls.
    `state_dict()` gives sums and counts. The states of two runs, added key by key, are the state of both together.
    If the model fails during a text, the layers before the failure have been added.
    Raises a `ClearheadError` where a module's reductions or heads differ from those before, and a `ShapeError` where a
    result has another shape: a `Pool` has ⌈L / ⌈L / size⌉⌉ cells, a number that depends on the length.
    """

    def __init__(self) -> None:
        self._sums: dict[str, list[Tensor]] = {}
        self._counts: dict[str, list[Tensor]] = {}
        self._of: dict[str, Any] = {}  # by module, the reductions and heads of its means, where they are known

    def add(self, call: ReducedCall) -> None:
        """Add one call."""
        self._include(call.name, [type(one).__name__ for one in call.reductions], call.heads, call.sums())

    def _include(self, name: str, kept: list[str], heads: tuple[int, ...], sums: list[tuple[Tensor, Tensor]]) -> None:
        """Add the sums and counts of a module's call. `kept`: what they are of."""
        with _lock:
            before, heads_before = self._of.setdefault(name, (kept, heads))
            if (before, heads_before) != (kept, heads):
                raise ClearheadError(
                    f"{name}: these are means of {', '.join(before)} in the heads {heads_before}; {', '.join(kept)} in "
                    f"the heads {heads} need a ch.models.Means() of their own."
                )
            self._add(name, [total for total, _ in sums], [count for _, count in sums])

    def _add(self, name: str, sums: list[Tensor], counts: list[Tensor]) -> None:
        before = self._sums.get(name)
        if before is None:
            self._sums[name], self._counts[name] = sums, counts
            return
        shapes, now = ([tuple(t.shape) for t in tensors] for tensors in (before, sums))
        if shapes != now:
            raise ShapeError(
                f"{name}: the sums have shapes {now}, and those of the calls before {shapes}. A Pool's map depends on "
                "the length of the text: take means of texts of one length, or leave it out."
            )
        self._sums[name] = [a + b for a, b in zip(before, sums, strict=True)]
        self._counts[name] = [a + b for a, b in zip(self._counts[name], counts, strict=True)]

    def include(self, state: Mapping[str, Tensor], modules: Iterable[str]) -> None:
        """Add the sums and counts of another `Means`, by its state, for these modules."""
        other = Means()
        other.load_state_dict(state)
        with _lock:
            for name in modules:
                self._add(name, other._sums[name], other._counts[name])

    def __getitem__(self, name: str) -> tuple[Tensor, ...]:
        if name not in self._sums:
            raise ClearheadError(f"there are no means of a module {name!r}; there are those of: {listed(self)}.")
        return tuple(s / c for s, c in zip(self._sums[name], self._counts[name], strict=True))

    def __iter__(self) -> Iterator[str]:
        return iter(self._sums)

    def __len__(self) -> int:
        return len(self._sums)

    @property
    def counts(self) -> dict[str, tuple[Tensor, ...]]:
        """By module, the number of queries, keys or sequences in each mean, for each head."""
        return {name: tuple(c.reshape(len(c), -1)[:, 0] for c in counts) for name, counts in self._counts.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Sums and counts, by "name:number:sum" and "name:number:count"."""
        return {
            f"{name}:{i}:{what}": tensor.clone()
            for what, held in (("sum", self._sums), ("count", self._counts))
            for name, tensors in held.items()
            for i, tensor in enumerate(tensors)
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace all sums and counts by these. Raises a `ClearheadError` unless they are the state of a `Means`."""
        found: dict[str, dict[int, dict[str, Tensor]]] = {}
        try:
            for key, tensor in state.items():
                name, number, what = key.rsplit(":", 2)
                held = found.setdefault(name, {}).setdefault(int(number), {})
                held[what] = tensor.detach().to("cpu", torch.float64, copy=True)
            sums, counts = (
                {name: [by_number[i][what] for i in range(len(by_number))] for name, by_number in found.items()}
                for what in ("sum", "count")
            )
            for total, count in ((a, b) for name in sums for a, b in zip(sums[name], counts[name], strict=True)):
                count.expand_as(total)
        except (AttributeError, KeyError, ValueError, RuntimeError) as error:
            raise ClearheadError(
                "the state of Means has tensors 'module:number:sum' and …count of each result, alike in shape; got "
                f"{brief(state)}."
            ) from error
        self._of, self._sums, self._counts = {}, sums, counts

    def __repr__(self) -> str:
        return f"Means({len(self)} modules)"
