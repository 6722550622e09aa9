"""Large finite numbers in place of minus infinity."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from clearhead.explanation.diagnosis.case import Case, Check, first_place
from clearhead.explanation.diagnosis.diagnosis import Finding
from clearhead.problem.fills import FILL

HALF = torch.finfo(torch.float16)


class FiniteFill(Check):
    """A mask or bias that is added to the scores holds finite numbers of −9000 and less in place of −∞.

    exp(−9000) is 0 in every dtype, so such numbers hide keys. But a query whose keys are all filled attends to all of
    them: the same number added to every score changes no softmax. It is a warning, or a note where no other query sees
    the keys of such queries, as with padding. Numbers below −65504, the least of float16, become −∞ in float16, and a
    row of them gives NaN: a warning for inputs in float16 and bfloat16, else a note.
    """

    name = "a finite fill"
    looks_for = "finite fills, such as -1e9, that overflow or leave a query all keys"

    def find(self, case: Case) -> Iterator[Finding]:
        remedy = "Use −∞, or a bool mask (True: may attend), which says the same in every dtype."
        if case.blind is not None:
            words = case.words.queries
            blind = case.blind.expand(case.shape[:3])
            blind = blind if words is None else blind & words.unsqueeze(1)
            if bool(blind.any()):
                yield self.finding(
                    case,
                    "note" if case.only_padding(blind) else "warning",
                    f"{int(blind.sum())} of {blind.numel()} queries have every key filled with a finite number: the "
                    "softmax undoes it, and they attend to all keys, masked ones too.",
                    remedy,
                    **first_place(blind),
                )
        for name, tensor in case.added.items():
            filled = (tensor <= FILL) & tensor.isfinite()
            if not bool(filled.any()):
                continue
            least = float(tensor[filled].min())
            if least >= HALF.min:
                continue
            low = case.inputs["query"].dtype in (torch.float16, torch.bfloat16)
            count = int(filled.sum())
            yield self.finding(
                case,
                "warning" if low else "note",
                f"{name} {tuple(tensor.shape)} holds {count} number{'s' * (count > 1)} down to {least:.3g}, as if −∞; "
                f"the least of float16 is {HALF.min:.0f}, so there they overflow to −∞, and a row of them gives NaN.",
                remedy,
                input=name,
            )
