"""Rows of keys and values in one message, and the place of each run of rows in the message."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

Runs = Sequence[range]


def places(runs: Runs) -> list[slice]:
    """The place of each run when the runs are laid one after another."""
    ends = [0]
    for run in runs:
        ends.append(ends[-1] + len(run))
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


def place_of(part: range, runs: Runs) -> slice:
    """The place of a part of one run among the rows of all runs."""
    for run, at in zip(runs, places(runs), strict=True):
        if run.start <= part.start and part.stop <= run.stop:
            return slice(at.start + part.start - run.start, at.start + part.stop - run.start)
    raise AssertionError(f"{part} is in no run of {runs}")


def pack(tensors: Sequence[Tensor], held: Runs, wanted: Runs) -> Tensor:
    """The rows `wanted` as one flat tensor. `tensors` (B, H, L, E) hold the rows `held`."""
    at = [place_of(run, held) for run in wanted]
    return torch.cat([t[:, :, rows].reshape(-1) for t in tensors for rows in at])


def unpack(flat: Tensor, like: Sequence[Tensor], wanted: Runs) -> list[Tensor]:
    """The tensors (B, H, rows, E) in a message that `pack` made, the runs one after another."""
    found, first = [], 0
    for tensor in like:
        batch, heads, _, width = tensor.shape
        parts = []
        for run in wanted:
            size = batch * heads * len(run) * width
            parts.append(flat[first : first + size].view(batch, heads, len(run), width))
            first += size
        found.append(parts[0] if len(parts) == 1 else torch.cat(parts, 2))
    return found


def room(like: Sequence[Tensor], wanted: Runs) -> Tensor | None:
    """The room for a message of these rows; None where there are no rows."""
    numbers = sum(t.shape[0] * t.shape[1] * t.shape[3] for t in like) * sum(map(len, wanted))
    return like[0].new_empty(numbers) if wanted else None


def add(sums: Sequence[Tensor], held: Runs, parts: Sequence[Tensor], runs: Runs) -> None:
    """Add `parts`, the rows of `runs` laid one after another, to `sums`, which hold the rows `held`."""
    for total, part in zip(sums, parts, strict=True):
        for run, at in zip(runs, places(runs), strict=True):
            total[:, :, place_of(run, held)] += part[:, :, at]
