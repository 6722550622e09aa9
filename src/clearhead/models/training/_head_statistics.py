"""Three numbers a head: entropy, largest logit, sink share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead.inspection.reductions.entropy import Entropy
from clearhead.inspection.reductions.max_score import MaxScore
from clearhead.models.reduced import ReducedCall
from clearhead.models.training._to_sinks import ToSinks

COLUMNS = ("entropy", "max_logit", "sink_share")
KEEP = (Entropy(), MaxScore(), ToSinks())  # what a call is reduced by, in the order of the columns


def of_heads(calls: list[ReducedCall]) -> dict[str, Tensor]:
    """By module (H, 3), float64: over the queries that count, the mean, the largest and the mean."""
    totals: dict[str, Tensor] = {}
    for call in calls:
        total, before = _totals(call), totals.get(call.name)
        if before is not None:  # a module that several layers share
            largest = torch.maximum(before[:, 1], total[:, 1])
            total = before + total
            total[:, 1] = largest
        totals[call.name] = total
    every = torch.cat(list(totals.values())).cpu()  # one wait for the device
    every[:, [0, 2]] /= every[:, 3:]
    parts = torch.split(every[:, :3], [len(total) for total in totals.values()])
    return {name: part.clone() for name, part in zip(totals, parts, strict=True)}


def _totals(call: ReducedCall) -> Tensor:
    """(H, 4): the sum of entropies, the largest logit, the sum of sink shares, and over how many queries."""
    entropy, largest, share = (result.double() for result in call.results)
    uncounted = ~call.queries
    return torch.stack(
        [
            entropy.masked_fill(uncounted, 0.0).sum((0, 2)),
            largest.masked_fill(uncounted, -torch.inf).amax((0, 2)),
            share.masked_fill(uncounted, 0.0).sum((0, 2)),
            call.queries.sum((0, 2)).double(),
        ],
        -1,
    )


def rows_of(step: int, found: dict[str, Tensor]) -> list[dict[str, Any]]:
    """A row for each head: step, module, head, and the three numbers."""
    return [
        {"step": step, "module": name, "head": head} | dict(zip(COLUMNS, values, strict=True))
        for name, heads in found.items()
        for head, values in enumerate(heads.tolist())
    ]
