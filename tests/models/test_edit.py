"""edit(): beside eager models whose weights are changed by hand; and everything else stays, to the bit."""

import contextlib
import functools
import os
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import clearhead as ch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")
from small_models import GROUPED, SIZES, T5, larger, made  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

IDS = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(0))
LEFT = torch.tensor([[1] * 12, [0] * 4 + [1] * 8])
SMALL = {**SIZES, "max_position_embeddings": 64}
SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
STEADY = T5 | {"dropout_rate": 0.0}


def make(name, options):
    torch.manual_seed(0)
    name = name.split(",")[0]
    family = "Gemma3Text" if "Gemma3" in name else name.replace("ForCausalLM", "").replace("Model", "")
    config = getattr(transformers, family + "Config")
    return larger(getattr(transformers, name)(config(**options)).eval(), 4)


BIAS = torch.randn(12, 12, generator=torch.Generator().manual_seed(3))


def test_all_else_is_the_backends_to_the_bit():
    model = make("LlamaModel", SMALL | GROUPED)
    given = []
    model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    with torch.no_grad():
        plain = model(input_ids=IDS).last_hidden_state
        with ch.edit(model, ch.edits.Knockout(0, [1, 2], [3, 9], 0), ch.edits.ScaleHeads(0, 3, 2.0, slice(10, None))):
            edited = model(input_ids=IDS).last_hidden_state
    before, after = (t.view(2, 12, 4, 8) for t in given)
    moved = (before != after).any(-1)[0].nonzero().tolist()
    assert moved == [[3, 1], [3, 2], [9, 1], [9, 2], [10, 3], [11, 3]]
    assert torch.equal(plain[:, :3], edited[:, :3])


def test_edits_meet():
    """Two on one head: both; on others: each its own."""
    x = torch.randn(2, 3, 9, 4, generator=torch.Generator().manual_seed(0))
    block = Direct(causal=False)
    edits = ch.edits.Knockout(heads=[0, 1], queries=slice(2, 6), keys=3), ch.edits.Knockout(heads=1, keys=5, after=True)
    with ch.edit(block, *edits, ch.edits.ScaleHeads(heads=[1, 2], factor=3.0, queries=[5, 8])):
        got = block(x)
    scores = x @ x.mT / 2
    scores[:, :2, 2:6, 3] = -torch.inf
    weights = scores.softmax(-1)
    weights[:, 1, :, 5] = 0.0
    wanted = weights @ x
    wanted[:, 1:, [5, 8]] *= 3.0
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


class Direct(torch.nn.Module):
    def __init__(self, causal=True, dropout_p=0.0):
        super().__init__()
        self.causal, self.dropout_p = causal, dropout_p

    def forward(self, x, key=None, **more):
        key = x if key is None else key
        more = {"is_causal": self.causal, "dropout_p": self.dropout_p} | more
        return F.scaled_dot_product_attention(x, key, key, **more)


def test_torchs_encoder_leaves_its_fast_path():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 4, 24, batch_first=True, dropout=0.0)
    model = torch.nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 7, 16)
    with torch.no_grad():
        plain = model(x)
        with ch.edit(model, ch.edits.ScaleHeads(heads=1)):
            got = model(x)
    changed = torch.nn.TransformerEncoder(layer, 2).train()
    changed.load_state_dict(model.state_dict())
    with torch.no_grad():
        for one in changed.layers:  # the head's columns of the projection
            one.self_attn.out_proj.weight[:, 4:8] = 0.0
        torch.testing.assert_close(got, changed(x), rtol=1e-5, atol=1e-5)
    assert float((plain - got).abs().max()) > 1e-2


class Own(torch.nn.Module):
    def forward(self, x):
        return ch.attention(x, x, x, score=ch.Gaussian(1.5), mask=ch.Causal(), bias=ch.ALiBi(x.shape[1]))


def test_clearheads_own():
    x = torch.randn(2, 3, 9, 4, generator=torch.Generator().manual_seed(0))
    model = Own()
    plain = model(x)
    with ch.edit(model, ch.edits.Knockout(heads=1, keys=2)):
        got = model(x)
    keep = torch.ones(9, 9, dtype=torch.bool).tril()
    keep[2:, 2] = False
    wanted = ch.attention(x, x, x, score=ch.Gaussian(1.5), mask=keep, bias=ch.ALiBi(3))
    torch.testing.assert_close(got[:, 1], wanted[:, 1], rtol=1e-5, atol=1e-6)
    assert torch.equal(got[:, 0], plain[:, 0]) and torch.equal(got[:, 2], plain[:, 2])


def test_gradients_flow_through_an_edit():
    x = torch.randn(1, 2, 6, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    block = Direct(causal=False)
    with ch.edit(block, ch.edits.Knockout(heads=1, keys=2), ch.edits.ScaleHeads(heads=0, factor=0.5, queries=3)):
        got = block(x)
    scores = x @ x.mT / 2
    cut = torch.zeros(2, 6, 6, dtype=torch.bool)
    cut[1, :, 2] = True
    factor = torch.ones(2, 6, 1)
    factor[0, 3] = 0.5
    wanted = scores.masked_fill(cut, -torch.inf).softmax(-1) @ x * factor
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    grads = [torch.autograd.grad(output.square().sum(), x)[0] for output in (got, wanted)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


SIX = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6} | {
    "return_dict_in_generate": True,
    "output_logits": True,
}
GENERATIONS = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "prefill in chunks": {"prefill_chunk_size": 5},
}


@pytest.mark.parametrize("how", GENERATIONS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_positions_are_absolute_in_generations(name, padded, how):
    """The steps of a generation give the logits of one forward pass over the whole, both edited."""
    model = make(name, SMALL | GROUPED | (SLIDING if "Gemma" in name else {}))
    given = {"attention_mask": LEFT} if padded else {}
    edits = [
        ch.edits.Knockout(0, [0, 2], slice(9, 15), [6, 11, 12]),
        ch.edits.ScaleHeads(1, 1, 0.5, queries=[10, 14]),
        ch.edits.AddBias(torch.randn(40, 40, generator=torch.Generator().manual_seed(1)), layers=0, heads=3),
    ]
    if not padded:  # else the mask would show padding
        edits.append(ch.edits.ForceMask(ch.Causal() & ch.SlidingWindow(before=5, after=0), layers=1, heads=[2, 3]))
    with torch.no_grad():
        with ch.edit(model, *edits):
            found = model.generate(IDS, **given, **SIX, **GENERATIONS[how])
        whole = found.sequences[:, :-1]
        mask = {"attention_mask": F.pad(LEFT, (0, whole.shape[1] - 12), value=1)} if padded else {}
        with ch.edit(model, *edits):
            logits = model(whole, **mask, use_cache=False).logits[:, 11:]
        plain = model(whole, **mask, use_cache=False).logits[:, 11:]
    assert float((plain - logits).abs().max()) > 1e-2
    torch.testing.assert_close(torch.stack(found.logits, 1), logits, rtol=1e-3, atol=1e-3)


NUMBERS = torch.randn(4, 15, 15, generator=torch.Generator().manual_seed(2))
SEEN = (NUMBERS > 0) | torch.eye(15).bool()
LOW = torch.ones(15, 15).tril().bool()
BIASES = ch.DenseBias(NUMBERS), ch.DenseBias(NUMBERS[0])
MASKS = ch.DenseMask(SEEN), ch.DenseMask(SEEN[0])
MATRICES = {  # an edit by an object that holds a matrix of all heads, and the same by its numbers alone
    "bias": lambda: (ch.edits.AddBias(BIASES[0]), ch.edits.AddBias(NUMBERS)),
    "bias of one head": lambda: (ch.edits.AddBias(BIASES[1], 0, 1), ch.edits.AddBias(NUMBERS[0], 0, 1)),
    "sum": lambda: (ch.edits.AddBias(BIASES[0] + BIASES[1]), ch.edits.AddBias(NUMBERS + NUMBERS[0])),
    "mask": lambda: (
        ch.edits.ForceMask(MASKS[1] & ch.Causal(), heads=2),
        ch.edits.ForceMask(SEEN[0] & LOW, heads=2),
    ),
    "masks": lambda: (
        ch.edits.ForceMask(ch.Causal() & ~(~MASKS[0] & ~MASKS[1])),
        ch.edits.ForceMask((SEEN | SEEN[0]) & LOW),
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("kind", MATRICES)
def test_a_matrix_of_the_whole_sequence_serves_each_step_of_a_cache(kind):
    model, (edit, plain) = make("LlamaForCausalLM", SMALL | GROUPED), MATRICES[kind]()
    with ch.edit(model, plain):
        wanted = model(IDS, use_cache=False).logits
    assert (wanted - model(IDS, use_cache=False).logits).abs().max() > 1e-3
    cache, found = transformers.DynamicCache(), []
    with ch.edit(model, edit):
        torch.testing.assert_close(model(IDS, use_cache=False).logits, wanted, rtol=1e-4, atol=1e-5)
        for part in (IDS[:, :4], IDS[:, 4:5], IDS[:, 5:]):
            found.append(model(part, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(found, 1), wanted, rtol=1e-4, atol=1e-5)


def test_cross_attention_counts_queries_by_the_decoders_cache():
    model = transformers_t5()
    edits = [
        ch.edits.Knockout("decoder.block.0.layer.1.*", None, [2, 4], [0, 1, 2]),
        ch.edits.ScaleHeads("encoder.*", 1),
    ]
    with torch.no_grad():
        with ch.edit(model, *edits):
            found = model.generate(
                IDS,
                do_sample=False,
                max_new_tokens=6,
                min_new_tokens=6,
                return_dict_in_generate=True,
                output_logits=True,
            )
            logits = model(input_ids=IDS, decoder_input_ids=found.sequences[:, :-1], use_cache=False).logits
        plain = model(input_ids=IDS, decoder_input_ids=found.sequences[:, :-1], use_cache=False).logits
    torch.testing.assert_close(torch.stack(found.logits, 1), logits, rtol=1e-3, atol=1e-3)
    assert float((plain - logits).abs().max()) > 1e-2


def transformers_t5():
    return made("T5", "ForConditionalGeneration", 2, **STEADY, decoder_start_token_id=0)


def test_gradients_reach_t5s_position_bias():
    model = make("T5Model", STEADY).double()
    ids = {"input_ids": IDS, "decoder_input_ids": IDS[:, :5]}
    mixing = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))

    def grads(*edits):
        model.zero_grad()
        with ch.edit(model, *edits) if edits else contextlib.nullcontext():
            output = model(**ids).last_hidden_state
        (output * mixing).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain, edited = grads(), grads(ch.edits.ScaleHeads(factor=1.0))
    assert plain.keys() == edited.keys()
    for name, grad in plain.items():
        near = 1e-9 * float(grad.abs().max())
        torch.testing.assert_close(edited[name], grad, rtol=1e-6, atol=near)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_are_edited_again(reentrant):
    model = make("LlamaModel", SMALL | GROUPED).train()
    given = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def grads():
        model.zero_grad()
        with ch.edit(model, ch.edits.Knockout(0, [1, 2], slice(3, None), [0, 2]), ch.edits.ScaleHeads(1, 0, 0.3)):
            model(inputs_embeds=given, use_cache=False).last_hidden_state.square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    wanted = grads()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    for one, other in zip(grads(), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


@pytest.mark.parametrize("kind", ["knockout", "patch", "own", "nested", "whole model", "own checkpoints"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_backward_pass_after_the_with(reentrant, kind):
    """A checkpoint computes layers again, without the edit: its error says so. Without one the gradients are right."""
    model = make("LlamaModel", SMALL | GROUPED).train()
    given = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with ch.watch(model, values=True) as values, torch.no_grad():
        model(inputs_embeds=given.flip(1), use_cache=False)
    cut = ch.edits.Knockout(0, [1, 2], slice(3, None), [0, 2])
    one = {"patch": ch.edits.Patch(values, 0, [1, 2], "value"), "own": ch.edits.MapWeights(torch.square, 0)}.get(
        kind, cut
    )

    def run(checkpointed):
        if checkpointed and kind == "whole model":
            called = functools.partial(model, use_cache=False)
            return checkpoint(lambda x: called(inputs_embeds=x)[0], given, use_reentrant=reentrant).square().sum()
        if checkpointed and kind == "own checkpoints":
            before = checkpoint(torch.sin, given, use_reentrant=reentrant)
            x = model(inputs_embeds=before, use_cache=False)[0]
            return x.square().sum() + checkpoint(torch.sin, x, use_reentrant=reentrant).sum()
        return model(inputs_embeds=given, use_cache=False)[0].square().sum()

    def after(checkpointed):
        with ch.edit(model, one):
            if kind != "nested":
                return run(checkpointed)
            with ch.edit(model, ch.edits.ScaleHeads(1, 0, 0.3)):
                return run(checkpointed)

    if kind != "nested":
        with ch.edit(model, one):
            (wanted,) = torch.autograd.grad(run(False), given)
        torch.testing.assert_close(torch.autograd.grad(after(False), given)[0], wanted)
    if kind not in ("whole model", "own checkpoints"):
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
    if kind == "own checkpoints":  # the edited calls are not in them
        after(True).backward()
        return
    loss = after(True)
    with pytest.raises(ch.ClearheadError, match=r"Call backward\(\) inside the `with`"):
        loss.backward()
    loss = after(True)
    with ch.edit(model, ch.edits.ScaleHeads(0, 3)):  # another one
        run(True)
        with pytest.raises(ch.ClearheadError, match=r"Call backward\(\) inside the `with`"):
            loss.backward()
    given.grad = None
    model.zero_grad()
    model(inputs_embeds=given, use_cache=False)[0].sum().backward()  # nothing stays behind
    assert given.grad is not None


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("who", ["watch", "gradients", "statistics", "lazy", "monitor"])
def test_a_backward_pass_after_what_only_looks(who, reentrant):
    model = make("LlamaModel", SMALL | GROUPED).train()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    given = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    looks = {
        "watch": lambda: ch.watch(model, values=True),
        "gradients": lambda: ch.watch(model, gradients=True),
        "statistics": lambda: ch.models.statistics(model, ch.reductions.Entropy(), fuse=True),
        "lazy": lambda: ch.models.lazy_attentions(model),
        "monitor": lambda: ch.models.monitor(model),
    }

    def grads(look):
        model.zero_grad()
        with look():
            loss = model(inputs_embeds=given, use_cache=False, output_attentions=who == "lazy")[0].square().sum()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    wanted = grads(contextlib.nullcontext)
    torch.testing.assert_close(grads(looks[who]), wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max()))


def test_edits_of_one_model_nest_and_of_its_parts_do_not():
    """Of two edits of overlapping models, one would be computed without what the other changes."""
    x = torch.randn(1, 2, 6, 4, generator=torch.Generator().manual_seed(0))
    block, holder = Direct(), torch.nn.Sequential(Direct())
    refused = pytest.raises(ch.ClearheadError, match="at work on this model")
    with ch.edit(block, ch.edits.ScaleHeads(heads=0, factor=0.5)):
        with refused, ch.edit(torch.nn.Sequential(block), ch.edits.ScaleHeads(heads=0)):
            pass
        with ch.edit(holder, ch.edits.ScaleHeads(heads=1)):  # another model
            assert float(holder(x)[:, 1].abs().max()) == 0.0
        with ch.edit(block, ch.edits.ScaleHeads(heads=[0, 1], factor=0.5)):
            quartered = block(x)
        halved = block(x)
        found = []

        def elsewhere():
            try:
                with ch.edit(block, ch.edits.ScaleHeads(heads=0)):
                    found.append(None)
            except ch.ClearheadError as error:
                found.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert "another thread" in str(found[0])
    torch.testing.assert_close(quartered, block(x) * torch.tensor([0.25, 0.5]).view(2, 1, 1))
    torch.testing.assert_close(halved[:, 0], block(x)[:, 0] / 2)
    with ch.edit(block, ch.edits.ScaleHeads(heads=0)):  # the first is over
        block(x)
    unused = pytest.raises(ch.ClearheadError, match=r"heads=0, .* changed nothing")
    inner = ch.edits.ScaleHeads(layers=0, heads=0, queries=99)  # it is told of at the end of its own `with`
    with ch.edit(block, ch.edits.ScaleHeads(heads=1)), unused, ch.edit(block, inner):
        block(x)
    with ch.edit(block, ch.edits.ScaleHeads(heads=1)), ch.edit(block, ch.edits.ScaleHeads(heads=0)):
        block(x)  # the outer edit is used by the inner `with` alone


def test_layers_that_share_the_keys_of_another():
    config = transformers.Gemma3nTextConfig(
        **{**SMALL, **GROUPED, "num_hidden_layers": 4, "intermediate_size": [64] * 4, "sliding_window": 4},
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=100,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 4,
        altup_num_inputs=2,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=1,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3nForCausalLM(config).eval()
    edits = [
        ch.edits.Knockout([2, 3], [0, 2], slice(9, 15), [9, 11, 12]),
        ch.edits.ScaleHeads(3, 1, 0.5, queries=[10, 14]),
    ]
    with torch.no_grad(), ch.edit(model, *edits):
        found = model.generate(IDS, **SIX)
        logits = model(found.sequences[:, :-1], use_cache=False).logits[:, 11:]
    torch.testing.assert_close(torch.stack(found.logits, 1), logits, rtol=1e-3, atol=1e-3)


def test_a_row_that_a_finite_mask_blinds():
    x = torch.randn(1, 1, 5, 4, generator=torch.Generator().manual_seed(0))
    keep = torch.ones(5, 5, dtype=torch.bool).tril()
    keep[2] = False
    finite, block = torch.zeros(5, 5).masked_fill(~keep, torch.finfo(torch.float32).min), Direct(causal=False)
    with ch.edit(block, ch.edits.ForceMask(ch.Causal())):
        forced = block(x, attn_mask=finite)
    torch.testing.assert_close(forced, F.scaled_dot_product_attention(x, x, x, is_causal=True))
    with ch.edit(block, ch.edits.AddBias(BIAS[:5, :5])):
        added = block(x, attn_mask=finite)
    torch.testing.assert_close(added, block(x, attn_mask=finite + BIAS[:5, :5]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("query, key", [((2, 3, 2, 6, 4), None), ((1, 2, 6, 4), (3, 2, 6, 4)), ((4, 6, 8), (2, 6, 8))])
def test_shapes_of_direct_calls(query, key):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(query, generator=generator).requires_grad_()
    k = q if key is None else torch.randn(key, generator=generator).requires_grad_()
    options = {"enable_gqa": True} if len(query) == 3 else {}
    block = Direct(causal=False)
    plain = block(q, k, **options)
    with ch.edit(block, ch.edits.ScaleHeads(heads=1, factor=0.0)):
        edited = block(q, k, **options)
    wanted = plain.clone()
    wanted.select(-3, 1).zero_()
    assert torch.equal(edited, wanted)
    with ch.watch(block, gradients=True) as seen:
        output = block(q, k, **options)
    assert torch.equal(output, plain)
    output.transpose(0, -2).contiguous().square().sum().backward()
    assert seen[0].head_importance.shape == seen[0].query.shape[:2] or key is not None
    assert torch.equal(seen[0].output.reshape(plain.shape), plain)


def test_clearheads_cache_tells_positions():
    torch.manual_seed(0)
    model, x = ch.nn.MultiHeadAttention(16, 4).eval(), torch.randn(2, 8, 16)
    edits = ch.edits.ScaleHeads(heads=2, factor=0.5, queries=[4, 6]), ch.edits.Knockout(heads=1, queries=[5, 7], keys=0)
    with torch.no_grad(), ch.edit(model, *edits):
        whole = model(x, x, x, mask=ch.Causal())
        for parts in ([(0, 4), (4, 5), (5, 8)], [(0, 3), (3, 8)]):
            cache = ch.nn.KeyValueCache()
            steps = [
                model(x[:, a:b], x[:, a:b], x[:, a:b], mask=ch.Causal(), cache=cache)  # equal, and not the same object
                for a, b in parts
            ]
            torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-5, atol=1e-6)


def test_bad_input():
    block, x = Direct(), torch.randn(1, 2, 6, 4)
    for edit, message in (
        (ch.edits.ScaleHeads(heads=2), "ScaleHeads: heads is 2, and Direct has 2 heads"),
        (ch.edits.ScaleHeads(layers="other.*"), "changed nothing: no call has such a layer. Calls were made by"),
        (ch.edits.ScaleHeads(layers=[0, 3]), "ScaleHeads: no call was made by a layer 3; calls were made by 'Direct'"),
        (ch.edits.Knockout(keys=6), "changed nothing"),
        (ch.edits.ScaleHeads(queries=np.int64(9)), "with queries at positions 0 … 5"),
        (ch.edits.ForceMask(torch.ones(4, 4, dtype=torch.bool)), "ForceMask: mask has shape"),
        (ch.edits.AddBias(torch.ones(3, 6, 6)), "AddBias: bias"),
    ):
        with pytest.raises(ch.ClearheadError, match=message), ch.edit(block, edit):
            block(x)
    dropping = Direct(dropout_p=0.1)
    with pytest.raises(ch.UnsupportedError, match="dropout"), ch.edit(dropping, ch.edits.ScaleHeads(heads=0)):
        dropping(x)
    with pytest.raises(ch.UnsupportedError, match="compiled"):
        ch.edit(torch.compile(block), ch.edits.ScaleHeads(heads=0))
    assert torch.equal(block(x), F.scaled_dot_product_attention(x, x, x, is_causal=True))  # all is as before


def test_an_edit_of_a_call_without_queries():
    block, nothing = ch.nn.DotProductAttention(), torch.zeros(1, 2, 0, 8)
    unused = pytest.raises(ch.ClearheadError, match=r"changed nothing.* numbered from 0, without queries\.$")
    with unused, ch.edit(block, ch.edits.ScaleHeads(heads=0)):
        block(nothing, nothing, nothing)
