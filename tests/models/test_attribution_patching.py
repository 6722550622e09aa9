"""Attribution patching, against gradients of our own in eager PyTorch, and against exact sweeps."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from by_hand import PARTS, by_hand
from small_models import MODELS, pair
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import clearhead as ch
from clearhead.models.causes.estimated import Probe

HEAD = {"GPT2": "LMHeadModel", "Bert": "ForMaskedLM", "Llama": "ForCausalLM", "T5": "ForConditionalGeneration"}
IDS = torch.randint(3, 100, (2, 7), generator=torch.Generator().manual_seed(3))
OTHER = torch.randint(3, 100, (2, 7), generator=torch.Generator().manual_seed(4))


class Case:
    """A model in float64, what another text had in it, and the gradient of a metric by every part of every call."""

    def __init__(self, name: str) -> None:
        self.model = pair(name, MODELS[name], HEAD[name])[0].double()
        self.metric = ch.models.logit_difference(token=[9, 40], against=5)
        more = {"decoder_input_ids": OTHER[:, :4]} if name == "T5" else {}
        self.inputs = {"input_ids": IDS, **more}
        with torch.no_grad(), ch.watch(self.model, values=True) as self.seen:
            self.model(input_ids=OTHER, **more)
        with torch.no_grad(), by_hand(self.model) as there:
            self.model(input_ids=OTHER, **more)
        self.there = [call.parts for call in there]
        with by_hand(self.model, gradients=True) as here:
            number = self.metric(self.model(**self.inputs)).mean()
        names = [(n, part) for n in range(len(here)) for part in PARTS]
        grads = torch.autograd.grad(number, [here[n].zeros[part] for n, part in names])
        self.grads = dict(zip(names, grads, strict=True))
        self.here = [
            replace(call, zeros={}, parts={name: part.detach() for name, part in call.parts.items()}) for call in here
        ]
        self.layers = [call.layer.column for call in self.seen.calls]

    def patched(self, part: str) -> Callable[[Any, int], ch.edits.Edit]:
        return lambda layer, head: ch.edits.Patch(self.seen, layer, head, part)  # type: ignore[arg-type]

    def effects(self, part: str) -> Tensor:
        """(patched − plain) · ∂metric/∂part of every head; for query and key of the weights that follow from them."""
        rows = []
        for n, call in enumerate(self.here):
            old, new, by = call.parts[part], self.there[n][part], part
            if part in ("query", "key"):
                by, old = "weights", call.parts["weights"]
                new = replace(call, **{part: new}, parts={}).weights()
            rows.append(((new - old) * self.grads[n, by]).sum((0, 2, 3)))
        return torch.stack(rows).detach()


@pytest.fixture(scope="module", params=list(HEAD))
def case(request: Any) -> Case:
    return Case(request.param)


@pytest.mark.parametrize("part", PARTS)
def test_it_is_the_gradient_times_the_change(case: Case, part: str) -> None:
    found = ch.models.attribution_patching(case.model, case.patched(part), case.inputs, case.metric, exact=3, batch=2)
    wanted = case.effects(part)
    assert found.values.shape == wanted.shape and wanted.abs().min(1).values.sum() > 0
    assert (found.values - wanted).abs().max() < 1e-10 * max(1.0, float(wanted.abs().max()))
    with torch.no_grad():
        assert found.plain == pytest.approx(float(case.metric(case.model(**case.inputs)).mean()), abs=1e-10)
        right = ch.models.sweep(case.model, case.patched(part), case.inputs, case.metric)
    largest = sorted((abs(row["effect"]) for row in found), reverse=True)[:3]
    assert [abs(row["effect"]) for row in found.checked] == largest
    exact = {(row["layer"], row["head"]): row["effect"] for row in right}
    for row in found.checked:
        assert row["exact"] == pytest.approx(exact[row["layer"], row["head"]], abs=1e-9)
        assert row["error"] == row["effect"] - row["exact"]
    assert sum(row["exact"] == row["exact"] for row in found) == 3


def test_ablations_and_factors_are_changes_of_outputs(case: Case) -> None:
    ablated = ch.models.attribution_patching(
        case.model, lambda layer, head: ch.edits.Ablate(layer, head), case.inputs, case.metric
    )
    half = ch.models.attribution_patching(
        case.model, lambda layer, head: ch.edits.ScaleHeads(layer, head, 0.5), case.inputs, case.metric, exact=0
    )
    wanted = torch.stack(
        [-(call.parts["output"] * case.grads[n, "output"]).sum((0, 2, 3)) for n, call in enumerate(case.here)]
    )
    assert (ablated.values - wanted).abs().max() < 1e-10 * float(wanted.abs().max())
    assert (half.values - wanted / 2).abs().max() < 1e-10 * float(wanted.abs().max())
    assert len(ablated.checked) == 5 and len(half.checked) == 0


def test_positions_and_several_edits_of_a_cell(case: Case) -> None:
    """By position; the edits of a cell may be of several layers, whose effects add up to first order."""
    last = case.layers[1]
    both = lambda position: [
        ch.edits.Patch(case.seen, last, 1, "output", queries=position),
        ch.edits.Ablate(case.layers[0], [0, 2], queries=position),
    ]
    found = ch.models.attribution_patching(case.model, both, case.inputs, case.metric, "position", exact=1)
    first = case.here[0].parts["output"]
    patched = (case.there[1]["output"] - case.here[1].parts["output"]) * case.grads[1, "output"]
    gone = -first * case.grads[0, "output"]
    for row in found[: patched.shape[2]]:
        at = row["position"]
        wanted = float(patched[:, 1, at].sum() + gone[:, [0, 2], at].sum())
        assert row["effect"] == pytest.approx(wanted, abs=1e-10 * max(1.0, float(gone.abs().sum())))


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, **more)).eval()


def zero(layer: Any, head: Any) -> ch.edits.Edit:
    return ch.edits.Ablate(layer, head)


def test_own_modules_and_own_attention() -> None:
    """PyTorch's module, which joins the heads inside, and clearhead's own attention."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    torchs = torch.nn.MultiheadAttention(16, 4, batch_first=True).double().eval()
    ours = ch.nn.MultiHeadAttention(16, 4).double().eval()
    for model, inputs in ((torchs, (x, x, x)), (ours, (x, x, x))):
        weight = torch.randn(16, dtype=torch.float64)
        metric = lambda out, weight=weight: ((out[0] if isinstance(out, tuple) else out) @ weight).mean(1)
        found = ch.models.attribution_patching(model, lambda head: ch.edits.Ablate(heads=head), inputs, metric, "head")
        assert [row["exact"] for row in found.checked] == pytest.approx([row["effect"] for row in found.checked])
        assert abs(found[0]["effect"]) > 1e-4


def test_nothing_is_left_behind() -> None:
    """Parameters without gradients, and the caller's no_grad; no gradient is added to the parameters."""
    model, ids = llama(), torch.arange(8)[None]
    metric = ch.models.logit_difference(3)
    before = ch.models.attribution_patching(model, zero, ids, metric)
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        again = ch.models.attribution_patching(model.requires_grad_(False), zero, ids, metric)
    assert torch.equal(again.values, before.values)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"make_edit": lambda layer, head: ch.edits.Ablate(layer, head, queries=99)}, "changed nothing"),
        ({"make_edit": lambda layer, head: None}, "attribution_patching: make_edit gave None"),
        ({"over": "heads"}, "attribution_patching: over is 'heads'"),
        ({"exact": -1}, "attribution_patching: exact"),
        ({"model": llama(attention_dropout=0.1).train()}, "dropout"),
    ],
)
def test_wrong_arguments_are_told(given: dict[str, Any], words: str) -> None:
    right = {"model": llama(), "make_edit": zero, "inputs": torch.arange(8)[None]}
    right["metric"] = ch.models.logit_difference(3)
    with pytest.raises(ch.ClearheadError, match=words):
        ch.models.attribution_patching(**{**right, **given})


def test_it_is_refused_inside_an_edit() -> None:
    model = llama()
    with pytest.raises(ch.ClearheadError, match="edit"), ch.edit(model, ch.edits.Ablate(0)):
        ch.models.attribution_patching(model, zero, torch.arange(8)[None], ch.models.logit_difference(3))


def test_inputs_of_inference_mode_are_copied() -> None:
    """Autograd keeps no tensor of inference mode: no estimate and no attribution may end in its own error."""
    case, metric = Case("GPT2"), ch.models.logit_difference(token=9)
    wanted = ch.models.attribution_patching(case.model, zero, case.inputs, metric, exact=0).values
    logits = ch.models.logit_attribution(case.model, case.inputs, token=9)
    with torch.inference_mode():
        inputs = {"input_ids": IDS.clone()}
        assert torch.equal(ch.models.attribution_patching(case.model, zero, inputs, metric, exact=0).values, wanted)
        assert torch.equal(ch.models.logit_attribution(case.model, inputs, token=9)[0].heads, logits[0].heads)
        token, place = torch.tensor(9), torch.tensor(-1)
    for numbers in ((token, None, place), (9, token - 1, -1)):
        metric = ch.models.logit_difference(*numbers)
        plain = ch.models.logit_difference(*(int(one) if isinstance(one, Tensor) else one for one in numbers))
        got, want = (ch.models.attribution_patching(case.model, zero, case.inputs, m, exact=0) for m in (metric, plain))
        assert torch.equal(got.values, want.values)
    assert torch.equal(ch.models.logit_attribution(case.model, case.inputs, token)[0].heads, logits[0].heads)


def test_calls_that_another_thread_still_makes_are_not_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    case, metric = Case("GPT2"), ch.models.logit_difference(token=9)
    wanted = ch.models.attribution_patching(case.model, zero, case.inputs, metric, exact=0).values
    gradients = Probe.gradients

    def late(probe: Probe, number: Tensor) -> list[Tensor | None]:
        found = gradients(probe, number)
        probe.met.append(probe.met[0])
        return found

    monkeypatch.setattr(Probe, "gradients", late)
    found = ch.models.attribution_patching(case.model, zero, case.inputs, metric, exact=0).values
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("patching", [ch.models.sweep, ch.models.attribution_patching])
def test_a_complex_metric_is_no_number(patching: Callable[..., Any]) -> None:
    case = Case("GPT2")
    with pytest.raises(ch.ClearheadError, match=r"of torch\.complex64"):
        patching(case.model, zero, case.inputs, lambda out: out.logits[:, -1, 3].to(torch.complex64))


def test_layers_that_are_held_are_told() -> None:
    """A path patch holds later layers; the gradient goes through them, so the estimate is of another effect."""
    model, ids, other = llama(), torch.arange(8)[None], torch.arange(8, 16)[None]
    kept = []
    for text in (ids, other):
        with torch.no_grad(), ch.watch(model, values=True) as seen:
            model(text)
        kept.append(seen)

    def direct(layer: Any, head: int) -> list[ch.edits.Edit]:
        return [ch.edits.Patch(kept[0]), ch.edits.Patch(kept[1], layer, head)]

    metric = ch.models.logit_difference(3)
    with pytest.warns(UserWarning, match="leave the output of L1, behind it.*ch.models.sweep"):
        held = ch.models.attribution_patching(model, direct, ids, metric, exact=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is held: no warning
        free = ch.models.attribution_patching(
            model, lambda layer, head: ch.edits.Patch(kept[1], layer, head), ids, metric, exact=0
        )
        ch.models.attribution_patching(model, lambda head: ch.edits.Ablate(heads=head), ids, metric, "head", exact=0)
    assert torch.allclose(held.values, free.values, atol=1e-5)  # as if nothing were held
