"""Where a recorded call's query, key, value and result came from: found among the layers that ran, or missing."""

import pytest
import torch
import torch.nn.functional as F
from recomputed import check_script
from small_models import MODELS, OWN_EAGER, inputs_of, pair
from torch import nn
from transformers.pytorch_utils import Conv1D

import clearhead as ch
from clearhead.models import bundled, load
from clearhead.models.origins import part

ALL = {**MODELS, **OWN_EAGER}
SIDES = {"query", "key", "value"}
MISSING = {"DeepseekV3": {"query", "key"}}  # latent attention: two layers and a part of a rotation for each


def recorded(model, *inputs, **named):
    with torch.no_grad(), ch.watch(model, values=True) as seen:
        model(*inputs, **named)
    return seen


def traced(explanation):
    """Which of query, key and value are computed from the module's input, and held to the model's own numbers."""
    said = "These are the model's own numbers: the line gives them"
    return {step.name for step in explanation.steps if step.name in SIDES and said in step.why}


def words(explanation):
    return " ".join(str(explanation).split())


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "too many to list"])
@pytest.mark.parametrize("name", ALL)
def test_every_side_and_the_result_of_each_architecture(name, listed, monkeypatch):
    monkeypatch.setattr(part, "LISTED", 8_000 if listed else 0)
    fast, _ = pair(name, ALL[name])
    results = {}
    for at, module in fast.named_modules():
        module.register_forward_hook(lambda _, __, output, at=at: results.update({at: output}))
    seen = recorded(fast, **inputs_of(name))
    for call in seen.calls:
        explanation = call.explain((1, slice(0, 4, 3), slice(2, 5)))
        assert traced(explanation) == SIDES - MISSING.get(name, set())
        for side in SIDES & MISSING.get(name, set()):
            assert f"The {side}: none of the layers" in words(explanation)
        assert ("x" in [step.name[:1] for step in explanation.steps]) == listed
        check_script(explanation)
        at = call.name
        if name in ("Bert", "Roberta"):  # the layer that joins the heads is in another module
            assert "The layer dense of another module." in words(explanation)
            at = f"{at.removesuffix('.self')}.output.dense"
        result = results[at][0] if isinstance(results[at], tuple) else results[at]
        torch.testing.assert_close(explanation["result"], result[1:2, 2:5], rtol=1e-4, atol=1e-5)


def test_a_last_projection_of_another_module_that_was_written_to_is_told():
    fast, _ = pair("Bert", ALL["Bert"])
    call = recorded(fast, **inputs_of("Bert"))[0]
    assert torch.equal(call.output_projection.weight, fast.encoder.layer[0].attention.output.dense.weight)
    with torch.no_grad():
        fast.encoder.layer[0].attention.output.dense.weight.mul_(2)
    explanation = call.explain((0, 1, 3))
    assert "result" not in [step.name for step in explanation.steps]
    assert "The input of the layer dense was the outputs of all heads" in words(explanation)


WIDTH, HEADS, KEY_HEADS, E = 12, 4, 2, 6


class Made(nn.Module):
    """Attention whose query, key and value are made in one of many ways."""

    def __init__(self, layout="separate", layer=nn.Linear, norm=None, rotary=None, factor=1.0, between=None, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.layout, self.rotary, self.factor, self.between = layout, rotary, factor, between
        sizes = [HEADS * E, KEY_HEADS * E, KEY_HEADS * E]
        made = (lambda n: Conv1D(n, WIDTH)) if layer is Conv1D else (lambda n: nn.Linear(WIDTH, n, bias=bias))
        if layout == "separate":
            self.to_query, self.to_key, self.to_value = map(made, sizes)
        elif layout == "gated":  # each head's query beside as many numbers for another use
            self.to_query, self.to_key, self.to_value = made(2 * sizes[0]), made(sizes[1]), made(sizes[2])
        else:
            self.all = made(sum(sizes))
        together = norm in ("flat RMS", "flat layer")
        kind = {"RMS": nn.RMSNorm, "layer": nn.LayerNorm}.get(norm and norm.split()[-1])
        if kind:
            self.query_norm = kind(sizes[0] if together else E, eps=1e-5)
            self.key_norm = kind(sizes[1] if together else E, eps=1e-5)
            for each in self.query_norm, self.key_norm:
                nn.init.normal_(each.weight, 1.0, 0.3)
        self.together = together
        self.out = nn.Linear(HEADS * E, WIDTH)

    def sides(self, x):
        batch, length, _ = x.shape
        if self.layout == "separate":
            q, k, v = self.to_query(x), self.to_key(x), self.to_value(x)
        elif self.layout == "gated":
            q = self.to_query(x).view(batch, length, HEADS, 2, E)[..., 0, :].flatten(2)
            k, v = self.to_key(x), self.to_value(x)
        elif self.layout == "blocks":
            q, k, v = self.all(x).split([HEADS * E, KEY_HEADS * E, KEY_HEADS * E], -1)
        else:
            groups = self.all(x).view(batch, length, KEY_HEADS, HEADS // KEY_HEADS + 2, E)
            q, k, v = (part.flatten(2) for part in groups.split([HEADS // KEY_HEADS, 1, 1], -2))
        if self.together:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k, v = (t.view(batch, length, -1, E).transpose(1, 2) for t in (q, k, v))
        if hasattr(self, "query_norm") and not self.together:
            q, k = self.query_norm(q), self.key_norm(k)
        return q, k, v

    def forward(self, x, position_embeddings=None):
        q, k, v = self.sides(x)
        if self.rotary:
            cos, sin = position_embeddings
            q, k = (self.rotary(t, cos.unsqueeze(1), sin.unsqueeze(1)) for t in (q, k))
        q = q * self.factor
        if self.between:
            q = self.between(q)
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(output.transpose(1, 2).flatten(2))


def halves(x, cos, sin):
    a, b = x[..., : E // 2], x[..., E // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def neighbours(x, cos, sin):
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


def first_entries(x, cos, sin):
    a, b, rest = x[..., :2], x[..., 2:4], x[..., 4:]
    return torch.cat([a * cos[..., :2] - b * sin[..., :2], b * cos[..., :2] + a * sin[..., :2], rest], -1)


ROTATIONS = {  # how it turns, and how the cosines are given: (B, L, R) of the angle of each pair
    "halves, a cosine each": (halves, lambda t: t.repeat(1, 1, 2), E // 2),
    "halves, a cosine a pair": (halves, lambda t: t, E // 2),
    "neighbours, a cosine a pair": (neighbours, lambda t: t, E // 2),
    "neighbours, a cosine each": (neighbours, lambda t: t.repeat_interleave(2, -1), E // 2),
    "neighbours, halves of cosines": (neighbours, lambda t: t.repeat(1, 1, 2), E // 2),
    "first entries": (first_entries, lambda t: t.repeat(1, 1, 2), 2),
}


def rotated(name, length, batch):
    turn, given, pairs = ROTATIONS[name]
    angles = torch.arange(length).view(1, -1, 1) * torch.tensor([1.0, 0.3, 0.1])[:pairs] + torch.rand(batch, 1, 1)
    cos, sin = given(angles.cos()), given(angles.sin())

    def with_given(x, *_):
        return turn(x, angles.cos().unsqueeze(1).to(x.dtype), angles.sin().unsqueeze(1).to(x.dtype))

    return with_given, (cos, sin)


def check(module, x, sides=SIDES, **named):
    call = recorded(module, x, **named)[0]
    explanation = call.explain((slice(None), slice(1, 4), slice(1, 4, 2)) if x.shape[0] < 3 else (0, 1, slice(1, 4, 2)))
    assert traced(explanation) == sides
    assert "more than rounding" not in str(explanation)
    check_script(explanation)
    return explanation


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("norm", [None, "RMS", "layer", "flat RMS", "flat layer"])
@pytest.mark.parametrize("layout", ["separate", "gated", "blocks", "groups"])
def test_layouts_and_norms(layout, norm, bias):
    explanation = check(Made(layout, norm=norm, bias=bias), torch.randn(2, 7, WIDTH))
    assert ("norm_query" in [step.name for step in explanation.steps]) == (norm is not None)


@pytest.mark.parametrize("norm", [None, "RMS"])
@pytest.mark.parametrize("factor", [1.0, 0.25])
@pytest.mark.parametrize("rotation", ROTATIONS)
def test_rotations_and_factors(rotation, factor, norm):
    torch.manual_seed(1)
    turn, given = rotated(rotation, 7, 2)
    explanation = check(
        Made(rotary=turn, factor=factor, norm=norm), torch.randn(2, 7, WIDTH), position_embeddings=given
    )
    names = [step.name for step in explanation.steps]
    assert {"query_cos", "key_cos"} <= {*names}
    assert ("unscaled_query" in names) == (factor != 1.0)


@pytest.mark.parametrize("layout", ["separate", "blocks"])
def test_weights_that_stand_the_other_way(layout):
    check(Made(layout, Conv1D), torch.randn(2, 7, WIDTH))


def test_a_norm_is_no_factor_where_one_vector_is_there():
    explanation = check(Made(norm="RMS"), torch.randn(1, 4, WIDTH))
    assert "unscaled_query" not in [step.name for step in explanation.steps]
    call = recorded(Made(norm="RMS"), torch.randn(1, 1, WIDTH))[0]
    assert "norm_query" in [step.name for step in call.explain((0, 1, 0)).steps]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    turn, given = rotated("halves, a cosine each", 7, 2)
    module = Made(rotary=turn, norm="RMS").to(dtype)
    call = recorded(module, torch.randn(2, 7, WIDTH).to(dtype), position_embeddings=given)[0]
    explanation = call.explain((1, 2, slice(1, 4, 2)))
    check_script(explanation)
    if dtype == torch.float64:
        assert traced(explanation) == SIDES
        return
    for side in SIDES:  # the model rounds between the steps, so its own numbers stand beside the exact ones
        far = (explanation[f"exact_{side}"] - explanation[side]).abs().max()
        assert far <= 2 * torch.finfo(dtype).eps * explanation[side].abs().max()
        assert torch.equal(
            explanation[side][0, 0].to(dtype),
            getattr(call, side)[1, 2 if side == "query" else 1][[1, 3] if side == "query" else slice(None)],
        )


def test_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        call = recorded(Made(), torch.randn(2, 7, WIDTH))[0]
    assert "exact_key" in [step.name for step in call.explain((0, 0, 3)).steps]


def test_what_changes_between_is_not_passed_over():
    explanation = check(Made(between=lambda q: q + 0.1), torch.randn(2, 7, WIDTH), SIDES - {"query"})
    assert "The query: none of the layers that ran before attention gives it" in words(explanation)


def test_one_position_that_is_changed():
    def elsewhere(q):
        q = q.clone()
        q[:, :, 3] += 1.0  # no position by which candidates are judged
        return q

    explanation = recorded(Made(between=elsewhere), torch.randn(2, 40, WIDTH))[0].explain((0, 1, 3))
    assert traced(explanation) == SIDES - {"query"}
    assert "The query: to_query makes it at some positions, and not at others." in words(explanation)


@pytest.mark.parametrize("changed", ["weight", "input"])
def test_weights_and_inputs_that_have_changed_since(changed):
    module, x = Made(), torch.randn(2, 7, WIDTH)
    call = recorded(module, x)[0]
    before = call.explain((0, 1, 3))
    with torch.no_grad():
        (module.to_query.weight if changed == "weight" else x).add_(1.0)
    after = call.explain((0, 1, 3))
    assert traced(before) == SIDES
    assert "query" not in traced(after)
    assert "or its weights or its input were changed since" in words(after)
    assert torch.equal(before["weights"], after["weights"])


def test_inputs_that_hold_no_number():
    x = torch.randn(2, 7, WIDTH)
    x[0, 6] = torch.nan
    explanation = recorded(Made(), x)[0].explain((0, 1, 3))
    assert not traced(explanation) & {"key", "value"}


def test_keys_of_a_cache():
    model, _ = pair("Llama", ALL["Llama"])
    model.config.use_cache = True
    with torch.no_grad(), ch.watch(model, values=True) as seen:
        cache = model(torch.tensor([[5, 6, 7]]), use_cache=True).past_key_values
        model(torch.tensor([[8]]), past_key_values=cache, use_cache=True)
    explanation = seen.calls[-1].explain((0, 1, 0))
    assert traced(explanation) == {"query"}
    assert "The key: the layers ran for 1 of 4 positions, the others were kept from before" in words(explanation)
    check_script(explanation)


@pytest.mark.parametrize("training", [True, False], ids=["slow path", "fast path"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_multihead_attention(training, batch_first):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, batch_first=batch_first).train(training)
    x = torch.randn(3, 5, 8)
    explanation = recorded(module, x, x, x, need_weights=False)[0].explain((1, 1, 2))
    assert traced(explanation) == SIDES
    assert "in_proj, of query," in words(explanation)
    check_script(explanation)


def test_nothing_is_kept_without_values():
    with torch.no_grad(), ch.watch(module := Made()) as seen:
        module(torch.randn(2, 7, WIDTH))
    assert seen[0].origin is None
    assert "What they were made of was not kept: watch with values=True." in words(seen[0].explain((0, 1, 3)))


def test_a_real_model():
    model, tokenizer = load(bundled())
    inputs = tokenizer("The quick brown fox jumps over the lazy dog.", return_tensors="pt")
    explanation = recorded(model, **inputs).explain(3, head=5, query=5, key=4)
    assert traced(explanation) == SIDES
    assert "are too many to be listed" in words(explanation)
    x = []
    model.encoder.layer[3].attention.self.query.register_forward_pre_hook(lambda _, given: x.append(given[0]))
    with torch.no_grad():
        model(**inputs)
    first = x[0][0, 5] @ model.encoder.layer[3].attention.self.query.weight[160]
    first = first + model.encoder.layer[3].attention.self.query.bias[160]
    assert f"query[5, 5, 0] = {x[0][0, 5, 0]:.4f}·" in words(explanation).replace("(", "")
    torch.testing.assert_close(explanation["query"][0, 0, 0, 0], first, rtol=1e-5, atol=1e-6)
    check_script(explanation)
