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


# what is called, the kind of error, and what its message must say
CASES = {
    "key heads": (lambda: MHA(8, 4, num_kv_heads=3), ch.ClearheadError, ["num_kv_heads is 3", "divide"]),
    "a score by name": (lambda: MHA(8, 4, score="dot"), ch.ClearheadError, ["'dot'", "Dot()"]),
    "rotary by True": (lambda: MHA(8, 4, rotary=True), ch.ClearheadError, ["rotary is True", "RotaryEmbedding(dim=2)"]),
    "key and value": (lambda: ATTEND(X, X, X[:, :4]), ch.ShapeError, ["key and value disagree", "value   2  4  8"]),
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
    "from another module": (lambda: MHA.from_torch(torch.nn.Linear(2, 2)), ch.ClearheadError, ["Linear", "from_torch"]),
    "rotary of a narrow head": (
        lambda: chnn.RotaryEmbedding(16)(X),
        ch.ShapeError,
        ["(2, 5, 8)", "dim = 16"],
    ),
    "offsets of another batch": (
        lambda: chnn.RotaryEmbedding(4)(X, torch.tensor([1, 2, 3])),
        ch.ShapeError,
        ["(3,)", "(2, 5, 8)", "(B,)"],
    ),
    "float offsets": (lambda: chnn.RotaryEmbedding(4)(X, torch.tensor([1.0, 2.0])), ch.ClearheadError, ["float32"]),
    "another width for a sinusoid": (
        lambda: chnn.SinusoidalPositionalEncoding(6)(X),
        ch.ShapeError,
        ["(2, 5, 8)", "(..., L, 6)"],
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
