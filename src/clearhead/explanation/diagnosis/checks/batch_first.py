"""Inputs (B, L, E) of a module that takes the length first."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from clearhead.explanation.diagnosis.case import Case, Check
from clearhead.explanation.diagnosis.diagnosis import Finding


class BatchFirst(Check):
    """A `torch.nn.MultiheadAttention` without `batch_first`, which takes (L, B, E), and inputs that may be (B, L, E).

    Two signs make it a warning. A first token: the vectors at place 0 of axis 1 are equal for all of axis 0, as where
    each sequence begins with the same token, and other vectors are not. Padding: the vectors that are 0 stand last
    along axis 1, and do not stand last along axis 0. Without a sign it is a note where axis 0 is shorter than axis 1,
    as a batch often is. It is not looked for where axis 0 is at least as long.
    """

    name = "length and batch exchanged"
    looks_for = "length and batch exchanged (batch_first), where a first token, padding or a short axis shows it"

    def find(self, case: Case) -> Iterator[Finding]:
        looked: set[int] = set()
        for name, tensor in case.length_first.items():
            first, second = tensor.shape[:2]
            if id(tensor) in looked or first < 2 or second < 2:
                continue
            looked.add(id(tensor))
            sign = _first_token(tensor) or _padding(tensor)
            read = (
                f"The module takes the length first: {tuple(tensor.shape)} is {second} sequences of {first} positions."
            )
            if sign or first < second:
                unknown = "Whether this was meant, shape and numbers don't say."
                yield self.finding(
                    case,
                    "warning" if sign else "note",
                    f"{read} {sign or unknown}",
                    f"If these are {first} sequences of {second} positions, build the module with batch_first=True, or "
                    f"pass {name}.transpose(0, 1).",
                    input=name,
                )


def _first_token(tensor: Tensor) -> str:
    same = (tensor == tensor[:1]).all(-1)  # (first, second)
    if not bool(same[:, 0].all()) or bool(same.all()):
        return ""
    return f"But the {len(tensor)} vectors of {tuple(tensor[:, 0].shape)} at [:, 0] are equal, as first tokens are."


def _padding(tensor: Tensor) -> str:
    zero = (tensor == 0).all(-1)
    if not bool(zero.any()) or not _stands_last(zero, 1) or _stands_last(zero, 0):
        return ""
    return f"But the {int(zero.sum())} vectors that are 0 stand last along axis 1, as padding does."


def _stands_last(zero: Tensor, dim: int) -> bool:
    """Whether along a dimension nothing but zeros follows a zero, and something precedes each."""
    return bool((zero.int().cummax(dim).values == zero).all()) and not bool(zero.select(dim, 0).any())
