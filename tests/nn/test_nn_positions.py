"""Positional encodings: against their formulas, against transformers, at any offset, length and dtype."""

import copy
import math
import pickle

import pytest
import torch

import clearhead as ch
from clearhead.nn import (
    KeyValueCache,
    LearnedPositionalEncoding,
    MultiHeadAttention,
    RotaryEmbedding,
    SinusoidalPositionalEncoding,
)


@pytest.mark.parametrize("embed_dim", [1, 2, 5, 8])
def test_sinusoid_is_the_formula(embed_dim):
    encode = SinusoidalPositionalEncoding(embed_dim)
    x = torch.randn(2, 9, embed_dim, dtype=torch.float64)
    expected = torch.tensor(
        [
            [(math.cos if d % 2 else math.sin)(p / 10000 ** ((d - d % 2) / embed_dim)) for d in range(embed_dim)]
            for p in range(9)
        ],
        dtype=torch.float64,
    )
    torch.testing.assert_close(encode(x), x + expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(encode(x[:, 4:], offset=4), encode(x)[:, 4:], atol=0, rtol=0)


def test_the_table_grows_and_keeps_its_digits():
    encode, x = SinusoidalPositionalEncoding(6), torch.zeros(1, 6)
    far = encode(x.double(), offset=100_000)
    torch.testing.assert_close(encode(x, offset=100_000), far.float(), atol=1e-7, rtol=0)  # sines of float32 would not
    encode.half()(x.half(), offset=3)
    torch.testing.assert_close(encode.float()(x, offset=3), encode(x.double(), offset=3).float(), atol=1e-7, rtol=0)


@pytest.mark.parametrize("module", [SinusoidalPositionalEncoding(4), RotaryEmbedding(4)], ids=["sinusoid", "rotary"])
def test_the_table_is_no_state(module):
    x = torch.randn(3, 4)
    with torch.inference_mode():
        expected = module(x)
    trained = x.clone().requires_grad_()
    module(trained).sum().backward()  # a table made in inference mode would not do
    assert trained.grad is not None
    assert not module.state_dict() and not list(module.parameters())
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other._table is None
        torch.testing.assert_close(other(x), expected)


def test_learned_adds_its_rows():
    encode, x = LearnedPositionalEncoding(10, 4), torch.randn(2, 3, 4)
    torch.testing.assert_close(encode(x, offset=7), x + encode.P[7:10])
    encode(x).sum().backward()
    assert (encode.P.grad[:3] == 2).all() and (encode.P.grad[3:] == 0).all()
    assert set(encode.state_dict()) == {"P"}
    assert encode.P.std() < 0.05
    with pytest.raises(ch.ShapeError, match=r"needs 11 positions; max_len is 10"):
        encode(x, offset=8)


@pytest.mark.parametrize("encode", [SinusoidalPositionalEncoding(8, 0.5), LearnedPositionalEncoding(64, 8, 0.5)])
def test_dropout_is_for_training(encode):
    x = torch.ones(1, 64, 8)
    torch.manual_seed(0)
    share = (encode.train()(x) == 0).float().mean()
    assert 0.4 < share < 0.6
    assert (encode.eval()(x) == 0).float().mean() < 0.05


def turned(x, positions, base, interleaved):
    """The formula, pair by pair."""
    output, half = x.clone(), x.shape[-1] // 2
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        angle = positions * base ** (-2 * i / x.shape[-1])
        output[..., a] = x[..., a] * angle.cos() - x[..., b] * angle.sin()
        output[..., b] = x[..., b] * angle.cos() + x[..., a] * angle.sin()
    return output


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_is_the_formula(interleaved):
    rotary = RotaryEmbedding(6, base=500.0, interleaved=interleaved)
    x = torch.randn(2, 3, 7, 10, dtype=torch.float64)
    for offset in (0, 5):
        output = rotary(x, offset)
        expected = turned(x[..., :6], torch.arange(7).double() + offset, 500.0, interleaved)
        torch.testing.assert_close(output[..., :6], expected, atol=1e-12, rtol=0)
        assert torch.equal(output[..., 6:], x[..., 6:])
    ragged = rotary(x, torch.tensor([4, 0]))
    torch.testing.assert_close(ragged, torch.stack([rotary(x[0], 4), rotary(x[1])]), atol=0, rtol=0)
    flat = rotary(x[:, 0], torch.tensor([4, 0], dtype=torch.int32))
    torch.testing.assert_close(flat, ragged[:, 0], atol=0, rtol=0)
    torch.testing.assert_close(rotary(x, torch.tensor(4)), rotary(x, 4), atol=0, rtol=0)
    assert torch.autograd.gradcheck(rotary, (x[:1, :1, :2].requires_grad_(), 3))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_scores_depend_on_the_distance_alone(interleaved):
    rotary = RotaryEmbedding(8, interleaved=interleaved)
    query, key = torch.randn(2, 8, dtype=torch.float64)
    score = lambda p, r: rotary(query[None], p) @ rotary(key[None], r).mT
    for distance in (0, 1, 40):
        for p in (0, 3, 5000):
            torch.testing.assert_close(score(p + distance, p), score(distance, 0), atol=1e-9, rtol=0)
    assert (score(1, 0) - score(0, 1)).abs() > 1e-3


def test_rotary_is_llamas():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama", reason="the reference is in transformers")
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
    )
    theirs = llama.LlamaRotaryEmbedding(config)
    query, key = torch.randn(2, 4, 50, 16), torch.randn(2, 2, 50, 16)
    cos, sin = theirs(query, torch.arange(50)[None])
    expected = llama.apply_rotary_pos_emb(query, key, cos, sin)
    rotary = RotaryEmbedding(16, base=5e5)
    for ours, other in zip((rotary(query), rotary(key)), expected, strict=True):
        torch.testing.assert_close(ours, other, atol=2e-5, rtol=0)


def test_rotary_in_half_precision_rounds_once():
    rotary, x = RotaryEmbedding(16), torch.randn(1, 30, 16)
    half = rotary(x.bfloat16(), 1000)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half, rotary(x.bfloat16().float(), 1000).bfloat16(), atol=0, rtol=0)


def test_decoding_with_positions_is_the_whole_at_once():
    """Encodings by offset, rotary by the cache's length."""
    torch.manual_seed(0)
    encode = SinusoidalPositionalEncoding(8)
    attend = MultiHeadAttention(8, 2, rotary=RotaryEmbedding(4)).eval()
    x, cache, steps = torch.randn(2, 9, 8), KeyValueCache(), []
    with torch.no_grad():
        for token in x.split(2, 1):
            token = encode(token, offset=len(cache))
            steps.append(attend(token, token, token, ch.Causal(), cache=cache))
        whole = encode(x)
        torch.testing.assert_close(torch.cat(steps, 1), attend(whole, whole, whole, ch.Causal()), atol=1e-5, rtol=0)


def test_repr_says_the_sizes():
    assert repr(RotaryEmbedding(4, interleaved=True)) == "RotaryEmbedding(dim=4, base=10000, interleaved=True)"
    assert "embed_dim=8" in repr(SinusoidalPositionalEncoding(8)) and "max_len=9" in repr(
        LearnedPositionalEncoding(9, 8)
    )
