"""logit_attribution(): what each head adds to a logit, by head, position and source."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from clearhead.base.arrays import accumulated
from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.managers import Uninterrupted
from clearhead.base.output.text import listed, said, with_outline
from clearhead.base.torch_state.contexts import without_autocast
from clearhead.explanation.modules.projection import Linear
from clearhead.models.causes.frozen import Frozen, Written, first_run
from clearhead.models.causes.metrics import Each, Metric, logit_difference, logits_of, refuse_padding
from clearhead.models.interception.layers import LayerName
from clearhead.models.interception.modules import Kind
from clearhead.models.model_calls import call_model, outside_inference
from clearhead.models.origins.find import agree, batched
from clearhead.models.recordings.attention_call import AttentionCall
from clearhead.models.recordings.call import Call
from clearhead.models.recordings.calls import Calls, HeadNumbers
from clearhead.models.table import Table
from clearhead.models.watch import watch_own

Answers = Each | Sequence[Sequence[int]]  # or several for each sequence, or for all alike


@with_outline
@dataclass(frozen=True, eq=False, repr=False)
class AttributedCall(Call):
    """What the heads of one attention call add to the logit.

    `heads`: (B, H). `positions`: (B, H, Lq), the same by the position at which a head writes. `sources`: (B, H, Lk),
    the same by the key that it was read from; with an attention sink, or a bias of the values, they may sum to less. An
    output that an edit put in a head's place was read from no key. Where K answers were asked for, each has a second
    axis: (B, K, H), (B, K, H, Lq) and (B, K, H, Lk).
    """

    name: str
    kind: Kind
    run: int
    layer: LayerName
    heads: Tensor
    positions: Tensor
    sources: Tensor
    _columns = "layer", "module", "kind"

    def _by_head(self) -> Mapping[str, Iterable[object]]:
        means = self.heads.mean(0).tolist()
        return {"head": range(len(means)), "attribution": means}


class LogitAttribution(HeadNumbers, Calls[AttributedCall]):
    """The parts of a logit that heads and other layers add to it directly. `logit_attribution` gives it.

    It iterates over its calls, each an `AttributedCall`. `logit`: (B,), the logit, or the difference of two. `others`:
    (B,) for each other layer that writes to the residual stream, by the name of its module. `remainder`: (B,), what is
    left: biases of norms and of the unembedding, and what is not linear behind the last block. All parts and the
    remainder sum to the logit. `capped`: None; or, where the model ends in a softcap, its own number, (B,): then
    `logit` and all parts are of logits before the cap. `values`, (calls, heads): the heads' parts as a tensor, whose
    meaning `name`, `unit` and `sentence` say, for a picture of every head, as `plot()` is. Printed, it is the sum with
    the strongest heads first.
    Where K answers were asked for, (B,) above is (B, K), and what is a mean over the sequences is one over the answers
    too. `answers`: a `LogitAttribution` of each answer by itself, such as `found.answers[2].plot()`; else [itself].
    """

    name, unit = "attribution", ""

    def __init__(
        self, calls: list[AttributedCall], logit: Tensor, others: dict[str, Tensor], capped: Tensor | None = None
    ) -> None:
        super().__init__(calls)
        self.logit, self.others, self.capped = logit, others, capped
        self.answers: list[LogitAttribution] = [self]
        self._asked: list[dict[str, int]] = []  # what the answers are, for the table

    @property
    def sentence(self) -> str:  # type: ignore[override]
        cap = "" if self.capped is None else " before the model's softcap"
        return f"What this head adds directly to the logit{cap}, through the residual stream and the last norm."

    @property
    def remainder(self) -> Tensor:
        parts = [call.heads.sum(-1) for call in self.calls] + list(self.others.values())
        left: Tensor = self.logit - sum(parts, torch.zeros_like(self.logit))
        return left

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        """What each head adds, (calls, heads), a mean over sequences and answers; NaN where a call has no such head.

        Raises a `ClearheadError` where no head was told apart from the layer that writes it.
        """
        if not self.calls:
            raise ClearheadError("no head of this model is told apart from the layer that writes it: read table().")
        each = [call.heads.flatten(0, -2).mean(0) for call in self.calls]
        return pad_sequence(each, batch_first=True, padding_value=torch.nan)

    @property
    def runs(self) -> list[Self]:
        """The model ran once."""
        return [self]

    @property
    def _meaning(self) -> str:  # type: ignore[override]
        cap = " before the softcap" * (self.capped is not None)
        return f"part of the logit{cap}, {float(self.logit.mean()):.4g}"

    def __repr__(self) -> str:
        return said(self, self._said)

    def _said(self) -> str:
        """The logit as a sum, a mean over sequences and answers: the strongest heads, and all that is left."""
        count, each, parts = len(self.logit), len(self.answers), dict[str, float]()
        if self.calls:
            values, parts = self.values, self._strongest()
            more = int(values.isfinite().sum()) - len(parts)
            if more > 0:
                parts[f"{more} other head{'s' * (more > 1)}"] = float(values.nansum()) - sum(parts.values())
        parts["other layers"] = sum(float(part.mean()) for part in self.others.values())
        parts["remainder"] = float(self.remainder.mean())
        shown = ", ".join(f"{name} {number:+.3g}" for name, number in parts.items())
        whole = f"{float(self.logit.mean()):.4g}" + " before the softcap" * (self.capped is not None)
        over = [f"{n} {what}" for n, what in ((count, "sequences"), (each, "answers")) if n > 1]
        return f"LogitAttribution({whole}{', mean of ' * bool(over)}{' and '.join(over)}: {shown})"

    def table(self) -> Table:
        """A row for each head, and for each other layer, with what it adds to the logit, a mean over the sequences.

        Where several answers were asked for, the rows of the first answer come first. The column `answer` has its
        number, and `token`, `against` and `position` say it, where they are the same for all sequences.
        """
        if self._asked:
            each = zip(self._asked, self.answers, strict=True)
            return Table(asked | row for asked, found in each for row in found.table())
        rows = super().table()
        for name, part in [*self.others.items(), ("remainder", self.remainder)]:
            rows.append({"layer": "", "module": name, "kind": "", "head": "", "attribution": float(part.mean())})
        return rows


def logit_attribution(
    model: nn.Module, inputs: object, token: Answers, *, against: Answers | None = None, position: Answers = -1
) -> LogitAttribution:
    """What each head, and each other layer, adds directly to a logit: through the residual stream and the last norm.

    >>> import torch, clearhead as ch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    ...                                      num_attention_heads=8, num_key_value_heads=2)).eval()
    >>> found = ch.models.logit_attribution(model, {"input_ids": torch.arange(10)[None]}, token=7)
    >>> found[1].heads.shape, found[1].sources.shape                # layer 1: by head, and by source token
    (torch.Size([1, 8]), torch.Size([1, 8, 10]))
    >>> bool(found.remainder.abs() < 1e-5)                          # Llama has no biases: nothing else adds
    True

    Formula: the logit is u · N(x), with the unembedding's row u, the last norm N and the residual stream x = Σ parts.
    N is taken at its own size in this run, √(mean square + ε), so it is linear, and each part p of x adds
    u · (N's matrix) · p. Where norms or factors stand between a layer and the residual stream, or in it, the part goes
    through all of them, each at its own size, and through gates, sigmoids, softmaxes and mixtures of several residual
    streams, at their values of this run. A head's part at position i is Σ_j w_ij · W_O v_j.
    Where the model ends in a softcap, c · tanh(x / c) as of Gemma 2, the logits x before it are attributed, for `token`
    and `against` alike, and `capped` is the model's own number, which `logit_difference` measures in a sweep. Another
    function that is not linear behind the last block, such as the GELU in the head of a masked language model, has its
    slope of this run: it warns that the parts do not add up.
    `model`: in eval mode, whose output has `logits`, (B, L, V) or (B, V), or is a tensor of that shape. `inputs`: as
    for `audit`. `token`: the number of the logit, one for all sequences or one for each. `against`: a second
    one: the difference of the two logits is attributed. `position`: which of the L outputs is looked at, one for all
    sequences or one for each; of texts that are padded on the right, `attention_mask.sum(1) - 1`. Several answers to
    one text are asked for by two dimensions in any of the three, (B, K), or (1, K) for all sequences: the whole of a
    text has `token=ids[:, 1:]` with `position=[range(len(ids[0]) - 1)]`, and then answers at padding are those of no
    token.
    Gives a `LogitAttribution`. Raises a `ClearheadError` where the model gives no logits, where no part of the residual
    stream reaches them, where `token` is `against`, and where one position is padding by the attention mask of the
    inputs; an `UnsupportedError` for a norm that computes something else.
    Inside of an `edit`'s `with` it is of the model with the edits, so that heads which make up for another are seen.
    A head whose last layer is not found, see `circuits`, because a norm or a gate stands between them, counts among the
    others, under the name of the layer that writes it; a warning names the layers of such heads.
    Cost: two runs of the model under `watch(values=True)`, whatever K is, and a backward pass through its residual
    stream for each sequence and answer.
    Source: nostalgebraist 2020, "interpreting GPT: the logit lens"; Wang et al. 2023, "Interpretability in the Wild".
    """
    if not isinstance(model, nn.Module):
        raise ClearheadError(f"logit_attribution takes a model, a torch.nn.Module; got a {type(model).__name__}.")
    if any(part.training for part in model.modules()):
        raise ClearheadError("logit_attribution takes a model in eval mode, without dropout: model.eval().")
    with torch.inference_mode(False):
        inputs = outside_inference(inputs)
        given = {"token": token, "position": position} | ({} if against is None else {"against": against})
        several = {name: numbers for name, one in given.items() if (numbers := _answers_of(one)) is not None}
        asked = _asked(given, several)
        found = _attributions(model, inputs, [logit_difference(**one) for one in asked], several)
        return _together(found, asked) if several else found[0]


def _answers_of(given: Any) -> Tensor | None:
    """An argument with several answers for each sequence, (B or 1, K); None for any other."""
    try:
        numbers = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):  # `logit_difference` says what it takes
        return None
    return numbers if numbers.ndim > 1 else None


def _asked(given: dict[str, Any], several: dict[str, Tensor]) -> list[dict[str, Any]]:
    """The arguments of each answer. `several`: those that have more than one, (B or 1, K)."""
    shapes = {name: tuple(numbers.shape) for name, numbers in several.items()}
    wrong = any(len(shape) > 2 or 0 in shape for shape in shapes.values())
    if wrong or len({shape[1:] for shape in shapes.values()}) > 1:
        raise ShapeError(
            f"logit_attribution: several answers have the shapes {shapes}; expected (B, K) or (1, K), one K from 1 on."
        )
    return [
        given | {name: numbers[0, n] if len(numbers) == 1 else numbers[:, n] for name, numbers in several.items()}
        for n in range(max((numbers.shape[1] for numbers in several.values()), default=1))
    ]


def _together(found: list[LogitAttribution], asked: list[dict[str, Any]]) -> LogitAttribution:
    """The attributions of several answers as one, with an axis for the answers."""

    def stacked(parts: Iterable[Tensor]) -> Tensor:
        return torch.stack(list(parts), 1)

    calls = []
    for same in zip(*found, strict=True):
        parts = {name: stacked(getattr(one, name) for one in same) for name in ("heads", "positions", "sources")}
        calls.append(replace(same[0], **parts))
    others = {name: stacked(one.others[name] for one in found) for name in found[0].others}
    capped = [one.capped for one in found if one.capped is not None]
    whole = LogitAttribution(calls, stacked(one.logit for one in found), others, stacked(capped) if capped else None)
    whole.answers = found
    for number, one in enumerate(asked):
        numbers = {name: set(torch.as_tensor(given).flatten().tolist()) for name, given in one.items()}
        whole._asked.append({"answer": number, **{name: min(few) for name, few in numbers.items() if len(few) == 1}})
    return whole


def _attributions(
    model: nn.Module, inputs: Any, metrics: list[Metric], several: dict[str, Tensor]
) -> list[LogitAttribution]:
    """The parts of the logit that each metric gives of the model's output. `several`: see `_asked`. A position that is
    padding is an error where it is one for all texts."""
    before = first_run(model, inputs)
    with torch.enable_grad(), watch_own(model, values=True) as seen:
        frozen = Frozen(model, before, seen)
        with Uninterrupted(frozen.hooked):
            output = call_model(model, inputs)
        logits = frozen.before_cap(logits_of(output))
        for metric in () if "position" in several else metrics:
            refuse_padding(metric, model, inputs, output)
        found = [_of_metric(metric, output, logits, frozen, seen.calls) for metric in metrics]
    apart = {one.call for one in frozen.written}
    mixed = [call.layer for number, call in enumerate(seen.calls) if number not in apart]
    if mixed:
        warnings.warn(
            f"logit_attribution: the heads of {listed(map(str, mixed))} are not told apart: no linear layer was given "
            "their outputs side by side. What they add counts among the others. For each head run ch.models.sweep("
            "model, lambda layer, head: ch.edits.Ablate(layer, head), inputs, ch.models.logit_difference(token)).",
            stacklevel=3,
        )
    if frozen.bends:
        warnings.warn(
            f"logit_attribution: behind its last block the model computes {', '.join(dict.fromkeys(frozen.bends))}, "
            "which is not linear: the parts do not add up to the logit. What is missing is in remainder.",
            stacklevel=3,
        )
    return found


def _of_metric(
    metric: Metric, output: Any, logits: Tensor | None, frozen: Frozen, calls: list[AttentionCall]
) -> LogitAttribution:
    """The parts of the logit of one metric. `logits`: those before a softcap, where there is one."""
    logit, capped = metric(output), None
    if logits is not None:
        logit, capped = metric(logits), logit.detach()
    found: list[AttributedCall] = []
    others: dict[str, Tensor] = {}
    if logit.requires_grad:
        with without_autocast(logit.device):
            leaves = [one.result for one in frozen.written]
            grads = [torch.autograd.grad(one, leaves, allow_unused=True, retain_graph=True) for one in logit]
        with torch.no_grad():
            found, others = _parts(calls, frozen.written, list(zip(*grads, strict=True)), logit.dtype)
    if not found and not others:
        raise ClearheadError(
            "logit_attribution: no layer's result reaches the logit by the residual stream, or forward() has no_grad()."
        )
    return LogitAttribution(found, logit.detach(), others, capped)


def _parts(
    calls: list[AttentionCall], written: list[Written], grads: list[tuple[Tensor | None, ...]], dtype: torch.dtype
) -> tuple[list[AttributedCall], dict[str, Tensor]]:
    """The parts of heads, and of other layers. `grads`: for each layer that has written, the gradient of each
    sequence's logit. `dtype`: the logit's."""
    found: list[AttributedCall] = []
    others: dict[str, Tensor] = {}
    for one, each in zip(written, grads, strict=True):
        there = [grad for grad in each if grad is not None]
        if not there:
            continue
        exact = accumulated(dtype)
        result = one.result.detach().to(exact)
        sums = [result.new_zeros(()) if grad is None else (grad * result).sum() for grad in each]
        name, part = one.name, torch.stack(sums)
        if one.call is not None:
            layer = calls[one.call].output_projection
            call = _of_call(calls[one.call], layer, torch.stack(there).sum(0).to(exact))
            found.append(call)
            name, part = f"{name}.bias", part - call.heads.sum(1)
        if one.call is None or layer.bias is not None:
            others[name] = others[name] + part if name in others else part
    return found, others


def _of_call(call: AttentionCall, layer: Linear, grad: Tensor) -> AttributedCall:
    """The parts of a call's heads, from the gradient of the layer that writes them, (B, Lq, d_model)."""
    assert call.outcome is not None and call.outcome.output is not None and call.value is not None
    output = call.outcome.output.to(grad.dtype)
    rows = batched(grad, output)
    assert rows is not None
    toward = (rows @ layer.weight.to(grad)).view(*rows.shape[:2], output.shape[1], -1).transpose(1, 2)  # (B, H, Lq, Ev)
    positions = (output * toward).sum(-1)
    value = call.value.to(grad.dtype)
    value = value.repeat_interleave(output.shape[1] // value.shape[1], 1)
    sources = value.new_zeros(value.shape[:3])
    for query in toward.ne(0).any(-1).any(0).any(0).nonzero().flatten().tolist():
        weights = call.weights[:, :, query].to(grad.dtype)
        if call.edited:  # an edit may have put another output in the place of this one
            read = (weights.unsqueeze(-2) @ value).squeeze(-2)
            weights = weights * agree(read, output[:, :, query], call.outcome.output.dtype)
        sources += weights * (value @ toward[:, :, query, :, None]).squeeze(-1)
    return AttributedCall(call.name, call.kind, call.run, call.layer, positions.sum(-1), positions, sources)
