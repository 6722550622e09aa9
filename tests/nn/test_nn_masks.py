"""`mask=` and `valid_lens=`, alike in every module: each alone, both at once, and what belongs in the other."""

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.nn import AdditiveAttention, DotProductAttention, MultiHeadAttention

B, H, LQ, LK, E = 3, 2, 5, 7, 8
torch.manual_seed(0)
QUERY, KEY, VALUE = torch.randn(B, LQ, E), torch.randn(B, LK, E), torch.randn(B, LK, E)
KEEP = torch.rand(B, LQ, LK) > 0.3
FLOAT = torch.randn(B, LQ, LK)
PER_SEQUENCE = torch.tensor([2, 0, 7])
PER_QUERY = torch.arange(15).reshape(3, 5).clamp(max=7)
LENS = {
    "a list": ([2, 0, 7], PER_SEQUENCE),
    "nested lists": (PER_QUERY.tolist(), PER_QUERY),
    "a tuple": ((2, 0, 7), PER_SEQUENCE),
    "an array": (np.array([2, 0, 7]), PER_SEQUENCE),
    "a tensor": (PER_SEQUENCE.int(), PER_SEQUENCE),
    "one a query": (PER_QUERY, PER_QUERY),
}
MASKS = {
    "none": (None, 0.0),
    "a mask": (ch.Causal(), torch.ones(LQ, LK).tril(2).bool()),
    "an expression": (
        ~ch.SlidingWindow(before=1),
        ~ch.SlidingWindow(before=1).dense(QUERY, KEY, "lower_right"),
    ),
    "a bool tensor": (KEEP, KEEP),
    "a bool array": (KEEP.numpy(), KEEP),
    "a float tensor": (FLOAT, FLOAT),
    "a float tensor with minus infinities": (
        FLOAT.masked_fill(~KEEP, -torch.inf),
        FLOAT.masked_fill(~KEEP, -torch.inf),
    ),
}
MODULES = {
    "dot": DotProductAttention,
    "additive": lambda: AdditiveAttention(4),
    "heads": lambda: MultiHeadAttention(E, H),
}


@pytest.fixture(params=MODULES)
def attend(request):
    torch.manual_seed(1)
    return MODULES[request.param]()


def weights(attend, added):
    """Softmax of the raw scores, from the module's own record of them, and what is added to each."""
    attend(QUERY, KEY, VALUE)
    scores = attend.attention_weights.scores()
    added = added if scores.ndim == 3 or not isinstance(added, torch.Tensor) or added.ndim == 2 else added[:, None]
    return (scores + added).softmax(-1).nan_to_num(0.0)


def as_added(mask):
    if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool:
        return torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    return mask


@pytest.mark.parametrize("lens", LENS)
@pytest.mark.parametrize("mask", MASKS)
def test_both_hold(attend, mask, lens):
    valid_lens, counts = LENS[lens]
    inside = torch.arange(LK) < (counts if counts.ndim == 2 else counts[:, None])[..., None]
    expected = weights(attend, as_added(MASKS[mask][1]) + as_added(inside.expand(B, LQ, LK)))
    output = attend(QUERY, KEY, VALUE, mask=MASKS[mask][0], valid_lens=valid_lens, align="lower_right")
    found = attend.attention_weights.dense()
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    if not isinstance(attend, MultiHeadAttention):
        torch.testing.assert_close(output, expected @ VALUE, atol=1e-5, rtol=1e-5)
    joined = {"mask": ch.Lengths(valid_lens)} if MASKS[mask][0] is None else {}
    if joined:
        torch.testing.assert_close(attend(QUERY, KEY, VALUE, **joined), output, atol=0, rtol=0)


def test_a_float_mask_and_a_bias_beside_lengths():
    attend = MultiHeadAttention(E, H)
    mask, bias = torch.randn(LQ, LK, requires_grad=True), torch.randn(1, H, LQ, LK)
    output = attend(QUERY, KEY, VALUE, mask, bias=bias, valid_lens=[2, 3, 7])
    same = attend(QUERY, KEY, VALUE, ch.Lengths([2, 3, 7]), bias=bias + mask)
    torch.testing.assert_close(output, same)
    alibi = ch.ALiBi(H)
    output = attend(QUERY, KEY, VALUE, mask, bias=alibi, valid_lens=[2, 3, 7], align="lower_right")
    same = attend(QUERY, KEY, VALUE, ch.Lengths([2, 3, 7]), bias=alibi + ch.DenseBias(mask), align="lower_right")
    torch.testing.assert_close(output, same)
    (gradient,) = torch.autograd.grad(output.sum(), mask)
    assert gradient.abs().sum() > 0
    with pytest.raises(ch.ClearheadError, match="bias is 'x'"):
        attend(QUERY, KEY, VALUE, mask, bias="x", valid_lens=[2, 3, 7])


def test_lengths_without_a_batch_and_with_a_cache():
    attend = MultiHeadAttention(E, H).eval()
    one = attend(QUERY[0], KEY[0], VALUE[0], valid_lens=[2])
    torch.testing.assert_close(one, attend(QUERY, KEY, VALUE, valid_lens=[2, 3, 4])[0])
    with torch.no_grad():
        cache = ch.nn.KeyValueCache()
        attend(KEY[:, :4], KEY[:, :4], KEY[:, :4], cache=cache)
        found = attend(KEY[:, 4:], KEY[:, 4:], KEY[:, 4:], valid_lens=[5, 6, 7], cache=cache)
        torch.testing.assert_close(found, attend(KEY[:, 4:], KEY, KEY, valid_lens=[5, 6, 7]), atol=1e-6, rtol=1e-5)


def test_lengths_in_compiled_code(attend):
    def call(query, key, value, lens):
        return attend(query, key, value, mask=ch.Causal(), valid_lens=lens, align="lower_right")

    expected = call(QUERY, KEY, VALUE, PER_SEQUENCE)
    found = torch.compile(call, fullgraph=True, backend="aot_eager")(QUERY, KEY, VALUE, PER_SEQUENCE)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


WRONG = {
    "a mask as lengths": ({"valid_lens": ch.Causal()}, ["valid_lens is Causal()", "Pass a mask as mask="]),
    "a word": ({"valid_lens": "3"}, ["valid_lens is '3'"]),
    "negative": ({"valid_lens": [1, 2, -1]}, ["-1"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_belongs_elsewhere_is_said(attend, name):
    options, says = WRONG[name]
    with pytest.raises(ch.ClearheadError) as caught:
        attend(QUERY, KEY, VALUE, **options)
    assert all(word in str(caught.value) for word in says), caught.value
