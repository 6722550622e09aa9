"""Checks of the order of axes: heads, length and batch that were exchanged or not transposed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clearhead.explanation.diagnosis.case import Case, Check, Findings

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

    def find(self, case: Case) -> Findings:
        for name, tensor in case.inputs.items():
            batch, heads, length, width = tensor.shape
            if heads < 2 or length < 2 or heads == length or not width:
                continue
            rows = ((batch, length, heads * width), (batch * length, heads * width))
            certain = case.memory.get(name) in rows
            told = (
                f"It is a view of a tensor of shape {case.memory[name]}, in the same order: the {heads} × {width} "
                f"numbers of a position became {heads} positions of one head."
                if certain
                else _by_means(tensor)
            )
            if told:
                yield self.finding(
                    "error" if certain else "warning",
                    f"{name} has shape {tuple(tensor.shape)}. {told}",
                    f"Split the last axis into heads, and then exchange two axes: with flat of shape (B, L, "
                    f"{heads * width}), pass flat.unflatten(-1, ({heads}, {width})).transpose(1, 2).",
                    input=name,
                )


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


class LengthSecond(Check):
    """Query and key (B, L, H, D) that were passed without `layout="BLHD"`.

    Shapes alone tell: both have more than 128 heads, and 4 times as many heads as positions. It is a note, since a
    model may have so many heads.
    """

    name = "length and heads exchanged"

    def find(self, case: Case) -> Findings:
        query, key = case.inputs["query"], case.inputs["key"]
        heads, length = query.shape[1:3]
        if query.shape[1:3] == key.shape[1:3] and heads > 128 and heads >= 4 * length:  # more heads than models have
            yield self.finding(
                "note",
                f"query has shape {tuple(query.shape)}, which is read as (B, H, L, D): {heads} heads of {length} "
                "positions. Whether this was meant, shapes don't say.",
                f"If these are {heads} positions of {length} heads, (B, L, H, D), pass layout='BLHD', or "
                "query.transpose(1, 2) and key and value alike.",
                input="query",
            )


class BatchFirst(Check):
    """A `torch.nn.MultiheadAttention` without `batch_first`, which takes (L, B, E), and inputs that may be (B, L, E).

    Two signs make it a warning. A first token: the vectors at place 0 of axis 1 are equal for all of axis 0, as where
    each sequence begins with the same token, and other vectors are not. Padding: the vectors that are 0 stand last
    along axis 1, and do not stand last along axis 0. Without a sign it is a note where axis 0 is shorter than axis 1,
    as a batch often is. It is not looked for where axis 0 is at least as long.
    """

    name = "length and batch exchanged"

    def find(self, case: Case) -> Findings:
        looked: set[int] = set()
        for name, tensor in case.length_first.items():
            first, second = tensor.shape[:2]
            if id(tensor) in looked or first < 2 or second < 2:
                continue
            looked.add(id(tensor))
            sign = _first_token(tensor) or _padding(tensor)
            if sign or first < second:
                told = sign or "Whether this was meant, shape and numbers don't say."
                yield self.finding(
                    "warning" if sign else "note",
                    f"The module takes the length first: {tuple(tensor.shape)} is {second} sequences of {first} "
                    f"positions. {told}",
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
