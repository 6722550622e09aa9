"""Heads that were made by a reshape without the transposition."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from clearhead.explanation.diagnosis.case import Case, Check
from clearhead.explanation.diagnosis.diagnosis import Finding

FAR = 4.0  # times as much as the heads' means, the means of rows H apart differ
SURE = 12.0  # standard deviations above what chance gives
LARGE = 3.0  # times the variance that chance gives


class NotTransposed(Check):
    """A query, key or value (B, H, L, D) that holds the numbers of (B, L, H·D) in their order in memory.

    The numbers of one position are those of H heads, side by side. A reshape to (B, H, L, D) without the transposition
    keeps their order, so that row i of head h is a part of position (h·L + i) // H. There are two signs:

    memory: the tensor is a view of a tensor (B, L, H·D) or (B·L, H·D), in the same order. This is exact, unless H = L.
    means: of rows whose places h·L + i differ by multiples of H, all are of one head in truth. An analysis of variance
    compares the mean vectors of these H groups, and those of the H heads as given: F is the variance of the means
    over what chance gives. It is a finding where the groups' F is above 3, is 12 standard deviations above chance, and
    is above 4 times the heads' F. Biases of a projection and a mean of the inputs make heads differ so.

    It cannot be known where the tensor was copied and the means of the heads are alike, and where H = L.
    """

    name = "heads without the transposition"
    looks_for = "heads that were reshaped without the transposition, where memory or the means of heads show it"

    def find(self, case: Case) -> Iterator[Finding]:
        for name, tensor in case.inputs.items():
            _, heads, length, width = tensor.shape
            if heads < 2 or length < 2 or heads == length or not width:
                continue
            certain = _of_rows(case.memory.get(name, ()), tensor)
            told = (
                f"It is a view of a tensor of shape {case.memory[name]}, in the same order: the {heads} × {width} "
                f"numbers of a position became {heads} positions of one head."
                if certain
                else _by_means(tensor)
            )
            if told:
                yield self.finding(
                    case,
                    "error" if certain else "warning",
                    f"{name} has shape {tuple(tensor.shape)}. {told}",
                    f"Split the last axis into heads, and then exchange two axes: with flat of shape (B, L, "
                    f"{heads * width}), pass flat.unflatten(-1, ({heads}, {width})).transpose(1, 2).",
                    input=name,
                )


def _of_rows(whole: tuple[int, ...], tensor: Tensor) -> bool:
    """Whether the shape of a whole tensor is (B, L, H·D) or (B·L, H·D), for a tensor (B, H, L, D)."""
    batch, heads, length, width = tensor.shape
    return whole in ((batch, length, heads * width), (batch * length, heads * width))


def _by_means(tensor: Tensor) -> str:
    """A sentence on the means of rows that are H apart; empty where they show nothing."""
    batch, heads, length, width = tensor.shape
    rows = tensor.double()
    if batch * length < 2 or not bool(rows.isfinite().all()):
        return ""
    place = torch.arange(heads * length, device=tensor.device).view(heads, length)
    given = _variance(rows, place // length)
    apart = _variance(rows, place % heads)
    freedom = (heads - 1) * width, heads * (batch * length - 1) * width
    chance = math.sqrt(2 / freedom[0] + 2 / freedom[1])
    if apart < max(LARGE, 1 + SURE * chance, FAR * given):
        return ""
    return (
        f"The mean vectors of rows that stand {heads} apart in memory differ {apart:.3g} times as much as chance "
        f"gives. Those of the {heads} heads differ {given:.3g} times as much. So the rows are those of (B, L, "
        f"{heads * width}), in their order."
    )


def _variance(rows: Tensor, group: Tensor) -> float:
    """F: the variance of the groups' mean vectors over that inside the groups. `group`: (H, L), numbers below H."""
    batch, heads, length, _ = rows.shape
    member = torch.nn.functional.one_hot(group.flatten(), heads).double()  # (H·L, H)
    flat = rows.flatten(1, 2)
    count = member.sum(0) * batch
    means = torch.einsum("bpd,pg->gd", flat, member) / count.unsqueeze(-1)
    between = (count.unsqueeze(-1) * (means - rows.mean((0, 1, 2))).square()).sum() / (heads - 1)
    inside = (flat - member @ means).square().sum() / (heads * (batch * length - 1))
    return float(between / inside) if float(inside) > 0 else 0.0
