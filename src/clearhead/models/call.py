"""One recorded attention call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import Tensor

from clearhead.biases.base import Bias
from clearhead.inspection.weights import Weights
from clearhead.masks.base import Mask
from clearhead.scores.base import Score


@dataclass(frozen=True, eq=False)
class Call:
    """An attention call of a model: what went in, from which any part of its weights can be computed.

    `query` (B, H, Lq, E) and `key` (B, Hk, Lk, E) are detached copies, the key heads unrepeated; `mask` is a `Mask` or
    None, `bias` what the model added to the scores, or None. `kind`: "self", or "cross" where the keys come from
    another sequence than the queries. `score`: the dot product with
    the call's scale, softcap and sinks, or what clearhead's own attention was given. `backend`:
    what computed it. `uniform`: queries that the mask left
    nothing, and to which the backend gave one weight for every key, as it does where a mask is a large negative number.
    """

    name: str
    kind: Literal["self", "cross"]
    query: Tensor
    key: Tensor
    mask: Mask | None
    bias: Tensor | Bias | None
    score: Score
    backend: str
    uniform: Tensor | None = None

    @cached_property
    def weights(self) -> Weights:
        """The weights of this call, lazy: those before any dropout."""
        query = self.query if self.uniform is None else self.query.masked_fill(self.uniform, 0.0)
        return Weights(query, self.key, score=self.score, mask=self.mask, bias=self.bias)

    def __repr__(self) -> str:
        mask = "no mask" if self.mask is None else self.mask.title()
        shapes = f"query {tuple(self.query.shape)}, key {tuple(self.key.shape)}"
        return f"Call({self.name!r}, {self.kind}, {shapes}, {mask}, {self.backend})"
