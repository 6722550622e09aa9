"""What a watch with `keep=` gives."""

from __future__ import annotations

from typing import Any

from clearhead.inspection.reductions.base import Reduction
from clearhead.inspection.reductions.entropy import Entropy
from clearhead.inspection.reductions.mean_distance import MeanDistance
from clearhead.inspection.reductions.sink_share import SinkShare
from clearhead.inspection.reductions.topk import TopK
from clearhead.models.call import AttentionCall
from clearhead.models.calls import Calls
from clearhead.models.use.reduced import ReducedCall


class Statistics(Calls[ReducedCall]):
    """The attention calls of a model watched with `keep=`: of each its `results`."""

    def table(self) -> list[dict[str, Any]]:
        """A row for each call and head, as `pandas.DataFrame` takes them.

        Its columns: run, module, kind, backend, queries, keys, head; and, by the name of its reduction, each of
        `call.means` that is one number a head.
        """
        return [row for call in self.calls for row in rows_of(call)]


def rows_of(call: ReducedCall) -> list[dict[str, Any]]:
    """A row for each head: run, module, kind, backend, queries, keys, head, and each mean that is one number."""
    _, _, queries, keys = call.shape
    same = {"run": call.run, "module": call.name, "kind": call.kind, "backend": call.backend}
    same |= {"queries": queries, "keys": keys}
    columns: dict[str, list[float]] = {}
    for reduction, mean in zip(call.reductions, call.means, strict=True):
        name = type(reduction).__name__
        name = name if name not in columns else f"{name} {len(columns)}"
        if mean.numel() == len(mean):  # one number a head
            columns[name] = mean.flatten().tolist()
    return [
        same | {"head": head} | {name: column[i] for name, column in columns.items()}
        for i, head in enumerate(call.heads)
    ]


def usual(call: AttentionCall) -> tuple[Reduction, ...]:
    """The means that a table begins with."""
    sizes = call.problem.sizes
    placed = sizes.align is not None or sizes.queries == sizes.keys
    far = (MeanDistance(),) if call.kind == "self" and placed else ()
    return (Entropy(), TopK(1), *far, *(() if call.problem.sinks is None else (SinkShare(),)))
