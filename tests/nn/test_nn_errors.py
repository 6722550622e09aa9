"""Bad input of the modules: one clear error that says what disagreed, with shapes, and what to pass instead."""

import pytest
import torch
from one_error import check_error

import clearhead as ch
from clearhead import nn as chnn

zeros = torch.zeros
X = zeros(2, 5, 8)
MHA = chnn.MultiHeadAttention
ATTEND = MHA(8, 4)


def additive(*widths):
    attend = chnn.AdditiveAttention(3)
    for query_width, key_width in widths:
        attend(zeros(2, 5, query_width), zeros(2, 5, key_width), X)


def cached(first, then):
    cache = chnn.KeyValueCache()
    for x in (first, then):
        ATTEND(x, x, x, cache=cache)


# what is called, the kind of error, and what its message must say
CASES = {
    "no heads": (lambda: MHA(8, 0), ch.ClearheadError, ["num_heads is 0", "1 or more"]),
    "heads by a bool": (lambda: MHA(8, True), ch.ClearheadError, ["num_heads is True", "whole number"]),
    "heads by a fraction": (lambda: MHA(8, 2.0), ch.ClearheadError, ["num_heads is 2.0"]),
    "embed_dim by a tensor": (lambda: MHA(zeros(3), 2), ch.ClearheadError, ["embed_dim", "whole number"]),
    "head_dim of 0": (lambda: MHA(8, 2, head_dim=0), ch.ClearheadError, ["head_dim is 0"]),
    "key heads": (lambda: MHA(8, 4, num_kv_heads=3), ch.ClearheadError, ["num_kv_heads is 3", "divide"]),
    "key heads of 0": (lambda: MHA(8, 4, num_kv_heads=0), ch.ClearheadError, ["num_kv_heads is 0"]),
    "dropout of 1": (lambda: MHA(8, 4, dropout=1.0), ch.ClearheadError, ["dropout is 1.0", "probability"]),
    "dropout by a bool": (lambda: chnn.DotProductAttention(True), ch.ClearheadError, ["dropout is True"]),
    "negative dropout": (lambda: chnn.AdditiveAttention(8, -0.1), ch.ClearheadError, ["dropout is -0.1"]),
    "a score class": (lambda: MHA(8, 4, score=ch.Dot), ch.ClearheadError, ["class Dot", "instance"]),
    "a score by name": (lambda: MHA(8, 4, score="dot"), ch.ClearheadError, ["str", "Dot()"]),
    "rotary by True": (lambda: MHA(8, 4, rotary=True), ch.ClearheadError, ["rotary is True", "RotaryEmbedding(dim=2)"]),
    "kdim of 0": (lambda: MHA(8, 4, kdim=0), ch.ClearheadError, ["kdim is 0"]),
    "a dtype that module and inputs share": (
        lambda: MHA(8, 2).to(torch.float8_e4m3fn)(*[X.to(torch.float8_e4m3fn)] * 3),
        ch.ClearheadError,
        ["query has dtype torch.float8_e4m3fn", "(2, 5, 8)", ".float()"],
    ),
    "a width": (
        lambda: ATTEND(X, zeros(2, 5, 6), X),
        ch.ShapeError,
        ["key has shape (2, 5, 6)", "(B, L, 8)", "width 8"],
    ),
    "heads made outside": (lambda: ATTEND(zeros(2, 4, 5, 8), X, X), ch.ShapeError, ["(2, 4, 5, 8)", "heads by itself"]),
    "one vector": (lambda: ATTEND(zeros(8), X, X), ch.ShapeError, ["query has shape (8,)", "(L, 8)"]),
    "a batch and none": (lambda: ATTEND(X, X[0], X[0]), ch.ShapeError, ["key has shape (5, 8)", "all three"]),
    "key and value": (lambda: ATTEND(X, X, X[:, :4]), ch.ShapeError, ["key and value disagree", "value   2  4  8"]),
    "batches": (
        lambda: ATTEND(X, zeros(3, 5, 8), zeros(3, 5, 8)),
        ch.ShapeError,
        ["query and key disagree in the batch", "^", "transpose(0, 1)"],
    ),
    "integers": (lambda: ATTEND(X.long(), X, X), ch.ClearheadError, ["query has dtype torch.int64", ".float()"]),
    "padding as a mask": (
        lambda: ATTEND(X, zeros(2, 7, 8), zeros(2, 7, 8), torch.ones(2, 7).bool()),
        ch.ShapeError,
        ["mask has shape (2, 7)", "scores   2  4  5  7", "Padding(mask)", "Padding(~mask)"],
    ),
    "torch's mask": (
        lambda: ATTEND(X, X, X, torch.ones(8, 5, 5).bool()),
        ch.ShapeError,
        ["mask has shape (8, 5, 5)", "~mask.unflatten(0, (2, 4))"],
    ),
    "a mask for each head": (lambda: ATTEND(X, X, X, zeros(4, 5, 5)), ch.ShapeError, ["(4, 5, 5)", "mask[None]"]),
    "a mask of other sizes": (
        lambda: ATTEND(X, X, X, torch.ones(5, 6).bool()),
        ch.ShapeError,
        ["(5, 6)", "scores   2  4  5  5", "(Lq, Lk)", "cache"],
    ),
    "a mask of one dimension": (lambda: ATTEND(X, X, X, torch.ones(5).bool()), ch.ShapeError, ["(5,)", "(Lq, Lk)"]),
    "a mask of five dimensions": (lambda: ATTEND(X, X, X, zeros(1, 1, 1, 5, 5)), ch.ShapeError, ["(1, 1, 1, 5, 5)"]),
    "a bias of three dimensions": (lambda: ATTEND(X, X, X, bias=zeros(4, 5, 5)), ch.ShapeError, ["bias[None]"]),
    "a cache that is none": (
        lambda: ATTEND(X, X, X, cache=True),
        ch.ClearheadError,
        ["cache is True", "KeyValueCache()"],
    ),
    "an alignment with a cache": (
        lambda: ATTEND(X, X, X, ch.Causal(), cache=chnn.KeyValueCache(), align=0),
        ch.ClearheadError,
        ["align", "cache"],
    ),
    "another batch for the cache": (
        lambda: cached(X, zeros(3, 5, 8)),
        ch.ShapeError,
        ["differ in batch", "cache     2  4  5  2", "new key   3  4  5  2", "own KeyValueCache()"],
    ),
    "other heads for the cache": (
        lambda: [m(X, X, X, cache=c) for c in [chnn.KeyValueCache()] for m in (ATTEND, MHA(8, 2))],
        ch.ShapeError,
        ["differ in key heads"],
    ),
    "other widths for the cache": (
        lambda: [m(X, X, X, cache=c) for c in [chnn.KeyValueCache()] for m in (ATTEND, MHA(8, 4, head_dim=3))],
        ch.ShapeError,
        ["differ in width"],
    ),
    "another dtype for the cache": (
        lambda: [
            m(X.to(d), *[X.to(d)] * 2, cache=c)
            for c in [chnn.KeyValueCache()]
            for m, d in ((ATTEND, torch.float32), (MHA(8, 4).double(), torch.float64))
        ],
        ch.ClearheadError,
        ["torch.float64", "cache holds torch.float32"],
    ),
    "from another module": (lambda: MHA.from_torch(torch.nn.Linear(2, 2)), ch.ClearheadError, ["Linear", "from_torch"]),
    "no hidden units": (lambda: chnn.AdditiveAttention(0), ch.ClearheadError, ["hidden_dim is 0"]),
    "another query width": (lambda: additive((4, 6), (5, 6)), ch.ShapeError, ["query has width 5", "width 4"]),
    "another key width": (lambda: additive((4, 6), (4, 7)), ch.ShapeError, ["key has width 7", "width 6"]),
    "lengths of another batch": (lambda: chnn.DotProductAttention()(X, X, X, [3] * 3), ch.ShapeError, ["(3,)", "(2,)"]),
    "an odd rotary": (lambda: chnn.RotaryEmbedding(5), ch.ClearheadError, ["dim is 5", "even"]),
    "a base of 0": (lambda: chnn.RotaryEmbedding(4, base=0.0), ch.ClearheadError, ["base", "above 0"]),
    "rotary of a narrow head": (
        lambda: chnn.RotaryEmbedding(16)(X),
        ch.ShapeError,
        ["(2, 5, 8)", "dim = 16"],
    ),
    "a negative offset": (lambda: chnn.RotaryEmbedding(4)(X, -1), ch.ClearheadError, ["offset is -1"]),
    "negative offsets": (lambda: chnn.RotaryEmbedding(4)(X, torch.tensor([1, -2])), ch.ClearheadError, ["-2"]),
    "offsets of another batch": (
        lambda: chnn.RotaryEmbedding(4)(X, torch.tensor([1, 2, 3])),
        ch.ShapeError,
        ["(3,)", "(2, 5, 8)", "(B,)"],
    ),
    "float offsets": (lambda: chnn.RotaryEmbedding(4)(X, torch.tensor([1.0, 2.0])), ch.ClearheadError, ["float32"]),
    "offsets of another batch for a sinusoid": (
        lambda: chnn.SinusoidalPositionalEncoding(8)(X, torch.arange(len(X) + 1)),
        ch.ShapeError,
        ["SinusoidalPositionalEncoding: offset has shape", "one position for each sequence"],
    ),
    "another width for a sinusoid": (
        lambda: chnn.SinusoidalPositionalEncoding(6)(X),
        ch.ShapeError,
        ["(2, 5, 8)", "(..., L, 6)"],
    ),
    "beyond max_len": (
        lambda: chnn.LearnedPositionalEncoding(9, 8)(X, 6),
        ch.ShapeError,
        ["needs 11", "max_len is 9", "max_len=11"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_clear_error(name):
    check_error(*CASES[name])


def test_a_refused_call_is_not_recorded():
    attend = MHA(8, 4)
    attend(X, X, X)
    with pytest.raises(ch.ClearheadError):
        attend(X[:, :3], X, X, ch.Causal())
    assert attend.attention_weights.shape == (2, 4, 5, 5)
