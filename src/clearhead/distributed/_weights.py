"""Statistics of the weights of a sequence that is shared out over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead._attention import ScoreLike
from clearhead.base.errors import ClearheadError, UnsupportedError
from clearhead.base.torch_state.contexts import disable_compiler, without_autocast
from clearhead.biases.base import BiasLike
from clearhead.distributed.agreement import agree
from clearhead.distributed.by_key import OverQueries, over_queries
from clearhead.distributed.by_query import by_query
from clearhead.distributed.layout import Layout, check_layout
from clearhead.distributed.once import refuse_transforms
from clearhead.distributed.pieces import Shard, sharded
from clearhead.inspection.reductions.base import Reduction
from clearhead.inspection.reductions.by_query import Output
from clearhead.masks.base import MaskLike
from clearhead.problem.partial import rows_of
from clearhead.problem.problem import ABSENT, Problem
from clearhead.problem.summary import Summary

# without sums and maxima over queries, which need the rows of the whole softmax
OVER_QUERIES: dict[str, Any] = {"received": False, "mean": None, "peak": None, "factors": None}


class ShardedWeights:
    """The weights of a sequence that is shared out over ranks; `reduce` gives statistics of them."""

    def __init__(self, query: Tensor, key: Tensor, layout: Layout, given: Mapping[str, object]) -> None:
        self._operands, self._layout = (query, key), layout
        self._given: dict[str, Any] = dict(given)

    def __repr__(self) -> str:
        return f"ShardedWeights({tuple(self._operands[0].shape)} of {self._layout})"

    @disable_compiler
    @torch.no_grad()
    def reduce(self, *reductions: Reduction[object]) -> Tensor | tuple[Tensor | tuple[Tensor, ...], ...]:
        """Reductions of the weights, as in `Weights.reduce`: the result of one, or a tuple of the results of several.

            found = ch.distributed.weights(query, key, layout=layout, mask=ch.Causal())
            wanted = ch.reductions.Entropy(), ch.reductions.TopK(5), ch.reductions.Pool(128)
            entropy, (values, indices), image = found.reduce(*wanted)

        Each result equals that of one process. Statistics of queries (`Entropy`, `LogSumExp`, `MaxScore`, `TopK`,
        `Mass`, `MeanDistance`, `SinkShare`, `Output`) and of keys (`Received`) are given for this rank's positions; the
        keys of `TopK` are positions in the whole sequence. A map (`Pool`) is of the whole sequence, the same to the bit
        on every rank. Groups of `Mass`, and factors of `queries=`, are of the whole sequence, the same on every rank;
        the value of `Output` is this rank's part. Results have no gradients.
        Every rank calls it together, with the same reductions. Raises a `ClearheadError` where the ranks' reductions
        differ, and an `UnsupportedError` for reductions that look at blocks of whole rows, for slices of queries with a
        step, and for reductions of your own whose `of` gives another mask, bias or score, or numbers for only some
        queries. Cost: a pass over the allowed pairs, and the messages of keys that `plan` shows. `Received` and maps
        need a second pass with its messages, and send a number for each key and head back. A map is gathered from all
        ranks.
        """
        wrong = [r for r in reductions if not isinstance(r, Reduction)]
        if wrong:
            raise ClearheadError(f"reduce takes reductions such as Entropy() or TopK(5), not {wrong[0]!r:.60}.")
        shard = self._shard(reductions)
        with without_autocast(shard.local.sizes.device):
            asked = [_asked(reduction, shard.whole) for reduction in reductions]
            words = tuple(_in_words(one) for one in asked)
            agree(shard, ("weights", *words), tuple(t for one in asked for t in one.summary if isinstance(t, Tensor)))
            restore = shard.local.sizes.restore
            results = tuple(
                tuple(map(restore, result)) if isinstance(result, tuple) else restore(result)
                for result in _results(asked, shard)
            )
            return results[0] if len(results) == 1 else results

    def _shard(self, reductions: tuple[Reduction[Any], ...]) -> Shard:
        check_layout(self._layout)
        refuse_transforms()
        values: list[Any] = [r.value for r in reductions if isinstance(r, Output)] or [ABSENT]
        if len(values) > 1:
            raise ClearheadError("reduce takes one Output(value); join the values along their last dimension.")
        local = sharded(*self._operands, values[0], self._layout, **self._given)
        return Shard.from_problem(local, self._layout)


class _Asked(NamedTuple):
    """A reduction, the problem of the whole sequence that it is of, and the statistics from which it is made."""

    reduction: Reduction[Any]
    meant: Problem
    summary: Summary

    @property
    def queries(self) -> range:
        return range(self.meant.sizes.queries) if self.meant.origin is None else self.meant.origin[2]


def _asked(reduction: Reduction[Any], whole: Problem) -> _Asked:
    reduction.check(whole)
    meant = reduction.of(whole)
    summary = reduction.summary(meant)
    if summary is None:
        raise UnsupportedError(
            f"{type(reduction).__name__} looks at blocks of whole rows, and over ranks a row's keys come in parts: "
            "reductions that have a summary() can be merged."
        )
    asked = _Asked(reduction, meant, summary)
    of_queries = any((summary.output, summary.rows, summary.entropy, summary.best, summary.top))
    of_queries = of_queries or summary.groups is not None or summary.distance is not None
    if asked.queries.step != 1 or (len(asked.queries) < whole.sizes.queries and of_queries):
        raise UnsupportedError(
            f"{reduction!r:.80} is of some queries, and over ranks statistics of queries are given for all queries of "
            "this rank: queries can be chosen only for Received and for maps, and cannot have a step."
        )
    parts = "scores", "visible", "bias"
    if meant.origin is None and any(getattr(meant, name) is not getattr(whole, name) for name in parts):
        raise UnsupportedError(
            f"{reduction!r:.80} is of another score, mask or bias; over ranks its of() may leave out only queries "
            "and sinks."
        )
    return asked


def _in_words(one: _Asked) -> tuple[Any, ...]:
    """The description of a reduction, without the tensors that it reads."""
    numbers = tuple(value for value in one.summary if not isinstance(value, Tensor))
    return type(one.reduction).__name__, one.meant.sinks is None, str(one.queries), str(numbers)


def _results(asked: list[_Asked], shard: Shard) -> list[Any]:
    """The results: statistics of queries in a first pass; statistics of keys, and maps, in a second pass. The second
    pass uses the maximum and the log-sum of each row, which the first pass finds."""
    summaries, places = _together([one.summary._replace(**OVER_QUERIES) for one in asked])
    merged = [found.found for found in by_query(shard, summaries)]
    found = [merged[at](one.meant.sinks) for one, at in zip(asked, places, strict=True)]
    of_keys = [i for i, one in enumerate(asked) if one.summary.received or one.summary.mean or one.summary.peak]
    wanted = [OverQueries(asked[i].summary, asked[i].queries, *rows_of(found[i])) for i in of_keys]
    for i, more in zip(of_keys, over_queries(shard, wanted), strict=True):
        found[i] = found[i]._replace(received=more.received, mean=more.mean, peak=more.peak)
    return [one.reduction.found(own, one.meant) for one, own in zip(asked, found, strict=True)]


def _together(summaries: list[Summary]) -> tuple[list[Summary], list[int]]:
    """The summaries joined into as few as possible, and for each given summary the place of the joined one."""
    few: list[Summary] = []
    places = []
    for summary in summaries:
        joined: list[Any] = [*(other.with_also(summary) for other in few), summary]
        at = next(at for at, both in enumerate(joined) if both is not None)
        few[at : at + 1] = [joined[at]]
        places.append(at)
    return few, places


def weights(
    query: Tensor,
    key: Tensor,
    *,
    layout: Layout,
    score: ScoreLike = None,
    mask: MaskLike = None,
    bias: BiasLike = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> ShardedWeights:
    """The weights of a sequence that is shared out over ranks; `reduce` gives statistics of them.

        found = ch.distributed.weights(query, key, layout=layout, mask=ch.Causal())
        wanted = ch.reductions.Entropy(), ch.reductions.TopK(5), ch.reductions.Received()
        entropy, (values, indices), received = found.reduce(*wanted)

    The arguments are those of `attention` over ranks: this rank's part of query and key; mask, bias and sinks of the
    whole sequence. Returns `ShardedWeights`; nothing is sent before `reduce`, which raises as `attention` does.
    """
    given = {"score": score, "mask": mask, "bias": bias, "scale": scale, "sinks": sinks}
    return ShardedWeights(query, key, layout, given)
