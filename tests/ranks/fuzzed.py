"""Random problems of `fuzz.py`, shared out over ranks, against the formulas in NumPy: what every rank runs."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fuzzing.attend import array, computed_in, dtype_of, first, loss_of, measure
from fuzzing.build import Built, build, placed
from fuzzing.draw import Spec, draw, is_packed
from torch import Tensor

import clearhead as ch
from clearhead.distributed import needs

D = ch.distributed


def everything(rank: int, begin: int, stop: int) -> dict[str, Any]:
    """Those of self-attention in ordinary surroundings; how many there were, and what is beyond its budget."""
    count, wrong = 0, []
    for number in range(begin, stop):
        spec = draw(number)
        query, key, _ = spec.problem.inputs
        align = spec.problem.align
        aligned = align is None or (not isinstance(align, np.ndarray) and align in (0, "upper_left", "lower_right"))
        aligned = aligned and (align is None or not is_packed(spec.problem.mask))  # ranks align no documents
        itself = query.shape[-2] == key.shape[-2] and aligned
        if spec.task == "attend" and spec.surroundings == "nothing" and itself:
            count += 1
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                wrong += [f"{spec}\n    {said}" for said in check(rank, spec)]
    return {"count": count, "wrong": wrong}


def check(rank: int, spec: Spec) -> Iterator[str]:
    r, ranks = random.Random(spec.number), dist.get_world_size()
    length, needs.PIECE = spec.problem.query.shape[-2], r.choice([3, 1024])
    cuts = sorted(r.randint(0, length) for _ in range(ranks - 1))
    uneven = [b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True)]
    layout = r.choice([D.ZigZag(length), D.Contiguous(length), D.Contiguous(uneven)])
    method = r.choice(["exchange", "exchange", "gather"])
    built, loss = build(spec), loss_of(spec)
    own = [layout.shard(t.detach(), -2).requires_grad_() for t in built.inputs]
    options = {name: given for name, given in built.options.items() if name != "align"}
    torch.manual_seed(spec.number)
    try:
        output = D.attention(*own, layout=layout, method=method, dropout_p=spec.problem.dropout_p, **options)
    except ch.ClearheadError as error:
        try:
            built.attend(*built.inputs, None)
        except ch.ClearheadError:
            return
        yield f"refused over ranks alone: {error}"
        return
    given = layout.shard(placed(loss).to(output.dtype), -2)
    shared = {name: leaf for name, leaf in built.leaves.items() if name not in ("query", "key", "value")}
    found = torch.autograd.grad(output, [*own, *shared.values()], given, allow_unused=True)
    results = {"output": _whole(output.detach(), layout)}
    for name, part in zip(("query", "key", "value"), found, strict=False):
        results[name] = _whole(part, layout)
    for (name, leaf), part in zip(shared.items(), found[3:], strict=True):
        results[name] = (torch.zeros_like(leaf) if part is None else part).detach().clone()
        dist.all_reduce(results[name])
    if rank == 0:
        yield from _beyond(spec, built, loss, results)


def _beyond(spec: Spec, built: Built, loss: Any, results: dict[str, Tensor]) -> Iterator[str]:
    assert computed_in(spec) == spec.dtype
    truth = first(spec, loss, built)
    for name, got in results.items():
        wrong = truth.wrong(name, array(got), measure(name, built), dtype_of(name, spec))
        if wrong:
            yield wrong


def _whole(part: Tensor, layout: Any) -> Tensor:
    """A tensor of all positions, of the parts of all ranks."""
    whole = part.new_zeros(*part.shape[:-2], layout.length, part.shape[-1])
    whole[..., layout.positions(), :] = part
    wide = whole.double()  # gloo adds no bfloat16
    dist.all_reduce(wide)
    return wide.to(part.dtype)
