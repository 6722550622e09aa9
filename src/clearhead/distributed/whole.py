"""Small tensors of the whole sequence, from the parts of all ranks."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from clearhead.distributed.channel import Channel
from clearhead.distributed.layout import Layout


def whole(part: Tensor, layout: Layout, channel: Channel) -> Tensor:
    """(n, L), from (n, l) of each rank, of the same n and dtype. Every rank of the group calls it together."""
    counts = [layout.count(rank) for rank in range(layout.ranks)]
    every = channel.gather(F.pad(part, (0, max(counts) - part.shape[1])))
    found = part.new_empty(part.shape[0], layout.length)
    for rank, count in enumerate(counts):
        found[:, layout.positions(part.device, rank)] = every[rank, :, :count]
    return found
