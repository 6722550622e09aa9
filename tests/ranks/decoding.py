"""Decoding with a cache that is spread over ranks, beside one process: what every rank runs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import clearhead as ch

D = ch.distributed
KEYS, PAGE = 403, 64


def _draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _own(rank: int, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
    """This rank's partial: every so-and-so-manyth page, all of them merged; of none, that of no key."""
    ranks, found = dist.get_world_size(), None
    for first in [*range(PAGE * rank, KEYS, PAGE * ranks)] or [KEYS]:
        pages = (t[:, :, first : first + PAGE] for t in (key, value))
        part = ch.partial(query, *pages, keys=(first, KEYS), align="lower_right", **given)
        found = part if found is None else found.merge(part)
    return found


def decoded(rank: int) -> list[str]:
    """What is apart from one process, or differs between ranks in any bit."""
    wrong = []
    for dtype, budget in ((torch.float32, 2e-6), (torch.float64, 1e-13), (torch.bfloat16, 2e-2)):
        query, key, value = (_draw(2, h, n, 16).to(dtype) for h, n in ((4, 2), (2, KEYS), (2, KEYS)))
        sinks = torch.tensor([0.5, -1.0, 3.0, 0.0], dtype=dtype)
        for mask in (ch.Causal(), ch.Lengths([KEYS, 0]), ch.SlidingWindow(before=90)):
            given = {"mask": mask, "bias": ch.ALiBi(4)}
            for _ in range(2):  # the second without a comparison of shapes
                merged = D.merge(_own(rank, query, key, value, **given))
            output = merged.finish(sinks)
            true = ch.attention(query, key, value, sinks=sinks, align="lower_right", **given)
            if output.dtype != dtype or not torch.allclose(output, true, rtol=budget, atol=budget):
                wrong.append(f"{dtype} {mask}: {float((output - true).abs().max()):.2g} apart")
            every = [torch.empty_like(output) for _ in range(dist.get_world_size())]
            dist.all_gather(every, output.contiguous())
            if not all(torch.equal(output, one) for one in every):
                wrong.append(f"{dtype} {mask}: ranks differ")
    return wrong


def groups(rank: int) -> list[bool]:
    """A group of two of the ranks; NumPy; after a part of the group has merged, shapes are compared anew."""
    found, pair = [], dist.new_group([0, 1])
    query, key, value = (_draw(1, 2, n, 8) for n in (1, 10, 10))
    true = ch.attention(query, key, value)
    if rank < 2:
        half = slice(0, 5) if rank == 0 else slice(5, 10)
        own = ch.partial(query, key[:, :, half], value[:, :, half])
        found.append(torch.allclose(D.merge(own, pair).finish(), true, atol=1e-6))
        arrays = ch.partial(*(t.numpy() for t in (query, key[:, :, half], value[:, :, half])))
        found.append(bool(abs(D.merge(arrays, pair).finish() - true.numpy()).max() < 1e-6))
    return found


def refused(rank: int) -> dict[str, str]:
    query = _draw(1, 2, 1 + rank, 8)
    fits, learns = ch.partial(query[:, :, :1], query, query), query.clone().requires_grad_()
    learnt = ch.partial(learns, learns, learns)
    said = {}
    for name, call in {
        "no partial": lambda: D.merge(query),
        "number": lambda: D.merge(fits, 2),
        "gradient": lambda: D.merge(learnt),
        "shapes": lambda: D.merge(ch.partial(query, query, query)),
        "dtypes": lambda: D.merge(ch.partial(*(query[:, :, :1].to([torch.float32, torch.float64][rank % 2]),) * 3)),
        "values": lambda: D.merge(ch.partial(*(query[:, :, :1].to([torch.float32, torch.bfloat16][rank % 2]),) * 3)),
        "many": lambda: D.merge(ch.partial(*(query[(slice(None), slice(None), *[None] * 6)],) * 3)),
    }.items():
        try:
            call()
        except ch.ClearheadError as error:
            said[name] = str(error)
    said["after"] = str(tuple(D.merge(fits).output.shape))
    return said


def everything(rank: int) -> dict[str, Any]:
    return {f.__name__: f(rank) for f in (decoded, groups, refused)}
