"""One recorded attention call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.inspection.gradients import WeightGradients
from clearhead.inspection.source import FromRecord
from clearhead.inspection.weights import Weights
from clearhead.masks.base import Mask
from clearhead.models._outcome import Outcome
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
    With `watch(values=True)`: `value` (B, Hk, Lk, Ev), and `output`, `value_norms` and `weighted_norms`; with
    `watch(gradients=True)` these, and after a backward pass `gradients` and `head_importance`.
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
    value: Tensor | None = None
    outcome: Outcome | None = None

    @property
    def problem(self) -> Problem:
        """The call in its normal form, without a value."""
        return self.record.problem

    @cached_property
    def weights(self) -> Weights:
        """The weights of this call, lazy: those before any dropout. Its reductions leave padding out."""
        source = FromRecord(self.record, {"score": self.score, "mask": self.mask})
        return Weights(source) if self.padding is None else PaddedWeights(source, self.padding)

    @property
    def output(self) -> Tensor:
        """What the backend computed, (B, H, Lq, Ev): after dropout, if there was any.

        `torch.nn.MultiheadAttention` gives it after its last projection alone: there it is `weights @ value`.
        """
        value, outcome = self._kept()
        output: Tensor = self.weights @ value if outcome.output is None else outcome.output
        return output

    @property
    def value_norms(self) -> Tensor:
        """‖v_j‖ of each key, (B, H, Lk): a weight moves an output by as much as the value it weighs."""
        value, _ = self._kept()
        norms: Tensor = value.norm(dim=-1)
        return norms.repeat_interleave(self.query.shape[1] // value.shape[1], 1)

    @property
    def weighted_norms(self) -> Tensor:
        """Σ_j w_ij ‖v_j‖ of each query, (B, H, Lq). Of one pair: `weights[b, h, i, j] * value_norms[b, h, j]`.

        Source: Kobayashi et al. 2020, "Attention is Not Only a Weight: Analyzing Transformers with Vector Norms".
        """
        value, _ = self._kept()
        norms: Tensor = self.weights @ value.norm(dim=-1, keepdim=True)
        return norms.squeeze(-1)

    @property
    def gradients(self) -> WeightGradients:
        """∂L/∂A of this call, a lazy matrix, the sum over all backward passes since; see `WeightGradients`.

        Its `by_key()` and `by_query()` sum A ∘ ∂A, its positive part with `positive=True`, on allowed pairs.
        Raises a `ClearheadError` where no gradient has come.
        """
        value, outcome = self._kept()
        return self.weights.gradients(value, outcome.gradient(self.name))

    @property
    def head_importance(self) -> Tensor:
        """Σ A ∘ ∂L/∂A of each head, (B, H): to first order, what the loss loses where the head is scaled to 0.

        Formula: Σ_ij A_ij ∂L/∂A_ij = Σ_i O_i · ∂L/∂O_i, so that no pair is computed. Michel et al. 2019, "Are Sixteen
        Heads Really Better than One?", take its absolute value.
        """
        grad = self._kept()[1].gradient(self.name)
        return (self.output.to(grad.dtype) * grad).sum((-2, -1))

    def _kept(self) -> tuple[Tensor, Outcome]:
        if self.value is None or self.outcome is None:
            raise ClearheadError(
                f"the value of {self.name} was not kept. Watch with values=True, or with gradients=True."
            )
        return self.value, self.outcome

    def __repr__(self) -> str:
        mask, align = "no mask" if self.mask is None else self.mask.title(), self.problem.sizes.align
        shapes = f"query {tuple(self.query.shape)}, key {tuple(self.key.shape)}"
        positional = self.mask is not None and self.mask.positional and self.query.shape[2] != self.key.shape[2]
        parts = [self.kind, shapes, mask, *([f"align={align!r}"] if positional else []), self.backend]
        if self.padding is not None:
            counts = [f"{int((~t).sum())} {side}" for side, t in self.padding._asdict().items() if t is not None]
            parts.append(f"padding: {' and '.join(counts)}")
        return f"AttentionCall({self.name!r}, {', '.join(parts)})"
