"""Which rows of the recorded tensors are explained."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

AXES = {"query": "Lq", "key": "Lk", "value": "Lk"}  # of the positions


class Places(NamedTuple):
    """Which sequences, heads and positions; a key head once for each query head that uses it."""

    batches: list[int]
    heads: list[int]
    positions: list[int]


def taken(tensor: Tensor, dim: int, places: list[int]) -> Tensor:
    """These places along a dimension: without a copy where they follow each other."""
    first = places[0] if places else 0
    if places == list(range(first, first + len(places))):
        return tensor.narrow(dim, first, len(places))
    return tensor.index_select(dim, torch.tensor(places, device=tensor.device))
