"""A generation's steps as one matrix: against a full forward of eager attention over the final sequence."""

import copy
import functools
import itertools
import os
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import clearhead as ch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")
from small_models import IDS, T5  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:joined. these rows are beams")  # test_joined_beams.py

STEPS = 7
LEFT = torch.tensor([[1] * 9, [0, 0, 0, 1, 1, 1, 1, 1, 1]])
SMALL = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None, "initializer_range": 0.15}
BART = {"vocab_size": 100, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4}
BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "init_std": 0.15}


def llama(**options):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **options))


def gemma():
    """Every other layer has a window of four keys."""
    kinds = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=4, layer_types=kinds)
    return transformers.Gemma3ForCausalLM(config)


def gpt_oss():
    """Sinks, a window, and eager attention alone: its masks are finite floats."""
    config = {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": 4}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**SMALL, **config, attn_implementation="eager"))


def t5():
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**T5, pad_token_id=0, decoder_start_token_id=0)
    )
    for block in (model.encoder.block[0], model.decoder.block[0]):
        torch.nn.init.normal_(block.layer[0].SelfAttention.relative_attention_bias.weight)
    return model


def bart():
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**BART, decoder_start_token_id=2))


def made(make, seed=0):
    torch.manual_seed(seed)
    model = make().eval()
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    return model


def generated(model, ids=IDS, mask=None, values=False, **options):
    """What was seen, and the sequences that the last step had run on."""
    options = {"max_new_tokens": STEPS, "do_sample": False, "attention_mask": mask, "pad_token_id": 0} | options
    if mask is None:
        options["attention_mask"] = torch.ones_like(ids)
    ran, prepare = [], model.prepare_inputs_for_generation

    @functools.wraps(prepare)
    def preparing(ids, *args, **more):
        ran.append(ids)
        return prepare(ids, *args, **more)

    model.prepare_inputs_for_generation = preparing
    # with a static cache the model is given a mask for its attention, and none that says what is padding
    padding = mask if options.get("cache_implementation") == "static" else None
    with torch.no_grad(), ch.watch(model, padding, values=values) as seen:
        sequences = model.generate(ids, **options)
    model.prepare_inputs_for_generation = prepare
    return seen, ran[-1] if "num_beams" in options else sequences[:, :-1]


def attentions(model, what, **inputs):
    """The weights of eager attention on a full forward."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return getattr(model(**inputs, output_attentions=True), what)


DECODERS = {
    "dynamic": (llama, {}),
    "static": (llama, {"cache_implementation": "static"}),
    "no cache": (llama, {"use_cache": False}),
    "prefill in chunks": (llama, {"prefill_chunk_size": 4}),
    "window": (gemma, {}),
    "window, static": (gemma, {"cache_implementation": "static"}),
    "window, prefill in chunks": (gemma, {"prefill_chunk_size": 4}),
    "sinks": (gpt_oss, {}),
    "sinks, static": (gpt_oss, {"cache_implementation": "static"}),
}


@pytest.mark.parametrize("mask", [None, LEFT], ids=["no padding", "left padding"])
@pytest.mark.parametrize("case", DECODERS)
def test_joined_steps_are_a_full_forward(case, mask):
    make, options = DECODERS[case]
    model = made(make)
    seen, sequences = generated(model, mask=mask, **options)
    full = None if mask is None else F.pad(mask, (0, STEPS - 1), value=1)
    wanted = attentions(model, "attentions", input_ids=sequences, attention_mask=full)
    assert len(seen.names) == len(wanted) == 2
    for name, want in zip(seen.names, wanted, strict=True):
        steps = seen[name]
        assert len(steps) >= STEPS and isinstance(steps, list)
        weights = steps.joined()
        words = torch.ones_like(sequences, dtype=torch.bool) if full is None else full.bool()
        dense = weights.dense()
        assert dense.shape == want.shape
        rows = words[:, None, :].expand(dense.shape[:3])
        torch.testing.assert_close(dense[rows], want[rows], atol=1e-6, rtol=0)
        assert (dense[rows] > 1e-4).sum() > 200  # the weights are not all alike, nor 0
        entropy = weights.entropy()
        if mask is not None:
            assert torch.equal(entropy.isnan(), ~rows)
        logs = torch.xlogy(want, want).sum(-1) / want.sum(-1) - want.sum(-1).log()
        torch.testing.assert_close(-logs[rows], entropy[rows], atol=1e-5, rtol=0)
        if mask is None:
            torch.testing.assert_close(weights.received(), want.sum(2), atol=1e-5, rtol=0)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_beams_are_followed(cache):
    model = made(llama)
    seen, sequences = generated(model, num_beams=4, num_return_sequences=4, cache_implementation=cache)
    links = [link for call in seen[seen.names[0]] for link in [call.cached_key.link]]
    assert any(link.rows is not None for link in links)
    wanted = attentions(model, "attentions", input_ids=sequences)
    for name, want in zip(seen.names, wanted, strict=True):
        dense = seen[name].joined().dense()
        assert dense.shape == (8, 4, 15, 15)
        torch.testing.assert_close(dense, want, atol=1e-6, rtol=0)


FEW = IDS % 5 + 3  # of few words beams soon have the same ones in a window


def windowed(**options):
    """Gemma, of few words: its first layer has a window of four keys, the second one all."""
    kinds = ["sliding_attention", "full_attention"]
    config = {**SMALL, "vocab_size": 8, "head_dim": 8, "sliding_window": 4, "initializer_range": 0.3} | options
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**{"layer_types": kinds, **config}))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("values", [False, True])
def test_beams_with_the_same_keys_in_a_window_are_told_apart_by_other_layers(cache, values, tmp_path):
    model = made(windowed)
    options = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 12, "cache_implementation": cache}
    seen, sequences = generated(model, FEW, values=values, **options)
    wanted = attentions(model, "attentions", input_ids=sequences)
    again = ch.models.load_recording(seen.write(tmp_path / "seen"))
    for name, want in zip(seen.names, wanted, strict=True):
        for recording in (seen, again):
            torch.testing.assert_close(recording[name].joined().dense(), want, atol=1e-6, rtol=0)
    first = seen["model.layers.0.self_attn"]
    shared = [call.cached_key.link.rows for call in first if call.cached_key.link.rows is not None]
    assert any(torch.equal(rows.sum(1), torch.ones(8)) for rows in shared)


def test_beams_that_no_layer_tells_apart_are_an_error():
    model = made(lambda: windowed(num_hidden_layers=1, layer_types=["sliding_attention"]))
    seen, _ = generated(model, FEW, num_beams=4, num_return_sequences=4, max_new_tokens=12)
    with pytest.raises(ch.ClearheadError, match=r"beams had the same keys in the window, and others before it"):
        seen["model.layers.0.self_attn"].joined()
    # sampled sequences stay where they are
    torch.manual_seed(0)
    seen, sequences = generated(model, FEW, do_sample=True, num_return_sequences=4, max_new_tokens=12)
    (want,) = attentions(model, "attentions", input_ids=sequences)
    torch.testing.assert_close(seen["model.layers.0.self_attn"].joined().dense(), want, atol=1e-6, rtol=0)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_the_same_word_again_and_again_without_positions_in_its_keys(beams, cache):
    model = made(t5)
    words = {"suppress_tokens": list(range(1 + beams, 100)), "cache_implementation": cache}
    seen, sequences = generated(model, num_beams=beams, num_return_sequences=beams, **words)
    inputs = {"input_ids": IDS.repeat_interleave(beams, 0), "decoder_input_ids": sequences}
    own, cross = (attentions(model, f"{kind}_attentions", **inputs) for kind in ("decoder", "cross"))
    names = [name for name in seen.names if "decoder" in name]
    for name, want in zip(names, [layer for pair in zip(own, cross, strict=True) for layer in pair], strict=True):
        torch.testing.assert_close(seen[name].joined().dense(), want, atol=1e-6, rtol=0)


def test_the_same_word_after_a_crop():
    model, word = made(t5), torch.full((1, 8), 5)
    with torch.no_grad(), ch.watch(model) as seen:
        out = model(input_ids=IDS[:1], decoder_input_ids=word[:, :6], use_cache=True)
        out.past_key_values.crop(-3)
        more = {"encoder_outputs": (out.encoder_last_hidden_state,), "past_key_values": out.past_key_values}
        model(decoder_input_ids=word[:, 3:], **more)
    own = attentions(model, "decoder_attentions", input_ids=IDS[:1], decoder_input_ids=word)
    names = [name for name in seen.names if "decoder" in name and "SelfAttention" in name]
    for name, want in zip(names, own, strict=True):
        torch.testing.assert_close(seen[name].joined().dense(), want, atol=1e-6, rtol=0)


# the last step of these rejects drafts
DRAFTED = [(llama, 2), (llama, 14), (llama, 15), (gemma, 5), (gemma, 11), (t5, 0), (bart, 1), (bart, 12)]


@pytest.mark.parametrize(("make", "seed"), DRAFTED, ids=[f"{make.__name__} {seed}" for make, seed in DRAFTED])
def test_prompt_lookup_drops_what_was_rejected(make, seed, tmp_path):
    """Also in the last step, which no later step shows: the cache is cropped after it."""
    model = made(make, seed)
    torch.manual_seed(seed)
    ids = torch.randint(2, 97, (1, 9)).repeat(1, 2)
    seen, sequences = generated(model, ids, prompt_lookup_num_tokens=3, max_new_tokens=12)
    text = {"input_ids": sequences} if make in (llama, gemma) else {"input_ids": ids, "decoder_input_ids": sequences}
    wanted = attentions(model, "attentions" if make in (llama, gemma) else "decoder_attentions", **text)
    again = ch.models.load_recording(seen.write(tmp_path / "steps.safetensors"))
    names = [name for name in seen.names if "encoder" not in name and "EncDec" not in name]
    for name, want in zip(names, wanted, strict=True):
        steps, length = seen[name], want.shape[2]
        assert sum(call.query.shape[2] for call in steps) > length  # some were rejected
        assert steps[-1].cached_key.link.rejected
        joined = steps.joined().dense()
        assert joined.shape[2] == joined.shape[3] == length
        torch.testing.assert_close(joined, want, atol=1e-6, rtol=0)
        torch.testing.assert_close(again[name].joined().dense(), joined)
        for end in (0, 1):  # the last token of a text may have been read, or not
            given = torch.cat([sequences, torch.full((1, end), 98)], 1)
            torch.testing.assert_close(steps.joined(given).dense(), want, atol=1e-6, rtol=0)
    for call in seen.joined():
        assert call.kind == "cross" or call.layer.stack == "encoder" or call.shape[2] == wanted[0].shape[2]


@pytest.mark.parametrize("make", [t5, bart])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("mask", [None, LEFT.flip(1)], ids=["no padding", "padding"])
def test_encoder_decoders(make, beams, mask):
    model = made(make)
    seen, sequences = generated(model, mask=mask, num_beams=beams, num_return_sequences=beams)
    repeated = {"input_ids": IDS.repeat_interleave(beams, 0), "decoder_input_ids": sequences}
    if mask is not None:
        repeated["attention_mask"] = mask.repeat_interleave(beams, 0)
    own = attentions(model, "decoder_attentions", **repeated)
    cross = attentions(model, "cross_attentions", **repeated)
    names = [name for name in seen.names if "decoder" in name]
    for name, want in zip(names, [layer for pair in zip(own, cross, strict=True) for layer in pair], strict=True):
        weights = seen[name].joined()
        torch.testing.assert_close(weights.dense(), want, atol=1e-6, rtol=0)
        rows = weights[:, :, 2:7:2, 1:]  # parts of a bias that is placed step by step
        torch.testing.assert_close(rows, weights.dense()[:, :, 2:7:2, 1:], atol=1e-6, rtol=0)


def test_each_step_is_still_what_the_model_computed_and_keys_are_kept_once():
    model = made(llama)
    copies = []

    def copying(module, query, key, value, mask, **options):
        copies.append((key.clone(), value.clone()))
        return own(module, query, key, value, mask, **options)

    from transformers.integrations.sdpa_attention import sdpa_attention_forward as own

    transformers.AttentionInterface.register("copying", copying)
    transformers.AttentionMaskInterface.register("copying", transformers.masking_utils.sdpa_mask)
    model.set_attn_implementation("copying")
    for options in ({}, {"num_beams": 3}, {"cache_implementation": "static"}):
        copies.clear()
        with torch.no_grad(), ch.watch(model, values=True) as seen:
            model.generate(IDS, max_new_tokens=STEPS, do_sample=False, pad_token_id=0, **options)
        assert len(copies) == len(seen.calls) == 2 * STEPS
        for call, (key, value) in zip(seen.calls, copies, strict=True):
            assert torch.equal(call.key, key) and torch.equal(call.value, value) and torch.equal(call.problem.key, key)
        kept = sum(call.cached_key.link.new.numel() for call in seen.calls)
        assert kept == sum(key[:, :, : 8 + STEPS].numel() for key, _ in copies[-2:])
        assert seen.calls[-1].cached_key.tensor() is not seen.calls[-1].key  # nothing is held by a look
        output = seen[-1].weights @ seen[-1].value
        torch.testing.assert_close(output, seen[-1].output, atol=1e-6, rtol=0)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_several_generations_in_one_recording(cache):
    model = made(llama)
    other = IDS.flip(0)[:, 2:]
    with torch.no_grad(), ch.watch(model) as seen:
        for ids in (IDS, IDS, other):  # the same text twice is two generations
            sequences = model.generate(ids, max_new_tokens=4, do_sample=False, cache_implementation=cache)
    steps = seen["model.layers.1.self_attn"]
    assert [steps[:n].joined().shape[2:] for n in (4, 8, 12)] == [(12, 12), (12, 12), (10, 10)]
    want = attentions(model, "attentions", input_ids=sequences[:, :-1])[1]
    torch.testing.assert_close(steps.joined().dense(), want, atol=1e-6, rtol=0)


def test_two_generations_from_one_source_are_two():
    model = made(bart)
    with torch.no_grad(), ch.watch(model) as seen:
        for _ in range(2):
            model.generate(IDS, max_new_tokens=4, do_sample=False)
    shapes = {name: seen[name].joined().shape[2] for name in seen.names if "decoder" in name}
    assert len(shapes) == 4 and set(shapes.values()) == {4}


def test_a_conversation_that_goes_on_with_its_cache():
    model = made(llama)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad(), ch.watch(model) as seen:
        first = model.generate(IDS, max_new_tokens=3, do_sample=False, past_key_values=cache)
        longer = torch.cat([first, IDS[:, :4]], 1)
        last = model.generate(longer, max_new_tokens=3, do_sample=False, past_key_values=cache)
    want = attentions(model, "attentions", input_ids=last[:, :-1])
    for name, one in zip(seen.names, want, strict=True):
        torch.testing.assert_close(seen[name].joined().dense(), one, atol=1e-6, rtol=0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_window_that_a_crop_has_moved_back(mode):
    model = made(gemma)
    cache = transformers.DynamicCache(config=model.config)
    for layer in cache.layers:
        if hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()
    with mode(), ch.watch(model) as seen:
        ids = IDS
        for dropped in (1, 3, 5):
            ids = model.generate(ids, max_new_tokens=6, do_sample=False, past_key_values=cache)
            cache.crop(-dropped)
            ids = torch.cat([ids[:, :-dropped], IDS[:, :4]], 1)
        last = model.generate(ids, max_new_tokens=3, do_sample=False, past_key_values=cache)
    want = attentions(model, "attentions", input_ids=last[:, :-1])
    for name, one in zip(seen.names, want, strict=True):
        torch.testing.assert_close(seen[name].joined().dense(), one, atol=1e-6, rtol=0)


def test_a_crop_of_the_whole_last_step_rejects_nothing():
    """A cache is cropped so that another text goes on after the prompt: the step before was no draft."""
    model = made(llama)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad(), ch.watch(model) as seen:
        for new in (IDS[:, :5], IDS[:, 5:]):
            model(new, past_key_values=cache)
        cache.crop(-4)
    for name, want in zip(seen.names, attentions(model, "attentions", input_ids=IDS), strict=True):
        torch.testing.assert_close(seen[name].joined().dense(), want, atol=1e-6, rtol=0)


@pytest.mark.parametrize("seed", range(8))
def test_drafts_of_a_random_generation(seed):
    """Steps of any lengths, of which the model's cache drops some of the last tokens; rows that are repeated,
    reordered and selected between steps."""
    model, rng = made(llama if seed % 2 else gemma), np.random.default_rng(seed)
    cache, text = transformers.DynamicCache(config=model.config), IDS[:, :0]
    for layer in cache.layers:
        if hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()
    with torch.no_grad(), ch.watch(model) as seen:
        for step in range(5):
            if step and rng.random() < 0.5:
                times = int(rng.integers(2, 4)) if len(text) < 4 else 1
                cache.batch_repeat_interleave(times)
                text = text.repeat_interleave(times, 0)
            if step and rng.random() < 0.5:
                rows = torch.from_numpy(rng.integers(0, len(text), int(rng.integers(1, len(text) + 1))))
                cache.batch_select_indices(rows)
                text = text[rows]
            new = torch.from_numpy(rng.integers(3, 97, (len(text), rng.integers(1, 5))))
            model(new, past_key_values=cache)
            dropped = int(rng.integers(0, new.shape[1]))
            cache.crop(-dropped)
            text = torch.cat([text, new[:, : new.shape[1] - dropped]], 1)
    for name, want in zip(seen.names, attentions(model, "attentions", input_ids=text), strict=True):
        for joined in (seen[name].joined(), seen[name].joined(text)):
            torch.testing.assert_close(joined.dense(), want, atol=1e-6, rtol=0)


def test_rows_that_are_repeated_after_the_prompt():
    """One prompt, several answers: transformers' own way to share a prefix."""
    for make, count in itertools.product((llama, gemma), (1, 2)):
        model, answers = made(make), torch.randint(3, 97, (3 * count, 2), generator=torch.Generator().manual_seed(0))
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad(), ch.watch(model, values=True) as seen:
            model(IDS[:count], past_key_values=cache)
            cache.batch_repeat_interleave(3)
            model(answers, past_key_values=cache)
        text = torch.cat([IDS[:count].repeat_interleave(3, 0), answers], 1)
        for name, want in zip(seen.names, attentions(model, "attentions", input_ids=text), strict=True):
            torch.testing.assert_close(seen[name].joined().dense(), want, atol=1e-6, rtol=0)
            torch.testing.assert_close(seen[name].joined(text).dense(), want, atol=1e-6, rtol=0)
        call, value = seen.joined(text)[0], seen[seen.names[0]][1].value
        assert call.shape[0] == len(call.value) == len(call.ids) == len(text)
        assert torch.equal(call.value[:, :, -value.shape[2] :], value)


def test_steps_from_the_middle_on():
    model = made(llama)
    seen, sequences = generated(model)
    steps = seen["model.layers.0.self_attn"]
    rows = steps[3:].joined()
    assert rows.shape == (2, 4, STEPS - 3, sequences.shape[1])
    assert torch.equal(rows.dense(), steps.joined().dense()[:, :, -(STEPS - 3) :])


class Block(torch.nn.Module):
    """Attention over keys that it is given, and over new ones."""

    def forward(self, x, past, mask=None, scale=None):
        keys = torch.cat([past, x], 2)
        causal = mask is None and x.shape[2] == keys.shape[2]
        return F.scaled_dot_product_attention(x, keys, keys, attn_mask=mask, is_causal=causal, scale=scale), keys


def blocks(lengths, change=None, masks=None, batch=1, **options):
    """A block watched on so many new positions a step."""
    torch.manual_seed(0)
    block, past = Block(), torch.zeros(batch, 2, 0, 8)
    with ch.watch(block, **options) as seen:
        for number, length in enumerate(lengths):
            mask = None if masks is None else masks[number]
            past = block(torch.randn(batch, 2, length, 8), past, mask)[1]
            past = past if change is None else change(past)
    return seen["Block"]


def test_what_is_no_one_generation_is_an_error():
    def quantised(past):
        return (past * 8).round() / 8 + 1e-3

    with pytest.raises(ch.ClearheadError, match=r"quantised cache changes them"):
        blocks([4, 1, 1], quantised).joined()
    with pytest.raises(ch.ClearheadError, match=r"queries of positions 4 … 4 are not in the recording"):
        blocks([4, 1, 1], every=2).joined()
    steps = blocks([4, 1, 1])
    with pytest.raises(ch.ClearheadError, match=r"step 1 is not among these calls"):
        ch.models.Generation([steps[0], steps[2]]).joined()
    alone = made(bart)
    with torch.no_grad(), ch.watch(alone, layers="*decoder*encoder_attn") as seen:
        alone.generate(IDS, max_new_tokens=3, do_sample=False)
    with pytest.raises(ch.ClearheadError, match=r"no self attention was recorded beside it"):
        seen["model.decoder.layers.0.encoder_attn"].joined()
    with pytest.raises(ch.ClearheadError, match=r"calls of none"):
        ch.models.Generation().joined()
    model = made(llama)
    seen, _ = generated(model)
    with pytest.raises(ch.ClearheadError, match=r"calls of 'model.layers.0.self_attn'"):
        seen["*self_attn"].joined()
    block, x = Block(), torch.randn(1, 2, 4, 8)
    with ch.watch(block) as seen:
        _, past = block(x, x[:, :, :0])
        block(x[:, :, :1], past, scale=0.7)
    with pytest.raises(ch.ClearheadError, match=r"one has scale 0.35\d*, a later one 0.7"):
        seen["Block"].joined()


def test_masks_of_any_form_are_placed():
    """Scattered pairs, gaps, biases of each kind: against the formula over all keys."""
    lengths, total = [5, 1, 3, 1], 10
    generator = torch.Generator().manual_seed(0)
    below = torch.ones(total, total, dtype=torch.bool).tril()
    scattered = (torch.rand(2, 1, total, total, generator=generator) > 0.4) & below | torch.eye(total, dtype=torch.bool)
    gaps = below.clone()
    gaps[:, 2:4] = False
    gaps |= torch.eye(total, dtype=torch.bool)
    bias = torch.randn(1, 2, total, total, generator=generator).masked_fill(~below, -torch.inf)
    edges = [0, 5, 6, 9, 10]
    for whole in (scattered, gaps, bias):
        masks = [whole[..., low:high, :high] for low, high in itertools.pairwise(edges)]
        steps = blocks(lengths, masks=masks, batch=2)
        query = torch.cat([call.query for call in steps], 2)
        key = steps[-1].key
        added = whole if whole.dtype != torch.bool else torch.zeros(()).masked_fill(~whole, -torch.inf)
        want = (query @ key.mT / 8**0.5 + added).softmax(-1)
        weights = steps.joined()
        torch.testing.assert_close(weights.dense(), want, atol=1e-6, rtol=0)
        torch.testing.assert_close(weights[1, :, 4:9:2, ::3], want[1, :, 4:9:2, ::3], atol=1e-6, rtol=0)
        torch.testing.assert_close(weights.received(), want.sum(2), atol=1e-5, rtol=0)
        torch.testing.assert_close(weights @ key, want @ key, atol=1e-5, rtol=0)


class Cached(torch.nn.Module):
    """clearhead's own attention, with its own cache."""

    def __init__(self):
        super().__init__()
        self.attention = ch.nn.MultiHeadAttention(16, 4)

    def forward(self, x, cache):
        return self.attention(x, x, x, mask=ch.Causal() & ch.SlidingWindow(before=3), cache=cache)


def test_clearheads_own_cache():
    torch.manual_seed(0)
    model, x = Cached().eval(), torch.randn(2, 6, 16)
    cache = ch.nn.KeyValueCache()
    with torch.no_grad(), ch.watch(model) as seen:
        for low, high in ((0, 3), (3, 4), (4, 6)):
            model(x[:, low:high], cache)
    with torch.no_grad(), ch.watch(model) as whole:
        model(x, ch.nn.KeyValueCache())
    name = seen.names[0]
    torch.testing.assert_close(seen[name].joined().dense(), whole[0].weights.dense(), atol=1e-6, rtol=0)


def test_clearheads_own_caches_that_take_turns_and_drop_drafts():
    torch.manual_seed(0)
    model, caches, texts = Cached().eval(), [ch.nn.KeyValueCache(), ch.nn.KeyValueCache()], torch.randn(2, 1, 8, 16)
    with torch.no_grad(), ch.watch(model) as seen:
        for low, high in ((0, 3), (3, 6), (4, 8)):
            for x, cache in zip(texts, caches, strict=True):
                model(x[:, low:high], cache)
                cache.crop({3: 3, 6: 4, 8: 7}[high])
    for count, x in zip((5, 6), texts, strict=True):
        with torch.no_grad(), ch.watch(model) as whole:
            model(x[:, :7], ch.nn.KeyValueCache())
        joined = seen[seen.names[0]][:count].joined()
        torch.testing.assert_close(joined.dense(), whole[0].weights.dense(), atol=1e-6, rtol=0)


SURROUNDINGS = {
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "gradients": torch.enable_grad,
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_surroundings_change_nothing(name):
    model = made(llama)
    with SURROUNDINGS[name](), ch.watch(model) as seen:
        ids, cache = IDS, None
        for _ in range(4):
            out = model(ids, past_key_values=cache, use_cache=True)
            ids, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
    steps = seen["model.layers.1.self_attn"]
    weights = steps.joined()
    assert weights.shape == (2, 4, 12, 12)
    rows = torch.cat([F.pad(call.weights.dense(), (0, 12 - call.key.shape[2])) for call in steps], 2)
    torch.testing.assert_close(weights.dense(), rows, atol=1e-6, rtol=0)


def test_keys_that_are_not_finite_continue_too():
    steps = blocks([3, 1, 1], lambda past: past.index_fill(2, torch.tensor([1]), torch.nan))
    # the first step's key was changed after it: the second step's are continued, bit by bit
    assert len({call.cached_key.chain for call in steps}) == 2 and steps[2].cached_key.number == 1
    assert steps[2].key[:, :, 1].isnan().all()


def test_copies_pickles_and_files_keep_chains(tmp_path):
    model = made(llama)
    seen, _ = generated(model, num_beams=2, mask=LEFT)
    name = "model.layers.1.self_attn"
    want = seen[name].joined().dense()
    again = ch.models.load_recording(seen.write(tmp_path / "seen"))
    for other in (copy.deepcopy(seen.calls), pickle.loads(pickle.dumps(seen.calls)), again.calls):
        steps = ch.models.Recording(other)[name]
        assert torch.equal(steps.joined().dense(), want)
        for old, new in zip(seen[name], steps, strict=True):
            assert torch.equal(old.key, new.key) and torch.equal(old.weights.dense(), new.weights.dense())
    # each key once in the file
    numbers = sum(call.query.numel() + call.cached_key.link.new.numel() for call in seen.calls)
    assert (tmp_path / "seen").stat().st_size < 4 * numbers + 40_000


@pytest.mark.parametrize("seed", range(4))
def test_a_window_that_was_watched_from_the_middle_on(seed):
    """Keys that it had left are no columns, and positions say which there are."""
    generator = np.random.default_rng(seed)
    length, window = 12, int(generator.integers(3, 8))
    begun = int(generator.integers(2, 10))
    torch.manual_seed(seed)
    model = transformers.MistralForCausalLM(
        transformers.MistralConfig(
            vocab_size=100, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, sliding_window=window,
        )
    ).eval()  # fmt: skip
    ids = torch.randint(3, 90, (1, length))
    with torch.no_grad():
        past = model(ids[:, :begun], use_cache=True).past_key_values
        with ch.watch(model) as seen:
            for i in range(begun, length):
                model(ids[:, i : i + 1], past_key_values=past, use_cache=True)
        with ch.watch(model) as whole:
            model(ids, use_cache=False)
    for name in whole.names:
        weights = seen[name].joined()
        queries, keys = seen[name].positions
        gone = max(begun + 1 - window, 0)
        assert (queries, keys) == (range(begun, length), range(gone, length))
        assert (f"keys={gone} … {length - 1}" in repr(weights)) == (gone > 0)
        wanted = whole[name][0].weights.dense()[:, :, queries.start : queries.stop, keys.start : keys.stop]
        torch.testing.assert_close(weights.dense(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_a_cache_that_is_written_to_through_data(seed):
    """Such a write is not counted; each step has the keys that it ran with."""
    generator = np.random.default_rng(seed)
    at, factor = int(generator.integers(6, 10)), float(generator.choice([-1.0, 0.5, 3.0]))
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=100, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4
        )
    ).eval()
    ids, past = torch.randint(3, 90, (1, 12)), None
    with torch.no_grad(), ch.watch(model, values=True) as seen:
        for i in range(5, 12):
            past = model(ids[:, i : i + 1], past_key_values=past, use_cache=True).past_key_values
            if i == at:
                for layer in past.layers:
                    layer.keys.data.mul_(factor)
    for call in seen.calls:
        torch.testing.assert_close(call.weights @ call.value, call.output, rtol=1e-4, atol=1e-6)
    with pytest.raises(ch.ClearheadError, match="are not those that it had"):
        seen[seen.names[0]].joined()


CHANGES = {
    "positions": lambda keys: keys.flip(2),
    "sequences": lambda keys: keys.flip(0),
    "heads": lambda keys: keys.flip(1),
    "columns": lambda keys: keys.flip(3),
    "some positions": lambda keys: keys[:, :, torch.randperm(keys.shape[2])],
    "two numbers": lambda keys: keys.clone().index_put((torch.tensor([0]),) * 3, keys[0, 0, 0].roll(1)[None]),
    "signs": lambda keys: keys.where(torch.arange(keys.shape[3]) % 2 == 0, -keys),
}


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("change", CHANGES)
def test_a_cache_whose_keys_change_places_through_data(change, window):
    """The sum of all numbers stays what it was: beams that are reordered in place, for one."""
    torch.manual_seed(0)
    size = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.MistralConfig(**size, num_attention_heads=4, num_key_value_heads=2, sliding_window=window)
    model = transformers.MistralForCausalLM(config).eval()
    ids, past = torch.randint(3, 90, (2, 12)), transformers.DynamicCache(config=config)
    with torch.no_grad(), ch.watch(model, values=True) as seen:
        for i in range(4, 12):
            model(ids[:, i : i + 1], past_key_values=past, use_cache=True)
            if i == 8:
                for layer in past.layers:
                    layer.keys.data.copy_(CHANGES[change](layer.keys).clone())
    for call in seen.calls:
        torch.testing.assert_close(call.weights @ call.value, call.output, rtol=1e-4, atol=1e-6)
