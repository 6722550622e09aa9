"""Layers that were put in another's place, resized or converted by hand: their tensors count, not the configuration."""

import copy

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.nn import AdditiveAttention, LearnedPositionalEncoding, MultiHeadAttention, TorchMultiheadAttention

E, WIDTH = 12, 4
X = torch.randn(2, 5, E, generator=torch.Generator().manual_seed(0))


def heads_by_hand(module, x):
    """The heads one by one, by PyTorch's operations on the weights as they are."""
    q, k, v = (layer(x).split(WIDTH, -1) for layer in (module.W_q, module.W_k, module.W_v))
    size = len(q) // len(k)
    parts = [(a @ k[h // size].mT / WIDTH**0.5).softmax(-1) @ v[h // size] for h, a in enumerate(q)]
    return module.W_o(torch.cat(parts, -1))


class Adapted(nn.Module):
    """A layer with an adapter beside it."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.down, self.up = layer, nn.Linear(E, 2, False), nn.Linear(2, layer.out_features, False)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


@pytest.mark.parametrize("seed", range(12))
def test_pruned_replaced_and_adapted_layers(seed):
    torch.manual_seed(seed)
    groups, kept = [(2, 1), (3, 3), (4, 2)][seed % 3], 1 + seed % 2
    module = MultiHeadAttention(E, groups[0] * 2, head_dim=WIDTH, num_kv_heads=groups[1] * 2).eval()
    q, k = (n * kept * WIDTH for n in groups)  # the heads that are left
    for name, rows in (("W_q", q), ("W_k", k), ("W_v", k)):
        layer = getattr(module, name)
        if seed % 4 < 2:  # the parameters by hand, which leaves out_features as it was
            layer.weight, layer.bias = nn.Parameter(layer.weight[:rows]), nn.Parameter(layer.bias[:rows])
        else:
            setattr(module, name, nn.Linear(E, rows))
    module.W_o.weight = nn.Parameter(module.W_o.weight[:, :q])
    if seed > 5:
        module.W_q = Adapted(nn.Linear(E, q))
    want = heads_by_hand(module, X)
    torch.testing.assert_close(module(X, X, X), want)
    torch.testing.assert_close(module(X, module.prepare(X, X)), want)
    assert module.attention_weights.shape[1] == q // WIDTH
    if seed <= 5:
        explained = ch.explain(module, X[:1], X[:1], X[:1])
        torch.testing.assert_close(explained["result"].float(), want[:1], atol=1e-5, rtol=1e-5)


def test_pruned_heads_of_torchs_module():
    torch.manual_seed(0)
    for widths in ({}, {"kdim": E, "vdim": E + 1}):
        module = TorchMultiheadAttention(E, 3, batch_first=True, **widths)
        value = torch.cat([X, X[..., :1]], -1)[..., : widths.get("vdim", E)]
        if widths:
            for name in "qkv":
                weight = getattr(module, f"{name}_proj_weight")
                setattr(module, f"{name}_proj_weight", nn.Parameter(weight[:8]))
            weights = [getattr(module, f"{name}_proj_weight") for name in "qkv"]
        else:
            module.in_proj_weight = nn.Parameter(module.in_proj_weight[:24])
            weights = module.in_proj_weight.split(8)
        module.in_proj_bias = nn.Parameter(torch.randn(24))
        module.out_proj.weight = nn.Parameter(module.out_proj.weight[:, :8])
        parts = zip((X, X, value), weights, module.in_proj_bias.split(8), strict=True)
        q, k, v = (nn.functional.linear(x, w, b).split(WIDTH, -1) for x, w, b in parts)
        found = [(a @ b.mT / WIDTH**0.5).softmax(-1) @ c for a, b, c in zip(q, k, v, strict=True)]
        torch.testing.assert_close(module(X, X, value)[0], module.out_proj(torch.cat(found, -1)))


LAYERS = ["W_q", "W_k", "W_v", "W_o"]
CHANGES = {
    "converted": lambda layer: layer.double(),
    "bias converted": lambda layer: setattr(layer, "bias", nn.Parameter(layer.bias.detach().double())),
    "bias cut": lambda layer: setattr(layer, "bias", nn.Parameter(layer.bias.detach()[:-1])),
    "a row less": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.detach()[:-1])),
    "a column less": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.detach()[:, :-1])),
    "a vector": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.detach()[0])),
    "a head less": lambda layer: layer.__dict__["_parameters"].update(
        weight=nn.Parameter(layer.weight.detach()[:-WIDTH]), bias=nn.Parameter(layer.bias.detach()[:-WIDTH])
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_do_not_fit_are_an_error(name, change):
    module = MultiHeadAttention(E, 3)
    CHANGES[change](getattr(module, name))
    if (name, change) == ("W_o", "a head less"):  # a narrower output
        assert module(X, X, X).shape == (2, 5, E - WIDTH)
        return
    with pytest.raises(RuntimeError):
        module(X, X, X)


@pytest.mark.parametrize("change", CHANGES)
def test_the_last_layer_of_torchs_module(change):
    module = TorchMultiheadAttention(E, 3, batch_first=True)
    CHANGES[change](module.out_proj)
    if change == "a head less":
        assert module(X, X, X)[0].shape == (2, 5, E - WIDTH)
        return
    with pytest.raises(RuntimeError):
        module(X, X, X)


def test_a_refused_last_layer_leaves_the_cache_as_it_was():
    module, cache = MultiHeadAttention(E, 3), ch.nn.KeyValueCache()

    class Fails(nn.Module):
        def forward(self, x):
            raise ValueError

    module.W_o = Fails()
    with pytest.raises(ValueError):
        module(X, X, X, cache=cache)
    assert len(cache) == 0


def additive():
    module = AdditiveAttention(6)
    module(X, X, X)
    return module


ADDITIVE = {
    "a bias": (lambda m: setattr(m, "W_q", nn.Linear(E, 6)), "has a bias"),
    "an adapter": (lambda m: setattr(m, "W_k", Adapted(m.W_k)), "Adapted that has a bias"),
    "a hook": (lambda m: m.W_q.register_forward_hook(lambda *given: given[2] * 2), "hooks"),
    "a forward of its own": (lambda m: setattr(m.W_q, "forward", lambda x: x), "hooks"),
    "hidden widths": (lambda m: setattr(m.W_q, "weight", nn.Parameter(torch.randn(5, E))), "changes the width alone"),
}


@pytest.mark.parametrize("name", ADDITIVE)
def test_layers_that_additive_attention_would_pass_by(name):
    change, words = ADDITIVE[name]
    module = additive()
    change(module)
    with pytest.raises(ch.ClearheadError, match=words):
        module(X, X, X)


def test_a_table_of_positions_put_in_anothers_place():
    module = LearnedPositionalEncoding(9, E)
    module.P = nn.Parameter(torch.randn(1, E))
    with pytest.raises(ch.ShapeError, match="max_len is 1"):
        module(X)
    module.P = nn.Parameter(torch.randn(20, E))
    torch.testing.assert_close(module(X, offset=15), X + module.P[15:])


def test_to_torch_reads_the_weights():
    module = MultiHeadAttention(E, 3)
    pruned = copy.deepcopy(module)
    for layer in (pruned.W_q, pruned.W_k, pruned.W_v):
        layer.weight, layer.bias = nn.Parameter(layer.weight[:8]), nn.Parameter(layer.bias[:8])
    pruned.W_o.weight = nn.Parameter(pruned.W_o.weight[:, :8])
    with pytest.raises(ch.UnsupportedError, match=r"\(8, 12\), \(8, 12\), \(8, 12\), \(12, 8\)"):
        pruned.to_torch()
    module.W_k.weight = nn.Parameter(torch.randn(E, 7))  # in_features stays 12
    torch.testing.assert_close(module.to_torch()(X, X[..., :7], X)[0], module(X, X[..., :7], X))
