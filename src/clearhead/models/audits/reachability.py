"""Which inputs may influence which outputs of a stack of layers, by the mask expected of each layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.base.shapes import Sizes
from clearhead.masks.base import Mask

LARGEST_MATRIX = 2**24  # pairs (B, Lq, Lk) of a mask with a residual that are written out
ROWS = 256  # queries of a residual that are evaluated together
EVERY = slice(None)


class AllowedPairs(NamedTuple):
    """The pairs that an expected mask allows in any head, as intervals of keys for each query, or as a matrix.

    `start`, `stop`: int64 (B or 1, Lq or 1, n); empty intervals have stop ≤ start. `matrix`: bool (B or 1, Lq, Lk),
    where the mask is no list of intervals; without it, a mask with a residual is replaced by its intervals, which
    allow more pairs, never fewer.
    """

    start: Tensor
    stop: Tensor
    matrix: Tensor | None = None

    @classmethod
    def from_mask(cls, mask: Mask, sizes: Sizes) -> AllowedPairs:
        """The pairs of `mask` for these sizes."""
        spans = mask._resolve(sizes)
        start, stop = (edge.clamp(0, sizes.keys).cpu() for edge in spans.intervals())
        start, stop = torch.broadcast_tensors(start, stop)  # type: ignore[no-untyped-call]
        start, stop = (edge.transpose(1, 2).flatten(2) for edge in (start, stop))  # the intervals of all heads
        if spans.residual is None or sizes.batch * sizes.queries * sizes.keys > LARGEST_MATRIX:
            return cls(start, stop)
        rows = (slice(row, row + ROWS) for row in range(0, sizes.queries, ROWS))
        parts = [spans.keep(EVERY, EVERY, row, EVERY, sizes.keys).any(1).cpu() for row in rows]
        shape = max(len(part) for part in parts), -1, sizes.keys
        return cls(start, stop, torch.cat([part.expand(shape) for part in parts], 1).expand(-1, sizes.queries, -1))

    def find_queries(self, keys: Tensor) -> Tensor:
        """The queries that may attend to any of these keys: bool (S, B, Lk) to bool (S, B, Lq or 1)."""
        if self.matrix is not None:
            return keys.transpose(0, 1).float().matmul(self.matrix.float().mT).transpose(0, 1) > 0
        count = F.pad(keys.cumsum(-1), (1, 0))  # (S, B, Lk + 1): how many of these keys are before each position
        found = torch.zeros((), dtype=torch.bool, device="cpu")
        for start, stop in zip(self.start.unbind(-1), self.stop.unbind(-1), strict=True):
            start, stop = (edge.expand(*keys.shape[:2], edge.shape[-1]) for edge in (start, stop))
            found = found | (count.gather(-1, stop) > count.gather(-1, start))
        return found

    def find_keys(self, queries: Tensor, size: int) -> Tensor:
        """The keys that any of these queries may attend to: bool (S, B, Lq) to bool (S, B, Lk)."""
        if self.matrix is not None:
            return queries.transpose(0, 1).float().matmul(self.matrix.float()).transpose(0, 1) > 0
        change = torch.zeros(
            *queries.shape[:2], size + 1, dtype=torch.int64, device="cpu"
        )  # intervals begun less intervals ended
        for start, stop in zip(self.start.unbind(-1), self.stop.unbind(-1), strict=True):
            count = (queries & (stop > start)).long()
            change.scatter_add_(-1, start.expand(count.shape), count)
            change.scatter_add_(-1, stop.expand(count.shape), -count)
        return change.cumsum(-1)[..., :size] > 0


class Reachability:
    """Which inputs may influence which outputs of a stack of layers with residual connections.

    A set of positions is followed through the layers by prefix sums, so a layer costs O(B · L), and no matrix is made.

    `layers`: the allowed pairs of the self attention of each layer, from the first to the last; equal layers are one
    object. `unlimited`: repeat each run of equal layers until nothing changes, where their number is not known.
    `least`: the reach without these repetitions.
    """

    def __init__(self, layers: Sequence[AllowedPairs], unlimited: bool = False) -> None:
        groups = [list(group) for _, group in groupby(layers, key=id)]
        self.least = Reachability(layers) if unlimited else self
        self._groups = [(group[0], None if unlimited else len(group)) for group in groups]
        self.key = tuple((id(pairs), number) for pairs, number in self._groups)  # equal for the same layers

    def find_outputs(self, inputs: Tensor) -> Tensor:
        """The outputs that any of these inputs may influence: bool (S, B, L), for S sets of inputs."""
        reached = inputs
        for pairs, number in self._groups:
            reached = _grow(reached, number, pairs.find_queries)
        return reached

    def find_inputs(self, outputs: Tensor) -> Tensor:
        """The inputs that may influence any of these outputs: bool (S, B, L), for S sets of outputs."""
        reached = outputs
        for pairs, number in reversed(self._groups):
            reached = _grow(reached, number, partial(pairs.find_keys, size=outputs.shape[-1]))
        return reached


class CrossReachability:
    """Which inputs of an encoder may influence which outputs of the decoder that attends to it.

    `encoder`: the reach inside the encoder. `layers`: for each layer of the decoder, the allowed pairs of its self
    attention and of its cross attention. `lengths`: of the encoder's sequences and of the decoder's.
    """

    def __init__(
        self,
        encoder: Reachability,
        layers: Sequence[tuple[AllowedPairs, AllowedPairs]],
        lengths: tuple[int, int],
    ) -> None:
        self._encoder, self._layers, self._lengths = encoder, layers, lengths
        self.least = self  # the number of layers is known

    def find_outputs(self, inputs: Tensor) -> Tensor:
        """The decoder's outputs that any of these inputs may influence: bool (S, B, Le) to bool (S, B, Ld)."""
        encoded = self._encoder.find_outputs(inputs)
        reached = torch.zeros(*inputs.shape[:2], self._lengths[1], dtype=torch.bool, device="cpu")
        for own, cross in self._layers:
            reached = reached | own.find_queries(reached)
            reached = reached | cross.find_queries(encoded)
        return reached

    def find_inputs(self, outputs: Tensor) -> Tensor:
        """The encoder's inputs that may influence any of these outputs: bool (S, B, Ld) to bool (S, B, Le)."""
        reached = outputs
        encoded = torch.zeros(*outputs.shape[:2], self._lengths[0], dtype=torch.bool, device="cpu")
        for own, cross in reversed(self._layers):
            encoded = encoded | cross.find_keys(reached, self._lengths[0])
            reached = reached | own.find_keys(reached, self._lengths[1])
        return self._encoder.find_inputs(encoded)


def _grow(positions: Tensor, number: int | None, step: Callable[[Tensor], Tensor]) -> Tensor:
    """The positions with all that `step` adds to them, `number` times, or until it adds nothing."""
    done = 0
    while number is None or done < number:
        grown = positions | step(positions)
        if torch.equal(grown, positions):
            break
        positions, done = grown, done + 1
    return positions
