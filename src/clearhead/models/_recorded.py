"""The bias of a call that is over."""

from __future__ import annotations

from clearhead.base.shapes import Sizes
from clearhead.biases.base import Added, Bias
from clearhead.biases.dense import DenseBias
from clearhead.biases.distance import DistanceBias


class RecordedBias(Bias):
    """The function of a bias, for the sizes of its call."""

    def __init__(self, added: Added) -> None:
        super().__init__()
        self.function, self.reads = added.function, added.reads

    def lower(self, sizes: Sizes) -> Added:
        return Added(function=self.function, reads=self.reads)


def recorded(added: Added) -> Bias:
    """A bias in its normal form: copies of its numbers, and its function as it is."""
    dense, relative = (None if t is None else t.detach().clone() for t in added[:2])
    parts: list[Bias] = [] if relative is None else [DistanceBias(relative)]
    parts += [] if dense is None else [DenseBias(dense)]
    parts += [] if added.function is None else [RecordedBias(added)]
    return sum(parts[1:], parts[0])
