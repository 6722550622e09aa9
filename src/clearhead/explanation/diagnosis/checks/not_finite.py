"""Inputs that are not finite, and where they are."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from clearhead.explanation.diagnosis.base import Check
from clearhead.explanation.diagnosis.case import Case
from clearhead.explanation.diagnosis.finding import Finding
from clearhead.problem.unseen import group, seen


class NotFinite(Check):
    """NaN and ±∞ in query, key and value, NaN and +∞ in what is added to the scores; exact.

    An error where it reaches an output. A note where the mask keeps it from every query: clearhead leaves it out.
    """

    name = "inputs that are not finite"
    looks_for = "NaN and infinity in the inputs"

    def find(self, case: Case) -> Iterator[Finding]:
        for name, tensor in case.inputs.items():
            bad = ~tensor.isfinite().all(-1)
            if not bool(bad.any()):
                continue
            reached = bad & used(case, name, tensor)
            visible = bool(reached.any())
            where = _place(reached if visible else bad, "query" if name == "query" else "key")
            who = "by a query" if name != "query" else "and sees a key"
            yield self.finding(
                case,
                "error" if visible else "note",
                f"{name} {tuple(tensor.shape)} has {int(tensor.isnan().sum())} NaN and {int(tensor.isinf().sum())} "
                f"infinite numbers, in {int(bad.sum())} vectors"
                + (
                    f", {int(reached.sum())} of which {'is' if int(reached.sum()) == 1 else 'are'} seen {who}."
                    if name != "query" and visible
                    else "."
                    if visible
                    else ": the mask hides them all."
                ),
                "Find what made it, upstream of this call: a division by 0, an overflow, memory that nothing was "
                "written to."
                if visible
                else "Fill padding with 0, where other backends are to give the same.",
                input=name,
                **where,
            )
        others = {**case.added, **({} if case.problem.sinks is None else {"sinks": case.problem.sinks})}
        for name, tensor in others.items():
            bad = tensor.isnan() | (tensor == torch.inf)
            if bool(bad.any()):
                place = [int(i) for i in bad.nonzero()[0]]
                yield self.finding(
                    case,
                    "error",
                    f"{name} {tuple(tensor.shape)} has {int(tensor.isnan().sum())} NaN and "
                    f"{int((tensor == torch.inf).sum())} numbers of +∞, the first at {place}: they make a query's "
                    "whole row NaN.",
                    "Use −∞ for a pair that is not allowed, and finite numbers elsewhere. A mask of 0 · ∞ is NaN: use "
                    "torch.where.",
                    input=name,
                )


def used(case: Case, name: str, tensor: Tensor) -> Tensor:
    """Which vectors of an input count: queries that see a key, keys (and values) that some query sees, (B, H, L)."""
    shape = tensor.shape[:-1]
    if case.problem.spans is None:
        return torch.ones(shape, dtype=torch.bool, device=tensor.device)
    keys, queries = seen(case.problem.spans, case.problem.sizes)
    if name == "query":
        found = queries
    else:
        found = keys.any(1, keepdim=True) if shape[1] == 1 else group(keys, shape[1])
    return _or_one(found, shape)


def _or_one(found: Tensor, shape: torch.Size) -> Tensor:
    """Broadcast to the input's own sizes; one vector for a whole batch counts where it counts in any of it."""
    if shape[0] == 1 and found.shape[0] > 1:
        found = found.any(0, keepdim=True)
    return found.expand(shape)


def _place(bad: Tensor, position: str) -> dict[str, int]:
    sequence, head, at = (int(i) for i in bad.nonzero()[0])
    return {"sequence": sequence, "head": head, position: at}
