"""watch(values=True) and watch(gradients=True): values, outputs and gradients of calls, beside eager models' own."""

import os

import pytest
import torch
import torch.nn.functional as F

import clearhead as ch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")
from small_models import GROUPED, IDS, SIZES, T5, pair  # noqa: E402

LEFT = torch.tensor([[1] * 9, [0] * 4 + [1] * 5])
VIT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16}

MODELS = {
    "Llama": (SIZES | GROUPED, {"input_ids": IDS}),
    "Llama, left padding": (SIZES | GROUPED, {"input_ids": IDS, "attention_mask": LEFT}),
    "Qwen3": (SIZES | GROUPED, {"input_ids": IDS}),
    "Gemma3Text": (
        {**SIZES, **GROUPED, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        {"input_ids": IDS},
    ),
    "Bert": (SIZES, {"input_ids": IDS, "attention_mask": LEFT.flip(1)}),
    "ViT": ({**VIT, "patch_size": 4}, {"pixel_values": torch.rand(2, 3, 16, 16)}),
    "T5": (T5 | {"dropout_rate": 0.0}, {"input_ids": IDS, "decoder_input_ids": IDS[:, :5]}),
}


def attentions(output):
    """By kind of module: all that an eager model gives."""
    named = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
    return [layer for name in named for layer in (getattr(output, name, None) or ())]


def matched(calls, weights):
    """Each call with the eager weights that are its own, by their values: the orders differ."""
    for call in calls:
        dense = call.weights.dense()
        alike = [w for w in weights if w.shape == dense.shape]
        yield call, min(alike, key=lambda w: float((w.detach() - dense).abs().sum()))


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_eager_models_weights(name):
    options, inputs = MODELS[name]
    fast, slow = pair(name.split(",")[0], options, times=4)
    mixing = torch.randn(32, generator=torch.Generator().manual_seed(1))

    def loss(output):
        return (output.last_hidden_state[:, -1] @ mixing).square().sum()

    eager = slow(**inputs, output_attentions=True)
    weights = attentions(eager)
    grads = torch.autograd.grad(loss(eager), weights)
    by_weight = {id(w): g for w, g in zip(weights, grads, strict=True)}
    with ch.watch(fast, gradients=True) as seen:
        total = loss(fast(**inputs))
    total.backward(retain_graph=True)
    assert len(seen.calls) == len(weights)
    for call, a in matched(seen.calls, weights):
        g = by_weight[id(a)]
        product, near = a.detach() * g, {"rtol": 2e-4, "atol": 2e-5 * float(g.abs().max())}
        torch.testing.assert_close(call.gradients.by_key(), product.sum(2), **near)
        torch.testing.assert_close(call.gradients.by_query(), product.sum(3), **near)
        torch.testing.assert_close(call.gradients.by_key(positive=True), product.clamp(min=0).sum(2), **near)
        torch.testing.assert_close(call.head_importance, product.sum((2, 3)), **near)
        once = call.head_importance
    total.backward()  # several add up
    torch.testing.assert_close(call.head_importance, 2 * once)


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_norms_are_those_of_the_weights(name):
    options, inputs = MODELS[name]
    fast, _ = pair(name.split(",")[0], options, times=4)
    with torch.no_grad():
        plain = fast(**inputs).last_hidden_state
        with ch.watch(fast, values=True) as seen:
            again = fast(**inputs).last_hidden_state
    assert torch.equal(plain, again)
    for call in seen.calls:
        dense, groups = call.weights.dense(), call.query.shape[1] // call.value.shape[1]
        value = call.value.repeat_interleave(groups, 1)
        sees = call.weights.logsumexp() > -torch.inf
        wanted = dense @ value
        torch.testing.assert_close(call.output[sees], wanted[sees], rtol=1e-5, atol=1e-5 * float(value.abs().max()))
        norms = value.norm(dim=-1)
        assert torch.equal(call.value_norms, norms)
        torch.testing.assert_close(call.weighted_value_norms, (dense @ norms[..., None])[..., 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_multihead_attention_of_torch(need_weights, batch_first):
    torch.manual_seed(0)
    model = torch.nn.MultiheadAttention(12, 3, batch_first=batch_first, add_zero_attn=True, add_bias_kv=True)
    x = torch.randn(2, 5, 12)
    x = x if batch_first else x.transpose(0, 1)
    with ch.watch(model, gradients=True) as seen:
        output, _ = model(x, x, x, need_weights=need_weights)
    output.square().sum().backward()
    (call,) = seen.calls
    rows = x if batch_first else x.transpose(0, 1)
    q, k, v = F.linear(rows, model.in_proj_weight, model.in_proj_bias).chunk(3, -1)
    k, v = torch.cat([k, model.bias_k.expand(2, 1, 12)], 1), torch.cat([v, model.bias_v.expand(2, 1, 12)], 1)
    q, k, v = (t.view(2, -1, 3, 4).transpose(1, 2) for t in (q, k, v))
    k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    a = ((q @ k.mT) / 2).softmax(-1).detach().requires_grad_()
    heads = a @ v.detach()
    result = model.out_proj(heads.transpose(1, 2).flatten(2))
    expected = output if batch_first else output.transpose(0, 1)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
    (grad,) = torch.autograd.grad(result.square().sum(), a)
    torch.testing.assert_close(call.output, heads.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(call.gradients[...], grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(call.head_importance, (a * grad).sum((2, 3)).detach(), rtol=1e-4, atol=1e-5)


class Direct(torch.nn.Module):
    def __init__(self, dropout_p=0.0):
        super().__init__()
        self.scale, self.dropout_p = torch.nn.Parameter(torch.ones(())), dropout_p

    def forward(self, x):
        return F.scaled_dot_product_attention(self.scale * x, x, x, is_causal=True, dropout_p=self.dropout_p)


class OfClearhead(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return ch.attention(self.scale * x, x, x, score=ch.Gaussian(1.5), mask=ch.Causal())


@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (3, 5, 4), (5, 4)])
@pytest.mark.parametrize("module", [Direct, OfClearhead])
def test_own_code(module, shape):
    model, x = module(), torch.randn(shape, generator=torch.Generator().manual_seed(0))
    with ch.watch(model, gradients=True) as seen:
        output = model(x)
    output.square().sum().backward()
    (call,) = seen.calls
    assert torch.equal(call.output.reshape(shape), output.detach())
    grad = (2 * output.detach()).reshape(call.output.shape) @ x.reshape(call.value.shape).mT
    dense = call.weights.dense().reshape(grad.shape)
    torch.testing.assert_close(
        call.gradients.by_key().reshape(grad.shape[:3]), (dense * grad).sum(2), atol=1e-5, rtol=1e-5
    )
    # kept apart from the model's own tensors
    x.zero_()
    assert float(call.value.abs().max()) > 0


def test_bit_identical_with_gradients():
    fast, _ = pair("Llama", SIZES | GROUPED, times=4)

    def grads(context):
        fast.zero_grad()
        with context:
            output = fast(input_ids=IDS).last_hidden_state
        output.square().sum().backward()
        return [output, *(p.grad.clone() for p in fast.parameters())]

    plain, watched = grads(torch.enable_grad()), grads(ch.watch(fast, gradients=True))
    assert all(map(torch.equal, plain, watched))


def test_what_was_not_kept_says_so():
    model, x = Direct(), torch.randn(1, 2, 5, 4)
    with ch.watch(model) as seen:
        model(x)
    norms = ("value_norms", "weighted_value_norms", "transformed_norms", "result_norms")
    for name in ("output", *norms, "gradients", "head_importance"):
        with pytest.raises(ch.ClearheadError, match="watch with values=True"):
            getattr(seen.calls[0], name)
    with ch.watch(model, values=True) as seen:
        output = model(x)
    output.sum().backward()
    with pytest.raises(ch.ClearheadError, match="Watch with gradients=True"):
        _ = seen.calls[0].gradients
    with torch.no_grad(), ch.watch(model, gradients=True) as seen:
        model(x)
    with pytest.raises(ch.ClearheadError, match=r"without torch.no_grad\(\)"):
        _ = seen.calls[0].gradients
    with ch.watch(model, gradients=True) as seen:
        model(x)
    with pytest.raises(ch.ClearheadError, match="no backward pass has reached"):
        _ = seen.calls[0].gradients
    dropping = Direct(0.5)
    with pytest.warns(UserWarning, match=r"dropout 0\.5"), ch.watch(dropping, gradients=True):
        dropping(x)
    for name in ("values", "gradients"):
        with pytest.raises(TypeError, match=name):
            ch.models.statistics(model, [ch.reductions.Entropy()], **{name: True})
        with pytest.raises(ch.ClearheadError, match=f"{name} is 1; expected True or False"):
            ch.watch(model, **{name: 1})
