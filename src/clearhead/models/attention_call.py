"""One recorded attention call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import Tensor

from clearhead.inspection.source import FromRecord
from clearhead.inspection.weights import Weights
from clearhead.masks.base import Mask
from clearhead.models._padding import Real
from clearhead.models.padded import PaddedWeights
from clearhead.problem.problem import Problem
from clearhead.problem.record import Record
from clearhead.scores.base import Score


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """An attention call of a model: what went in, from which any part of its weights can be computed.

    `query` (B, H, Lq, E) and `key` (B, Hk, Lk, E) are detached copies, the key heads unrepeated. `kind`: "self", or
    "cross" where the keys come from another sequence than the queries. `score` and `mask` are what the call came from:
    the dot product with its scale and softcap, or what clearhead's own attention was given; a `Mask`, or None.
    `backend`: what computed it. `problem`: its normal form, from which the weights are computed; `problem.bias` and
    `problem.sinks` are what the model added to the scores and to the softmax. `uniform`: queries without
    an allowed key, to which the backend gave one weight for every key, as it does where a mask is finite.
    `padding`: which positions are words, where some are padding: `padding.queries` (B, Lq) and `padding.keys` (B, Lk),
    bool, True for a word, each None where all are; None where no padding is known. Reductions of `weights` leave
    padding out, see `PaddedWeights`. `run`: which run of the model made it, from 0 on.
    """

    name: str
    kind: Literal["self", "cross"]
    query: Tensor
    key: Tensor
    score: Score
    mask: Mask | None
    backend: str
    record: Record
    uniform: Tensor | None = None
    padding: Real | None = None
    run: int = 0

    @property
    def problem(self) -> Problem:
        """The call in its normal form, without a value."""
        return self.record.problem

    @cached_property
    def weights(self) -> Weights:
        """The weights of this call, lazy: those before any dropout. Its reductions leave padding out."""
        source = FromRecord(self.record, {"score": self.score, "mask": self.mask})
        return Weights(source) if self.padding is None else PaddedWeights(source, self.padding)

    def __repr__(self) -> str:
        mask, align = "no mask" if self.mask is None else self.mask.title(), self.problem.sizes.align
        shapes = f"query {tuple(self.query.shape)}, key {tuple(self.key.shape)}"
        positional = self.mask is not None and self.mask.positional and self.query.shape[2] != self.key.shape[2]
        parts = [self.kind, shapes, mask, *([f"align={align!r}"] if positional else []), self.backend]
        if self.padding is not None:
            counts = [f"{int((~t).sum())} {side}" for side, t in self.padding._asdict().items() if t is not None]
            parts.append(f"padding: {' and '.join(counts)}")
        return f"AttentionCall({self.name!r}, {', '.join(parts)})"
