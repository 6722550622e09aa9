"""Which entries of a recorded query and key were turned together by their positions, and how fast."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from clearhead.explanation.modules.origin.chain import Turn
from clearhead.explanation.modules.origin.find import find
from clearhead.explanation.modules.origin.places import Places, taken
from clearhead.explanation.modules.origin.ran import Origin

Pair = tuple[int, int, float | None]


def frequencies(origin: Origin, query: Tensor, key: Tensor, sequence: int) -> tuple[Pair, ...]:
    """Of each pair of entries its two places, and in how many positions it turns once; () where nothing was turned.

    Formula: the product of a pair is r cos(ω(i − j) + δ), of one frequency ω (Su et al. 2021, "RoFormer"); 2π/ω is
    None where positions do not follow each other.

    Args:
        origin: the layers that ran, and the cosines and sines that they were given.
        query, key: (B, H, Lq, E) and (B, Hk, Lk, E), as they were recorded.
    """
    heads = query.shape[1], key.shape[1]
    found = [
        find(name, given, origin, Places([sequence], [0], list(range(given.shape[2]))), heads)
        for name, given in (("query", query), ("key", key))
    ]
    turns = [None if chain is None else chain.turn for chain in found]
    first, second = turns
    if first is None or second is None or (first.dim, first.interleaved) != (second.dim, second.interleaved):
        return ()
    half = first.dim // 2
    ones = range(0, first.dim, 2) if first.interleaved else range(half)
    away = 1 if first.interleaved else half
    return tuple((one, one + away, _period(second, sequence, one)) for one in ones)


def _period(turn: Turn, sequence: int, entry: int) -> float | None:
    """In how many positions an entry's angle grows by 2π; None where it does not grow evenly."""
    place = [sequence if turn.cos.shape[0] > 1 else 0]
    cos, sin = (taken(part, 0, place)[0, :, entry].double() for part in (turn.cos, turn.sin))
    steps = torch.atan2(sin[1:] * cos[:-1] - cos[1:] * sin[:-1], cos[1:] * cos[:-1] + sin[1:] * sin[:-1])
    if len(steps) == 0 or not bool(((steps - steps.mean()).abs() <= 1e-3 * steps.mean().abs() + 1e-5).all()):
        return None
    speed = abs(float(steps.mean()))
    return None if speed == 0 else 2 * math.pi / speed
