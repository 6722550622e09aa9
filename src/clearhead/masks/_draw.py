"""A mask as a small picture of characters."""

from __future__ import annotations

import torch
from torch import Tensor

CELLS = 12  # the most rows and columns a picture has
LARGEST = 1024  # beyond this many queries or keys, only the first are drawn


def draw(keep: Tensor, shape: tuple[int, int, int, int]) -> str:
    """The first part of a mask of this shape: ■ may attend, · may not, ▪ some of the pairs it stands for may."""
    pictures = []
    for b, h in [(b, h) for b in range(min(keep.shape[0], 3)) for h in range(min(keep.shape[1], 2))]:
        lines = _matrix(keep[b, h])
        names = [f"batch {b}"] * (shape[0] > 1) + [f"head {h}"] * (shape[1] > 1)
        pictures.append("\n".join([", ".join(names), *lines] if names else lines))
    if shape[0] > 3:
        pictures.append(f"… {shape[0] - 3} more sequences")
    if max(shape[2:]) > LARGEST:
        pictures.append(f"… the first {LARGEST} of {shape[2]} queries × {shape[3]} keys")
    return "\n".join(pictures)


def _matrix(keep: Tensor) -> list[str]:
    if not keep.numel():
        return [f"(no pairs: {keep.shape[0]} queries, {keep.shape[1]} keys)"]
    keep = keep.cpu()
    rows, columns = (torch.arange(n, device="cpu") * min(n, CELLS) // n for n in keep.shape)
    shape = (int(rows[-1]) + 1, int(columns[-1]) + 1)
    cell = (rows[:, None] * shape[1] + columns[None, :]).flatten()
    counts = torch.zeros(2, shape[0] * shape[1], dtype=torch.float32, device="cpu")
    counts[0].index_add_(0, cell, keep.float().flatten())
    counts[1].index_add_(0, cell, torch.ones(cell.numel(), dtype=torch.float32, device="cpu"))
    text = ["■" if some == every else "▪" if some else "·" for some, every in counts.T.tolist()]
    return [" ".join(text[i * shape[1] : (i + 1) * shape[1]]) for i in range(shape[0])]
