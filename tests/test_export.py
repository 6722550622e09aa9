"""Exported programs: saved, loaded, and given other sizes; what an exported program can't hold."""

import io

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.base.shapes import Sizes
from clearhead.inspection.index import parse


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = ch.nn.MultiHeadAttention(8, 2, num_kv_heads=1, score_bias=ch.RelativeBias(2))

    def forward(self, x, padding):
        return self.attend(x, x, x, ch.Causal() & ~ch.Padding(padding))


def by_hand(block, x, padding):
    """The module in plain PyTorch: grouped heads, and T5's bias by its buckets."""
    layers, at = block.attend, torch.arange(x.shape[1])
    q, k, v = (w(x).unflatten(-1, (-1, 4)).transpose(1, 2) for w in (layers.W_q, layers.W_k, layers.W_v))
    added = layers.score_bias.weight[layers.score_bias.bucket(at - at[:, None])].movedim(-1, 0)
    keep = (at <= at[:, None]) & ~padding[:, None, None]
    weights = torch.softmax((q @ k.mT / 2 + added).masked_fill(~keep, -torch.inf), -1).nan_to_num(0.0)
    return layers.W_o((weights @ v).transpose(1, 2).flatten(2))


def test_a_saved_program_takes_other_sizes():
    torch.manual_seed(0)
    block = Block().eval()
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=2, max=512)
    shapes = {"x": {0: batch, 1: length}, "padding": {0: batch, 1: length}}
    given = torch.randn(2, 5, 8), torch.zeros(2, 5, dtype=torch.bool)
    file = io.BytesIO()
    torch.export.save(torch.export.export(block, given, dynamic_shapes=shapes), file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for batch, length in ((2, 5), (3, 60), (1, 2)):
        x, padding = torch.randn(batch, length, 8), torch.rand(batch, length) < 0.3
        torch.testing.assert_close(loaded(x, padding), by_hand(block, x, padding))


def test_a_cache_of_the_exported_code_alone():
    """A cache that the code makes itself belongs to the program; one from outside would stand still."""

    class Two(nn.Module):
        def __init__(self, cache=None):
            super().__init__()
            self.attend, self.cache = ch.nn.MultiHeadAttention(8, 2), cache

        def forward(self, x):
            cache = ch.nn.KeyValueCache(capacity=6) if self.cache is None else self.cache
            both = [self.attend(part, part, part, ch.Causal(), cache=cache) for part in (x[:, :4], x[:, 4:])]
            return torch.cat(both, 1)

    torch.manual_seed(0)
    x = torch.randn(1, 5, 8)
    with torch.no_grad():
        own = Two().eval()
        found = torch.export.export(own, (x,)).module()(x)
        torch.testing.assert_close(found, own.attend(x, x, x, ch.Causal()))
        for cache in (ch.nn.KeyValueCache(capacity=6), ch.nn.KeyValueCache().of(0)):
            with pytest.raises(
                ch.UnsupportedError, match=r"KeyValueCache was made outside .* call attention\(query, keys"
            ):
                torch.export.export(Two(cache), (x,))


class Twice(nn.Module):
    """Two calls with a cache that grows, which forward makes."""

    def __init__(self):
        super().__init__()
        self.attend = ch.nn.MultiHeadAttention(8, 2)

    def forward(self, x):
        cache = ch.nn.KeyValueCache()
        self.attend(x, x, x, ch.Causal(), cache=cache)
        return self.attend(x, x, x, ch.Causal(), cache=cache)


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")  # a module keeps its last call
@pytest.mark.parametrize("strict", [False, True])
def test_a_cache_that_grows_in_exported_code(strict):
    """Its keys are put side by side: writes to memory of its own gave an error of PyTorch's, or other numbers."""
    torch.manual_seed(0)
    model, x = Twice().eval(), torch.randn(2, 5, 8)
    both = torch.cat([x, x], 1)
    with torch.no_grad():
        found = torch.export.export(model, (x,), strict=strict).module()(x)
        torch.testing.assert_close(found, model.attend(both, both, both, ch.Causal())[:, 5:])


def test_an_index_in_compiled_code():
    """Its rows are numbers of Python's: NumPy's are tensors to PyTorch's compiler."""
    sizes = Sizes(6, 3, 5, 5, leading=(2, 3, 3))

    @torch.compile(backend="eager", fullgraph=True)
    def found(x):
        part = parse((1, slice(0, 3, 2), -1), x.shape, sizes)
        return x.flatten(0, 1)[[rows.start for rows in part.batches], part.heads]

    x = torch.randn(2, 3, 3, 5, 5)
    torch.testing.assert_close(found(x), x[1, 0:3:2, -1:])


@pytest.mark.parametrize("strict", [False, True])
def test_weights_at_fixed_sizes(strict):
    class Look(nn.Module):
        def forward(self, x, padding):
            weights = ch.weights(x, x, mask=ch.Padding(padding))
            return weights.dense(), weights[0, 1].dense(), weights.logsumexp()

    torch.manual_seed(0)
    draw = lambda: (torch.randn(2, 3, 5, 4), torch.arange(5) < torch.tensor([[4], [2]]))
    exported = torch.export.export(Look(), draw(), strict=strict).module()
    x, padding = draw()
    scores = (x @ x.mT / 2).masked_fill(~padding[:, None, None], -torch.inf)
    expected = torch.softmax(scores, -1), torch.softmax(scores, -1)[0, 1], torch.logsumexp(scores, -1)
    torch.testing.assert_close(exported(x, padding), expected)
