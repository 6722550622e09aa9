"""Nothing wrong is found where nothing is wrong: no error and no warning."""

import pytest
import torch

import clearhead as ch
from clearhead import nn
from clearhead.testing import ALIGN, Inputs, biases, masks, scores
from diagnosis.planted import qkv

named = {"ids": lambda x: x.__name__ if isinstance(x, type) else str(x)}


def clean(diagnosis):
    return not diagnosis.errors and not diagnosis.warnings


@pytest.mark.parametrize("score", scores(), **named)
@pytest.mark.parametrize("mask", [None, *masks()], **named)
@pytest.mark.parametrize("lengths", [(63, 63), (7, 63)], ids=str)
def test_normal_inputs(score, mask, lengths):
    example = score.example()
    inputs = Inputs.draw(example, lengths, torch.float32)
    given = None if mask is None else mask.example(inputs.sizes)
    diagnosis = ch.diagnose(*inputs, score=example[0].float(), mask=given, align=ALIGN)
    assert clean(diagnosis), diagnosis


class Learnt(ch.extend.Score):
    """A score without a normal form, whose layer and tensor are in float32."""

    def __init__(self):
        super().__init__()
        self.layer, self.gain = torch.nn.Linear(8, 8), torch.ones(8)

    def tile(self, query, key):
        return (self.layer(query) * self.gain) @ key.mT


@pytest.mark.parametrize("score", [Learnt, lambda: ch.Additive(8, 8, 4).then(lambda s, b, h, i, j: s * 2)])
def test_a_score_with_parameters_is_computed_in_float64_too(score):
    torch.manual_seed(0)
    made = score()
    diagnosis = ch.diagnose(*(torch.randn(1, 2, 9, 8) for _ in range(3)), score=made)
    assert not diagnosis.errors
    assert {p.dtype for p in made.parameters()} == {torch.float32}


@pytest.mark.parametrize("bias", biases(), **named)
@pytest.mark.parametrize("lengths", [(63, 63), (7, 63)], ids=str)
def test_biases(bias, lengths):
    example = ch.Dot.example()
    inputs = Inputs.draw(example, lengths, torch.float32)
    assert clean(ch.diagnose(*inputs, bias=bias.example(inputs.sizes).float(), align=ALIGN))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("width", [1, 4, 8, 16, 64, 256])
@pytest.mark.parametrize("length", [1, 2, 3, 8, 300])
def test_sizes_and_dtypes(dtype, width, length):
    inputs = qkv(2, 3, queries=length, keys=length, width=width, dtype=dtype)
    for mask in (None, ch.Causal(), ch.SlidingWindow(before=2), ch.Causal() & ch.Documents(torch.arange(length) // 4)):
        for sinks in (None, torch.zeros(3, dtype=dtype)):
            diagnosis = ch.diagnose(*inputs, mask=mask, sinks=sinks)
            assert clean(diagnosis), diagnosis


MASKS = {
    "a window into the future": ch.SlidingWindow(before=0, after=3),
    "no diagonal": ch.MaskFunction(lambda b, h, i, j: i != j),
    "a causal one without its diagonal, and the first key": ch.MaskFunction(lambda b, h, i, j: (j < i) | (j == 0)),
    "every other key": ch.MaskFunction(lambda b, h, i, j: (i - j) % 2 == 0),
    "left padding": ch.Padding(torch.arange(24) >= torch.tensor([[9], [0]])),
    "right padding": ch.Padding(torch.arange(24) < torch.tensor([[9], [24]])),
    "left padding, causal": ch.Causal() & ch.Padding(torch.arange(24) >= torch.tensor([[9], [0]])),
    "padding on both sides": ch.DenseMask(
        ((torch.arange(24) < 9)[:, None] & (torch.arange(24) < 9))[None, None] | torch.zeros(1, 1, 24, 24).bool()
    ),
    "two directions": ch.PrefixLM([5, 9]),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_that_look_like_others_turned_over(name):
    diagnosis = ch.diagnose(*qkv(2, 3), mask=MASKS[name])
    assert clean(diagnosis), diagnosis


def test_one_key_to_see_is_no_entropy_of_0():
    diagnosis = ch.diagnose(*qkv(2, 3), mask=ch.SlidingWindow(before=0, after=0))
    assert len(diagnosis) == 0


X = qkv(2, width=32, queries=20, keys=20)
MODULES = {
    "MultiHeadAttention": (lambda: nn.MultiHeadAttention(32, 4), {}),
    "causal": (lambda: nn.MultiHeadAttention(32, 4), {"mask": ch.Causal()}),
    "lengths": (lambda: nn.MultiHeadAttention(32, 4), {"valid_lens": [7, 20]}),
    "grouped, rotary": (lambda: nn.MultiHeadAttention(32, 4, num_kv_heads=2, rotary=nn.RotaryEmbedding(8)), {}),
    "cosine": (lambda: nn.MultiHeadAttention(32, 4, score=ch.Cosine()), {"bias": ch.ALiBi(4)}),
    "AdditiveAttention": (lambda: nn.AdditiveAttention(8), {"valid_lens": [7, 20]}),
    "DotProductAttention": (lambda: nn.DotProductAttention(), {"mask": ch.Causal()}),
    "torch's": (lambda: torch.nn.MultiheadAttention(32, 4, batch_first=True), {}),
    "torch's, length first": (lambda: torch.nn.MultiheadAttention(32, 4), {"attn_mask": torch.ones(2, 2).triu(1) > 0}),
    "torch's, a float mask": (
        lambda: torch.nn.MultiheadAttention(32, 4, batch_first=True),
        {"attn_mask": torch.nn.Transformer.generate_square_subsequent_mask(20)},
    ),
    "TorchMultiheadAttention": (
        lambda: nn.TorchMultiheadAttention(32, 4, batch_first=True),
        {"key_padding_mask": torch.arange(20) >= torch.tensor([[7], [20]])},
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_fresh_modules(name):
    make, keywords = MODULES[name]
    torch.manual_seed(0)
    diagnosis = ch.diagnose(make(), *X, **keywords)
    assert clean(diagnosis), diagnosis
    assert "uniform heads" not in [finding.name for finding in diagnosis.warnings]


def test_a_module_is_left_as_it_was():
    attend, cache = nn.MultiHeadAttention(32, 4), nn.KeyValueCache()
    attend(*X, cache=cache)
    before, weights = len(cache), attend.attention_weights
    ch.diagnose(attend, *X, cache=cache)
    assert len(cache) == before == 20
    assert attend.attention_weights is weights


def test_nothing_is_drawn_and_a_lazy_module_stays_lazy():
    attend = nn.AdditiveAttention(8, dropout=0.5)
    state = torch.get_rng_state()
    ch.diagnose(attend, *X)
    ch.diagnose(nn.DotProductAttention(dropout=0.5), *X)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.nn.parameter.is_lazy, (attend.W_q.weight, attend.W_k.weight)))


def test_inputs_of_size_0():
    for sizes in ({"queries": 0}, {"keys": 0}):
        assert len(ch.diagnose(*qkv(2, 3, **sizes), mask=ch.Lengths([0, 0]))) == 0
    diagnosis = ch.diagnose(*qkv(2, 3, width=0), mask=ch.Lengths([5, 5]))
    assert [finding.name for finding in diagnosis] == ["uniform heads"]


def test_what_surrounds_the_call():
    query, key, value = qkv(2, 3)
    want = ch.diagnose(query, key, value, scale=1.0).to_dict()
    query.requires_grad_()
    assert ch.diagnose(query, key, value, scale=1.0).to_dict() == want
    assert ch.diagnose(query.detach().numpy(), key.numpy(), value.numpy(), scale=1.0).to_dict() == want
    with torch.inference_mode():
        assert ch.diagnose(query, key, value, scale=1.0).to_dict() == want
    with torch.autocast("cpu"):
        found = ch.diagnose(query, key, value)
        assert [finding.name for finding in found] == ["precision"] and "bfloat16" in found[0].evidence


@pytest.mark.parametrize(("heads", "length"), [(4, 24), (12, 5), (3, 100), (8, 8)], ids=str)
def test_heads_that_were_transposed(heads, length):
    torch.manual_seed(0)
    flat = torch.nn.Linear(32, heads * 16)(torch.randn(2, length, 32) + torch.randn(32) + torch.randn(length, 1))
    right = flat.unflatten(-1, (heads, 16)).transpose(1, 2)
    for query in (right, right.contiguous(), right.detach().clone(), flat.view(2, length, heads * 16)):
        names = [finding.name for finding in ch.diagnose(query, query, query)]
        assert "heads without the transposition" not in names


@pytest.mark.parametrize(("heads", "queries", "keys"), [(256, 1, 300), (128, 4, 4), (256, 100, 100)], ids=str)
def test_many_heads(heads, queries, keys):
    query, key = torch.randn(1, heads, queries, 8), torch.randn(1, heads, keys, 8)
    assert "length and heads exchanged" not in [finding.name for finding in ch.diagnose(query, key, key)]


def test_sequences_of_a_module_that_takes_the_length_first():
    attend, x = torch.nn.MultiheadAttention(32, 4), torch.randn(20, 3, 32)
    first = x.clone()
    first[0] = 1.0  # each sequence begins with one token
    padded = x.masked_fill(torch.arange(20)[:, None, None] > torch.tensor([19, 9, 4])[:, None], 0.0)
    for inputs in (x, first, padded):
        assert "length and batch exchanged" not in [f.name for f in ch.diagnose(attend, *[inputs] * 3)]
    assert len(ch.diagnose(attend, *[torch.randn(3, 32)] * 3)) == 0


def test_functions_that_can_take_hidden_pairs():
    def hides(s, b, h, i, j):
        return torch.where(i >= j, s - (i - j).clamp(min=0).sqrt(), -torch.inf)

    bias = ch.BiasFunction(lambda b, h, i, j: -(i - j).clamp(min=0).log1p())
    assert clean(ch.diagnose(*qkv(2, 3), score=ch.Dot().then(hides), mask=ch.Causal(), bias=bias))
