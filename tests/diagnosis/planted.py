"""Planted faults: what is called with a fault in it, and the finding that must come of it.

`PLANTED` has for each finding several ways to plant it: other scores, heads, dtypes, modules, recorded calls.
"""

import torch
import torch.nn.functional as F

import clearhead as ch
from clearhead import nn

LENGTH, WIDTH = 24, 64


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(*leading, queries=LENGTH, keys=LENGTH, width=WIDTH, dtype=torch.float32):
    """Query, key and value of normal numbers."""
    lengths = (queries, keys, keys)
    return [draw(*leading, length, width, seed=i, dtype=dtype) for i, length in enumerate(lengths)]


def called(leading=(2, 3), sizes=None, **options):
    return lambda: ch.diagnose(*qkv(*leading, **(sizes or {})), **options)


def changed(change, leading=(2, 3), **options):
    """A call whose inputs were changed."""

    def call():
        inputs = qkv(*leading)
        change(*inputs)
        return ch.diagnose(*inputs, **options)

    return call


class Sdpa(torch.nn.Module):
    """A model of one direct call."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, **self.options)


def recorded(change=None, leading=(2, 3), sizes=None, **options):
    """A direct call of PyTorch's, recorded."""

    def call():
        inputs = qkv(*leading, **(sizes or {}))
        if change is not None:
            change(*inputs)
        model = Sdpa(**options)
        with ch.watch(model, values=True) as seen:
            model(*inputs)
        return ch.diagnose(seen)

    return call


def recorded_output(change, sizes=None):
    """A direct call of PyTorch's, whose recorded output was changed."""

    def call():
        with ch.watch(model := Sdpa(), values=True) as seen:
            model(*qkv(2, 3, **(sizes or {})))
        seen[0].outcome.output = change(seen[0].output)
        return ch.diagnose(seen)

    return call


def module(make, *inputs, change=None, **keywords):
    def call():
        torch.manual_seed(0)
        attend = make()
        if change is not None:
            with torch.no_grad():
                change(attend)
        return ch.diagnose(attend, *inputs, **keywords)

    return call


def ours(**keywords):
    return module(lambda: nn.MultiHeadAttention(WIDTH, 4), *[draw(2, LENGTH, WIDTH)] * 3, **keywords)


def torchs(make=torch.nn.MultiheadAttention, **keywords):
    return module(lambda: make(WIDTH, 4, batch_first=True), *[draw(2, LENGTH, WIDTH)] * 3, **keywords)


def scaled(name, factor):
    """Multiply the weights of one projection."""

    def change(attend):
        getattr(attend, name).weight.mul_(factor)

    return change


def put_into(name, number):
    """Put a number into the weights of one projection."""

    def change(attend):
        getattr(attend, name).weight[0, 0] = number

    return change


def recorded_module(change):
    def call():
        attend, x = nn.MultiHeadAttention(WIDTH, 4), draw(2, LENGTH, WIDTH)
        with torch.no_grad(), ch.watch(attend, values=True) as seen:
            change(attend)
            attend(x, x, x)
        return ch.diagnose(seen)

    return call


def put(which, at, number):
    def change(*inputs):
        inputs[which][at] = number

    return change


def offset(query, key, value):
    key += 3e4


def one_strong_key(query, key, value):
    key[..., 3, :] = 0.0
    query[..., 0], key[..., 0] = 20.0, 0.0
    key[..., 3, 0] = 20.0


def dull(query, key, value):
    query *= 1e-3


def sharp(query, key, value):
    key *= 200


def divided(query, key, value):
    query /= WIDTH**0.5


def divided_keys(query, key, value):
    key /= WIDTH**0.5


def padding_of_zeros(query, key, value):
    key[..., 15:, :] = 0.0


def padding_repeated(query, key, value):
    key[..., 15:, :] = key[..., 15:16, :].clone()


UPPER = torch.ones(LENGTH, LENGTH).triu(1).bool()  # what torch.nn's modules call a causal mask
WORDS = torch.arange(LENGTH) < torch.tensor([[15], [LENGTH]])  # of two sequences
ALL_WORDS = WORDS[:1].expand(2, -1)
NONE = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
LAST_BLIND = torch.ones(LENGTH, LENGTH).bool().index_fill(0, torch.tensor([5]), False)
ONES = torch.ones(LENGTH, LENGTH)
FILLED = torch.zeros(LENGTH, LENGTH).masked_fill(UPPER, -1e9)
WHOLE_ROW = FILLED.index_fill(0, torch.tensor([5]), -1e9)
ONE = torch.tensor([1])
NAN, INF = float("nan"), float("inf")
LONGER = {"queries": 6, "keys": LENGTH}
SHORTER = {"queries": LENGTH, "keys": 6}
LOW = {"dtype": torch.bfloat16}
HALF = {"dtype": torch.float16}
DOUBLE = {"dtype": torch.float64}

WIDE = {"width": 16}
FLAT = qkv(2, width=3 * WIDTH)  # (B, L, H·D)
FIRST_TOKEN = draw(LENGTH, 9, WIDTH).index_fill(1, torch.tensor([0]), 1.0)  # (B, L, E)
PADDED = draw(9, LENGTH, WIDTH).masked_fill(
    torch.arange(LENGTH)[:, None] > torch.tensor([6, 0, 2, 1, 9, 4, 7, 8, 5])[:, None, None], 0.0
)


def projected():
    """The queries of a projection, (2, LENGTH, 64): its heads have biases, and the inputs a mean."""
    torch.manual_seed(0)
    inputs = draw(2, LENGTH, WIDTH) + draw(WIDTH, seed=1)
    return torch.nn.Linear(WIDTH, WIDTH)(inputs).detach()


def rooted(score, batch, head, query, key):
    return score - torch.sqrt((query - key).float())


PLANTED = {
    "queries that see nothing": [
        called(mask=NONE),
        called(leading=(), mask=LAST_BLIND),
        called(mask=LAST_BLIND, score=ch.Additive(WIDTH, WIDTH, hidden_dim=4)),
        called(mask=ch.Lengths([0, 24])),
        called(mask=ch.DenseMask(LAST_BLIND), sizes=HALF),
        called(mask=torch.zeros(LENGTH, LENGTH).masked_fill(~LAST_BLIND, -INF)),
        called(sizes=SHORTER, mask=ch.Causal(), align="lower_right"),
        recorded(attn_mask=LAST_BLIND),
        ours(valid_lens=[0, 24]),
        torchs(key_padding_mask=torch.ones(2, LENGTH).bool()),
    ],
    "a mask of the opposite polarity": [
        called(mask=UPPER),
        called(leading=(), mask=UPPER),
        called(mask=UPPER, score=ch.Cosine()),
        called(mask=~ch.Causal(), sizes=LOW),
        called(mask=~ch.Causal() & ch.Lengths([9, 24])),
        called(mask=ch.MaskFunction(lambda b, h, i, j: j > i)),
        called(mask=ONES.triu().bool()),
        called(mask=torch.zeros(LENGTH, LENGTH).masked_fill(~UPPER, -INF)),
        called(mask=torch.zeros(LENGTH, LENGTH).masked_fill(~UPPER, -1e9)),
        called(mask=~(ch.SlidingWindow(before=2, after=2))),
        called(mask=~ch.Documents(torch.arange(LENGTH) // 4)),
        called(mask=ch.Padding(~WORDS)),
        called(mask=~WORDS[:, None, None]),
        changed(padding_of_zeros, mask=ch.Padding(~ALL_WORDS)),
        changed(padding_repeated, mask=ch.Padding(~ALL_WORDS)),
        changed(padding_of_zeros, leading=(2,), mask=ch.Padding(~ALL_WORDS)),
        recorded(attn_mask=UPPER),
        recorded(attn_mask=~WORDS[:, None, None]),
        ours(mask=UPPER),
        ours(mask=ch.Padding(~WORDS)),
        torchs(attn_mask=ONES.tril().bool(), need_weights=False),
        torchs(key_padding_mask=WORDS),
        torchs(nn.TorchMultiheadAttention, attn_mask=~UPPER),
    ],
    "a mask of 0 and 1": [
        called(mask=ONES.tril()),
        called(mask=ONES),
        called(mask=ONES.tril().double(), sizes=DOUBLE),
        called(mask=WORDS[:, None, None].half(), sizes=HALF),
        called(mask=ONES.tril().numpy(), leading=()),
        recorded(attn_mask=ONES.tril()),
        ours(mask=ONES.tril()),
        torchs(attn_mask=ONES.triu(1)),
        torchs(nn.TorchMultiheadAttention, attn_mask=ONES.triu(1)),
    ],
    "a mask that is all true": [
        called(mask=ONES.bool()),
        called(mask=ch.Lengths([LENGTH, LENGTH])),
        called(mask=ch.SlidingWindow(before=100, after=100), score=ch.Cosine()),
        called(mask=ch.MaskFunction(lambda b, h, i, j: j >= 0)),
        called(mask=torch.zeros(LENGTH, LENGTH)),
        ours(valid_lens=[LENGTH, LENGTH]),
    ],
    "positions of unequal lengths": [
        called(sizes=LONGER, mask=ch.Causal()),
        called(sizes=LONGER, leading=(), mask=ch.Causal() & ch.Lengths(20)),
        called(sizes=SHORTER, mask=ch.SlidingWindow(before=3)),
        called(sizes=LONGER, bias=ch.ALiBi(3)),
        called(sizes=LONGER, mask=ch.Causal(), align="upper_left"),
        called(sizes=LONGER, mask=ch.Causal(), align=0, score=ch.Additive(WIDTH, WIDTH, hidden_dim=4)),
        recorded(sizes=LONGER, is_causal=True),
        module(lambda: nn.DotProductAttention(), *qkv(2, **LONGER), mask=ch.Causal()),
    ],
    "heads without the transposition": [
        lambda: ch.diagnose(*(part.reshape(2, 3, LENGTH, WIDTH) for part in FLAT)),
        lambda: ch.diagnose(*(part.view(2 * LENGTH, -1).view(2, 3, LENGTH, WIDTH) for part in FLAT)),
        lambda: ch.diagnose(projected().requires_grad_().view(2, 8, LENGTH, 8), *qkv(2, 8, width=8)[1:]),
        lambda: ch.diagnose(*[projected().reshape(2, 4, LENGTH, 16).clone()] * 3, mask=ch.Causal()),
        lambda: ch.diagnose(*[projected().reshape(2, 4, LENGTH, 16).numpy()] * 3),
        lambda: recorded(
            lambda *inputs: [t.copy_(projected().reshape(2, 4, LENGTH, 16)) for t in inputs], (2, 4), WIDE
        )(),
    ],
    "length and heads exchanged": [
        lambda: ch.diagnose(*qkv(2, 256, queries=4, keys=4, width=16)),
        lambda: ch.diagnose(*qkv(1, 240, queries=60, keys=60, width=2), mask=ch.Causal()),
    ],
    "length and batch exchanged": [
        module(lambda: torch.nn.MultiheadAttention(WIDTH, 4), *[draw(2, LENGTH, WIDTH)] * 3),
        module(lambda: torch.nn.MultiheadAttention(WIDTH, 4), *[FIRST_TOKEN] * 3),
        module(lambda: torch.nn.MultiheadAttention(WIDTH, 4), *[PADDED] * 3),
        module(lambda: nn.TorchMultiheadAttention(WIDTH, 4), draw(9, 3, WIDTH), *[PADDED[:, :3]] * 2),
    ],
    "the scale": [
        called(scale=1.0),
        called(leading=(), scale=1.0),
        called(leading=(2,), scale=1.0, mask=ch.Causal()),
        called(sizes={"width": 16}, scale=1.0),
        called(sizes={"width": 128, **LOW}, scale=1.0),
        called(score=ch.Dot(scale=1.0), mask=ch.Lengths([20, 24])),
        called(score=lambda query, key: query @ key.mT),
        recorded(scale=1.0),
        called(scale=1 / WIDTH),
        called(sizes={"width": 256, **HALF}, scale=1 / 256),
        changed(divided),
        changed(divided_keys, mask=ch.Causal()),
        recorded(divided),
        recorded(scale=1 / WIDTH, is_causal=True),
    ],
    "saturation": [
        changed(sharp),
        changed(sharp, leading=(), mask=ch.Causal()),
        changed(sharp, score=ch.Bilinear.from_weights(torch.eye(WIDTH))),
        called(score=ch.Gaussian(bandwidth=0.1)),
        called(score=ch.Cosine(temperature=1e-4), sizes=LOW),
        recorded(sharp),
        ours(change=scaled("W_q", 3000.0)),
    ],
    "few effective keys": [
        changed(sharp),
        changed(sharp, leading=(4,), mask=ch.Lengths([20] * 4)),
        changed(sharp, sinks=torch.zeros(3)),
        called(score=ch.Gaussian(bandwidth=0.1), sizes=HALF),
        recorded(sharp, is_causal=True),
        ours(change=scaled("W_k", 3000.0)),
    ],
    "uniform heads": [
        changed(dull),
        changed(dull, leading=(), mask=ch.Causal()),
        changed(dull, mask=ch.SlidingWindow(before=3)),
        changed(dull, score=ch.Bilinear.from_weights(torch.eye(WIDTH))),
        changed(dull, sinks=torch.zeros(3)),
        recorded(dull, is_causal=True),
        recorded(dull, attn_mask=~UPPER),
        ours(change=scaled("W_q", 1e-3)),
    ],
    "heads that do nothing": [
        changed(one_strong_key),
        changed(one_strong_key, leading=()),
        changed(one_strong_key, score=lambda query, key: query @ key.mT / 8),
        called(sinks=torch.full((3,), 30.0)),
        recorded(one_strong_key),
    ],
    "values of 0": [
        changed(lambda query, key, value: value.zero_()),
        changed(put(2, (slice(None), 1), 0.0), mask=ch.Causal()),
        changed(put(2, (slice(None), 1, slice(None, 5)), 0.0), mask=ch.Lengths([5, 5])),
        recorded(put(2, (slice(None), 1), 0.0)),
        ours(change=lambda attend: (attend.W_v.weight.zero_(), attend.W_v.bias.zero_())),
    ],
    "inputs that are not finite": [
        changed(put(0, (1, 2, 3, 4), NAN)),
        changed(put(1, (1, 2, 3, 4), INF), mask=ch.Causal()),
        changed(put(2, (1, 2, 3, 4), -INF), score=ch.Cosine()),
        changed(put(1, (0, 0, 20, 4), NAN), mask=ch.Lengths([20, 24])),
        changed(put(2, (3, 4), NAN), leading=()),
        called(mask=FILLED.masked_fill(UPPER, NAN)),
        called(bias=ONES * INF),
        called(sinks=torch.tensor([0.0, NAN, 0.0])),
        recorded(put(1, (1, 2, 3, 4), NAN)),
        recorded(put(2, (1, 2, 3, 4), NAN), attn_mask=~UPPER),
        lambda: ch.diagnose(nn.MultiHeadAttention(WIDTH, 4), *[draw(2, LENGTH, WIDTH).index_fill(0, ONE, NAN)] * 3),
    ],
    "parameters that are not finite": [
        ours(change=lambda attend: attend.W_k.weight.fill_(NAN)),
        ours(change=put_into("W_o", INF)),
        ours(change=put_into("W_v", -INF)),
        torchs(change=lambda attend: attend.in_proj_weight.fill_(NAN)),
        module(lambda: nn.AdditiveAttention(4, query_dim=8, key_dim=8), *qkv(2, width=8), change=put_into("W_q", NAN)),
        recorded_module(put_into("W_k", NAN)),
    ],
    "a function that is NaN behind the mask": [
        called(score=ch.Dot().then(rooted), mask=ch.Causal()),
        called(score=ch.Cosine().then(rooted), mask=ch.Causal() & ch.Lengths([9, 24])),
        called(bias=ch.BiasFunction(lambda b, h, i, j: (i - j).sqrt()), mask=ch.Causal()),
        ours(mask=ch.Causal(), bias=ch.BiasFunction(lambda b, h, i, j: 1.0 / (i >= j))),
    ],
    "NaN behind the mask": [
        changed(put(1, (0, 0, 20, 4), NAN), mask=ch.Lengths([20, 24])),
        changed(put(2, (0, 0, 20, 4), INF), mask=ch.Lengths([20, 24])),
        changed(put(2, (20, 4), NAN), leading=(), mask=ch.Causal()),
        changed(put(1, (1, 20, 4), NAN), leading=(2,), mask=WORDS.flip(0)[:, None]),
        changed(put(1, (0, 0, 20, 4), NAN), mask=torch.zeros(LENGTH).masked_fill(~WORDS[0], -1e9)[None]),
        recorded(put(2, (0, 0, 20, 4), NAN), attn_mask=WORDS[:, None, None]),
    ],
    "a finite fill": [
        called(mask=FILLED),
        called(mask=FILLED.bfloat16(), sizes=LOW),
        called(bias=FILLED, score=ch.Additive(WIDTH, WIDTH, hidden_dim=4)),
        called(bias=ch.DenseBias(FILLED), leading=(2,)),
        called(mask=WHOLE_ROW.clamp_min(-6e4)),
        called(bias=WHOLE_ROW),
        recorded(attn_mask=WHOLE_ROW.masked_fill(WHOLE_ROW < 0, torch.finfo(torch.float32).min)),
        recorded(attn_mask=torch.full((LENGTH, LENGTH), torch.finfo(torch.float32).min)),
        torchs(attn_mask=FILLED),
        ours(mask=FILLED),
    ],
    "an output of another formula": [
        recorded_output(lambda output: output * 1.01),
        recorded_output(lambda output: output * torch.nan),
        recorded_output(lambda output: output.roll(1, -2), LOW),
        recorded_output(lambda output: output.roll(1, 1), HALF),
    ],
    "precision": [
        changed(offset),
        changed(offset, leading=(), mask=ch.Causal()),
        called(sizes=LOW),
        called(sizes=HALF, mask=ch.Causal()),
        called(sizes=LOW, score=ch.Additive(WIDTH, WIDTH, hidden_dim=4).bfloat16()),
        recorded(sizes=LOW),
        recorded(offset),
    ],
}
