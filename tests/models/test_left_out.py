"""A call that cannot be recorded is left out, with a warning that names its layer: the model's run goes on."""

import copy
import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from small_models import IDS, MODELS, SMALL, made
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import clearhead as ch
from clearhead.models.interception.masks import MaskStore
from clearhead.models.interception.place import Place
from clearhead.models.recorder.recorder import Recorder

ENTROPY = ch.reductions.Entropy()


class Attend(nn.Module):
    def __init__(self, attend=F.scaled_dot_product_attention):
        super().__init__()
        self.attend = attend

    def forward(self, x):
        return self.attend(x, x, x)


class Three(nn.Module):
    """Three layers; the one in the middle attends as it is told."""

    def __init__(self, middle):
        super().__init__()
        self.layers = nn.ModuleList([Attend(), Attend(middle), Attend()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def nested(q, k, v):
    rows = torch.nested.as_nested_tensor(list(q.transpose(1, 2)), layout=torch.jagged).transpose(1, 2)
    out = F.scaled_dot_product_attention(rows, rows, rows)
    return torch.stack([*out.transpose(1, 2).unbind()]).transpose(1, 2)


def in_vmap(q, k, v):
    return torch.func.vmap(F.scaled_dot_product_attention)(q, k, v)


def in_grad(q, k, v):
    return torch.func.grad(lambda x: F.scaled_dot_product_attention(x, x, x).square().sum())(q)


def on_meta(q, k, v):
    F.scaled_dot_product_attention(*(t.to("meta") for t in (q, k, v)), torch.zeros(4, 4, device="meta"))
    return v


def without_a_mask_on_meta(q, k, v):
    F.scaled_dot_product_attention(*(t.to("meta") for t in (q, k, v)))
    return v


def on_fake_tensors(q, k, v):
    with FakeTensorMode() as mode:
        F.scaled_dot_product_attention(*map(mode.from_tensor, (q, k, v)))
    return v


MIDDLE = {"nested": nested, "vmap": in_vmap, "grad": in_grad, "meta": on_meta}
MIDDLE |= {"meta without a mask": without_a_mask_on_meta, "fake": on_fake_tensors}
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
X = torch.randn(2, 2, 4, 8, generator=torch.Generator().manual_seed(0))


def run(model, manager):
    """The output and the messages of the warnings of a run inside the manager, and what it gave."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with manager as seen:
            output = model(X)
    return output, [str(one.message) for one in told if "layers." in str(one.message)], seen


@pytest.mark.parametrize("name", MIDDLE)
@pytest.mark.parametrize("values", [False, True])
def test_a_layer_that_cannot_be_recorded_is_left_out(name, values):
    model = Three(MIDDLE[name])
    plain = model(X)
    output, told, seen = run(model, ch.watch(model, values=values))
    assert torch.equal(output, plain)
    assert [call.name for call in seen] == ["layers.0", "layers.2"] and [str(call.layer) for call in seen] == [
        "L0",
        "L2",
    ]
    assert len(told) == 1 and "layers.1" in told[0]
    for which in ("layers.1", "L1"):
        with pytest.raises(ch.ClearheadError, match=r"layers\.1"):
            seen[which]
    with pytest.raises(ch.ClearheadError, match=r"layers\.1"):
        seen.rollout()
    assert "layers.1" in repr(seen) and "layers.1" in repr(seen.runs[0])


@pytest.mark.parametrize("name", MIDDLE)
def test_statistics_and_monitor_leave_out_too(name):
    model = Three(MIDDLE[name])
    plain = model(X)
    output, told, seen = run(model, ch.models.statistics(model, ENTROPY))
    assert torch.equal(output, plain) and len(seen.calls) == 2 and len(told) == 1 and "layers.1" in told[0]
    with pytest.raises(ch.ClearheadError, match=r"layers\.1"):
        seen["layers.1"]
    output, told, seen = run(model.train(), ch.models.monitor(model, every=1))
    assert torch.equal(output, plain) and len(told) == 1 and "layers.1" in told[0]
    assert {row["module"] for row in seen.table()} == {"layers.0", "layers.2"}


@pytest.mark.parametrize("name", ["nested", "vmap"])
def test_an_edit_raises_before_the_first_changed_call(name):
    model = Three(MIDDLE[name])
    ran = []
    model.layers[1].attend = lambda q, k, v: ran.append(MIDDLE[name](q, k, v)) or v
    with pytest.raises(ch.ClearheadError), ch.edit(model, ch.edits.ScaleHeads(heads=0)):
        model(X)
    assert not ran


def test_named_layers_are_not_warned_of():
    model = Three(MIDDLE["vmap"])
    _, told, seen = run(model, ch.watch(model, layers=[0, 2]))
    assert told == [] and [str(call.layer) for call in seen] == ["L0", "L2"]


def test_a_model_of_which_no_layer_can_be_recorded_runs_on():
    model = Attend(MIDDLE["vmap"])
    with pytest.warns(UserWarning, match="'Attend' is not in the record"), ch.watch(model) as seen:
        output = model(X)
    assert torch.equal(output, model(X)) and len(seen) == 0


class Broken(RuntimeError):
    pass


@pytest.mark.parametrize("seed", range(12))
def test_a_fault_at_any_place_of_the_record_leaves_the_run_as_it_is(seed, monkeypatch):
    """A fault of a drawn function that reads calls, at a drawn call: the outputs and the gradients are the model's."""
    dice = random.Random(seed)
    owner, name = dice.choice([(MaskStore, "convert"), (Recorder, "before"), (Recorder, "_keep"), (Recorder, "check")])
    fails, here, function = dice.randrange(2), [], getattr(owner, name)

    def broken(*args, **kwargs):
        if here[-1:] == [fails]:
            raise Broken("at a place that was drawn")
        return function(*args, **kwargs)

    model = made("Llama", **MODELS["Llama"])
    for number, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(lambda *_, number=number: here.append(number))
    right = model(IDS)[0]
    (want,) = torch.autograd.grad(right.sum(), [model.embed_tokens.weight])
    monkeypatch.setattr(owner, name, broken)
    options = dice.choice([{}, {"values": True}, {"gradients": True}])
    with (
        pytest.warns(UserWarning, match=rf"layers\.{fails}\.self_attn.*\n?.*Broken: at a place that was drawn") as told,
        ch.watch(model, **options) as seen,
    ):
        output = model(IDS)[0]
        output.sum().backward()
    assert torch.equal(output, right) and torch.equal(model.embed_tokens.weight.grad, want)
    assert len(told) == 1 and [str(call.layer) for call in seen] == [f"L{1 - fails}"]


def test_an_error_of_the_models_own_is_unchanged():
    def failing(q, k, v):
        raise Broken("of the model")

    def wrong(q, k, v):
        return F.scaled_dot_product_attention(q, k[..., :3], v)

    with pytest.raises(Broken, match="of the model"), ch.watch(model := Three(failing)):
        model(X)
    with pytest.raises(RuntimeError) as plain:
        Three(wrong)(X)
    with pytest.raises(RuntimeError) as watched, ch.watch(model := Three(wrong)):
        model(X)
    assert str(plain.value) == str(watched.value) and type(plain.value) is type(watched.value)


def test_a_keyword_of_unknown_meaning_leaves_its_layers_out():
    model = made("Llama", **MODELS["Llama"])
    with torch.no_grad(), pytest.warns(UserWarning, match=r"'head_mask'") as told, ch.watch(model) as seen:
        model(IDS, head_mask=torch.ones(4))
    assert len(told) == 1 and len(seen) == 0
    with pytest.raises(ch.ClearheadError, match="head_mask"):
        seen["layers.0.self_attn"]


def test_lazy_attentions_give_none_for_a_layer_left_out():
    model = made("Llama", **MODELS["Llama"])
    with torch.no_grad():
        plain = model(IDS, head_mask=torch.ones(4))[0]
        with pytest.warns(UserWarning, match=r"head_mask") as told, ch.models.lazy_attentions(model):
            output = model(IDS, head_mask=torch.ones(4), output_attentions=True)
    assert torch.equal(output[0], plain) and len(told) == 2
    assert all(one is None for one in output.attentions or ())


class Stop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@pytest.mark.parametrize("own", [False, True])
def test_a_backward_pass_without_a_gradient_of_the_output(own):
    attend = ch.nn.MultiHeadAttention(16, 2) if own else Attend()
    x = torch.randn(1, 2, 5, 16)[:, 0] if own else X.clone()
    x.requires_grad_()
    model = nn.Sequential(attend)
    with ch.watch(model, gradients=True) as seen:
        output = attend(x, x, x) if own else attend(x)
        (x + Stop.apply(output)).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    with pytest.raises(ch.ClearheadError, match="no backward pass has reached"):
        _ = seen[0].gradients


def test_a_gradient_that_cannot_be_read_does_not_end_the_backward_pass(monkeypatch):
    model = Attend()
    x = X.clone().requires_grad_()
    with ch.watch(model, gradients=True) as seen:
        output = model(x)

    def broken(*args):
        raise Broken("in the hook")

    monkeypatch.setattr(Place, "gradient", broken)
    output.sum().backward()
    assert x.grad is not None
    with pytest.raises(ch.ClearheadError, match="in the hook"):
        _ = seen[0].gradients


@pytest.mark.filterwarnings("ignore")  # PyTorch's own, of this quantisation
def test_dynamic_quantisation_and_gradients():
    model = made("Llama", "ForCausalLM", **SMALL)
    model = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)
    with ch.watch(model, gradients=True) as seen:
        loss = model(IDS).logits.sum()
    loss.backward()
    assert len(seen) == 2
