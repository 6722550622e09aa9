"""Positional encodings: against their formulas, against transformers, at any offset, length and dtype."""

import copy
import math
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import clearhead as ch
from clearhead.nn import (
    KeyValueCache,
    LearnedPositionalEncoding,
    MultiHeadAttention,
    RotaryEmbedding,
    RotaryScaling,
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


@pytest.mark.parametrize(
    "settings",
    [
        {"base": 5e5},
        {"dim": 4},
        {"interleaved": True},
        {"scaling": RotaryScaling.linear(4)},
        {"scaling": RotaryScaling.yarn(4, 8)},
        {"scaling": RotaryScaling.dynamic(4, 4)},
    ],
    ids=str,
)
@pytest.mark.parametrize("positions", [None, [4, 0, 2, 9, 9, 1]], ids=["in order", "positions"])
def test_what_is_set_after_a_call_counts_in_the_next(settings, positions):
    """The formula in plain Python, whose angles each scaling gives by its own."""
    dim, base, interleaved, scaling = (
        {"dim": 8, "base": 100.0, "interleaved": False, "scaling": None} | settings
    ).values()
    rotary, x = RotaryEmbedding(8, 100.0), torch.randn(6, 8, dtype=torch.float64)
    before = rotary(x, positions=positions)
    for name, value in settings.items():
        setattr(rotary, name, value)
    at = list(range(6)) if positions is None else positions
    plain = torch.tensor([base ** (-2 * n / dim) for n in range(dim // 2)], dtype=torch.float64)
    speeds = plain if scaling is None else scaling.speeds(plain, base, torch.tensor(max(at) + 1.0, dtype=torch.float64))
    want = x.clone()
    for row, place in enumerate(at):
        for n, speed in enumerate(speeds.tolist()):
            one, two = (2 * n, 2 * n + 1) if interleaved else (n, n + dim // 2)
            a, b, angle = x[row, one], x[row, two], place * speed
            want[row, one] = a * math.cos(angle) - b * math.sin(angle)
            want[row, two] = b * math.cos(angle) + a * math.sin(angle)
    want[:, :dim] *= 1.0 if scaling is None else scaling.magnitude
    torch.testing.assert_close(rotary(x, positions=positions), want)
    for name in settings:
        setattr(rotary, name, {"dim": 8, "base": 100.0, "interleaved": False, "scaling": None}[name])
    torch.testing.assert_close(rotary(x, positions=positions), before)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dim": 3}, "must be even"),
        ({"dim": 0}, "dim is 0; expected a whole number, 2 or more"),
        ({"base": -1}, "base is -1; expected a number above 0"),
        ({"base": torch.tensor(50.0)}, "expected a finite number"),
        ({"interleaved": 1}, "expected True or False"),
        ({"scaling": {"rope_type": "linear"}}, "expected a RotaryScaling, such as RotaryScaling.linear"),
        ({"scaling": RotaryScaling.dynamic(4, 4), "dim": 2}, "and dim above 2"),
    ],
    ids=str,
)
def test_what_is_set_is_checked_as_when_it_is_given(settings, said):
    rotary, x = RotaryEmbedding(4), torch.randn(2, 4)
    rotary(x)
    for name, value in settings.items():
        setattr(rotary, name, value)
    with pytest.raises(ch.ClearheadError, match=said):
        rotary(x)


def test_the_width_of_a_sinusoid_may_be_set_after_a_call():
    encode = SinusoidalPositionalEncoding(6)
    encode(torch.zeros(3, 6))
    encode.embed_dim = 4
    want = [[math.sin(p), math.cos(p), math.sin(p / 100), math.cos(p / 100)] for p in range(3)]
    torch.testing.assert_close(encode(torch.zeros(3, 4)), torch.tensor(want))


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


ROPES = {
    "default": [({}, None)],
    "linear": [({"factor": 4.0}, RotaryScaling.linear(4.0))],
    "dynamic": [
        ({"factor": f, "original_max_position_embeddings": 32}, RotaryScaling.dynamic(f, 32)) for f in (1.0, 2.0, 6.0)
    ],
    "yarn": [
        ({"factor": 4.0, "original_max_position_embeddings": 32}, RotaryScaling.yarn(4.0, 32)),
        (
            {
                "factor": 40.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 20,
                "beta_slow": 2,
                "truncate": False,
            },
            RotaryScaling.yarn(40.0, 4096, beta_fast=20, beta_slow=2, truncate=False),
        ),
        (
            {"factor": 8.0, "original_max_position_embeddings": 16, "attention_factor": 1.25},
            RotaryScaling.yarn(8.0, 16, attention_factor=1.25),
        ),
        (
            {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.707, "mscale_all_dim": 1.0},
            RotaryScaling.yarn(40.0, 4096, attention_factor=(0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1)),
        ),
    ],
    "llama3": [
        (
            {"factor": f, "low_freq_factor": low, "high_freq_factor": 4.0, "original_max_position_embeddings": n},
            RotaryScaling.llama3(f, n, low_freq_factor=low),
        )
        for f, low, n in ((8.0, 1.0, 8192), (32.0, 1.0, 64), (2.0, 2.5, 40))
    ],
}


@pytest.mark.parametrize(
    ("kind", "given", "scaling"), [(kind, *pair) for kind, pairs in ROPES.items() for pair in pairs], ids=str
)
@pytest.mark.parametrize("base", [1e4, 5e5])
def test_scaled_rotary_is_transformers(kind, given, scaling, base):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama", reason="the reference is in transformers")
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=32 if kind == "dynamic" else 131072,
        rope_parameters={"rope_type": kind, "rope_theta": base, **given},
    )
    query, key = torch.randn(2, 4, 50, 16), torch.randn(2, 2, 50, 16)
    rotary = RotaryEmbedding(16, base=base, scaling=scaling)
    for positions in (torch.arange(50), torch.arange(20), torch.arange(900, 950), torch.arange(50) % 7):
        q, k = query[:, :, : len(positions)], key[:, :, : len(positions)]
        cos, sin = llama.LlamaRotaryEmbedding(config)(q, positions[None])
        expected = llama.apply_rotary_pos_emb(q, k, cos, sin)
        for ours, other in zip((q, k), expected, strict=True):
            atol = 2e-4 if positions.max() > 100 else 2e-5  # their angles are of float32
            torch.testing.assert_close(rotary(ours, positions=positions), other, atol=atol, rtol=0)
        speeds = llama.LlamaRotaryEmbedding(config)
        speeds(q, positions[None])
        ours = rotary.speeds(positions.double())
        torch.testing.assert_close(ours.float(), speeds.inv_freq, atol=0, rtol=1e-5)


def test_a_scaled_model_of_transformers_is_a_module_with_its_rotary():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama", reason="the reference is in transformers")
    from transformers import LlamaConfig

    rope = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, attn_implementation="eager",
        rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **rope},
    )  # fmt: skip
    theirs = llama.LlamaAttention(config, 0).eval()
    rotary = RotaryEmbedding(16, 5e5, scaling=RotaryScaling.llama3(8.0, 32))
    ours = MultiHeadAttention(64, 4, bias=False, num_kv_heads=2, rotary=rotary).eval()
    for mine, name in ((ours.W_q, "q"), (ours.W_k, "k"), (ours.W_v, "v"), (ours.W_o, "o")):
        mine.weight = getattr(theirs, f"{name}_proj").weight
    x, positions = torch.randn(2, 40, 64), torch.arange(40)[None] + torch.tensor([[0], [7]])
    both = llama.LlamaRotaryEmbedding(config)(x, positions)
    mask = torch.full((40, 40), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        expected = theirs(x, both, mask)[0]
        torch.testing.assert_close(ours(x, x, x, ch.Causal(), positions=positions), expected, atol=2e-5, rtol=1e-4)


ENCODINGS = {
    "sinusoid": (SinusoidalPositionalEncoding(8), (2, 6, 8)),
    "learnt": (LearnedPositionalEncoding(64, 8), (2, 6, 8)),
    "rotary": (RotaryEmbedding(8), (2, 6, 8)),
    "rotary, heads": (RotaryEmbedding(6), (2, 3, 6, 8)),
    "sinusoid, five dimensions": (SinusoidalPositionalEncoding(8), (2, 3, 2, 6, 8)),
}


@pytest.mark.parametrize("name", ENCODINGS)
def test_positions_say_where_each_vector_stands(name):
    encode, shape = ENCODINGS[name]
    x, places = torch.randn(shape), torch.randint(0, 60, (2, 6), generator=torch.Generator().manual_seed(0))
    one = lambda b, i: encode(x[b : b + 1, ..., i : i + 1, :], offset=int(places[b, i]))
    want = torch.cat([torch.cat([one(b, i) for i in range(6)], -2) for b in range(2)])
    torch.testing.assert_close(encode(x, positions=places), want, atol=0, rtol=0)
    torch.testing.assert_close(encode(x, positions=places.int().numpy()), want, atol=0, rtol=0)
    torch.testing.assert_close(encode(x, positions=places[:1])[:1], want[:1], atol=0, rtol=0)
    torch.testing.assert_close(encode(x, positions=places[0].tolist())[:1], want[:1], atol=0, rtol=0)
    torch.testing.assert_close(encode(x[0, ..., :, :], positions=places[0]), want[0], atol=0, rtol=0)
    first = torch.tensor([5, 9])
    both = encode(x, positions=first[:, None] + torch.arange(6))
    torch.testing.assert_close(encode(x, offset=first), both, atol=0, rtol=0)
    compiled = torch.compile(lambda t, at: encode(t, positions=at), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, places), want, atol=1e-6, rtol=0)
    torch.testing.assert_close(encode(x, positions=torch.arange(6)), encode(x), atol=0, rtol=0)
    assert encode(x[..., :0, :], positions=places[:, :0]).shape == (*shape[:-2], 0, 8)


def test_learnt_positions_have_gradients_and_repeat():
    encode, x = LearnedPositionalEncoding(9, 4), torch.randn(2, 5, 4)
    places = torch.tensor([[0, 1, 2, 0, 1], [3, 3, 3, 3, 8]])
    (encode(x, positions=places) * torch.arange(1.0, 6)[:, None]).sum().backward()
    want = torch.zeros(9).index_add(0, places.flatten(), torch.arange(1.0, 6).repeat(2))
    torch.testing.assert_close(encode.P.grad, want[:, None].expand(9, 4))


WRONG = {
    "beside an offset": ({"offset": 1, "positions": [0] * 6}, "both offset and positions"),
    "floats": ({"positions": torch.arange(6.0)}, "dtype torch.float32; expected integers"),
    "bools": ({"positions": torch.ones(6).bool()}, "dtype torch.bool"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("encode", [e for e, _ in ENCODINGS.values()][:3], ids=lambda e: type(e).__name__)
def test_wrong_positions_are_said(encode, name):
    given, said = WRONG[name]
    with pytest.raises(ch.ClearheadError, match=said):
        encode(torch.randn(2, 6, 8), **given)


def test_positions_beyond_the_learnt_ones():
    encode, x = LearnedPositionalEncoding(4, 8), torch.randn(2, 3, 8)
    with pytest.raises(ch.ShapeError, match=r"up to position 9, which needs 10 positions; max_len is 4"):
        encode(x, positions=[0, 9, 1])
    with pytest.raises(ch.ShapeError, match="needs 6 positions"):
        encode(x, offset=torch.tensor([0, 3]))
    compiled = torch.compile(lambda at: encode(x, positions=at), fullgraph=True, backend="aot_eager")
    compiled(torch.tensor([0, 3, 1]))
    for wrong in ([0, 9, 1], [0, -1, 1]):
        with pytest.raises(RuntimeError, match="below 0, or beyond the last"):
            compiled(torch.tensor(wrong))


def test_far_positions_need_no_table_of_their_size():
    rotary, x = RotaryEmbedding(8), torch.randn(1, 2, 8, dtype=torch.float64)
    far = torch.tensor([3, 2**33])
    want = turned(x, far.double(), 10000.0, False)
    torch.testing.assert_close(rotary(x, positions=far), want, atol=1e-5, rtol=0)
    torch.testing.assert_close(rotary(x[:, 1:], 2**33), want[:, 1:], atol=1e-5, rtol=0)
    assert rotary._table is None


def test_unequal_prompts_decode_with_positions_that_are_added():
    """Each sequence's encoding goes on where its own prompt ended, as if it were alone."""
    torch.manual_seed(0)
    attend, x = MultiHeadAttention(8, 2).eval(), torch.randn(2, 9, 8)
    for encode in (SinusoidalPositionalEncoding(8), LearnedPositionalEncoding(16, 8)):
        cache, prompts = KeyValueCache(), encode(x[:, :5])
        with torch.no_grad():
            attend(prompts, prompts, prompts, ch.Causal(), cache=cache, new_lens=[5, 3])
            for _ in range(3):
                at = torch.tensor(cache.lengths)
                token = encode(x[torch.arange(2), at][:, None], offset=at)
                got = attend(token, token, token, ch.Causal(), cache=cache)
                for row, n in enumerate(at.tolist()):
                    whole = encode(x[row : row + 1, : n + 1])
                    want = attend(whole, whole, whole, ch.Causal())[:, -1:]
                    torch.testing.assert_close(got[row : row + 1], want, atol=1e-5, rtol=1e-5)


SCALINGS = {
    "a factor below 1": (lambda: RotaryScaling.linear(0.5), "1 or more"),
    "fast below slow": (lambda: RotaryScaling.yarn(2, 16, beta_fast=1, beta_slow=2), "beta_fast is 1"),
    "high below low": (lambda: RotaryScaling.llama3(2, 16, high_freq_factor=0.5), "the high one is above it"),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_wrong_scalings_are_said(name):
    make, said = SCALINGS[name]
    with pytest.raises(ch.ClearheadError, match=said):
        make()


@pytest.mark.parametrize("module", [SinusoidalPositionalEncoding(4), RotaryEmbedding(4)], ids=["sinusoid", "rotary"])
def test_shapes_alone_leave_no_table(module):
    x = torch.randn(3, 4)
    expected = module(x)
    for begun in (True, False):  # with a table from before, and without
        other = copy.deepcopy(module)
        _ = other(x) if begun else None
        with FakeTensorMode() as mode:
            assert other(mode.from_tensor(x)).shape == (3, 4)
        torch.testing.assert_close(other(x), expected)


def test_a_rotary_whose_forward_was_replaced():
    attend, x = MultiHeadAttention(8, 2, rotary=RotaryEmbedding(4)).eval(), torch.randn(1, 5, 8)
    attend(x, x, x)  # now the rotary has a table
    attend.rotary.forward = lambda x, offset=0, positions=None: x
    found = attend(x, x, x)
    attend.rotary = None
    torch.testing.assert_close(found, attend(x, x, x))
