"""Modules of attention, edited and recorded, beside their attention by hand in float64: drawn at random."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fuzz_edits import Draw

import clearhead as ch

E, H = 16, 4


def drawn_edit(draw, queries, keys, more):
    """An edit, and what it does: its kind, where, and with what. `more`: keys that the module adds."""
    heads, rows, columns = draw.some(H), draw.some(queries), draw.some(keys)
    kind, at = draw.one("knockout", "after", "scale", "bias", "force"), {"heads": heads, "queries": rows}
    every = draw.one(1, H)
    what = {
        "knockout": columns,
        "after": columns,
        "scale": draw.one(0.0, 0.5, -2.0),
        "bias": draw.normal(1, every, queries, keys + more),
        "force": draw.normal(1, every, queries, keys + more) > -0.3,
    }[kind]
    made = {
        "knockout": lambda: ch.edits.Knockout(**at, keys=what),
        "after": lambda: ch.edits.Knockout(**at, keys=what, after=True),
        "scale": lambda: ch.edits.ScaleHeads(**at, factor=what),
        "bias": lambda: ch.edits.AddBias(what, **at),
        "force": lambda: ch.edits.ForceMask(what, **at),
    }[kind]()
    return made, (kind, heads, rows, what)


def by_hand(scores, seen, edits):
    """The edited weights, float64 (B, H, Lq, Lk)."""
    seen, gone = seen.expand_as(scores).clone(), torch.zeros_like(scores, dtype=torch.bool)
    factor = torch.ones(*scores.shape[:3], 1, dtype=torch.float64)
    for kind, heads, rows, what in edits:
        here = torch.zeros(1, *scores.shape[1:3], 1, dtype=torch.bool)
        here[:, torch.tensor(heads)[:, None], torch.tensor(rows)] = True
        column = torch.zeros(scores.shape[-1], dtype=torch.bool)
        if kind in ("knockout", "after"):
            column[what] = True
        if kind == "knockout":
            seen &= ~(here & column)
        elif kind == "after":
            gone |= here & column
        elif kind == "scale":
            factor = torch.where(here, factor * what, factor)
        elif kind == "bias":
            scores = torch.where(here, scores + what.double(), scores)
        else:
            seen = torch.where(here, what, seen)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    return weights.masked_fill(gone, 0.0) * factor


def close(got, wanted):
    torch.testing.assert_close(got.detach().double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("number", range(40))
def test_torchs_module_and_its_drop_in(number, ours):
    """With and without a batch, in each layout, with keys that it adds, and with the weights that it returns."""
    draw = Draw(number)
    torch.manual_seed(number)
    cross, batched, first = (draw.one(True, False) for _ in range(3))
    batch, queries = draw.one(1, 2, 3) if batched else 1, draw.one(1, 5, 7)
    keys = draw.one(1, 4, 7) if cross else queries
    added = {} if ours else {"add_bias_kv": draw.one(True, False), "add_zero_attn": draw.one(True, False)}
    more = sum(added.values())
    module = torch.nn.MultiheadAttention(E, H, batch_first=first, **added).train(draw.one(True, False))
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(2) if weight.ndim > 1 else weight.normal_()
    wanted_module = module
    if ours:
        module = ch.nn.TorchMultiheadAttention.from_torch(module)
    q = draw.normal(batch, queries, E)
    k = draw.normal(batch, keys, E) if cross else q
    hidden = draw.one(None, draw.normal(queries, keys) > 0.5, draw.normal(batch * H, queries, keys) > 0.5)
    if hidden is not None:
        hidden[..., 0] = False
    drawn = [drawn_edit(draw, queries, keys, more) for _ in range(draw.one(1, 2, 3))]
    edits, changes = zip(*drawn, strict=True)

    m = wanted_module
    projected = [
        x @ w.T + b for x, w, b in zip((q, k, k), m.in_proj_weight.chunk(3), m.in_proj_bias.chunk(3), strict=True)
    ]
    for i, learnt in ((1, m.bias_k), (2, m.bias_v)):
        rows = [projected[i]] + ([learnt.expand(batch, 1, E)] if learnt is not None else [])
        projected[i] = torch.cat([*rows, torch.zeros(batch, int(m.add_zero_attn), E)], 1)
    by_head = [x.detach().double().unflatten(-1, (H, -1)).transpose(1, 2) for x in projected]
    seen = torch.ones(batch, 1, queries, keys, dtype=torch.bool)
    if hidden is not None:
        seen = seen & ~(hidden if hidden.ndim == 2 else hidden.view(batch, H, queries, keys))
    seen = F.pad(seen, (0, more), value=True)
    weights = by_hand(by_head[0] @ by_head[1].mT / (E // H) ** 0.5, seen, changes)
    output = (weights @ by_head[2]).transpose(1, 2).flatten(2) @ m.out_proj.weight.detach().double().T
    output = output + m.out_proj.bias.detach().double()

    def given(x):
        return x[0] if not batched else x if first else x.transpose(0, 1)

    average, x = draw.one(True, False), given(q)
    y = given(k) if cross else x
    for around in (False, True):
        watching, editing = ch.watch(module, values=True), ch.edit(module, *edits)
        with watching if around else editing as a, editing if around else watching as b:
            got, returned = module(x, y, y, attn_mask=hidden, average_attn_weights=average)
        call = (a if around else b)[0]
        close(got, given(output))
        mean = weights.mean(1) if average else weights
        close(returned, mean if batched else mean[0])
        close(call.weights.dense(), weights)
        close(call.output, weights @ by_head[2])
        if ours:
            close(module.attention_weights.dense(), weights)


def own_modules(draw):
    module = ch.nn.MultiHeadAttention(E, H, bias=draw.one(True, False))
    return draw.one(module, ch.nn.DotProductAttention())


@pytest.mark.parametrize("number", range(20))
def test_weights_that_clearheads_modules_keep(number):
    """`attention_weights` are those that ran, whatever reads them and when."""
    draw = Draw(number)
    torch.manual_seed(number)
    module, x = own_modules(draw), draw.normal(2, 6, E)
    module.record_gradients = draw.one(True, False)
    several = isinstance(module, ch.nn.MultiHeadAttention)
    call = (x, x, x) if several else tuple(x.unflatten(-1, (H, -1)).transpose(1, 2) for _ in range(3))
    mask = draw.one(None, ch.Causal())
    edits, changes = zip(*[drawn_edit(draw, 6, 6, 0) for _ in range(draw.one(1, 2))], strict=True)
    module(*call, mask=mask)
    plain = module.attention_weights.dense().detach().double()
    with ch.watch(module) as seen, ch.edit(module, *edits):
        module(*call, mask=mask)
        inside = module.attention_weights.dense()
    problem = seen[0].problem
    q, k = (call[0], call[1]) if not several else (seen[0].query, seen[0].key)
    assert problem.sizes.shape == (2, H, 6, 6)
    allowed = torch.ones(6, 6, dtype=torch.bool)
    wanted = by_hand(q.double() @ k.double().mT / 2.0, allowed if mask is None else allowed.tril(), changes)
    close(inside, wanted)
    close(module.attention_weights.dense(), wanted)
    close(seen[0].weights.dense(), wanted)
    assert np.isfinite(plain.numpy()).all()
    module(*call, mask=mask)
    close(module.attention_weights.dense(), plain)


class Inner(ch.edits.Edit):
    """An edit that computes attention itself."""

    def before(self, problem, spot):
        return problem._replace(value=ch.attention(problem.value, problem.value, problem.value))


class Block(torch.nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend

    def forward(self, x):
        return self.attend(x, x, x)


@pytest.mark.parametrize("attend", [F.scaled_dot_product_attention, ch.attention])
@pytest.mark.parametrize("heads", [0, 2, [1, 2], None])
def test_attention_inside_an_edit_is_none_of_the_models(attend, heads):
    x = torch.rand(1, 4, 5, 8, generator=torch.Generator().manual_seed(0))
    block = Block(attend)
    with ch.watch(block) as seen, ch.edit(block, Inner(heads=heads)):
        output = block(x)
    wanted = F.scaled_dot_product_attention(x, x, F.scaled_dot_product_attention(x, x, x))
    some = range(4) if heads is None else np.atleast_1d(heads)
    for head in range(4):
        plain = F.scaled_dot_product_attention(x, x, x)
        torch.testing.assert_close(output[:, head], (wanted if head in some else plain)[:, head], atol=1e-5, rtol=1e-4)
    assert len(seen.calls) == 1


@pytest.mark.parametrize("number", range(8))
def test_a_causal_flag_with_more_keys_than_queries(number):
    """Query 0 stands at key 0, and the keys after the last query are there, for a mask that is forced."""
    draw = Draw(number)
    q, k = draw.normal(1, H, 4, 8), draw.normal(1, H, 7, 8)
    edits, changes = zip(*[drawn_edit(draw, 4, 7, 0) for _ in range(2)], strict=True)
    block = torch.nn.Module()
    block.forward = lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True)
    with ch.edit(block, *edits):
        output = block(q, k)
    scores = q.double() @ k.double().mT / 8**0.5
    close(output, by_hand(scores, torch.ones(4, 7, dtype=torch.bool).tril(), changes) @ k.double())


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("average", [False, True])
def test_changed_rows_of_returned_weights_have_no_gradient(ours, average):
    """Neither that of the edit, nor that of the weights before it; the other rows keep theirs."""
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(E, H, batch_first=True)
    module = ch.nn.TorchMultiheadAttention.from_torch(module) if ours else module
    x = torch.randn(2, 5, E)

    def gradient(row, *edits):
        module.zero_grad()
        with ch.edit(module, *edits):
            module(x, x, x, average_attn_weights=average)[1][..., row, :].square().sum().backward()
        return module.in_proj_weight.grad.clone()

    changed, elsewhere = ch.edits.ScaleHeads(factor=0.5, queries=1), ch.edits.ScaleHeads(factor=0.5, queries=3)
    assert not gradient(1, changed).any()
    assert gradient(1, elsewhere).any()
