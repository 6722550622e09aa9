"""The computed test of `audit`: outputs of healthy and of wrong backends beside the formula, in all dtypes."""

import pytest
import torch
import torch.nn.functional as F

import clearhead as ch
from clearhead.models import bundled, load

transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")
from small_models import IDS, SIZES, T5, made  # noqa: E402

LEFT = torch.tensor([[1] * 9, [0] * 4 + [1] * 5])
SMALL = SIZES | {"num_hidden_layers": 3}


def model_of(kind, **more):
    return made(kind, **SMALL, num_key_value_heads=2, **more)


def llama(**more):
    return model_of("Llama", **more)


def expect_of_t5(call):
    return ch.Causal() if call.kind == "self" and call.layer.stack == "decoder" else None


MODELS = {
    "llama": (llama, {"input_ids": IDS}, ch.Causal()),
    "llama, left padding": (llama, {"input_ids": IDS, "attention_mask": LEFT}, ch.Causal()),
    "large scores": (lambda: llama(initializer_range=1.0), {"input_ids": IDS}, ch.Causal()),
    "t5": (
        lambda: made("T5", **T5),
        {"input_ids": IDS, "attention_mask": LEFT.flip(1), "decoder_input_ids": IDS[:, :4]},
        expect_of_t5,
    ),
    "bert": (lambda: load(bundled())[0], {"input_ids": IDS, "attention_mask": LEFT.flip(1)}, None),
}


def audit_computed(model, inputs, mask):
    """The computed test of a run on these inputs."""
    with torch.no_grad(), ch.watch(model, values=True) as seen:
        model(**inputs)
    return ch.audit(seen, mask).tests[1]


# float64's least value is −∞ to its softmax in float32: eager rows of padding are NaN, and 0 · NaN reaches the tokens
NOT_FINITE = ("llama, left padding", torch.float64, "eager")


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_healthy_backends_compute_their_formula(name, dtype, backend):
    make, inputs, mask = MODELS[name]
    model = make().to(dtype)
    model.set_attn_implementation(backend)
    found = audit_computed(model, inputs, mask)
    assert found.holds == ((name, dtype, backend) != NOT_FINITE), found
    if not found.holds:
        assert "inf times its rounding" in found.findings[0].text


@pytest.fixture
def register():
    """Registers a backend with SDPA's masks, for the time of a test."""
    functions, masks = transformers.AttentionInterface, transformers.AttentionMaskInterface

    def add(function):
        functions.register("wrong", function)
        masks.register("wrong", masks._global_mapping["sdpa"])

    yield add
    functions._global_mapping.pop("wrong", None)
    masks._global_mapping.pop("wrong", None)


def sdpa(module, *args, **more):
    return transformers.AttentionInterface._global_mapping["sdpa"](module, *args, **more)


def scaled(module, q, k, v, mask, scaling=None, **more):
    return sdpa(module, q, k, v, mask, scaling=scaling * (1.01 if module.layer_idx == 1 else 1), **more)


def without_mask(module, q, k, v, mask, is_causal=None, **more):
    if module.layer_idx != 1:
        return sdpa(module, q, k, v, mask, is_causal=is_causal, **more)
    return sdpa(module, q, k, v, None, is_causal=False, **more)


def of_nan(module, q, k, v, mask, **more):
    out, weights = sdpa(module, q, k, v, mask, **more)
    return (out * torch.nan if module.layer_idx == 1 else out), weights


@pytest.mark.parametrize(
    ("function", "code"), [(scaled, "formula-differs"), (without_mask, "mask-ignored"), (of_nan, "formula-differs")]
)
def test_a_wrong_backend_is_named_with_its_layer(register, function, code):
    register(function)
    model = llama()
    model.set_attn_implementation("wrong")
    report = ch.audit(model, {"input_ids": IDS, "use_cache": False}, ch.Causal())
    finding = next(finding for finding in report.findings if finding.test == "computed")
    assert (finding.module, finding.layer, finding.code) == ("layers.1.self_attn", "L1", code)
    assert "backend wrong" in finding.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("length", [128, 300])
def test_a_window_that_is_wrong_by_one_key_is_found_in_low_precision(dtype, length):
    class Windowed(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            distance = torch.arange(length)[:, None] - torch.arange(length)
            self.mask = (distance >= 0) & (distance < width)

        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)

    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, length, 64, generator=generator).to(dtype).unbind()
    inputs = dict(zip("qkv", (q, k, v), strict=True))
    expected = ch.Causal() & ch.SlidingWindow(before=63)
    assert audit_computed(Windowed(64), inputs, expected).holds
    for width in (63, 65):
        assert not audit_computed(Windowed(width), inputs, expected).holds
