"""Whether two recordings fit each other, and at which positions."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError, ShapeError, columns
from clearhead.models.attention_call import AttentionCall

Places = tuple[Tensor, Tensor] | None


def checked_places(aligned: Any) -> Places:
    """The positions to compare, of the one text and of the other, ascending; None is all of them."""
    if aligned is None:
        return None
    pair = list(aligned) if isinstance(aligned, Sequence) and not isinstance(aligned, str) else []
    if len(pair) != 2:
        raise ClearheadError(
            f"compare: aligned is {aligned!r:.60}; pass a pair of lists of positions, those of this recording's text "
            "and those of the other's that correspond to them: aligned=([0, 1, 3], [0, 1, 2])."
        )
    mine, theirs = (_positions(side) for side in pair)
    if len(mine) != len(theirs):
        raise ShapeError(
            f"compare: aligned has {len(mine)} positions of this recording and {len(theirs)} of the other."
        )
    return mine, theirs


def _positions(given: Any) -> Tensor:
    try:
        numbers = [operator.index(number) for number in given if not isinstance(number, bool)]
        if len(numbers) != len(given):
            raise TypeError
    except TypeError:
        raise ClearheadError(f"compare: aligned holds {given!r:.60}; expected whole numbers, positions.") from None
    if not numbers or numbers[0] < 0 or any(b <= a for a, b in pairwise(numbers)):
        raise ClearheadError(f"compare: aligned holds {given!r:.60}; expected positions from 0 on, ascending.")
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def check_calls(mine: Sequence[AttentionCall], theirs: Sequence[AttentionCall]) -> None:
    """Raise where two recordings do not have as many calls."""
    if len(mine) != len(theirs) or not mine:
        raise ClearheadError(
            f"compare: this recording has {len(mine)} calls and the other {len(theirs)}; record one run of one "
            "architecture in each, or pass some of them: seen.runs[0], ch.Recording(seen.calls[:12])."
        )


def check_pair(number: int, mine: AttentionCall, theirs: AttentionCall, places: Places) -> None:
    """Raise where the calls of one number can't be compared, pair by pair."""
    one, other = mine.problem.sizes.shape, theirs.problem.sizes.shape
    who = f"compare: call {number} is {mine.name}, {mine.kind}, and {theirs.name}, {theirs.kind}, in the other"
    shapes = columns({"this": ("B", "H", "Lq", "Lk"), "": one, "the other": other})
    if mine.kind != theirs.kind:
        raise ClearheadError(f"{who}: self attention is compared with self attention, cross with cross.")
    if one[1] != other[1]:
        raise ShapeError(f"{who}, with {one[1]} and {other[1]} heads; compare models of one architecture.\n{shapes}")
    if one[0] != other[0]:
        raise ShapeError(f"{who}, of {one[0]} and {other[0]} sequences; record as many in each.\n{shapes}")
    if places is None:
        if one != other:
            raise ShapeError(
                f"{who}, of other lengths. Say which positions correspond, aligned=([0, 1, 3], [0, 1, 2]), or give "
                f"both texts as many tokens.\n{shapes}"
            )
        return
    if mine.kind != "self" or one[2] != one[3] or other[2] != other[3]:
        raise ClearheadError(
            f"{who}: aligned= takes the self attention of whole texts, as many queries as keys.\n{shapes}"
        )
    for shape, side in zip((one, other), places, strict=True):
        if int(side[-1]) >= shape[3]:
            raise ShapeError(f"{who}: aligned holds {int(side[-1])}, and there are {shape[3]} positions.\n{shapes}")
