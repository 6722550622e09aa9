"""A float mask that holds nothing but 0 and 1."""

from __future__ import annotations

from collections.abc import Iterator

from clearhead.explanation.diagnosis.case import Case, Check
from clearhead.explanation.diagnosis.diagnosis import Finding
from clearhead.problem.problem import only_zeros_and_ones


class ZerosAndOnes(Check):
    """A float mask holds only 0 and 1, and some 1. The check is exact.

    `attention` refuses such a mask. Other libraries add it to the scores, where it hides nothing.
    """

    name = "a mask of 0 and 1"
    looks_for = "float masks of 0 and 1, which hide nothing"

    def find(self, case: Case) -> Iterator[Finding]:
        for name in case.as_mask:
            tensor = case.added[name].cpu()
            if not only_zeros_and_ones(tensor):
                continue
            ones = int((tensor == 1).sum())
            yield self.finding(
                case,
                "error",
                f"{name} is {str(tensor.dtype).removeprefix('torch.')}, {tuple(tensor.shape)}, and holds {ones} ones "
                f"and {tensor.numel() - ones} zeros: a float mask is added to the scores, and hides nothing.",
                'Pass mask.bool() where 1 means "may attend", mask == 0 where it means "may not"; one row a sequence, '
                "(B, Lk), as Padding(mask.bool()), or mask.bool()[:, None, None].",
                input=name,
            )
