"""The differences between two recordings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from clearhead.base.errors import UnsupportedError
from clearhead.base.text import said
from clearhead.inspection.difference import Aligned, WeightDifference
from clearhead.inspection.source import FromRecord
from clearhead.inspection.weights import Weights
from clearhead.models.attention_call import AttentionCall
from clearhead.models.calls import Calls, Label, labels
from clearhead.models.read.divergence import Places, check_calls, check_pair, checked_places, divergences
from clearhead.models.table import Table
from clearhead.models.tap.layers import FIRST

UNNAMED = Label(FIRST)


@dataclass(frozen=True, eq=False)
class CallDifference:
    """The differences between the calls of one number in two recordings. `Recording.compare` gives it.

    `weights`: the signed difference, the other call's weights less this call's, a lazy matrix. `by_query`: the
    Jensen–Shannon divergence of each query's weights in nats, float64 (B, H, Lq), 0 to log 2; NaN for queries that do
    not count.
    `divergence`: its mean for each head, (H,); NaN where no query counts.
    """

    name: str
    kind: Literal["self", "cross"]
    number: int
    weights: WeightDifference
    by_query: Tensor
    run: int = 0
    label: Label = UNNAMED

    @property
    def divergence(self) -> Tensor:
        return self.by_query.transpose(0, 1).flatten(1).nanmean(-1)

    def table(self) -> Table:
        """A row for each head: layer, call (its number), run, module, kind, head, divergence."""
        same = {
            "layer": self.label.layer.column,
            "call": self.number,
            "run": self.run,
            "module": self.name,
            "kind": self.kind,
        }
        return Table.of(same, {"head": range(len(self.divergence)), "divergence": self.divergence.tolist()})

    def __repr__(self) -> str:
        return f"CallDifference({self.name!r}, {self.kind}, {tuple(self.weights.shape)})"


class Differences(Calls[CallDifference]):
    """The differences between the calls of two recordings. `Recording.compare` gives it.

    Calls are found as in a `Recording`, by number, module and run: each is a `CallDifference`. `most`: the number of
    the call and the head that differ most. `str()` names them in a sentence.
    """

    @property
    def most(self) -> tuple[int, int]:
        """(call, head) of the largest divergence; NaN is left out."""
        largest = [call.divergence.nan_to_num(-1.0).max(0) for call in self.calls]
        call = max(range(len(largest)), key=lambda number: float(largest[number].values))
        return call, int(largest[call].indices)

    def table(self) -> Table:
        """A row for each call and head. Its columns: layer, call (its number), run, module, kind, head, divergence."""
        return Table(row for call in self.calls for row in call.table())

    def __str__(self) -> str:
        return said(self, self._said)

    def _said(self) -> str:
        place, head = self.most
        call = self.calls[place]
        most = torch.log(torch.tensor(2.0, device="cpu"))
        every = torch.cat([one.divergence for one in self.calls])
        return (
            f"{call.label.head(head)} differs most: a Jensen–Shannon divergence of {float(call.divergence[head]):.3g} "
            f"nats, of at most {most:.3f}; the mean over {int(every.isfinite().sum())} heads is "
            f"{float(every.nanmean()):.3g} ({call.name})."
        )


def compare_calls(mine: list[AttentionCall], theirs: list[AttentionCall], matched: Any) -> Differences:
    """See `Recording.compare`."""
    places = checked_places(matched)
    check_calls(mine, theirs)
    for call in (*mine, *theirs):
        if call.factor is not None:
            raise UnsupportedError(
                f"compare: an edit multiplied weights of {call.name} after the softmax, and the divergence is of "
                "softmaxes. Compare recordings without ScaleHeads and without Knockout(after=True), or parts by hand: "
                "seen[0].weights[index]."
            )
    found = []
    for number, (one, other, label) in enumerate(zip(mine, theirs, labels(mine), strict=True)):
        check_pair(number, one, other, places)
        found.append(difference_of(number, one, other, places, label))
    return Differences(found)


def difference_of(
    number: int, mine: AttentionCall, theirs: AttentionCall, places: Places, label: Label
) -> CallDifference:
    """The differences of two calls, which `check_pair` has compared."""
    by_query = divergences(mine, theirs, places)
    before, after = (
        Aligned(_weights(call), at) for call, at in zip((mine, theirs), places or (None, None), strict=True)
    )
    return CallDifference(mine.name, mine.kind, number, WeightDifference(before, after), by_query, mine.run, label)


def _weights(call: AttentionCall) -> Weights:
    """The call's own weights, (B, H, Lq, Lk)."""
    problem = call.record.problem
    record = call.record._replace(problem=problem._replace(sizes=problem.sizes._replace(leading=None)))
    return Weights(FromRecord(record, {}))
