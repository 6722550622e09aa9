"""A bool mask that is a view of bytes: every byte but 0 is True, as in PyTorch's operations, for whatever reads it."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import clearhead as ch
from clearhead.nn import KeyValueCache, MultiHeadAttention

LENGTHS = [(1, 5), (1, 97), (3, 64), (20, 9), (70, 131)]
ENGINES = [None, "native", "sdpa", "tiled", "reference"]
KINDS = ["random", "intervals", "one column"]


def masks(queries, keys, kind="random"):
    """A mask of bytes, and the same of 0 and 1."""
    generator = torch.Generator().manual_seed(queries + keys)
    keep = torch.rand(queries, keys, generator=generator) < 0.6
    if kind == "intervals":
        keep = torch.arange(keys) <= torch.arange(queries)[:, None] + keys // 2
    elif kind == "one column":
        keep = keep[:, :1]
    numbers = torch.randint(1, 256, keep.shape, generator=generator)  # seldom 1
    raw = numbers.masked_fill(~keep, 0).to(torch.uint8).view(torch.bool)
    assert torch.equal(raw, keep) and bool((raw.view(torch.uint8) > 1).any())
    return raw, keep


def tensors(queries, keys):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, length, 8, generator=generator) for length in (queries, keys, keys)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients(engine, lengths, kind):
    found = []
    for keep in masks(*lengths, kind):
        inputs = [t.requires_grad_() for t in tensors(*lengths)]
        output = ch.attention(*inputs, mask=keep, engine=engine)
        found.append([output, *torch.autograd.grad(output.square().sum(), inputs)])
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("wrap", [
    ch.DenseMask, lambda m: ~ch.DenseMask(m), lambda m: ch.DenseMask(m) & ch.SlidingWindow(before=9, after=9),
    lambda m: ch.DenseMask(m) | ch.Lengths([3]), lambda m: ch.Padding(m[:1]), lambda m: ch.DenseMask(m.numpy()),
    lambda m: ch.MaskFunction(lambda b, h, i, j: m[i, j], reads=(m,)),
    lambda m: ch.DenseMask(m.t().contiguous().t()),
], ids=["dense", "not", "and", "or", "padding", "numpy", "function", "strides"])  # fmt: skip
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_statistics_and_looks(wrap, lengths):
    query, key, value = tensors(*lengths)
    wanted = (ch.reductions.Entropy(), ch.reductions.Received(), ch.reductions.TopK(2), ch.reductions.Output(value))
    found = []
    for keep in masks(*lengths):
        mask = wrap(keep)
        for engine in ("native", "tiled"):
            weights = ch.weights(query, key, mask=mask, engine=engine, align="upper_left")
            found.append(
                [*torch.utils._pytree.tree_leaves(weights.reduce(*wanted)), weights.dense(), weights[0, 1].dense()]
            )
        found[-1] += [repr(mask), str(ch.diagnose(query, key, value, mask=mask, align="upper_left"))]
    for got, want in zip(found[:2], found[2:], strict=True):
        for one, other in zip(got, want, strict=True):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("queries", [1, 6])
def test_watch(queries):
    class Model(torch.nn.Module):
        def forward(self, query, key, value, mask):
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    model, found = Model(), []
    for keep in masks(queries, 30):
        with ch.watch(model) as seen:
            output = model(*tensors(queries, 30), keep[None, None])
        torch.testing.assert_close(seen[0].weights @ tensors(queries, 30)[2], output)
        found.append((seen[0].weights.dense(), repr(seen[0])))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


@pytest.mark.parametrize("limits", [{}, {"capacity": 40}], ids=str)
def test_a_cache(limits):
    torch.manual_seed(0)
    attend, x = MultiHeadAttention(8, 2).eval(), torch.randn(1, 30, 8)
    wide = 40 if limits else 30
    cache, found = KeyValueCache(**limits), []
    with torch.no_grad():
        attend(x[:, :29], x[:, :29], x[:, :29], ch.Causal(), cache=cache)
        for keep in masks(1, wide):
            own = copy.copy(cache)
            found.append(attend(x[:, 29:], x[:, 29:], x[:, 29:], keep[None], cache=own))
    assert torch.equal(*found)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend, inductor_cache):
    compiled = torch.compile(lambda *inputs: ch.attention(*inputs[:3], mask=inputs[3] & ch.Causal()), backend=backend)
    raw, keep = (ch.DenseMask(m) for m in masks(20, 20))
    torch.testing.assert_close(compiled(*tensors(20, 20), raw), ch.attention(*tensors(20, 20), mask=keep & ch.Causal()))


def test_packed_by_the_kernels():
    """Each byte alone, at each place of the eight that are read at once, and beyond them."""
    for byte in (1, 2, 3, 4, 16, 127, 128, 255):
        for place in range(13):
            raw = np.zeros((2, 13), np.uint8)
            raw[0, place] = raw[1, 0] = raw[1, 12] = byte
            query, key, _ = tensors(2, 13)
            mask = torch.from_numpy(raw).view(torch.bool)
            weights = ch.weights(query, key, mask=mask, engine="native").dense()
            assert torch.equal(weights > 0, torch.from_numpy(raw != 0).expand(1, 2, 2, 13))
