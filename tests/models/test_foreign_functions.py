"""Attention functions that belong neither to PyTorch nor to transformers: recorded, and compared with the record."""

import functools
import random
import warnings

import pytest
import torch
import torch.nn.functional as F
import transformers
from small_models import IDS, MODELS, RIGHT, made
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import clearhead as ch

FOREIGN = "foreign_for_tests"


def weights_of(query, key, mask, scaling, bias=0.0):
    scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT * scaling + bias
    keep = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
    return scores.masked_fill(~(keep if mask is None else mask), -torch.inf).softmax(-1).nan_to_num()


def output_of(weights, value):
    return (weights.to(value.dtype) @ value.repeat_interleave(weights.shape[1] // value.shape[1], 1)).transpose(1, 2)


def plain(module, query, key, value, mask, scaling=None, **kwargs):
    weights = weights_of(query, key, mask, scaling)
    return output_of(weights, value), weights


def biased(module, query, key, value, mask, scaling=None, **kwargs):
    distance = torch.arange(key.shape[2]) - torch.arange(query.shape[2])[:, None]
    weights = weights_of(query, key, mask, scaling, 0.1 * distance)
    return output_of(weights, value), weights


def two_keys(module, query, key, value, mask, scaling=None, **kwargs):
    """The two largest weights of a row alone: rows of one or two keys are those of the softmax."""
    weights = weights_of(query, key, mask, scaling)
    weights = weights * (weights >= weights.topk(2)[0][..., -1:])
    return output_of(weights / weights.sum(-1, keepdim=True), value), weights


def gated(module, query, key, value, mask, scaling=None, **kwargs):
    return 0.5 * output_of(weights_of(query, key, mask, scaling), value), None


def one_head(module, query, key, value, mask, scaling=None, **kwargs):
    weights = weights_of(query, key, mask, scaling)
    weights = torch.cat([weights[:, :-1], weights[:, -1:].roll(1, 2)], 1)
    return output_of(weights, value), weights


@functools.wraps(sdpa_attention_forward)
def named_as_transformers_own(module, query, key, value, mask, scaling=None, **kwargs):
    return gated(module, query, key, value, mask, scaling)


OTHERS = (biased, two_keys, gated, one_head, named_as_transformers_own, functools.partial(gated))


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, FOREIGN, sdpa_mask)

    def make(function, **options):
        monkeypatch.setitem(transformers.modeling_utils.AttentionInterface._global_mapping, FOREIGN, function)
        return made("Llama", times=8, **MODELS["Llama"], attn_implementation=FOREIGN, **options)

    return make


@pytest.mark.parametrize("function", OTHERS, ids=lambda one: getattr(one, "__name__", "partial"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_function_with_other_weights_is_told_of_once_for_each_layer(registered, function, dtype):
    model = registered(function).to(dtype)
    with warnings.catch_warnings(record=True) as told, torch.no_grad(), ch.watch(model) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            model(IDS)
    messages = [str(one.message) for one in told]
    assert len(seen.calls) == 4 and len(messages) == 2
    for layer, message in enumerate(messages):
        assert f"layers.{layer}.self_attn" in message and "times its rounding" in message


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_function_with_the_softmax_of_the_record_is_not_told_of(registered, padded, dtype):
    model = registered(plain).to(dtype)
    mask = RIGHT.flip(1) if padded else None
    with torch.no_grad(), ch.watch(model) as seen:
        model(IDS, attention_mask=mask)
        model.train()
        model(IDS, attention_mask=mask)
    assert len(seen.calls) == 4


def test_monitor_and_lazy_weights_compare_too(registered):
    model = registered(gated).train()
    with pytest.warns(UserWarning, match="times its rounding") as told, ch.models.monitor(model, every=1) as seen:
        for _ in range(3):
            model(IDS)
    assert len(told) == 2 and len(seen.table()) == 3 * 2 * 4
    with torch.no_grad(), pytest.warns(UserWarning, match="times its rounding") as told:  # noqa: SIM117
        with ch.models.lazy_attentions(model):
            for _ in range(2):
                model(IDS, output_attentions=True)
    assert len(told) == 2


def test_statistics_compare_too(registered):
    model = registered(gated)
    entropy = ch.reductions.Entropy()
    watching = ch.models.statistics(model, entropy, layers=1)
    with pytest.warns(UserWarning, match=r"layers\.1\.self_attn") as told, torch.no_grad(), watching:
        model(IDS)
    assert len(told) == 1


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Own(), nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        x = self.first(x)
        return self.second(x, x, x)[0]


def kernel(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, factor=1.0, **kwargs):
    """Stands for a compiled kernel: no softmax of PyTorch's runs in it."""
    e = (q @ k.mT / q.shape[-1] ** 0.5).exp()
    e = e.tril() if is_causal else e if attn_mask is None else e * attn_mask
    return factor * (e / e.sum(-1, keepdim=True) @ v)


@pytest.mark.parametrize("factor", [1.0, 0.7])
def test_a_replaced_function_of_torch_is_recorded_and_compared(monkeypatch, factor):
    torch.manual_seed(0)
    model, x = Both(), torch.randn(1, 5, 16)
    with ch.watch(model) as right, torch.no_grad():
        model(x)
    monkeypatch.setattr(F, "scaled_dot_product_attention", functools.partial(kernel, factor=factor))
    with warnings.catch_warnings(record=True) as told, torch.no_grad(), ch.watch(model, values=True) as seen:
        warnings.simplefilter("always")
        output = model(x)
    assert torch.equal(output, model(x))
    assert [call.name for call in seen] == ["first", "second"]
    torch.testing.assert_close(seen[0].weights.dense(), right[0].weights.dense())
    assert [("first" in str(one.message)) for one in told] == ([] if factor == 1.0 else [True])
    if factor == 1.0:
        torch.testing.assert_close(seen[0].weights @ seen[0].value, seen[0].output)


def test_a_replaced_function_inside_transformers_own(monkeypatch):
    model = made("Bert", times=8, **MODELS["Bert"])
    monkeypatch.setattr(F, "scaled_dot_product_attention", functools.partial(kernel, factor=0.7))
    with pytest.warns(UserWarning) as told, torch.no_grad(), ch.watch(model) as seen:
        model(IDS)
    assert len(seen.calls) == 2
    assert [f"layer.{n}.attention.self" in str(one.message) for n, one in enumerate(told)] == [True, True]


def test_two_managers_and_an_edit_see_a_replaced_function(monkeypatch):
    torch.manual_seed(0)
    model, x = Own(), torch.randn(1, 5, 16)
    cut = ch.edits.Knockout(layers=0, queries=4, keys=0)
    with torch.no_grad():
        with ch.edit(model, cut):
            right = model(x)
        monkeypatch.setattr(F, "scaled_dot_product_attention", kernel)
        with ch.watch(model) as outer, ch.edit(model, cut), ch.watch(model) as inner:
            torch.testing.assert_close(model(x), right)
    for seen in (outer, inner):
        assert len(seen.calls) == 1 and (seen[0].weights[0, :, 4, 0] == 0).all()
    assert F.scaled_dot_product_attention is kernel


def test_a_function_replaced_while_watching_is_recorded_and_stays(monkeypatch):
    torch.manual_seed(0)
    model, x = Own(), torch.randn(1, 5, 16)
    monkeypatch.setattr(F, "scaled_dot_product_attention", F.scaled_dot_product_attention)  # is put back at the end
    with torch.no_grad(), pytest.warns(UserWarning, match="times its rounding"), ch.watch(model) as seen:
        model(x)
        watched = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = kernel
        model(x)
        F.scaled_dot_product_attention = functools.wraps(watched)(lambda *args, **kwargs: 2 * watched(*args, **kwargs))
        model(x)
        F.scaled_dot_product_attention = last = functools.partial(kernel, factor=0.7)
        with ch.watch(model) as inner:
            model(x)
        model(x)
    assert F.scaled_dot_product_attention is last and len(seen.calls) == 5 and len(inner.calls) == 1
    for call in seen.calls:
        torch.testing.assert_close(call.weights.dense(), seen[0].weights.dense())


@pytest.mark.parametrize("seed", range(6))
def test_random_functions_of_either_kind(registered, seed):
    """A function that multiplies drawn numbers into its weights is told of where these are not all equal."""
    dice, g = random.Random(seed), torch.Generator().manual_seed(seed)
    size = dice.choice([0.0, 0.3, 3.0])
    bias = size * torch.randn(4, 9, 9, generator=g)

    def drawn(module, query, key, value, mask, scaling=None, **kwargs):
        return output_of(weights_of(query, key, mask, scaling, bias), value), None

    model = registered(drawn)
    with warnings.catch_warnings(record=True) as told, torch.no_grad(), ch.watch(model):
        warnings.simplefilter("always")
        model(IDS)
    assert len(told) == (2 if size else 0)
