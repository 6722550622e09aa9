"""What goes wrong between ranks: what every rank runs, and what it is told."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from ranks.words import each_said

import clearhead as ch

D = ch.distributed
LENGTH = 12


class Own(ch.extend.Score):
    def tile(self, query: Any, key: Any) -> Any:
        return query @ key.transpose(-1, -2)


class Halved(Own):
    def tile(self, query: Any, key: Any) -> Any:
        return super().tile(query, key) / 2


def _call(rank: int, *, dtype: Any = None, heads: int = 2, **given: Any) -> str:
    """What the call says: the error's words, or "done"."""
    layout = given.pop("layout", None) or D.ZigZag(LENGTH)
    query, key, value = torch.randn(
        3, 1, heads, layout.length, 4, dtype=dtype, generator=torch.Generator().manual_seed(0)
    )
    own = [layout.shard(t, 2).requires_grad_(given.pop("grad", True)) for t in (query, key, value)]
    try:
        D.attention(*own, layout=layout, **given)
    except ch.ClearheadError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def unlike(rank: int) -> dict[str, str]:
    """Calls in which the last rank differs; the next call finds the group as it was."""
    odd = rank == dist.get_world_size() - 1
    ids = torch.tensor([0] * 5 + [1 if not odd else 0] * 7)
    long = D.ZigZag(200)
    hidden = torch.full((200, 200), -torch.inf).triu(1)
    return {
        "mask": _call(rank, mask=ch.Causal() if odd else None),
        "documents": _call(rank, mask=ch.Documents(ids)),
        "rule": _call(rank, mask=torch.tril(torch.ones(LENGTH, LENGTH), -1 if odd else 0).bool()),
        "bias": _call(rank, bias=torch.full((LENGTH, LENGTH), 1.0 + odd)),
        "score": _call(rank, score=ch.Dot(softcap=5.0 if odd else 6.0)),
        "own score": _call(rank, score=Halved() if odd else Own()),
        "own scale": _call(rank, score=Own(), scale=0.5 if odd else 0.25),
        "large mask": _call(rank, layout=long, mask=hidden.T.contiguous() if odd else hidden),
        "sinks": _call(rank, sinks=torch.tensor([0.0, float(odd)])),
        "dtype": _call(rank, dtype=torch.float64 if odd else torch.float32),
        "heads": _call(rank, heads=3 if odd else 2),
        "layout": _call(rank, layout=D.Contiguous(LENGTH) if odd else D.ZigZag(LENGTH)),
        "method": _call(rank, method="gather" if odd else "exchange"),
        "dropout": _call(rank, dropout_p=0.5 if odd else 0.25),
        "gradient": _call(rank, grad=not odd),
        "after": _call(rank),
    }


def one_ends(rank: int, when: str) -> str:
    """The last rank ends before the call, in it, or between forward and backward."""
    dist.barrier()  # until all are connected
    last = rank == dist.get_world_size() - 1
    layout = D.ZigZag(LENGTH)
    own = [torch.ones(1, 2, layout.count(), 4, requires_grad=True) for _ in range(3)]
    if last and when == "before":
        time.sleep(0.5)  # until the others know that all are connected
        os._exit(1)
    if last and when == "between messages":
        D.exchange.engine_of = lambda _: os._exit(1)
    try:
        output = D.attention(*own, layout=layout)
        if last:
            os._exit(1)
        output.sum().backward()
    except ch.ClearheadError as error:
        return str(error)
    return "done"


def one_never_calls(rank: int) -> str:
    """The group's time limit is 20 s; a shorter one here."""
    from datetime import timedelta

    group = dist.new_group(timeout=timedelta(seconds=2))
    if rank == dist.get_world_size() - 1:
        time.sleep(4)
        return "slept"
    layout = D.ZigZag(LENGTH, group)
    try:
        D.attention(*torch.ones(3, 1, 2, layout.count(), 4), layout=layout)
    except ch.ClearheadError as error:
        return str(error)
    return "done"


def bad_input(rank: int) -> dict[str, str]:
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

    layout = D.ZigZag(LENGTH)
    whole, part = torch.ones(1, 2, LENGTH, 4), torch.ones(1, 2, layout.count(), 4)
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    spread = distribute_tensor(whole, mesh, [Shard(2)])
    given = {
        "whole": lambda: D.attention(whole, whole, whole, layout=layout),
        "unlike": lambda: D.attention(part, part[:, :, 1:], part[:, :, 1:], layout=layout),
        "no layout": lambda: D.attention(part, part, part, layout=[0, 6]),
        "numbers": lambda: D.attention(part, part, part, layout=D.ZigZag(LENGTH, 2)),
        "method": lambda: D.attention(part, part, part, layout=layout, method="ring"),
        "dtensor": lambda: D.attention(spread, spread, spread, layout=D.Contiguous(LENGTH, mesh)),
        "mesh": lambda: D.ZigZag(LENGTH, DeviceMesh("cpu", [[0], [1]])),
        "dropout": lambda: D.attention(part, part, part, layout=layout, dropout_p=2.0),
    }
    said = each_said(given)
    mesh_layout = D.Contiguous(LENGTH, mesh)
    said["through a mesh"] = _call(rank, layout=mesh_layout)
    return said
