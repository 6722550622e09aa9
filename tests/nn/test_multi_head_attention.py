"""MultiHeadAttention: against a plain formula, its masks, dropout, dtypes, gradients."""

import inspect

import pytest
import torch

import clearhead as ch
from clearhead.nn import AdditiveAttention, MultiHeadAttention, RotaryEmbedding, TorchMultiheadAttention

torch.manual_seed(0)
B, H, LQ, LK, E = 2, 4, 5, 7, 12
QUERY, KEY, VALUE = torch.randn(B, LQ, E), torch.randn(B, LK, E), torch.randn(B, LK, E)
KEEP = torch.rand(B, H, LQ, LK) > 0.4
KEEP[..., 0] = True


def make(*args, **options):
    torch.manual_seed(1)
    return MultiHeadAttention(*(args or (E, H)), **options)


def formula(attend, query, key, value, added=0.0, score=None):
    """Head after head, from the weight matrices; `added` broadcasts to (B, H, Lq, Lk)."""
    heads, groups = [], attend.num_heads // attend.num_kv_heads
    width = attend.head_dim
    weights = []
    added = torch.as_tensor(added).expand(query.shape[0], attend.num_heads, query.shape[1], key.shape[1])
    for h in range(attend.num_heads):
        own, shared = slice(h * width, (h + 1) * width), slice(h // groups * width, (h // groups + 1) * width)
        q = query @ attend.W_q.weight[own].T + attend.W_q.bias[own]
        k = key @ attend.W_k.weight[shared].T + attend.W_k.bias[shared]
        v = value @ attend.W_v.weight[shared].T + attend.W_v.bias[shared]
        scores = q @ k.mT / width**0.5 if score is None else score(q, k)
        weights.append((scores + added[:, h]).softmax(-1).nan_to_num(0.0))
        heads.append(weights[-1] @ v)
    return torch.cat(heads, -1) @ attend.W_o.weight.T + attend.W_o.bias, torch.stack(weights, 1)


def test_any_sizes_that_multiply_out():
    attend = make(5, 6, head_dim=4, kdim=3, vdim=2)
    assert (attend.embed_dim, attend.num_heads, attend.head_dim, attend.kdim, attend.vdim) == (5, 6, 4, 3, 2)
    query, key, value = torch.randn(2, 3, 5), torch.randn(2, 4, 3), torch.randn(2, 4, 2)
    output = attend(query, key, value)
    torch.testing.assert_close(output, formula(attend, query, key, value)[0], atol=1e-5, rtol=1e-5)
    assert attend.attention_weights.shape == (2, 6, 3, 4)
    assert "embed_dim=5, num_heads=6, head_dim=4, kdim=3, vdim=2" in repr(attend)


def test_the_arguments_are_torchs():
    ours, theirs = (
        list(inspect.signature(cls).parameters)[:4] for cls in (MultiHeadAttention, torch.nn.MultiheadAttention)
    )
    assert ours == theirs
    assert [p.default for p in inspect.signature(MultiHeadAttention).parameters.values()][2:4] == [0.0, True]


def minus_infinity(keep):
    return torch.zeros(keep.shape).masked_fill(~keep, -torch.inf)


def check(attend, added=0.0, score=None, **options):
    output = attend(QUERY, KEY, VALUE, **options)
    assert isinstance(output, torch.Tensor)
    expected, weights = formula(attend, QUERY, KEY, VALUE, added, score)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(attend.attention_weights.dense(), weights, atol=1e-5, rtol=1e-5)


SHAPES = {
    "4 heads": {},
    "narrow heads": {"head_dim": 2},
    "wide heads": {"head_dim": 20},
    "two key heads": {"num_kv_heads": 2},
    "one key head": {"num_kv_heads": 1, "head_dim": 5},
}


@pytest.mark.parametrize("name", SHAPES)
def test_output_and_weights_are_the_formula(name):
    attend = make(**SHAPES[name])
    check(attend)
    check(attend, minus_infinity(KEEP), mask=KEEP)


FLOAT = torch.randn(B, H, LQ, LK)
MASKS = {
    "(Lq, Lk)": (KEEP[0, 0], KEEP[0, 0]),
    "(B, 1, Lk)": (KEEP[:, 0, :1], KEEP[:, :1, :1]),
    "(B, Lq, Lk)": (KEEP[:, 0], KEEP[:, :1]),
    "(B, 1, Lq, Lk)": (KEEP[:, :1], KEEP[:, :1]),
    "(1, H, Lq, Lk)": (KEEP[:1], KEEP[:1]),
    "(B, H, Lq, Lk)": (KEEP, KEEP),
    "an array": (KEEP.numpy(), KEEP),
    "Lengths": (ch.Lengths([3, 0]), (torch.arange(LK) < torch.tensor([3, 0])[:, None])[:, None, None]),
    "Causal & Lengths": (
        ch.Causal() & ch.Lengths([3, 7]),
        torch.ones(LQ, LK).tril(2).bool() & (torch.arange(LK) < torch.tensor([3, 7])[:, None])[:, None, None],
    ),
    "float (Lq, Lk)": (FLOAT[0, 0], FLOAT[0, 0]),
    "float (B, Lq, Lk)": (FLOAT[:, 0], FLOAT[:, :1]),
    "float (B, H, Lq, Lk)": (FLOAT, FLOAT),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    mask, same = MASKS[name]
    check(make(), same if same.is_floating_point() else minus_infinity(same), mask=mask, align="lower_right")


def test_with_as_many_sequences_as_heads_three_dimensions_are_the_batch():
    attend = make(E, 2)
    check(attend, minus_infinity(KEEP[:, :1]), mask=KEEP[:, 0])


def test_a_query_that_sees_nothing_gives_the_bias():
    attend = make()
    output = attend(QUERY, KEY, VALUE, ch.Lengths([0, 3]))
    torch.testing.assert_close(output[0], attend.W_o.bias.expand(LQ, E), atol=0, rtol=0)
    assert (output[1] != attend.W_o.bias).any()


def test_bias_is_added():
    check(make(), FLOAT, bias=FLOAT)
    check(make(), FLOAT + minus_infinity(KEEP), bias=FLOAT, mask=KEEP)
    check(make(), FLOAT[0] + FLOAT[1], bias=FLOAT[:1], mask=FLOAT[1:])
    alibi = ch.ALiBi(H)
    distances = alibi(torch.zeros(B, H, LQ, 1), torch.zeros(B, H, LK, 1), "lower_right")
    check(make(), distances, bias=alibi, align="lower_right")


def test_any_score():
    torch.manual_seed(2)
    for score in (ch.Cosine(), ch.Additive(3, 3, 8), ch.Bilinear(3, 3), ch.Dot(scale=2.0, softcap=1.5)):
        check(make(score=score), score=score)
    closest = lambda q, k: -(q.unsqueeze(-2) - k.unsqueeze(-3)).abs().sum(-1)
    check(make(score=closest), score=closest)


def test_the_score_is_trained_with_the_module():
    attend = make(score=ch.Bilinear(3, 3))
    assert "score.W" in attend.state_dict()
    attend(QUERY, KEY, VALUE).sum().backward()
    assert attend.score.W.grad.abs().sum() > 0
    layer = torch.nn.Bilinear(3, 3, 1)
    attend = make(score=lambda q, k: q @ layer.weight[0] @ k.mT)
    attend(QUERY, KEY, VALUE).square().sum().backward()
    assert layer.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2}], ids=["heads", "groups"])
def test_unbatched_is_a_batch_of_one(options):
    attend = make(**options)
    batched = attend(QUERY[:1], KEY[:1], VALUE[:1], KEEP[:1, 0])
    for mask in (KEEP[0, 0], KEEP[:1, 0], KEEP[:1, :1], ch.DenseMask(KEEP[0, 0])):
        output = attend(QUERY[0], KEY[0], VALUE[0], mask)
        torch.testing.assert_close(output, batched[0])
    assert attend.attention_weights.shape == (1, H, LQ, LK)


def test_one_memory_for_every_sequence():
    attend = make()
    output = attend(QUERY, KEY[:1], VALUE[:1])
    torch.testing.assert_close(output, attend(QUERY, KEY[:1].expand(B, -1, -1), VALUE[:1].expand(B, -1, -1)))


def test_empty_inputs():
    attend = make()
    assert attend(QUERY[:, :0], KEY, VALUE).shape == (B, 0, E)
    torch.testing.assert_close(attend(QUERY, KEY[:, :0], VALUE[:, :0]), attend.W_o.bias.expand(B, LQ, E))


def test_autocast_takes_float_masks():
    attend = make()
    with torch.autocast("cpu", torch.bfloat16):
        output = attend(QUERY, KEY, VALUE, FLOAT)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), attend(QUERY, KEY, VALUE, FLOAT), atol=0.03, rtol=0.03)


def prepared_before(x):
    attend = make().double()
    prepared = attend.prepare(x.double(), x.double())
    return attend.float()(x, prepared)


def additive_in_double(x):
    attend = AdditiveAttention(4)
    attend(x, x, x)
    return attend.double()(x, x, x)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x: make().double()(x, x, x), "weights are torch.float64"),
        (lambda x: make()(x.double(), x.double(), x.double()), r"module.to\(query\)"),
        (prepared_before, "Prepare the keys"),
        (additive_in_double, "torch.float64"),
        (lambda x: TorchMultiheadAttention(E, H).double()(x, x, x), "weights are torch.float64"),
        (lambda x: ch.attention(x, x, x, score=ch.Additive(E, E, 4).double()), "torch.float64"),
    ],
)
def test_autocast_leaves_float64_alone_so_beside_others_it_is_refused(call, said):
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ch.ClearheadError, match=said):
        call(torch.randn(2, 3, E))


def test_dropout_is_of_the_weights_and_for_training():
    attend, x = make(dropout=0.5), QUERY
    attend.eval()
    expected = attend(x, x, x)
    torch.testing.assert_close(expected, attend(x, x, x), atol=0, rtol=0)
    weights = attend.attention_weights.dense()
    attend.train()
    torch.manual_seed(3)
    draws = [attend(x, x, x) for _ in range(400)]
    torch.testing.assert_close(attend.attention_weights.dense(), weights)  # those before dropout
    assert (draws[0] - draws[1]).abs().max() > 0.01
    mean, spread = torch.stack(draws).mean(0), torch.stack(draws).std(0)
    assert ((mean - expected).abs() < 5 * spread / 400**0.5).all()
    torch.manual_seed(3)
    torch.testing.assert_close(attend(x, x, x), draws[0], atol=0, rtol=0)


def test_a_row_of_nan_in_padding_stays_there():
    attend = make()
    key, value = KEY.clone(), VALUE.clone()
    key[0, 3:], value[0, 3:] = torch.nan, torch.inf
    mask = ch.Lengths([3, 7])
    torch.testing.assert_close(attend(QUERY, key, value, mask), attend(QUERY, KEY, VALUE, mask))


def test_inputs_are_not_written_to():
    before = [t.clone() for t in (QUERY, KEY, VALUE, KEEP)]
    make(rotary=RotaryEmbedding(2))(QUERY, KEY, VALUE, KEEP).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(before, (QUERY, KEY, VALUE, KEEP), strict=True))


def test_layouts_need_no_copies():
    """Views of the projections go to the fused kernel; its output is flat again without a copy."""
    attend = make(64, 4)
    x = torch.randn(2, 7, 64)
    with torch.profiler.profile() as seen, torch.no_grad():
        attend(x, x, x)
    names = [event.name for event in seen.events()]
    assert not {"aten::clone", "aten::contiguous"} & set(names), names
