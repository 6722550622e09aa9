"""Models whose parameters are shared out over the ranks, watched: what every rank runs."""

from __future__ import annotations

import warnings

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import clearhead as ch


class Stacked(nn.Module):
    def __init__(self, batch_first: bool, need_weights: bool) -> None:
        super().__init__()
        self.need_weights = need_weights
        self.attentions = nn.ModuleList(nn.MultiheadAttention(32, 4, batch_first=batch_first) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for attention in self.attentions:
            x = x + attention(x, x, x, need_weights=self.need_weights)[0]
        return x


def gradients(rank: int) -> list[float]:
    """How far the gradients that a watch records are from those of the same model that is not shared out."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator, found = np.random.default_rng(0), []
    for case in range(4):
        batch_first, need_weights, each = (bool(generator.integers(2)) for _ in range(3))
        x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(10 * case + rank))
        recorded = []
        for shared in (False, True):
            torch.manual_seed(case)
            model = Stacked(batch_first, need_weights)
            for attention in model.attentions if shared and (each or case == 0) else ():
                fully_shard(attention, mesh=mesh, reshard_after_forward=True)
            if shared:
                fully_shard(model, mesh=mesh, reshard_after_forward=True)
            with warnings.catch_warnings(), ch.watch(model, gradients=True) as seen:
                warnings.simplefilter("ignore")  # of views that a wrapped module returns
                model(x).square().sum().backward()
            recorded.append([t for call in seen.calls for t in (call.head_importance, call.gradients.by_key())])
        found.append(max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*recorded, strict=True)))
    return found
