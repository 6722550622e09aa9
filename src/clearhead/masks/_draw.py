"""A mask as a small picture of characters."""

from __future__ import annotations

import torch
from torch import Tensor

CELLS = 12  # the most rows and columns a picture has
LARGEST = 1024  # beyond this many queries or keys, only the first are drawn


def draw(keep: Tensor) -> str:
    """■ may attend, · may not; where one character stands for many pairs, ▪ is "some of them"."""
    pictures = []
    for b, h in [(b, h) for b in range(min(keep.shape[0], 3)) for h in range(min(keep.shape[1], 2))]:
        lines = _matrix(keep[b, h, :LARGEST, :LARGEST])
        names = [f"batch {b}"] * (keep.shape[0] > 1) + [f"head {h}"] * (keep.shape[1] > 1)
        pictures.append("\n".join([", ".join(names), *lines] if names else lines))
    if keep.shape[0] > 3:
        pictures.append(f"… {keep.shape[0] - 3} more sequences")
    if max(keep.shape[2:]) > LARGEST:
        pictures.append(f"… the first {LARGEST} of {keep.shape[2]} queries × {keep.shape[3]} keys")
    return "\n".join(pictures)


def _matrix(keep: Tensor) -> list[str]:
    if not keep.numel():
        return [f"(no pairs: {keep.shape[0]} queries, {keep.shape[1]} keys)"]
    rows, columns = (torch.arange(n) * min(n, CELLS) // n for n in keep.shape)
    shape = (int(rows[-1]) + 1, int(columns[-1]) + 1)
    cell = (rows[:, None] * shape[1] + columns[None, :]).flatten()
    counts = torch.zeros(2, shape[0] * shape[1])
    counts[0].index_add_(0, cell, keep.cpu().float().flatten())
    counts[1].index_add_(0, cell, torch.ones(cell.numel()))
    text = ["■" if some == every else "▪" if some else "·" for some, every in counts.T.tolist()]
    return [" ".join(text[i * shape[1] : (i + 1) * shape[1]]) for i in range(shape[0])]
