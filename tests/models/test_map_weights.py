"""Weights that a function changes after the softmax, beside the same by hand."""

import os

import pytest
import torch
import torch.nn.functional as F

import clearhead as ch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")
from small_models import IDS, RIGHT, SIZES, made  # noqa: E402

MapWeights = ch.edits.MapWeights
B, H, L, E = 2, 4, 6, 8
CAUSAL = torch.ones(L, L, dtype=torch.bool).tril()


class Block(torch.nn.Module):
    def forward(self, q, k, v, **more):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **more)


def drawn(heads, seed, dtype=torch.float64, length=L):
    return torch.randn(B, heads, length, E, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def soft(q, k, keep=CAUSAL):
    scores = (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT) * E**-0.5
    return scores.masked_fill(~keep, -torch.inf).softmax(-1).nan_to_num(0.0)


def of_values(weights, v):
    return weights @ v.repeat_interleave(weights.shape[1] // v.shape[1], 1)


def sharper(weights):
    square = weights**2
    return square / square.sum(-1, keepdim=True)


def llama(**more):
    sizes = {**SIZES, "max_position_embeddings": 64, "num_key_value_heads": 2, **more}
    return made("Llama", "ForCausalLM", 10, **sizes)


def test_the_function_is_given_the_chosen_rows_of_neighbouring_heads():
    asked, block = [], Block()
    q, k, v = drawn(H, 0), drawn(2, 1), drawn(2, 2)

    def function(weights):
        asked.append(weights.clone())
        return weights.flip(-1)

    with ch.edit(block, MapWeights(function, heads=[0, 2, 3], queries=[1, 4])):
        output = block(q, k, v, is_causal=True)
    plain = soft(q, k)
    wanted = plain.clone()
    for head, row in ((head, row) for head in (0, 2, 3) for row in (1, 4)):
        wanted[:, head, row] = plain[:, head, row].flip(-1) * CAUSAL[row]  # what the mask hides is 0 again
    torch.testing.assert_close(output, of_values(wanted, v), rtol=1e-12, atol=1e-12)
    for given, heads in zip(asked, ([0], [2, 3]), strict=True):
        torch.testing.assert_close(given, plain[:, heads][:, :, [1, 4]], rtol=1e-12, atol=1e-12)


def test_gradients_are_those_by_hand():
    """By query, key and value, and by a number that the function learns; the function may write to its argument."""
    block, weight = Block(), drawn(H, 9)
    parts = [drawn(H, 0), drawn(2, 1), drawn(2, 2), torch.tensor(1.7, dtype=torch.float64)]
    q, k, v, power = [part.requires_grad_() for part in parts]

    def function(weights):
        weights *= 2.0
        return weights.clamp_min(1e-30) ** power

    with ch.edit(block, MapWeights(function, heads=[1, 2], queries=slice(2, None))):
        output = block(q, k, v, is_causal=True)
    plain = soft(q, k)
    inside = torch.zeros(1, H, L, 1, dtype=torch.bool)
    inside[:, 1:3, 2:] = True
    new = torch.where(inside, (2 * plain).clamp_min(1e-30) ** power * CAUSAL, plain)
    grads = [torch.autograd.grad((one * weight).sum(), parts) for one in (output, of_values(new, v))]
    for mine, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-9)


def test_a_hidden_pair_stays_hidden():
    """Whatever the function gives for it, and whatever its value is; `ForceMask` before it opens the pair."""
    block, q, k, v = Block(), drawn(H, 0), drawn(H, 1), drawn(H, 2)
    keep = torch.ones(L, L, dtype=torch.bool)
    keep[:, 3:] = False
    v[:, :, 4] = torch.nan  # of a key that no query sees
    even = lambda weights: (weights * 0 + 1 / 3) / (weights > 0)  # ∞ where the weight is 0
    with ch.edit(block, MapWeights(even)):
        torch.testing.assert_close(block(q, k, v, attn_mask=keep), v[:, :, :3].mean(2, keepdim=True).expand_as(v))
    v[:, :, 4] = 1.0
    with ch.edit(block, ch.edits.ForceMask(~keep), MapWeights(even)):
        torch.testing.assert_close(block(q, k, v, attn_mask=keep), v[:, :, 3:].mean(2, keepdim=True).expand_as(v))
    none = CAUSAL.clone()
    none[2] = False  # a query without any key
    with ch.edit(block, MapWeights(lambda weights: weights + 1.0), edits := MapWeights(sharper)):
        output = block(q, k, v, attn_mask=none)
    assert edits.heads is None and (output[:, :, 2] == 0).all() and output.isfinite().all()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_generation_is_the_whole_text(attention):
    """In each step the function is given the rows of the new tokens and the columns of all keys."""
    model, sizes = llama(attn_implementation=attention), []

    def function(weights):
        sizes.append(tuple(weights.shape))
        return sharper(weights)

    change = [MapWeights(function, layers=0, heads=[1, 2]), MapWeights(sharper, layers=1, queries=slice(3, 8))]
    with torch.no_grad(), ch.edit(model, *change):
        text = model.generate(IDS[:, :6], max_new_tokens=4, do_sample=False, output_logits=True, **IN_FULL)
        steps = list(dict.fromkeys(sizes))
        whole = model(text.sequences[:, :-1]).logits
        beyond = model(text.sequences[:, :-1], use_cache=False).logits
    assert steps == [(2, 2, 6, 6), (2, 2, 1, 7), (2, 2, 1, 8), (2, 2, 1, 9)]
    torch.testing.assert_close(torch.stack(text.logits, 1), whole[:, 5:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(whole, beyond)
    with torch.no_grad():
        assert (model(text.sequences[:, :-1]).logits - whole).abs().max() > 0.1  # the edits change much


IN_FULL = {"return_dict_in_generate": True, "pad_token_id": 0}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_changes_nothing(attention):
    model = llama(attn_implementation=attention)
    spread = lambda weights: weights.sqrt() + 0.1  # also for padding, which the mask takes away again
    with torch.no_grad(), ch.edit(model, MapWeights(spread)):
        for mask in (RIGHT, RIGHT.flip(1)):
            batch = model(IDS, attention_mask=mask).logits
            for text, words, found in zip(IDS, mask.bool(), batch, strict=True):
                alone = model(text[words][None]).logits[0]
                torch.testing.assert_close(found[words], alone, rtol=1e-4, atol=1e-4)


def test_lengths_and_sinks_of_a_module():
    q, lens, sinks = drawn(H, 0), torch.tensor([3, 6]), torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
    attend = ch.nn.DotProductAttention()

    class Sunk(torch.nn.Module):
        def forward(self, x):
            return ch.attention(x, x, x, sinks=sinks)

    with ch.edit(attend, MapWeights(sharper, heads=slice(1, 3))):
        output = attend(q, q, q, valid_lens=lens)
    plain = soft(q, q, (torch.arange(L) < lens[:, None])[:, None, None])
    wanted = torch.cat([plain[:, :1], sharper(plain[:, 1:3]), plain[:, 3:]], 1)
    torch.testing.assert_close(output, wanted @ q, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(attend.attention_weights.dense(), wanted, rtol=1e-12, atol=1e-12)

    with ch.watch(sunk := Sunk()) as seen, ch.edit(sunk, MapWeights(torch.sqrt)):
        output = sunk(q)
    scores = torch.cat([q @ q.mT * E**-0.5, sinks.view(1, -1, 1, 1).expand(B, -1, L, 1)], -1)
    wanted = scores.softmax(-1)[..., :-1].sqrt()  # the sink's column is not given
    torch.testing.assert_close(output, wanted @ q, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(seen[0].weights.dense(), wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(seen[0].unedited.weights.dense(), scores.softmax(-1)[..., :-1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_float32_in_half_precision(dtype):
    block, q, k, v = Block(), *(drawn(H, seed, dtype) for seed in range(3))
    with ch.watch(block) as seen, ch.edit(block, MapWeights(sharper)):
        output = block(q, k, v)
    wanted = sharper(soft(q.double(), k.double(), torch.ones(L, L, dtype=torch.bool)))
    assert seen[0].factor is None  # the rows sum to 1, so the record is of a softmax
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), wanted @ v.double(), rtol=eps, atol=4 * eps)
    torch.testing.assert_close(seen[0].weights.dense().double(), wanted, rtol=1e-4, atol=1e-6)  # not of `dtype`


def test_an_edit_of_ones_own_changes_weights_by_position():
    class Nearer(ch.edits.Edit):
        def weights(self, weights, spot):
            return weights / (1 + (torch.tensor(spot.rows)[:, None] - torch.tensor(spot.keys)).abs())

    block, q, k, v = Block(), drawn(H, 0), drawn(2, 1), drawn(2, 2)
    with ch.watch(block) as seen, ch.edit(block, Nearer(queries=[2, 5])):
        output = block(q, k, v, is_causal=True)
    wanted = soft(q, k)
    far = (torch.arange(L)[:, None] - torch.arange(L)).abs()
    wanted[:, :, [2, 5]] /= 1 + far[[2, 5]]
    torch.testing.assert_close(output, of_values(wanted, v), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(seen[0].weights.dense(), wanted, rtol=1e-12, atol=1e-12)


def test_numbers_below_zero_run_and_are_not_recorded():
    """Also on a backend that returns its weights."""
    block, q, k, v = Block(), drawn(H, 0), drawn(2, 1), drawn(2, 2)
    less = MapWeights(lambda weights: weights - 0.2, heads=1)
    with ch.edit(block, less):
        output = block(q, k, v, is_causal=True)
    wanted = soft(q, k)
    wanted[:, 1] = (wanted[:, 1] - 0.2) * CAUSAL
    torch.testing.assert_close(output, of_values(wanted, v), rtol=1e-12, atol=1e-12)
    with pytest.warns(UserWarning, match=r"not in the record.*weights below 0, down to -0\.17"):  # noqa: SIM117
        with ch.watch(block), ch.edit(block, less):
            assert torch.equal(block(q, k, v, is_causal=True), output)
    eager = llama(attn_implementation="eager")
    with torch.no_grad(), ch.edit(eager, less):
        returned = eager(IDS, output_attentions=True).attentions[0]
    with torch.no_grad():
        plain = eager(IDS, output_attentions=True).attentions[0]
    plain[:, 1] = (plain[:, 1] - 0.2).tril()
    torch.testing.assert_close(returned, plain)


def test_random_numbers_run_and_are_not_recorded():
    block, q = Block(), drawn(H, 0)
    noisy = MapWeights(lambda weights: weights * torch.rand_like(weights))
    with ch.edit(block, noisy):
        assert not torch.equal(block(q, q, q), block(q, q, q))
    with pytest.warns(UserWarning, match="MapWeights gives other results each time"):  # noqa: SIM117
        with ch.watch(block), ch.edit(block, noisy):
            block(q, q, q)


WRONG = {
    "nothing": (lambda w: None, "gave a NoneType; expected weights (2, 4, 6, 6) (B, h, q, Lk)"),
    "a row": (lambda w: w[:, :, :1], "gave (2, 4, 1, 6) of torch.float64 on cpu; expected weights"),
    "the mean of heads": (lambda w: w.mean(1), "gave (2, 6, 6)"),
    "another dtype": (lambda w: w.float(), "gave (2, 4, 6, 6) of torch.float32"),
    "a mask": (lambda w: w > 0.1, "of torch.bool"),
    "no memory": (lambda w: w.to("meta"), "on meta"),
}


@pytest.mark.parametrize("name", WRONG)
def test_another_result_is_an_error(name):
    function, said = WRONG[name]
    block, q = Block(), drawn(H, 0)
    with pytest.raises(ch.ShapeError) as error, ch.edit(block, MapWeights(function)):
        block(q, q, q)
    assert str(error.value).startswith("MapWeights: function gave") and said in str(error.value)


def test_a_sweep_and_its_estimate():
    """Cells side by side are the cells one by one; an estimate of a small change is its effect."""
    model = llama()
    metric = ch.models.logit_difference(token=7)
    over = lambda layer, head: MapWeights(lambda w: 0.9 * w + 0.1 * sharper(w), layer, head)
    one, batch = (ch.models.sweep(model, over, IDS, metric, batch=size).values for size in (1, 4))
    torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(batch), rtol=1e-3, atol=1e-4)
    assert torch.as_tensor(one).abs().max() > 1e-2
    small = lambda layer, head: MapWeights(lambda w: w * (1 - 1e-3 * (w > 0.3)), layer, head)
    for row in ch.models.attribution_patching(model.double(), small, IDS, metric, exact=3).checked:
        assert abs(row["error"]) < 0.05 * abs(row["exact"])


def test_weights_given_to_a_score_that_a_function_changes():
    """What a function makes of a score of 0 is no part of weights that are given."""
    q, given = drawn(H, 0), soft(drawn(H, 3), drawn(H, 4))

    class Far(torch.nn.Module):
        def forward(self, x):
            return ch.attention(x, x, x, score=ch.Dot().then(lambda s, b, h, i, j: s + 0.3 * j))

    far = Far()
    with ch.watch(far) as seen, ch.edit(far, ch.edits.Freeze(given)):
        torch.testing.assert_close(far(q), given @ q, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(seen[0].weights.dense(), given, rtol=1e-9, atol=1e-9)
    with ch.watch(far) as seen, ch.edit(far, MapWeights(sharper, heads=[0, 3])):
        output = far(q)
    wanted = (q @ q.mT * E**-0.5 + 0.3 * torch.arange(L)).softmax(-1)
    wanted[:, [0, 3]] = sharper(wanted[:, [0, 3]])
    torch.testing.assert_close(output, wanted @ q, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(seen[0].weights.dense(), wanted, rtol=1e-9, atol=1e-9)


def test_what_is_no_function_is_an_error():
    with pytest.raises(ch.ClearheadError, match=r"MapWeights: function is 0\.5; expected a function of the weights"):
        MapWeights(0.5)
