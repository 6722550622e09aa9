"""Messages between the ranks of a group. Both peers post in the same order, because NCCL matches messages by order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from clearhead.base.errors import ClearheadError


class Channel:
    """The connection of this rank to the others of a group."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    @property
    def on_cuda(self) -> bool:
        """Whether the group sends only tensors of a CUDA device."""
        return bool(dist.get_backend(self.group) == "nccl")

    def post(self, to: int, tensor: Tensor | None, source: int, room: Tensor | None) -> Posted:
        """Send `tensor` to one rank, and receive a tensor from another rank into `room`. Returns at once. Each is None
        where there is no message. A tensor without elements is not sent, which both peers know."""
        moves = []
        if tensor is not None and tensor.numel():
            moves.append(self._move(dist.isend, tensor, to))
        if room is not None and room.numel():
            moves.append(self._move(dist.irecv, room, source))
        with _told("a rank of the group has ended"):
            return Posted(dist.batch_isend_irecv(moves) if moves else [], room, tensor)

    def gather(self, row: Tensor) -> Tensor:
        """The rows of all ranks, (ranks, …). `row` has the same shape and dtype on every rank."""
        rows = [torch.empty_like(row) for _ in range(self.ranks)]
        with _told(
            f"rank {self.rank} of {self.ranks} has waited for the others in vain: one has ended, or has not made this "
            "call, which all ranks of the group must make together"
        ):
            dist.all_gather(rows, row, group=self.group)
        return torch.stack(rows)

    def _move(self, what: Any, tensor: Tensor, peer: int) -> Any:
        place = peer if self.group is None else dist.get_global_rank(self.group, peer)
        return dist.P2POp(what, tensor.view(torch.uint8), place, self.group)  # bytes: every dtype on every backend


class Posted:
    """Messages under way."""

    def __init__(self, works: Sequence[Any], room: Tensor | None, sent: Tensor | None) -> None:
        self._works, self._room, self._sent = works, room, sent  # tensors stay until the messages are through

    def wait(self) -> Tensor | None:
        """The received tensor, once the messages are through; None where nothing was to be received."""
        with _told("a rank of the group has ended, or does not answer"):
            for work in self._works:
                work.wait()
        return self._room


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Raise a `ClearheadError` that begins with `what` in place of a backend's own error."""
    try:
        yield
    except RuntimeError as error:
        raise ClearheadError(f"{what}.\n{error}") from error
