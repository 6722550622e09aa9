"""A change of scores of a padded batch, for its sequences packed into one row."""

from __future__ import annotations

from torch import Tensor, nn

from clearhead.base.modules import with_parameters
from clearhead.base.ragged import Sequences, places_in
from clearhead.scores.base import ChangeOfPair, Score, name_of


class RaggedChange(nn.Module):
    """A change of a score that is given the sequence of each query, and places in the sequences of query and key."""

    def __init__(self, change: ChangeOfPair, sequences: Sequences) -> None:
        super().__init__()
        self.change, self.sequences = change, sequences
        self.__name__ = name_of(change)

    def forward(self, score: Tensor, batch: Tensor, head: Tensor, query_index: Tensor, key_index: Tensor) -> Tensor:
        of = self.sequences
        number, query = places_in(of.queries.to(score.device), query_index)
        _, key = places_in(of.keys.to(score.device), key_index)
        return self.change(score, number, head, query, key)


def ragged(score: Score, sequences: Sequences) -> Score:
    """The score of a padded batch, for the packed row of its sequences."""
    return score if score.changed_by is None else with_change(score, RaggedChange(score.changed_by, sequences))


def unpacked(score: Score) -> Score:
    """The score of the padded batch, of that of the packed row."""
    change = score.changed_by
    return with_change(score, change.change) if isinstance(change, RaggedChange) else score


def with_change(score: Score, change: ChangeOfPair) -> Score:
    """The same score over the same parameters, with another change."""
    copied = with_parameters(score, lambda p: p, every=True)
    assert isinstance(copied, Score)
    del copied.changed_by  # a function cannot take a module's place
    copied.changed_by = change
    return copied
