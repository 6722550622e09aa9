"""Inputs that are not finite, and where they are."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from clearhead.explanation.diagnosis.case import Case, Check, used
from clearhead.explanation.diagnosis.diagnosis import Finding


class NotFinite(Check):
    """NaN and ±∞ in query, key and value, and NaN and +∞ in a bias, a float mask or sinks. The check is exact.

    It is an error where such a number reaches an output, and a note where the mask hides it from every query:
    clearhead leaves such keys out.
    """

    name = "inputs that are not finite"
    looks_for = "NaN and infinity in the inputs"

    def find(self, case: Case) -> Iterator[Finding]:
        told = case.given_finite and case.broken  # parameters made these numbers, and are named by a check of their own
        for name, tensor in () if told else case.inputs.items():
            bad = ~tensor.isfinite().all(-1)
            if bool(bad.any()):
                yield self._of_vectors(case, name, bad, bad & used(case, name, tensor))
        sinks = {} if case.problem.sinks is None else {"sinks": case.problem.sinks}
        for name, tensor in {**case.added, **sinks}.items():
            bad = tensor.isnan() | (tensor == torch.inf)
            if bool(bad.any()):
                yield self._of_added(case, name, tensor, bad)

    def _of_vectors(self, case: Case, name: str, bad: Tensor, reached: Tensor) -> Finding:
        """`bad` (B, H, L): vectors that are not finite. `reached`: those among them that reach an output."""
        tensor, count = case.inputs[name], int(reached.sum())
        sequence, head, at = (int(i) for i in (reached if count else bad).nonzero()[0])
        numbers = (
            f"{name} {tuple(tensor.shape)} has {int(tensor.isnan().sum())} NaN and {int(tensor.isinf().sum())} "
            f"infinite numbers, in {int(bad.sum())} vectors"
        )
        place = {"input": name, "sequence": sequence, "head": head, "query" if name == "query" else "key": at}
        if not count:
            remedy = "Fill padding with 0, where other backends are to give the same."
            return self.finding(case, "note", f"{numbers}: the mask hides them all.", remedy, **place)
        return self.finding(
            case,
            "error",
            f"{numbers}; of these {count} {'see a key' if name == 'query' else 'are seen by a query'}.",
            "Find what made these numbers before this call: a division by 0, an overflow, a parameter that is not "
            "finite, or memory never written to.",
            **place,
        )

    def _of_added(self, case: Case, name: str, tensor: Tensor, bad: Tensor) -> Finding:
        return self.finding(
            case,
            "error",
            f"{name} {tuple(tensor.shape)} has {int(tensor.isnan().sum())} NaN and {int((tensor == torch.inf).sum())} "
            f"numbers of +∞, the first at {bad.nonzero()[0].tolist()}: they make a query's whole row NaN.",
            "Use −∞ for a pair that is not allowed, and finite numbers elsewhere. 0 · ∞ is NaN: use torch.where.",
            input=name,
        )
