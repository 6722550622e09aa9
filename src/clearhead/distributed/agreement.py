"""Compare the arguments of all ranks before a call: ranks with different ones would wait for each other forever."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.distributed.channel import Channel
from clearhead.distributed.pieces import Shard
from clearhead.problem.visible import intervals_of
from clearhead.scores.base import Pairwise

ALL = 2**16  # a tensor of at most so many bytes is compared byte by byte; of a larger one, a weighted sum is compared
GOLDEN = -7046029254386353131  # 2⁶⁴ / golden ratio, odd, as a number with a sign
PART = 2**22  # numbers that are summed at a time
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def agree(shard: Shard, call: tuple[Any, ...], reads: tuple[Tensor, ...] = ()) -> None:
    """Raise a `ClearheadError` where the ranks' calls differ; it names the argument and the ranks. `call`: the call in
    words and numbers; `reads`: further tensors of the whole sequence that the call reads."""
    advice = (
        "Masks, biases, lengths and scores are those of the whole sequence, the same on every rank, and so are dtypes "
        "and heads; each rank passes its own part of query, key and value alone (layout.shard)."
    )
    compare(dict(_of_call(shard, call, reads)), shard.channel, shard.local.query.device, advice)


def compare(
    said: dict[str, Any],
    channel: Channel,
    device: torch.device,
    advice: str,
    kind: type[ClearheadError] = ClearheadError,
) -> None:
    """Raise an error where the ranks give different values for a name of `said`. Digests on `device` are compared."""
    digests = [_digest(value) for value in said.values()]
    every = channel.gather(torch.tensor(digests, dtype=torch.int64, device=device)).cpu()
    for at, name in enumerate(said):
        alike: dict[int, list[int]] = {}
        for rank, digest in enumerate(every[:, at].tolist()):
            alike.setdefault(digest, []).append(rank)
        if len(alike) > 1:
            mine = f"; here, on rank {channel.rank}, it is {said[name]!r:.80}" if _short(said[name]) else ""
            raise kind(f"{name} differs {_which(list(alike.values()))}{mine}. {advice}")


def _which(alike: list[list[int]]) -> str:
    """The ranks that differ from the majority; where there is no majority, the groups of equal ranks."""
    most, *others = sorted(alike, key=len, reverse=True)
    if len(most) > sum(map(len, others)):
        return f"on rank {', '.join(str(rank) for ranks in others for rank in ranks)}"
    return "between the ranks " + " and ".join(f"{', '.join(map(str, ranks))}" for ranks in alike)


def _short(value: Any) -> bool:
    """Whether a value can be printed in the message: it is text or numbers."""
    return all(map(_short, value)) if isinstance(value, tuple) else isinstance(value, str | int | float)


def _of_call(shard: Shard, call: tuple[Any, ...], reads: tuple[Tensor, ...]) -> Iterator[tuple[str, Any]]:
    local, needs = shard.local, shard.needs
    inputs = [t for t in (local.query, local.key, local.value) if t is not None]
    yield "the call", call
    yield "what the call reads", tuple(map(_of_tensor, reads))
    visible, bias, scores = local.visible, local.bias, local.scores
    yield "the layout", tuple(tuple((c.start, c.stop) for c in own) for own in needs.layout.chunks)
    yield "the batch and the heads", (needs.sizes.batch, needs.sizes.heads, local.key.shape[1])
    yield "the width of query, key and value", tuple(t.shape[-1] for t in inputs)
    yield "the dtype", tuple(str(t.dtype) for t in inputs)
    lowered = local.lowered
    form = scores.phi if isinstance(scores, Pairwise) else type(scores.score).__qualname__
    yield "the score", (form, scores.scale, scores.softcap or 0.0)
    yield "the weight of the score", None if lowered is None else lowered.weight
    yield "the mask", None if visible is None else tuple(map(_of_array, intervals_of(visible)))
    spans = local.spans
    reads_of_mask = () if spans is None else (spans.residual is not None, *map(_of_tensor, spans.reads))
    yield "what the mask reads", reads_of_mask
    yield "the bias", () if bias is None else tuple(map(_of_tensor, (*bias.tensors, *bias.reads)))
    yield "the sinks", local.sinks
    yield "the dropout", local.dropout_p
    tensors = local.query, local.key, local.value, local.sinks, *local.added
    grads = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in tensors)
    yield "which inputs need a gradient", grads


def _of_array(array: np.ndarray[Any, Any]) -> bytes:
    return hashlib.blake2b(str(array.shape).encode() + np.ascontiguousarray(array).tobytes()).digest()


def _of_tensor(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    flat = tensor.detach().resolve_neg().reshape(-1).contiguous()
    if flat.numel() < 2:  # a tensor of one element counts as contiguous at any stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    if flat.nbytes <= ALL:
        return tuple(tensor.shape), flat.view(torch.uint8).cpu().numpy().tobytes()
    words = flat.view(WORDS[flat.element_size()])
    parts = (_sum(words[first : first + PART], first) for first in range(0, words.numel(), PART))
    return tuple(tensor.shape), (sum(parts) % 2**64).to_bytes(8, "little")


def _sum(words: Tensor, first: int) -> int:
    """The sum of each word times an odd number that follows from its place, modulo 2⁶⁴: exact in any order."""
    place = torch.arange(first, first + words.numel(), dtype=torch.int64, device=words.device) * GOLDEN
    return int((words.long() * ((place ^ (place >> 29)) | 1)).sum())


def _digest(value: Any) -> int:
    value = _of_tensor(value) if isinstance(value, Tensor) else value
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest(), "little")
