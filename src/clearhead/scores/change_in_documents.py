"""A change of scores that counts positions inside each document."""

from __future__ import annotations

from torch import Tensor, nn

from clearhead.base.document_edges import DocumentEdges
from clearhead.base.torch_state.modules import with_parameters
from clearhead.scores.base import ChangeOfPair, Score, name_of


class ChangeInDocuments(nn.Module):
    """A change of a score that is given the document of each query, and the indices of query and key in it."""

    def __init__(self, change: ChangeOfPair, edges: DocumentEdges) -> None:
        super().__init__()
        self.change, self.edges = change, edges
        self.__name__ = name_of(change)

    def forward(self, score: Tensor, batch: Tensor, head: Tensor, query_index: Tensor, key_index: Tensor) -> Tensor:
        document, query = self.edges.queries.locate(score.device, query_index)
        _, key = self.edges.keys.locate(score.device, key_index)
        return self.change(score, document, head, query, key)


def count_in_documents(score: Score, edges: DocumentEdges) -> Score:
    """Return the score of the padded batch, for the row of the documents."""
    return score if score.changed_by is None else copy_with_change(score, ChangeInDocuments(score.changed_by, edges))


def count_in_row(score: Score) -> Score:
    """Return the score that `count_in_documents` was given."""
    change = score.changed_by
    return copy_with_change(score, change.change) if isinstance(change, ChangeInDocuments) else score


def copy_with_change(score: Score, change: ChangeOfPair) -> Score:
    """The same score over the same parameters, with another change."""
    copied = with_parameters(score, lambda p: p, every=True)
    assert isinstance(copied, Score)
    del copied.changed_by  # a function cannot take a module's place
    copied.changed_by = change
    return copied
