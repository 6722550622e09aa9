"""One recorded attention call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from torch import Tensor

from clearhead.base.shapes import Align
from clearhead.biases.base import Bias
from clearhead.inspection.weights import Weights
from clearhead.masks.base import Mask
from clearhead.models._padding import Real
from clearhead.models.padded import PaddedWeights
from clearhead.scores.base import Score


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """An attention call of a model: what went in, from which any part of its weights can be computed.

    `query` (B, H, Lq, E) and `key` (B, Hk, Lk, E) are detached copies, the key heads unrepeated; `mask` is a `Mask` or
    None, `bias` what the model added to the scores, or None. `kind`: "self", or "cross" where the keys come from
    another sequence than the queries. `score`: the dot product with the call's scale and softcap, or what clearhead's
    own attention was given; `scale`, beside a score that has none of its own; `sinks`, (H,), or None. `backend`: what
    computed it. `align`: where query 0 stands; the last query at the last key, where the call did not say. `uniform`:
    queries that the mask left nothing, and to which the backend gave one weight for every key, as it does where a mask
    is a large negative number.
    `padding`: which positions are words, where some are padding: `padding.queries` (B, Lq) and `padding.keys` (B, Lk),
    bool, True for a word, each None where all are; None where nothing is known of any. Reductions of `weights` leave
    padding out, see `PaddedWeights`.
    """

    name: str
    kind: Literal["self", "cross"]
    query: Tensor
    key: Tensor
    mask: Mask | None
    bias: Tensor | Bias | None
    score: Score
    backend: str
    scale: float | None = None
    sinks: Tensor | None = None
    align: Align = "lower_right"
    uniform: Tensor | None = None
    padding: Real | None = None

    @cached_property
    def weights(self) -> Weights:
        """The weights of this call, lazy: those before any dropout. Its reductions leave padding out."""
        query = self.query if self.uniform is None else self.query.masked_fill(self.uniform, 0.0)
        options: dict[str, Any] = {
            "score": self.score,
            "mask": self.mask,
            "bias": self.bias,
            "scale": self.scale,
            "sinks": self.sinks,
            "align": self.align,
            "detached": True,
        }
        if self.padding is None:
            return Weights(query, self.key, **options)
        return PaddedWeights(query, self.key, padding=self.padding, **options)

    def __repr__(self) -> str:
        mask = "no mask" if self.mask is None else self.mask.title()
        shapes = f"query {tuple(self.query.shape)}, key {tuple(self.key.shape)}"
        positional = self.mask is not None and self.mask.positional and self.query.shape[2] != self.key.shape[2]
        parts = [self.kind, shapes, mask, *([f"align={self.align!r}"] if positional else []), self.backend]
        if self.padding is not None:
            counts = [f"{int((~t).sum())} {side}" for side, t in self.padding._asdict().items() if t is not None]
            parts.append(f"padding: {' and '.join(counts)}")
        return f"AttentionCall({self.name!r}, {', '.join(parts)})"
