"""The figures of each head that a monitor keeps: entropy, largest logit and sink share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.inspection.reductions.base import Reduction
from clearhead.inspection.reductions.by_query import Entropy, MaxScore, SinkShare
from clearhead.models.interception.layers import LayerName
from clearhead.models.recordings.reduced import ReducedCall
from clearhead.models.table import Table
from clearhead.problem.problem import Problem
from clearhead.problem.summary import Found, Summary
from clearhead.problem.unseen import seen


@dataclass(frozen=True)
class ToSinks(Reduction):
    """The share of each query's softmax that goes to its sequence's first key, and to its head's sink, if it has one.

    Formula: p_i = w_if + 1 − Σ_j w_ij, where f is the first key that any query of the sequence may see. Result: (B, H,
    Lq).
    """

    along = "queries"

    def summary(self, problem: Problem) -> Summary:
        return Summary(groups=_find_first_key(problem), rows=problem.sinks is not None)

    def found(self, found: Found, problem: Problem) -> Tensor:
        assert found.groups is not None
        share = found.groups[..., 0]
        return share if problem.sinks is None else share + SinkShare().found(found, problem)


def _find_first_key(problem: Problem) -> Tensor:
    """A tensor (B or 1, Lk, 1) with 1 at the first key that some query of the sequence may see, and 0 elsewhere."""
    sizes, spans = problem.sizes, problem.spans
    every = torch.ones(1, sizes.keys, dtype=torch.bool, device=sizes.device)
    keys = every if spans is None else seen(spans, sizes)[0].any(1)  # (B or 1, Lk)
    first = keys & (keys.cumsum(-1) == 1)
    return first.to(problem.key.dtype).unsqueeze(-1)


COLUMNS = ("entropy", "max_logit", "sink_share")
KEEP = (Entropy(), MaxScore(), ToSinks())  # the reductions of a call, in the order of the columns


def compute_figures(calls: list[ReducedCall]) -> dict[str, Tensor]:
    """The figures of each module, (H, 3), float64: mean entropy, largest logit and mean sink share of its queries."""
    totals: dict[str, Tensor] = {}
    for call in calls:
        total, before = _add_up(call), totals.get(call.name)
        if before is not None:  # a module that several layers share
            largest = torch.maximum(before[:, 1], total[:, 1])
            total = before + total
            total[:, 1] = largest
        totals[call.name] = total
    device = next(iter(totals.values())).device  # the layers of a model may be on several devices
    every = torch.cat([total.to(device) for total in totals.values()]).cpu()  # the device is waited for once
    every[:, [0, 2]] /= every[:, 3:]
    parts = torch.split(every[:, :3], [len(total) for total in totals.values()])
    return {name: part.clone() for name, part in zip(totals, parts, strict=True)}


def _add_up(call: ReducedCall) -> Tensor:
    """A tensor (H, 4): the sum of entropies, the largest logit, the sum of sink shares, and the number of queries."""
    results: tuple[Any, ...] = call.results
    entropy, largest, share = (result.double() for result in results)
    uncounted = ~call.queries
    largest = largest.masked_fill(uncounted, -torch.inf).transpose(0, 1).flatten(1)
    return torch.stack(
        [
            entropy.masked_fill(uncounted, 0.0).sum((0, 2)),
            F.pad(largest, (0, 1), value=-torch.inf).amax(1),  # a batch may be empty
            share.masked_fill(uncounted, 0.0).sum((0, 2)),
            call.queries.sum((0, 2)).double(),
        ],
        -1,
    )


def make_rows(step: int, found: dict[str, Tensor], layers: dict[str, LayerName]) -> Table:
    """A row for each head: step, layer (the first, where several share the module), module, head, and the figures."""
    each = (
        Table.of(
            {"step": step, "layer": layers[name].column, "module": name},
            {"head": range(len(heads)), **dict(zip(COLUMNS, heads.T.tolist(), strict=True))},
        )
        for name, heads in found.items()
    )
    return Table(row for rows in each for row in rows)
