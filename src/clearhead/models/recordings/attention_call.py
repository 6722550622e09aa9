"""One recorded attention call."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.base.errors import ClearheadError, UnsupportedError
from clearhead.base.output.text import said
from clearhead.base.output.words import TokensLike
from clearhead.base.torch_state.contexts import without_autocast
from clearhead.base.torch_state.tensor_kind import is_readable
from clearhead.explanation.diagnosis.diagnose import diagnosis_of
from clearhead.explanation.diagnosis.diagnosis import Diagnosis
from clearhead.explanation.explanation import Explanation, shown_as
from clearhead.explanation.modules.projection import Linear
from clearhead.inspection.by_head import as_value, of_value
from clearhead.inspection.gradients import WeightGradients
from clearhead.inspection.matrix import Index
from clearhead.inspection.source import FromRecord
from clearhead.inspection.weights import Weights
from clearhead.masks.base import Mask
from clearhead.models.interception.layers import FIRST, LayerName
from clearhead.models.interception.modules import Kind
from clearhead.models.origins.ran import Origin, check_unwritten
from clearhead.models.recordings.cached import Cached
from clearhead.models.recordings.call import Call, Outcome, with_key
from clearhead.models.recordings.call_explanation import case_of, explain_call
from clearhead.models.recordings.weights import weights_of
from clearhead.problem.problem import Problem
from clearhead.problem.record import Record
from clearhead.problem.words import Words
from clearhead.scores.base import Score


class CallInputs(NamedTuple):
    """The inputs of a call, copied.

    `record`: its problem, whose key has the right shape alone where `cached_key` has to be put together. `ids`: the
    tokens of the queries, (B, Lq), where the model was given some; not in a file. The others: see `AttentionCall`.
    """

    query: Tensor
    cached_key: Cached
    score: Score
    mask: Mask | None
    record: Record
    cached_value: Cached | None = None
    uniform: Tensor | None = None
    padding: Words | None = None
    ids: Tensor | None = None


class CallResult(NamedTuple):
    """The result of a call.

    `outcome`: its output, where it was kept. `factor`, `edited`: see `AttentionCall`. `unedited`: the call without its
    edit; None where there was none, and in a file.
    """

    outcome: Outcome | None = None
    factor: Tensor | None = None
    edited: bool = False
    unedited: AttentionCall | None = None


class CallContext(NamedTuple):
    """Where a call was made.

    `origin`: the layers around the call, for `explain`. `begins`: see `AttentionCall`. `windows_of`: of how many longer
    sequences its sequences are windows; None: they are whole. The others: see `Call`.
    """

    name: str
    kind: Kind
    backend: str
    layer: LayerName = FIRST
    run: int = 0
    origin: Origin | None = None
    begins: tuple[int, ...] = ()
    windows_of: int | None = None


def _read(field: str) -> Any:
    """A property that reads a field of a part of the call."""
    return property(attrgetter(field))


class AttentionCall(Call):
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
    The record is of the computation that ran, with the changes of an `edit`: `edited` says whether one changed this
    call, and `unedited` is the call without it. `factor`, (B, H, Lq): the factor by which an edit, `ScaleHeads`,
    `Knockout(after=True)` or `MapWeights`, multiplied the rows of the softmax over `problem`; `weights` are the
    product. None: no edit did. `begins`: of a joined generation, the first query of each step; else ().
    With `watch(values=True)`: `value` (B, Hk, Lk, Ev), and `output`, `value_norms`, `weighted_value_norms`, and where
    the layer that writes the heads is found, `output_projection`, `transformed_norms`, `weighted_transformed_norms` and
    `result_norms`; with `watch(gradients=True)` value, output and value norms, and after a backward pass `gradients`
    and `head_importance`.
    """

    query: Tensor = _read("inputs.query")
    cached_key: Cached = _read("inputs.cached_key")
    cached_value: Cached | None = _read("inputs.cached_value")
    score: Score = _read("inputs.score")
    mask: Mask | None = _read("inputs.mask")
    uniform: Tensor | None = _read("inputs.uniform")
    padding: Words | None = _read("inputs.padding")
    ids: Tensor | None = _read("inputs.ids")
    outcome: Outcome | None = _read("result.outcome")
    factor: Tensor | None = _read("result.factor")
    edited: bool = _read("result.edited")
    name: str = _read("context.name")
    kind: Kind = _read("context.kind")
    backend: str = _read("context.backend")
    layer: LayerName = _read("context.layer")
    run: int = _read("context.run")
    origin: Origin | None = _read("context.origin")
    begins: tuple[int, ...] = _read("context.begins")
    windows_of: int | None = _read("context.windows_of")

    def __init__(self, inputs: CallInputs, result: CallResult, context: CallContext) -> None:
        self.inputs, self.result, self.context = inputs, result, context

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, Lq, Lk)."""
        batch, heads, queries, _ = self.query.shape
        return batch, heads, queries, self.cached_key.link.length

    @property
    def key(self) -> Tensor:
        return self.cached_key.tensor()

    @property
    def value(self) -> Tensor | None:
        return None if self.cached_value is None else self.cached_value.tensor()

    @property
    def record(self) -> Record:
        """The record of the call, with its key."""
        record = self.inputs.record
        return record if self.cached_key.whole else record._replace(problem=with_key(record.problem, self.key))

    @property
    def problem(self) -> Problem:
        """The call in its normal form, without a value."""
        return self.record.problem

    def values(self) -> tuple[Tensor, Outcome]:
        value = self.value
        if value is None or self.outcome is None:
            raise ClearheadError(f"the value of {self.name} was not kept: watch with values=True, or gradients=True.")
        return value, self.outcome

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
    def unedited(self) -> AttentionCall:
        """This call without the edits that changed it: its `weights`, its `value` and its `output`.

        >>> import torch, clearhead as ch
        >>> block, x = ch.nn.DotProductAttention(), torch.zeros(1, 1, 2, 8)
        >>> with ch.watch(block) as seen, ch.edit(block, ch.edits.Knockout(keys=0)):
        ...     output = block(x, x, x)
        >>> seen[0].weights[0, 0, 1], seen[0].unedited.weights[0, 0, 1]
        (tensor([0., 1.]), tensor([0.5000, 0.5000]))

        Its query, key and value are those that the model gave to this call, in which edits of earlier layers have
        effects; its output is `weights @ value`. The call itself where no edit changed it. Raises a `ClearheadError`
        for an edited call from a file, which has only what ran.
        """
        if not self.edited:
            return self
        if self.result.unedited is None:
            raise ClearheadError(
                f"{self.name} was changed by an edit, and was read from a file, which has only what ran. Write the "
                "calls without it too: ch.models.Recording([call.unedited for call in seen.calls]).write(path)."
            )
        return self.result.unedited

    @property
    def value_norms(self) -> Tensor:
        """‖v_j‖ of each key, (B, H, Lk): the part of a key in the head's output grows with its weight and this norm."""
        value, _ = self.values()
        norms: Tensor = value.norm(dim=-1, dtype=accumulated(value.dtype))
        return norms.repeat_interleave(self.query.shape[1] // value.shape[1], 1)

    @property
    def weighted_value_norms(self) -> Tensor:
        """Σ_j w_ij ‖v_j‖ of each query, (B, H, Lq). One pair has `weights[b, h, i, j] * value_norms[b, h, j]`."""
        value, _ = self.values()
        norms: Tensor = self.weights @ value.norm(dim=-1, keepdim=True, dtype=accumulated(value.dtype))
        return norms.squeeze(-1)

    @property
    def transformed_norms(self) -> Tensor:
        """‖f(x_j)‖ of each key, (B, H, Lk): the length of what the head would write for this key with a weight of 1.

        Formula: f(x_j) = v_j W_O, v_j = x_j W_V + b_V, with the part W_O of `output_projection` that reads the head.
        With W_Oᵀ = Q R, ‖v_j W_O‖ = ‖R v_j‖, so no vector of d_model numbers is made for a key. The key with the
        largest norm need not be that of `value_norms`. Raises the errors of `output_projection`.
        Cost: O(H Ev² (B Lk + d_model)) time, O(B H Lk Ev) memory.
        Source: Kobayashi et al. 2020, "Attention is Not Only a Weight: Analyzing Transformers with Vector Norms".
        """
        return self._norms_written(self.values()[0])

    def _norms_written(self, vectors: Tensor) -> Tensor:
        """‖x W_O‖ of vectors (B, H or Hk, L, Ev), with the part of the layer's weight for each head: (B, H, L)."""
        layer = self.output_projection
        vectors = vectors.to(accumulated(vectors.dtype))
        by_head = layer.weight.to(vectors).reshape(-1, self.query.shape[1], vectors.shape[-1]).transpose(0, 1)
        turned: Tensor = torch.linalg.qr(by_head, mode="r").R  # (H, Ev, Ev)
        with without_autocast(vectors.device):
            turned = vectors.unsqueeze(2) @ turned.view(vectors.shape[1], -1, *turned.shape[1:]).mT
        norms: Tensor = turned.norm(dim=-1)  # (B, Hk, H / Hk, L)
        return norms.flatten(1, 2)

    @property
    def weighted_transformed_norms(self) -> Tensor:
        """Σ_j ‖w_ij f(x_j)‖ of each query, (B, H, Lq). One pair has `weights[b, h, i, j] * transformed_norms[b, h, j]`.

        Raises the errors of `output_projection`.
        Source: Kobayashi et al. 2020, "Attention is Not Only a Weight: Analyzing Transformers with Vector Norms".
        """
        norms = as_value(self.transformed_norms.unsqueeze(-1), self.cached_key.shape[1])
        return of_value(self.weights @ norms, 1).squeeze(-1)

    @property
    def result_norms(self) -> Tensor:
        """‖Σ_j w_ij f(x_j)‖ of each query, (B, H, Lq): the length of what the head writes, o_i W_O of its `output` o_i.

        Vectors of several keys may cancel: then `weighted_transformed_norms` is larger. Raises the errors of
        `output_projection`. Cost: O(H Ev² (B Lq + d_model)) time, O(B H Lq Ev) memory.
        Source: Kobayashi et al. 2020, "Attention is Not Only a Weight: Analyzing Transformers with Vector Norms".
        """
        return self._norms_written(self.output)

    @property
    def output_projection(self) -> Linear:
        """The linear layer that was given the outputs of the heads side by side: `weight` (d_model, H · Ev), `bias`.

        It is found by its numbers, as `explain` finds layers, and may be in another module than the call's. Its weights
        are the model's own, no copies. A layer that computes more than its weight says is called instead, on the rows
        of the identity: adapters (LoRA), hooks that change its result, quantised weights, and weights that are kept
        elsewhere between calls count as they run, without dropout. Raises a `ClearheadError` where the layers around
        the call were not kept, or the weights were written to since; an `UnsupportedError` where no layer was given
        these numbers, where the layer is not linear, and where its weights are sharded over ranks.
        """
        self.values()
        if self.origin is None:
            raise ClearheadError(
                f"the layers around {self.name} were not kept: watch with values=True. A file has none."
            )
        if not self.origin.writers:
            raise UnsupportedError(
                f"{self.name}: no linear layer was given its heads side by side. The model computes something between."
            )
        found = self.origin.writer
        assert found is not None
        check_unwritten(found.versions, f"{self.name}: the weights of {found.name}, which writes its heads,")
        layer = found.layer
        assert isinstance(layer, Linear)
        return layer

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
        self,
        at: Index = None,
        *,
        tokens: TokensLike | None = None,
        source_tokens: TokensLike | None = None,
        title: str | None = None,
        digits: int | None = None,
    ) -> Explanation:
        """How this call came to its weights and its output, step by step: see `clearhead.explain`.

        `at`: an index of the weights (B, H, Lq, Lk), such as `(0, 5, 17)`: sequence 0, head 5, query 17, and perhaps a
        key; None is the whole matrix where it is small. `tokens`: a word, or the id of a token, for each position; in
        cross attention for each query, and `source_tokens` for each key. `title`, `digits`: as for `clearhead.explain`.
        With `watch(values=True)` the steps begin at the module's input, if the layers that made query, key and value
        are found among those that ran in the module, with their norm and rotation. They end in the output, beside the
        model's own output, and in the layer that was given the heads. The explanation says what was not found or not
        kept; then the steps begin at the query and the key that the model gave to attention. The layers' inputs and
        weights are the model's own tensors, not copies: tensors that were written to since are not found.
        Raises a `ClearheadError` for an index that names no pair, a `ShapeError` for words that do not fit.
        Cost: the scores of the chosen queries with every key, O(Lk) memory for each.
        """
        return shown_as(lambda: explain_call(self, at, tokens, source_tokens), title, digits)

    def diagnose(self) -> Diagnosis:
        """Faults and risks of this call: see `clearhead.diagnose`. Values are checked where they were kept."""
        return diagnosis_of([case_of(self)])

    def __repr__(self) -> str:
        mask = "no mask" if self.mask is None else said(self.mask, self.mask.title)
        align = self.inputs.record.problem.sizes.align
        query, key = self.query.shape, self.cached_key.shape
        shapes = f"query {tuple(query)}, key {tuple(key)}"
        positional = self.mask is not None and self.mask.positional and query[2] != key[2]
        parts = [self.kind, shapes, mask, *([f"align={align!r}"] if positional else []), self.backend]
        if self.padding is not None:
            known = [(side, t) for side, t in self.padding._asdict().items() if t is not None]
            counts = [f"{int((~t).sum()) if is_readable(t) else 'some'} {side}" for side, t in known]
            parts.append(f"padding: {' and '.join(counts)}")
        return f"AttentionCall({self.name!r}, {', '.join(parts)})"


def norms_of(call: AttentionCall) -> dict[str, Tensor]:
    """The lengths of the "value" and of the "transformed" value of each key, (B, H, Lk), as far as they are known."""
    if call.value is None:
        return {}
    found = {"value": call.value_norms}
    if call.origin is not None and call.origin.writer is not None and call.origin.writer.can_be_read():
        found["transformed"] = call.transformed_norms
    return found


def find_uncounted_rows(call: AttentionCall) -> Tensor | None:
    """Rows that are padding, and fully masked rows to which the backend gave uniform weights: bool, (B, H or 1, Lq)."""
    found = None if call.uniform is None else call.uniform[..., 0]
    if call.padding is not None and call.padding.queries is not None:
        padding = ~call.padding.queries[:, None]
        found = padding if found is None else found | padding
    return found
