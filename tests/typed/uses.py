"""Right uses and wrong ones, for type checkers: an error is expected on each marked line, and on no other."""

from typing import assert_type

import numpy as np
import torch
from torch import Tensor

import clearhead as ch
from clearhead import nn

x, lengths = torch.rand(2, 5, 8), [3, 5]
array = np.zeros((2, 5, 8), dtype=np.float32)

# what tensors give, and what arrays give
assert_type(ch.attention(x, x, x, mask=ch.Causal(), valid_lens=lengths, bias=ch.ALiBi(1)), Tensor)
assert_type(ch.attention(torch.nn.Parameter(x), x, x, score=lambda q, k: q @ k.mT, sinks=torch.zeros(1)), Tensor)
assert_type(ch.attention(array, array, array, mask=np.ones((5, 5), dtype=bool), scale=0.5), np.ndarray)
assert_type(ch.scaled_dot_product_attention(x, x, x, is_causal=True), Tensor)
assert_type(ch.masked_softmax(x, lengths), Tensor)
assert_type(ch.masked_softmax([[0.0, 1.0]], 1), np.ndarray)
assert_type(ch.plan(x, x, x, engine="native", align="lower_right").engine, str)
assert_type(ch.partial(x, x, x, keys=(0, 5)).finish(), Tensor)
assert_type(ch.partial(array, array, array).logsumexp, np.ndarray)
assert_type(ch.check_shape(array, "B L E")["B"], int)
ch.attention(x, x, x, mask=3)  # expect
ch.attention(x, x, x, bias="x")  # expect
ch.attention(x, x, array)  # expect
ch.attention([[1.0]], x, x)  # expect
ch.attention(x, x, x, is_causal=True)  # expect
ch.attention(x, x, x, align="lower")  # expect
ch.attention(x, x, x, valid_lens=3)  # expect
ch.attention(x, x, x, scale="1")  # expect
ch.attention(x, x, x, sinks=1.0)  # expect
ch.attention(x, x, x, score=ch.Causal())  # expect
ch.attention(x, x, x, ch.Causal())  # expect
ch.plan(x, x, x, causal=True)  # expect
ch.partial(x, x, x, sinks=x)  # expect
ch.masked_softmax(x, dim="last")  # expect

# the lazy matrix
w, of_arrays = ch.weights(x, x, mask=ch.Causal()), ch.weights(array, array)
assert_type(w, ch.results.Weights[Tensor])
assert_type(w[:], Tensor)
assert_type(of_arrays[...], np.ndarray)
assert_type(w.entropy(), Tensor)
assert_type(of_arrays.received(), np.ndarray)
assert_type(w.topk(2), tuple[Tensor, Tensor])
assert_type(w.max(), Tensor)
assert_type(w.max(-1), tuple[Tensor, Tensor])
assert_type(w.size(0), int)
assert_type(w @ x, Tensor)
assert_type(w * 2, Tensor)
assert_type(2 - of_arrays, np.ndarray)
assert_type(w.numpy(), np.ndarray)
assert_type(w.gradients(x, x).by_key(), Tensor)
entropy, (values, keys) = w.reduce(ch.reductions.Entropy(), ch.reductions.TopK(2))
assert_type(entropy, Tensor)
assert_type(keys, Tensor)
ch.weights(x, array)  # expect
ch.weights(x, x, dropout=0.1)  # expect
w["first"]  # expect
w.pool("large")  # expect
w.reduce("entropy")  # expect


# masks, biases, scores, and those of one's own
class Own(ch.extend.Score):
    def tile(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.mT


class Every(ch.extend.Mask):
    def lower(self, sizes: ch.extend.Sizes) -> ch.extend.Spans:
        start = torch.zeros(1, 1, 1, dtype=torch.int64, device=sizes.device)
        return ch.extend.Spans(start, start + sizes.keys)


class Longest(ch.extend.Reduction):
    def begin(self, problem: ch.extend.Problem) -> Tensor:
        return torch.zeros(problem.sizes.shape[:3])

    def end(self, buffers: Tensor, problem: ch.extend.Problem) -> Tensor:
        return buffers


assert_type(ch.Causal() & ~ch.Lengths(lengths) | Every(), ch.extend.Mask)
assert_type(ch.ALiBi(2) + ch.DenseBias(array), ch.extend.Bias)
assert_type(ch.Padding(x[:, :, 0] > 0).dense(5, 5), Tensor)
assert_type(ch.Dot(softcap=3.0)(x, x), Tensor)
assert_type(ch.Additive(8, 8, 4)(array, array), np.ndarray)
assert_type(ch.ALiBi(1)(x, x), Tensor)
ch.attention(x, x, x, score=Own(), mask=Every())
w.reduce(Longest())
ch.Causal() & x  # expect
ch.Causal() | 3  # expect
ch.ALiBi(2) + 1  # expect
ch.ALiBi("eight")  # expect
ch.SlidingWindow(before="wide")  # expect
ch.Lengths("three")  # expect
ch.Padding([1, 0])  # expect
ch.Documents(3.5)  # expect
ch.Dot(softcap="small")  # expect
ch.Dot()(x, 3)  # expect
ch.DenseMask(True)  # expect

# modules
attend, bahdanau = nn.MultiHeadAttention(8, 2, num_kv_heads=1, rotary=nn.RotaryEmbedding(4)), nn.AdditiveAttention(4)
cache = nn.KeyValueCache()
assert_type(attend(x, x, x, mask=ch.Causal(), cache=cache), Tensor)
assert_type(attend(x, attend.prepare(x, x), valid_lens=torch.tensor(lengths)), Tensor)
assert_type(bahdanau(x, x, x, lengths), Tensor)
assert_type(nn.DotProductAttention()(array, array, array), np.ndarray)
attend(x, x, x, mask=3)  # expect
attend(x, x, x, bias="x")  # expect
attend(x, x, x, key_padding_mask=x)  # expect
attend(x, x, x, ch.Causal(), lengths)  # expect
attend(array, array, array)  # expect
bahdanau(x, x, x, mask="causal")  # expect
nn.DotProductAttention()(x, x, x, is_causal=True)  # expect
nn.MultiHeadAttention("8", 2)  # expect
nn.MultiHeadAttention(8, 2, score="dot")  # expect
cache.crop("all")  # expect

# what explains and watches
assert_type(ch.explain(x, x, x, mask=ch.Causal(), at=(0, 1)), ch.explanation.Explanation)
assert_type(ch.explain(attend, x, x, x, gradients=True), ch.explanation.Explanation)
assert_type(ch.diagnose(x, x, x, valid_lens=lengths), ch.explanation.Diagnosis)
assert_type(ch.diagnose(attend, x, x, x), ch.explanation.Diagnosis)
with ch.watch(attend, padding=x[..., 0] > 0) as seen:
    attend(x, x, x)
assert_type(seen, ch.models.Recording)
assert_type(seen[0].weights[:], Tensor)
with ch.edit(attend, ch.edits.Ablate(0, heads=1, kind="mean", over=seen)):
    attend(x, x, x)
ch.explain(x, x, x, bias="x")  # expect
ch.diagnose(x)  # expect
ch.watch(attend, every="second")  # expect
ch.edits.ForceMask("causal")  # expect
ch.edits.Ablate(0, kind="median")  # expect

# modules of positions, and torch's own call
assert_type(nn.SinusoidalPositionalEncoding(8)(x, 3), Tensor)
assert_type(nn.RotaryEmbedding(8)(x, torch.tensor([1, 2])), Tensor)
nn.SinusoidalPositionalEncoding(8)(x, "first")  # expect
nn.LearnedPositionalEncoding(9, 8)(array)  # expect
