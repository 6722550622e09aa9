"""Layers that compute more than their own weight says: the tools read them by a call, as they run.

Each stands for a library: LoRA and DoRA adapters, hooks, integer weights, weights that are elsewhere between calls.
"""

import copy
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import clearhead as ch
from clearhead.models.origins import called

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers", reason="the extra [models] is not installed")

from merged import INPUTS, assert_same_numbers, llama, numbers_of
from small_models import MODELS, made


def weight_of(layer):
    """The weight (out, in) of an nn.Linear or a Conv1D."""
    return layer.weight.detach() if isinstance(layer, nn.Linear) else layer.weight.detach().T


class LoRA(nn.Module):
    def __init__(self, layer, dropout=0.5):
        super().__init__()
        out, width = weight_of(layer).shape
        self.base_layer, self.dropout = layer, nn.Dropout(dropout)
        self.A, self.B = nn.Linear(width, 4, bias=False), nn.Linear(4, out, bias=False)
        self.to(weight_of(layer).dtype)

    def forward(self, x):
        return self.base_layer(x) + 2 * self.B(self.A(self.dropout(x)))

    def merged(self):
        return weight_of(self.base_layer) + 2 * self.B.weight.detach() @ self.A.weight.detach()


class DoRA(LoRA):
    """The rows of the merged weight have lengths of their own, and the bias is added once."""

    def forward(self, x):
        bias = self.base_layer.bias
        plain = self.base_layer(x) if bias is None else self.base_layer(x) - bias
        result = (plain + 2 * self.B(self.A(x))) * self.sizes()
        return result if bias is None else result + bias

    def sizes(self):
        return 1.5 / LoRA.merged(self).norm(dim=1)

    def merged(self):
        return super().merged() * self.sizes()[:, None]


class Int8Linear(nn.Module):
    """Integers and a factor for each row, in buffers."""

    def __init__(self, layer):
        super().__init__()
        weight = weight_of(layer)
        self.register_buffer("factor", weight.abs().amax(1, keepdim=True) / 127)
        self.register_buffer("numbers", (weight / self.factor).round().to(torch.int8))
        self.bias = layer.bias

    def forward(self, x):
        return F.linear(x, self.merged(), self.bias)

    def merged(self):
        return self.numbers.to(self.factor.dtype) * self.factor


class Int8Tensor(torch.Tensor):
    """A weight that only a linear layer can read."""

    @staticmethod
    def __new__(cls, numbers, factor):
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=factor.dtype)

    def __init__(self, numbers, factor):
        self.numbers, self.factor = numbers, factor

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, weight, bias = (*args, None)[:3]
            return F.linear(x, weight.numbers.to(weight.factor.dtype) * weight.factor, bias)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].numbers, args[0].factor)
        raise NotImplementedError(f"Int8Tensor: {func}")


def int8_weight(layer):
    stored = Int8Linear(layer)
    layer.weight = nn.Parameter(Int8Tensor(stored.numbers, stored.factor), requires_grad=False)
    return layer, stored.merged()


def offloaded(layer):
    """Its parameters are on the device meta but while it runs, as accelerate has them."""
    weight = weight_of(layer)
    away = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    forward = layer.forward

    def put(there):
        for name, tensor in away.items():
            layer._parameters[name] = nn.Parameter(tensor if there else tensor.to("meta"), requires_grad=False)

    def fetched(x):
        put(True)
        try:
            return forward(x)
        finally:
            put(False)

    put(False)
    layer.forward = fetched
    return layer, weight


def hooked(layer):
    weight, more = weight_of(layer), torch.randn(weight_of(layer).shape, dtype=weight_of(layer).dtype) / 10
    layer.register_forward_hook(lambda _, args, result: result + args[0] @ more.T)
    return layer, weight + more


def scaled_before(layer):
    factor = torch.rand(weight_of(layer).shape[1]).to(weight_of(layer)) + 0.5
    layer.register_forward_pre_hook(lambda _, args: (args[0] * factor,))
    return layer, weight_of(layer) * factor


def parametrized(layer):
    weight = weight_of(layer)
    name = "weight"
    parametrizations.weight_norm(layer, name, dim=0)
    getattr(layer.parametrizations, name).original0.data.mul_(2)
    return layer, 2 * weight


def wrapped(kind):
    def make(layer):
        adapter = kind(layer)
        return adapter, adapter.merged().detach()

    return make


KINDS = {
    "LoRA": wrapped(LoRA),
    "DoRA": wrapped(DoRA),
    "int8 layer": wrapped(Int8Linear),
    "int8 weight": int8_weight,
    "offloaded": offloaded,
    "hooked": hooked,
    "scaled before": scaled_before,
    "weight norm": parametrized,
    "int8 in LoRA": lambda layer: nested(layer),
}


def nested(layer):
    """An adapter around an integer weight."""
    adapter = LoRA(layer)
    layer, weight = int8_weight(layer)
    return adapter, weight + 2 * adapter.B.weight.detach() @ adapter.A.weight.detach()


def changed_pair(model, kinds, names):
    """The model with other layers in the place of those of these names, and one with their merged weights."""
    merged = copy.deepcopy(model)
    for name, kind in zip(names, kinds, strict=True):
        layer, weight = KINDS[kind](model.get_submodule(name))
        model.set_submodule(name, layer.eval())
        plain = merged.get_submodule(name)
        plain.weight.data = weight if isinstance(plain, nn.Linear) else weight.T.contiguous()
    return model, merged


LAYERS = [f"model.layers.1.self_attn.{side}_proj" for side in "qkvo"]


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_the_merged_weights(kind):
    """Of each kind at the output projection, and three kinds that are drawn at random at the others."""
    generator = torch.Generator().manual_seed(list(KINDS).index(kind))
    drawn = [list(KINDS)[n] for n in torch.randint(len(KINDS), (3,), generator=generator)]
    torch.manual_seed(1)
    model, merged = changed_pair(llama(attention_bias=kind in ("DoRA", "offloaded")), [*drawn, kind], LAYERS)
    for one in model, merged:
        for name, parameter in one.named_parameters():
            if name.endswith("bias") and not parameter.is_meta:
                parameter.data.fill_(0.0)
    with torch.no_grad():
        torch.testing.assert_close(model(**INPUTS).logits, merged(**INPUTS).logits, rtol=1e-3, atol=1e-3)
    assert_same_numbers(model, merged)


@pytest.mark.parametrize("kind", ["LoRA", "hooked", "scaled before"])
def test_queries_keys_and_values_of_one_layer_of_the_other_orientation(kind):
    """GPT-2's Conv1D, with biases."""
    names = [f"transformer.h.1.attn.{name}" for name in ("c_attn", "c_proj")]
    plain = made("GPT2", "LMHeadModel", times=10, **MODELS["GPT2"])
    plain.transformer.h[1].attn.c_attn.bias.data.normal_(0, 30)
    model, merged = changed_pair(plain, [kind, kind], names)
    assert_same_numbers(model, merged)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [0.0, 100.0])
def test_a_large_bias_costs_no_digits(dtype, bias):
    torch.manual_seed(0)
    layer = LoRA(nn.Linear(24, 16).to(dtype))
    layer.base_layer.bias.data.fill_(bias)
    x = torch.randn(2, 5, 24).to(dtype)
    with torch.no_grad():
        read = called.CalledLayer(called.Linear, layer.eval(), x, layer(x)).read("layer")
    wanted = layer.merged().double()
    assert (read.weight - wanted).abs().max() <= 2 * torch.finfo(dtype).eps * wanted.abs().max()
    assert torch.equal(read.bias, layer.base_layer.bias.detach().to(read.bias)) if bias else read.bias is None


def recorded(model):
    with torch.no_grad(), ch.watch(model, values=True) as seen:
        model(**INPUTS)
    return seen


def adapted():
    model = llama()
    attention = model.model.layers[1].self_attn
    attention.o_proj = LoRA(attention.o_proj)
    return model.eval(), attention


def test_wide_layers_are_called_in_blocks(monkeypatch):
    monkeypatch.setattr(called, "BLOCK", 5)
    model, attention = adapted()
    torch.testing.assert_close(recorded(model)[1].output_projection.weight, attention.o_proj.merged())


def test_a_run_under_autocast():
    model, attention = adapted()
    with torch.autocast("cpu", torch.bfloat16):
        seen = recorded(model)
    torch.testing.assert_close(seen[1].output_projection.weight, attention.o_proj.merged())


class Picky(LoRA):
    """Takes no other length than that of the run."""

    def forward(self, x):
        if x.shape[1] != INPUTS["input_ids"].shape[1]:
            raise ValueError("another length")
        return super().forward(x)


def test_an_adapter_that_cannot_be_called_is_not_left_out():
    model, attention = adapted()
    attention.o_proj.__class__ = Picky
    with pytest.raises(ch.UnsupportedError, match="Picky, cannot be called on the rows of the identity"):
        _ = recorded(model)[1].result_norms


def test_reading_leaves_no_trace():
    """No dropout while it is read in training; its modes, random numbers, gradients and recordings are as before."""
    model, attention = adapted()
    model.train()
    model.config.attention_dropout = 0.0
    seen, state = recorded(model), torch.get_rng_state()
    attention.o_proj.dropout.eval()
    with torch.inference_mode(), ch.watch(model, values=True) as others:
        with torch.autocast("cpu", torch.bfloat16):
            weight = seen[1].output_projection.weight
        model(**INPUTS)
    torch.testing.assert_close(weight, attention.o_proj.merged())
    assert not weight.is_inference() and not weight.requires_grad
    assert torch.equal(torch.get_rng_state(), state)
    assert attention.o_proj.training and not attention.o_proj.dropout.training and attention.o_proj.A.training
    assert others[0].run == others[-1].run == 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_hooks_that_only_record_do_not_run_again():
    model = llama()
    kept = []
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda module, args, result: kept.append(result))
    before = numbers_of(llama())
    seen = recorded(model)
    count = len(kept)
    assert torch.equal(seen[1].result_norms, before["result_norms"])
    seen[1].explain((0, 1, 3))
    assert len(kept) == count


def test_an_adapter_that_is_changed_after_the_run():
    model, attention = adapted()
    seen = recorded(model)
    attention.o_proj.B.weight.data = torch.zeros_like(attention.o_proj.B.weight)
    with pytest.raises(ch.ClearheadError, match=r"o_proj, a \S+LoRA, gives other numbers now than in the run"):
        _ = seen[1].result_norms
    seen = recorded(model)
    with torch.no_grad():
        attention.o_proj.B.weight.add_(1.0)
    with pytest.raises(ch.ClearheadError, match="weights of o_proj, which writes its heads, were written to"):
        _ = seen[1].result_norms


class Rounded(nn.Linear):
    """Rounds its input, as int8 activations are."""

    def forward(self, x):
        step = x.abs().amax(-1, keepdim=True).clamp_min(1e-9) / 127
        return super().forward((x / step).round() * step)


class Drawn(nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.randn(())


class Bent(LoRA):
    def forward(self, x):
        return self.base_layer(x) + self.B(self.A(x).tanh())


@pytest.mark.parametrize("kind", [Rounded, Drawn, Bent])
def test_what_is_not_linear_is_an_error_and_ends_no_run(kind):
    model = llama()
    attention = model.model.layers[1].self_attn
    if kind is Bent:
        attention.o_proj = Bent(attention.o_proj)
    else:
        attention.o_proj.__class__ = kind
    seen = recorded(model.eval())
    with pytest.raises(ch.UnsupportedError, match=rf"o_proj, a \S+{kind.__name__}, gives no linear function of its"):
        _ = seen[1].result_norms
    assert torch.isfinite(seen[1].weighted_value_norms).all()
    assert "weighted transformed norm" in seen.table()[0] and seen.table()[-1]["weighted value norm"] > 0
    with pytest.raises(ch.UnsupportedError, match="gives no linear function"):
        ch.models.circuits(seen).ov(1, 0)


def test_a_norm_behind_the_layer_is_no_part_of_it():
    model = llama()
    attention = model.model.layers[1].self_attn
    weight = attention.o_proj.weight.detach()
    attention.o_proj = nn.Sequential(attention.o_proj, nn.LayerNorm(weight.shape[0]))
    assert torch.equal(recorded(model.eval())[1].output_projection.weight, weight)


@pytest.mark.filterwarnings(
    "ignore:torch.ao.quantization is deprecated:DeprecationWarning", "ignore:torch.quantize_per:UserWarning"
)
def test_a_layer_that_pytorch_has_quantised_is_named():
    """Its input is rounded too, and so differs from what its weights make of it."""
    model = torch.ao.quantization.quantize_dynamic(llama(), {nn.Linear}, dtype=torch.qint8).eval()
    kind = r"o_proj, a torch.ao.nn.quantized.dynamic.modules.linear.Linear, gives no linear function of its input"
    with pytest.raises(ch.UnsupportedError, match=kind):
        _ = recorded(model)[1].result_norms


class Letters:
    """A tokenizer of letters."""

    pad_token_id, cls_token_id, sep_token_id = 0, None, None
    all_special_ids, padding_side, model_max_length = (0,), "right", 64

    def __call__(self, texts, **options):
        rows = [[ord(letter) % 90 + 3 for letter in text] for text in texts]
        return {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}

    def convert_ids_to_tokens(self, ids):
        return [str(number) for number in ids]


@pytest.mark.parametrize("kind", ["LoRA", "offloaded", "int8 weight"])
def test_a_survey_has_the_numbers_of_the_merged_weights(kind):
    model, merged = changed_pair(llama(), [kind], LAYERS[-1:])
    column = "weighted transformed norm"
    found, wanted = (
        [row[column] for row in ch.models.survey(one, ["hello you", "one more"], Letters(), keep=[column]).table()]
        for one in (model, merged)
    )
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-3, atol=1e-5)
