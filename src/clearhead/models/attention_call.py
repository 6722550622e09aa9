"""One recorded attention call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.base.text import said
from clearhead.explanation.diagnosis.diagnose import diagnosis_of
from clearhead.explanation.diagnosis.diagnosis import Diagnosis
from clearhead.explanation.explanation import Explanation
from clearhead.inspection.gradients import WeightGradients
from clearhead.inspection.source import FromRecord
from clearhead.inspection.weights import Weights
from clearhead.models.call import CallRecord
from clearhead.models.explained import case_of, explain_call
from clearhead.models.weights import weights_of


@dataclass(frozen=True, eq=False)
class AttentionCall(CallRecord):
    """An attention call of a model: its inputs, from which any part of its weights can be computed.

    `query` (B, H, Lq, E) and `key` (B, Hk, Lk, E) are detached copies, the key heads unrepeated. In a generation, keys
    that a cache gave again are kept once: each access to `key`, `value`, `problem` or `weights` of a later step puts
    its keys together, O(Lk), so keep the result. `kind`: "self", or "cross" where the keys come from another sequence
    than the queries. `score`: the dot product with its scale and softcap, or the score that clearhead's own attention
    was given. `mask`: a `Mask`, or None. `backend`: the name of the function that computed the call. `problem`: its
    normal form, from which the weights are computed; `problem.bias` is added to the scores, and
    `problem.sinks` are its sinks. `uniform`: queries without an allowed key, to which the backend gave one weight for
    every key, as backends do where a mask is finite.
    `padding`: which positions are words, where some are padding: `padding.queries` (B, Lq) and `padding.keys` (B, Lk),
    bool, True for a word, each None where all are words; None where no padding is known. Reductions of `weights` leave
    padding out, see `PaddedWeights`. `run`: which run of the model made the call, from 0 on.
    The record is of the computation that ran, with the changes of an `edit`. `factor`, (B, H, Lq): the factor by which
    an edit, `ScaleHeads` or `Knockout(after=True)`, multiplied the rows of the softmax over `problem`; `weights` are
    the product. None: no edit did.
    With `watch(values=True)`: `value` (B, Hk, Lk, Ev), and `output`, `value_norms` and `weighted_norms`; with
    `watch(gradients=True)` these, and after a backward pass `gradients` and `head_importance`.
    """

    @property
    def weights(self) -> Weights:
        """The weights of this call before any dropout, a lazy matrix. Its reductions leave padding out."""
        found: Weights | None = vars(self).get("_weights")
        if found is None:
            source = FromRecord(self.record, {"score": self.score, "mask": self.mask})
            found = weights_of(source, self.padding, self.factor)
            if self.cached_key.whole:  # else the call would keep a key of its own
                vars(self)["_weights"] = found
        return found

    @property
    def output(self) -> Tensor:
        """The output of the backend, (B, H, Lq, Ev), after dropout if there was any.

        `torch.nn.MultiheadAttention` gives only a projection of the output: there it is `weights @ value`.
        """
        value, outcome = self.values()
        output: Tensor = self.weights @ value if outcome.output is None else outcome.output
        return output

    @property
    def value_norms(self) -> Tensor:
        """‖v_j‖ of each key, (B, H, Lk): the part of a key in an output grows with its weight and with this norm."""
        value, _ = self.values()
        norms: Tensor = value.norm(dim=-1, dtype=accumulated(value.dtype))
        return norms.repeat_interleave(self.query.shape[1] // value.shape[1], 1)

    @property
    def weighted_norms(self) -> Tensor:
        """Σ_j w_ij ‖v_j‖ of each query, (B, H, Lq). One pair has `weights[b, h, i, j] * value_norms[b, h, j]`.

        Source: Kobayashi et al. 2020, "Attention is Not Only a Weight: Analyzing Transformers with Vector Norms".
        """
        value, _ = self.values()
        norms: Tensor = self.weights @ value.norm(dim=-1, keepdim=True, dtype=accumulated(value.dtype))
        return norms.squeeze(-1)

    @property
    def gradients(self) -> WeightGradients:
        """∂L/∂A of this call, a lazy matrix: the sum over all backward passes since the call. See `WeightGradients`.

        Its `by_key()` and `by_query()` sum A ∘ ∂A, its positive part with `positive=True`, on allowed pairs.
        Raises a `ClearheadError` where no gradient has reached the output.
        """
        value, outcome = self.values()
        return self.weights.gradients(value, outcome.gradient(self.name))

    @property
    def head_importance(self) -> Tensor:
        """Σ A ∘ ∂L/∂A of each head, (B, H): to first order, the decrease of the loss if the head is scaled to 0.

        Formula: Σ_ij A_ij ∂L/∂A_ij = Σ_i O_i · ∂L/∂O_i, so that no pair is computed. Michel et al. 2019, "Are Sixteen
        Heads Really Better than One?", take its absolute value.
        """
        grad = self.values()[1].gradient(self.name)
        return (self.output.to(grad.dtype) * grad).sum((-2, -1))

    def explain(
        self, at: Any = None, *, tokens: Sequence[str] | None = None, source_tokens: Sequence[str] | None = None
    ) -> Explanation:
        """How this call came to its weights and its output, step by step: see `clearhead.explain`.

        `at`: an index of the weights (B, H, Lq, Lk), such as `(0, 5, 17)`: sequence 0, head 5, query 17, and perhaps a
        key; None is the whole matrix where it is small. `tokens`: a word for each position; in cross attention for each
        query, and `source_tokens` for each key.
        With `watch(values=True)` the steps begin at the module's input, if the layers that made query, key and value
        are found among those that ran in the module, with their norm and rotation. They end in the output, beside the
        model's own output, and in the module's last layer. The explanation says what was not found or not kept; then
        the steps begin at the query and the key that the model gave to attention. The layers' inputs and weights are
        the model's own tensors, not copies: tensors that were written to since are not found.
        Raises a `ClearheadError` for an index that names no pair, a `ShapeError` for words that do not fit.
        Cost: the scores of the chosen queries with every key, O(Lk) memory for each.
        """
        return explain_call(self, at, tokens, source_tokens)

    def diagnose(self) -> Diagnosis:
        """Faults and risks of this call: see `clearhead.diagnose`. Values are checked where they were kept."""
        return diagnosis_of([case_of(self)])

    def __repr__(self) -> str:
        mask = "no mask" if self.mask is None else said(self.mask, self.mask.title)
        align = self.kept.problem.sizes.align
        query, key = self.query.shape, self.cached_key.shape
        shapes = f"query {tuple(query)}, key {tuple(key)}"
        positional = self.mask is not None and self.mask.positional and query[2] != key[2]
        parts = [self.kind, shapes, mask, *([f"align={align!r}"] if positional else []), self.backend]
        if self.padding is not None:
            counts = [f"{int((~t).sum())} {side}" for side, t in self.padding._asdict().items() if t is not None]
            parts.append(f"padding: {' and '.join(counts)}")
        return f"AttentionCall({self.name!r}, {', '.join(parts)})"
