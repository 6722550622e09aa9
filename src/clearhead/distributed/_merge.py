"""Decoding with keys that are spread over ranks."""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from clearhead._partial import PartialAttention
from clearhead.base.errors import ClearheadError, ShapeError, UnsupportedError
from clearhead.base.torch_state.contexts import disable_compiler
from clearhead.distributed.agreement import compare
from clearhead.distributed.channel import Channel
from clearhead.distributed.layout import Group, members
from clearhead.distributed.once import refuse_transforms
from clearhead.problem.partial import Partial

# For each group, the shapes and dtypes that were found to be the same on all ranks.
_compared: WeakKeyDictionary[Any, set[tuple[Any, ...]]] = WeakKeyDictionary()


@disable_compiler
def merge(partial: PartialAttention, group: Group = None) -> PartialAttention:
    """Attention over the keys of all ranks of a group, from each rank's `partial` over its own: for decoding.

    Every rank has the same queries and some of the keys, such as its pages of a cache, and calls it together:

        own = ch.partial(query, keys, values, mask=mask, keys=(first, total))
        output = ch.distributed.merge(own, group).finish(sinks)

    Formula: that of `PartialAttention.merge`, in the order of the ranks, so the result is the same on all to the bit.
    `group`: a process group, a `DeviceMesh` of one dimension, or None for all processes.
    Returns a `PartialAttention` without gradients (`attention` over ranks has gradients). Raises a `ClearheadError`
    where a rank has ended, and a `ShapeError` where outputs differ in shape or dtype; these are compared when a group
    first merges an output of a shape and dtype. Cost: one gather of an output and two numbers for each of its queries.
    Source: Rabe and Staats 2021, "Self-attention Does Not Need O(n²) Memory"; Dao et al. 2023, "Flash-Decoding".
    """
    if not isinstance(partial, PartialAttention):
        raise ClearheadError(f"merge takes the result of partial(), not {type(partial).__name__}.")
    if isinstance(group, int):
        raise ClearheadError(f"group is {group}; merge takes a process group, or None for all processes.")
    group = members(group)[0]
    refuse_transforms()
    found = partial._found
    tensors = [t for t in found[:3] if isinstance(t, Tensor)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise UnsupportedError(
            "merge over ranks has no gradients, and this partial needs one: call it under torch.no_grad(); to train "
            "over ranks there is clearhead.distributed.attention."
        )
    channel = Channel(group)
    _compare(found.output, partial._dtype, channel)
    every = channel.gather(torch.cat([t.detach().reshape(-1) for t in tensors]))
    sizes = [t.numel() for t in tensors]
    parts = [Partial(*(part.view(t.shape) for part, t in zip(row.split(sizes), tensors, strict=True))) for row in every]
    return PartialAttention(functools.reduce(Partial.merge, parts), partial._dtype, partial._numpy)


def _compare(output: Tensor, dtype: torch.dtype, channel: Channel) -> None:
    """Raise an error where the outputs differ in shape or dtype: a gather of unequal tensors would end the processes.

    `dtype`: the dtype of the finished output. Each shape is compared once, since a comparison costs a message, and on a
    GPU a wait.
    """
    mine = (*output.shape, output.dtype, dtype)
    seen = _compared.setdefault(channel.group or dist.group.WORLD, set())
    if mine not in seen:
        said = {"shape": tuple(output.shape), "computed dtype": str(output.dtype), "dtype": str(dtype)}
        advice = "All ranks have the same queries, and each its own part of the keys."
        named = {f"the {name} of the output": value for name, value in said.items()}
        compare(named, channel, output.device, advice, ShapeError)
        seen.add(mine)
