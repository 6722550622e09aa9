"""The weight of each query on each group of keys."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from clearhead.base.arrays import Array, to_tensor
from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.shapes import placed
from clearhead.inspection.reductions.base import Reduction
from clearhead.problem.problem import Problem
from clearhead.problem.summary import Summary

MOST = 2**28  # the most numbers of the memberships


@dataclass(frozen=True, eq=False, repr=False)
class Mass(Reduction):
    """The weight of each query on each group of keys, such as the system prompt, each document, or digits.

    >>> import torch, clearhead as ch
    >>> w = ch.weights(torch.zeros(2, 4), torch.zeros(4, 4))
    >>> w.reduce(ch.reductions.Mass([0, 1, 1, 1]))                         # each key's group
    tensor([[0.2500, 0.7500],
            [0.2500, 0.7500]])
    >>> w.reduce(ch.reductions.Mass([[True, True, True, False]]))          # or each group's keys, which may overlap
    tensor([[0.7500],
            [0.7500]])

    Formula: m_ig = Σ_j w_ij [j in g]. `groups`: integers from 0 on, (Lk,) or (B or 1, Lk), the group of each key; or
    bool, (G, Lk). Gives (..., Lq, G), without sinks summing to 1 where groups cover the keys once. Differentiable.
    Raises a `ShapeError` or `ClearheadError` for other groups.
    Cost: that of an output of width G; memory O((Lq + Lk) · G).
    """

    along = "queries"
    gives = "groups"

    groups: Array

    def _members(self, problem: Problem) -> Tensor:
        """(B or 1, Lk, G): 1 where a key belongs to a group."""
        sizes = problem.sizes
        groups, keys = placed(self._as_tensor(), sizes.device, "Mass: groups"), sizes.keys
        shape = tuple(groups.shape)
        if groups.dtype == torch.bool:
            if len(shape) != 2 or shape[1] != keys:
                raise ShapeError(f"Mass: groups is bool {shape}; expected (groups, Lk) with Lk = {keys}.")
            return groups.to(problem.key.dtype).T.unsqueeze(0)
        if groups.is_floating_point() or groups.is_complex():
            raise ClearheadError(f"Mass: groups is {groups.dtype} {shape}; expected integers, or bool (groups, Lk).")
        if len(shape) not in (1, 2) or shape[-1] != keys or (len(shape) == 2 and shape[0] not in (1, sizes.batch)):
            raise ShapeError(
                f"Mass: groups has shape {shape}; expected the group of each key, ({keys},) or ({sizes.batch} or 1, "
                f"{keys}), or bool (groups, {keys})."
            )
        groups = groups.long().reshape(-1, keys)
        least, most = torch.stack(groups.aminmax()).tolist() if groups.numel() else (0, -1)  # read at once
        count = most + 1
        if least < 0:
            raise ClearheadError(
                f"Mass: groups holds {least}; groups count from 0. For keys in no group pass bool, (groups, Lk)."
            )
        if count * groups.numel() > MOST:
            raise ClearheadError(
                f"Mass: groups holds {count - 1}, which makes {count:,} groups of {keys} keys. Number them without "
                "gaps: torch.unique(groups, return_inverse=True)[1]."
            )
        return (groups.unsqueeze(-1) == torch.arange(count, device=sizes.device)).to(problem.key.dtype)

    def _as_tensor(self) -> Tensor:
        given = self.groups
        if isinstance(given, list | tuple):
            try:
                given = np.asarray(given)
            except ValueError as ragged:
                raise ClearheadError(f"Mass: groups is no array: {ragged}.") from None
        groups: Tensor = to_tensor(given, "Mass: groups")
        if groups.layout != torch.strided:
            raise ClearheadError(
                f"Mass: groups has the layout {groups.layout}; pass a dense tensor: groups.to_dense()."
            )
        return groups

    def summary(self, problem: Problem) -> Summary:
        return Summary(groups=self._members(problem))
