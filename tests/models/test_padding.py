"""A padded batch: statistics and reports are those of the words."""

import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import clearhead as ch
from clearhead.cli.report import summarise
from clearhead.models.loading import bundled
from clearhead.report.statistics import THUMBNAIL

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")
from small_models import IDS, RIGHT, SIZES, T5, made  # noqa: E402

SENTENCE = "The pump in Broad Street was closed."
SEGMENTS = RIGHT * torch.tensor([1, 1, 2, 2, 3, 3, 3, 4, 5])  # packed rows: any number but 0 is a word
MASKS = {"r": RIGHT, "l": RIGHT.flip(1), "bool": RIGHT.bool(), "float": RIGHT.float(), "segments": SEGMENTS}
MASKS |= {"left segments": SEGMENTS.flip(1), "bytes": SEGMENTS.to(torch.uint8)}


def make(name, backend="sdpa", **options):
    return made(name, times=6, attn_implementation=backend, **options)


def bert(text, **options):
    """The real small BERT's calls, one sentence with and without padding."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(bundled(), local_files_only=True)
    model = transformers.AutoModel.from_pretrained(bundled(), local_files_only=True).eval()
    inputs = tokenizer(text, return_tensors="pt", **options)
    with torch.no_grad(), ch.watch(model) as seen:
        model(**inputs)
    return seen, tokenizer.convert_ids_to_tokens(inputs["input_ids"][0].tolist()), inputs["attention_mask"][0].bool()


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("length", [30, 124])
def test_statistics_of_a_padded_sentence_are_those_of_the_sentence(length, side):
    plain, _, _ = bert([SENTENCE])
    seen, _, words = bert([SENTENCE], padding="max_length", max_length=length, padding_side=side)
    assert (~words).sum() > 15
    whole = ch.reductions.Pool(THUMBNAIL, "mean")
    for call, want in zip(seen.calls, plain.calls, strict=True):
        assert torch.equal(call.padding.queries[0], words) and torch.equal(call.padding.keys[0], words)
        assert f"padding: {int((~words).sum())} queries and {int((~words).sum())} keys" in repr(call)
        assert want.padding is None and "padding" not in repr(want)
        reductions = (
            ch.reductions.Entropy(),
            ch.reductions.TopK(3),
            ch.reductions.Received(),
            ch.reductions.MeanDistance(),
            whole,
            ch.reductions.Output(call.key),
        )
        entropy, (values, indices), received, distance, image, output = call.weights.reduce(*reductions)
        expected = want.weights.reduce(*reductions[:-1], ch.reductions.Output(want.key))
        assert expected[-2].sum() > 0 and output.shape[2] == length
        for got, per_position in ((entropy, 0), (received, 2), (distance, 3), (values, None)):
            wanted = expected[1][0] if per_position is None else expected[per_position]
            # positions differ under left padding, and BERT embeds them: outputs are close to it, not equal
            if side == "right":
                torch.testing.assert_close(got[0][:, words], wanted[0], atol=1e-4, rtol=1e-4)
            assert got[0][:, ~words].isnan().all() and got[0][:, words].isfinite().all()
        assert words[indices[0][:, words]].all()
        torch.testing.assert_close(image.sum() * (call.weights.shape[-1] / image.shape[-1]) ** 2, words.sum() * 12.0)
        torch.testing.assert_close(call.weights.received().nansum(-1), torch.full((1, 12), float(words.sum())))


def test_the_weights_themselves_stay_the_models_own():
    fast, slow = make("Llama", **SIZES), make("Llama", "eager", **SIZES)
    with torch.no_grad(), ch.watch(slow) as seen:
        own = slow(input_ids=IDS, attention_mask=RIGHT, output_attentions=True).attentions
    for call, weights in zip(seen.calls, own, strict=True):
        assert call.padding is not None
        torch.testing.assert_close(call.weights.dense(), weights, atol=1e-5, rtol=0)
        torch.testing.assert_close(call.weights[1, 0].dense(), weights[1, 0], atol=1e-5, rtol=0)
        assert call.weights.logsumexp().isfinite().all()
        torch.testing.assert_close(call.weights @ call.query, weights @ call.query, atol=1e-5, rtol=0)
    with torch.no_grad(), ch.watch(fast) as seen:
        fast(input_ids=IDS, attention_mask=torch.ones_like(IDS))
    assert all(call.padding is None and type(call.weights) is ch.results.Weights for call in seen.calls)


@pytest.mark.parametrize("backend", ["sdpa", "eager", "clearhead"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_causal_models_on_every_backend(backend, mask):
    model = make("Llama", **SIZES) if backend == "clearhead" else make("Llama", backend, **SIZES)
    if backend == "clearhead":
        ch.models.run_on_clearhead(model)
    with torch.no_grad(), ch.watch(model) as seen:
        model(input_ids=IDS, attention_mask=mask)
    words = mask.bool()
    for call in seen.calls:
        assert torch.equal(call.padding.queries, words) and torch.equal(call.padding.keys, words)
        dense = call.weights.dense()
        entropy, received = call.weights.entropy(), call.weights.received()
        rows = words[:, None, :, None].expand_as(dense)
        want = (dense * rows).sum(2).masked_fill(~words[:, None], torch.nan)
        torch.testing.assert_close(received, want, equal_nan=True, atol=1e-5, rtol=0)
        want = torch.special.entr(dense).sum(-1).masked_fill(~words[:, None], torch.nan)
        torch.testing.assert_close(entropy, want, equal_nan=True, atol=1e-5, rtol=0)
        torch.testing.assert_close(call.weights.pool(9), dense * rows, atol=1e-6, rtol=0)


@pytest.mark.parametrize("said", [True, False])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_with_a_cache_the_mask_covers_the_keys(cache, said):
    model = made("Llama", "ForCausalLM", **SIZES)
    left = RIGHT.flip(1)
    past = (
        transformers.DynamicCache() if cache == "dynamic" else transformers.StaticCache(model.config, max_cache_len=12)
    )
    with torch.no_grad(), ch.watch(model, padding=left if said else None) as seen:
        mask = left
        for step in range(3):
            ids = IDS if step == 0 else IDS[:, :1]
            model(input_ids=ids, attention_mask=mask, past_key_values=past)
            mask = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], 1)
    steps = [call for call in seen.calls if call.name.endswith("layers.1.self_attn")]
    assert len(steps) == 3 and torch.equal(steps[0].padding.queries, left.bool())
    for step, call in enumerate(steps):
        keys, filled = call.padding.keys, 9 + step
        assert keys.shape[1] == (12 if cache == "static" else filled)
        assert torch.equal(keys[:, :9], left.bool()) and keys[:, 9:filled].all()
        assert not keys[:, filled:].any() and (step == 0 or call.padding.queries is None)
        received = call.weights.received()
        assert torch.equal(received.isnan()[:, 0], ~keys)
        seen_queries = left.sum(1) if step == 0 else torch.ones(2)
        torch.testing.assert_close(received.nansum(-1), seen_queries[:, None].expand(2, 4).float())


def test_generation():
    model = made("Llama", "ForCausalLM", **SIZES)
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with ch.watch(model) as seen:
        model.generate(IDS, attention_mask=RIGHT.flip(1), num_beams=2, **options)
    assert seen.calls[0].padding.queries.shape == (4, 9) and seen.calls[-1].padding.keys.shape == (4, 11)
    # with a static cache generate() makes the masks itself, and the model is given no (B, L) one
    options |= {"cache_implementation": "static", "disable_compile": True}
    with ch.watch(model, padding=RIGHT.flip(1)) as seen:
        model.generate(IDS, attention_mask=RIGHT.flip(1), **options)
    for call in seen.calls:
        assert torch.equal(call.padding.keys[:, :9], RIGHT.flip(1).bool())
        assert (call.weights.received().nansum(-1) > 0.99).all()


def test_encoders_and_decoders_have_each_their_own():
    model = make("T5", **T5)
    decoder = torch.tensor([[1] * 9, [1] * 7 + [0] * 2])
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS}
    with torch.no_grad(), ch.watch(model) as seen:
        model(**inputs, attention_mask=RIGHT, decoder_attention_mask=decoder)
        model(**inputs, attention_mask=RIGHT)
        model(**inputs, attention_mask=RIGHT, decoder_attention_mask=RIGHT)
    for i, call in enumerate(seen.calls):
        own = (decoder, torch.ones_like(RIGHT), RIGHT)[i // 6].bool()
        inside = call.name.startswith("encoder")
        queries = RIGHT.bool() if inside else own
        keys = RIGHT.bool() if inside or call.kind == "cross" else own
        said = call.padding or (None, None)
        for side, want in zip(said, (queries, keys), strict=True):
            assert want.all() if side is None else torch.equal(side, want), (i, call)


def test_a_sequence_that_is_all_padding():
    model = make("T5", **T5)
    mask = torch.tensor([[1] * 9, [0] * 9])
    with torch.no_grad(), ch.watch(model) as seen:
        model(input_ids=IDS, attention_mask=mask, decoder_input_ids=IDS[:, :5])
    assert torch.equal(seen.calls[0].padding.keys, mask.bool())
    assert len(seen.layers(sequence=0)) == len(seen.calls)
    with pytest.raises(ch.ClearheadError, match="nothing but padding for this sequence"):
        seen.layers(sequence=1)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_a_part_of_a_prompt_that_is_all_padding_in_a_static_cache(backend):
    model = make("Llama", backend, **SIZES)
    cache, mask = transformers.StaticCache(config=model.config, max_cache_len=12), torch.tensor([[0] * 3 + [1] * 6] * 2)
    with torch.no_grad(), ch.watch(model) as seen:
        for start, stop in ((0, 2), (2, 9)):
            model(IDS[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache)
    for call, stop in zip(seen["layers.0.self_attn"], (2, 9), strict=True):
        assert call.padding.keys[:, :stop].tolist() == mask[:, :stop].bool().tolist()
        assert not call.padding.keys[:, stop:].any()


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("window", [None, 5])
def test_a_prompt_in_a_static_cache_whose_mask_generate_has_made(backend, window):
    """The model is given a mask of four dimensions alone."""
    name, more = ("Llama", {}) if window is None else ("Mistral", {"sliding_window": window, "num_key_value_heads": 2})
    model = made(name, "ForCausalLM", times=6, attn_implementation=backend, **SIZES, **more)
    mask, rows = RIGHT.flip(1), []
    for cache in ("dynamic", "static"):
        options = {"cache_implementation": cache, "disable_compile": True, "max_new_tokens": 3, "do_sample": False}
        with ch.watch(model) as seen:
            model.generate(IDS, attention_mask=mask, pad_token_id=0, eos_token_id=None, **options)
        prompt = seen["model.layers.0.self_attn"][0]
        assert torch.equal(prompt.padding.queries, mask.bool())
        assert torch.equal(prompt.padding.keys[:, :9], mask.bool()) and not prompt.padding.keys[:, 9:].any()
        rows.append(seen.table()[:4])
    for one, other in zip(*rows, strict=True):
        numbers = [{k: n for k, n in row.items() if isinstance(n, float)} for row in (one, other)]
        assert len(numbers[0]) > 9 and numbers[0] == pytest.approx(numbers[1], rel=1e-4, nan_ok=True)
    with ch.watch(model) as seen:
        model.generate(IDS, pad_token_id=0, eos_token_id=None, **options)
    assert all(call.padding is None for call in seen.calls)


def test_another_sequence_in_the_same_model_is_not_taken_for_it():
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    vision = {**text, "image_size": 16, "patch_size": 4}  # 17 positions
    text = {**text, "vocab_size": 100, "max_position_embeddings": 20}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    model = transformers.CLIPModel(config).eval()
    ids = torch.randint(3, 100, (2, 17), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1] * 17, [1] * 9 + [0] * 8])
    with torch.no_grad(), ch.watch(model) as seen:
        model(input_ids=ids, attention_mask=mask, pixel_values=torch.randn(2, 3, 16, 16))
    assert {call.name.split("_")[0]: call.padding is not None for call in seen.calls} == {"text": True, "vision": False}


class Direct(torch.nn.Module):
    def forward(self, x, mask=None):
        keep = None if mask is None else mask[:, None, None].bool()
        return F.scaled_dot_product_attention(x, x, x, attn_mask=keep)


@pytest.mark.parametrize("padding", [RIGHT, RIGHT.numpy(), RIGHT.bool(), SEGMENTS])
@pytest.mark.parametrize("masked", [True, False])
def test_padding_can_be_said(padding, masked):
    model, x = Direct(), torch.randn(2, 3, 9, 8, generator=torch.Generator().manual_seed(0))
    with ch.watch(model, padding=padding) as seen:
        model(x, RIGHT if masked else None)
    (call,) = seen.calls
    assert torch.equal(call.padding.keys, RIGHT.bool()) and torch.equal(call.padding.queries, RIGHT.bool())
    received, dense = call.weights.received(), call.weights.dense()
    assert received[1, :, 5:].isnan().all()
    torch.testing.assert_close(received[1, :, :5], dense[1, :, :5, :5].sum(1), atol=1e-5, rtol=0)
    # where the model let a word see padding, its row stays what it was
    want = torch.special.entr(dense[1, :, :5]).sum(-1)
    torch.testing.assert_close(call.weights.entropy()[1, :, :5], want, atol=1e-5, rtol=0)


class Square(torch.nn.Module):
    def forward(self, x, attention_mask):
        return F.scaled_dot_product_attention(x, x, x, attn_mask=attention_mask)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float])
def test_a_square_mask_is_no_padding_of_a_batch_as_large(dtype):
    x = torch.randn(6, 3, 6, 8)
    with ch.watch(model := Square()) as seen:
        model(x, attention_mask=torch.ones(6, 6).tril().to(dtype))
    assert seen.calls[0].padding is None and seen.calls[0].weights.entropy().isfinite().all()


WRONG = {
    "one dimension": (RIGHT[0], r"padding has dtype torch.int64, shape \(9,\)"),
    "other numbers": (RIGHT - 1, "1 or more for a word and 0 for padding"),
    "a list": ([[1, 1]], "padding is a list"),
}


@pytest.mark.parametrize("name", WRONG)
def test_padding_that_does_not_fit_is_an_error(name):
    padding, said = WRONG[name]
    model = Direct()
    with pytest.raises(ch.ClearheadError, match=said), ch.watch(model, padding=padding):
        model(torch.randn(2, 3, 9, 8))


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("length", [20, 124])
def test_the_report_leaves_padding_out(length, side, tmp_path):
    padded, tokens, words = bert([SENTENCE], padding="max_length", max_length=length, padding_side=side)
    plain, own, _ = bert([SENTENCE])
    assert [t for t, word in zip(tokens, words, strict=True) if word] == own
    for given in (tokens, own):
        for layer, want, call in zip(
            padded.layers(given, error=0), plain.layers(own, error=0), padded.calls, strict=True
        ):
            assert layer.query_tokens == layer.key_tokens == own
            assert layer.query.shape == want.query.shape and layer.thumbnail.shape == want.thumbnail.shape
            dense = call.weights.dense()[0][:, words][:, :, words].numpy()
            query, key = layer.query.astype(np.float64), layer.key.astype(np.float64).transpose(0, 2, 1)
            scores = query @ key * layer.scale
            # a float32 sum of `head_dim` terms, in any order, is off by no more than this share of their sizes
            rounding = query.shape[-1] * np.finfo(np.float32).eps / 2 * (abs(query) @ abs(key) * layer.scale).max()
            places = np.arange(len(own))
            sees = (places >= layer.start[..., None]) & (places < layer.stop[..., None])
            np.testing.assert_allclose(np.exp(scores - layer.logsumexp[..., None]) * sees, dense, atol=rounding)
            np.testing.assert_allclose(layer.thumbnail, dense * len(own), atol=1e-6 * len(own))
            np.testing.assert_allclose(layer.received, dense.sum(1), atol=1e-5)
            if side == "right":
                assert summarise(layer).sink[:2] == summarise(want).sink[:2]
                np.testing.assert_allclose(layer.entropy, want.entropy, atol=1e-4)
                np.testing.assert_allclose(layer.distance, want.distance, atol=1e-3)
    page = padded.view(tokens=tokens).write(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "[PAD]" not in page and "broad" in page


def test_maps_of_many_words_and_masks_with_holes():
    torch.manual_seed(0)
    keep = torch.rand(2, 100) < 0.7
    x = torch.randn(2, 3, 100, 8)
    model = Direct()
    with ch.watch(model, padding=keep) as seen:
        model(x * 3, keep)
    (layer,) = seen.layers(sequence=1, error=0)
    dense = seen.calls[0].weights.dense()[1][:, keep[1]][:, :, keep[1]]
    step = -(-dense.shape[1] // THUMBNAIL)
    count = -(-dense.shape[1] // step)
    filled = F.pad(dense, (0, count * step - dense.shape[2], 0, count * step - dense.shape[1]))
    want = filled.unflatten(2, (count, step)).amax(3).unflatten(1, (count, step)).amax(2)
    np.testing.assert_allclose(layer.thumbnail, want.numpy() * dense.shape[2], atol=1e-6 * dense.shape[2])
    assert layer.key_tokens == [str(i) for i in keep[1].nonzero().flatten().tolist()]
    scores = layer.query @ layer.key.transpose(0, 2, 1) * layer.scale + (0 if layer.bias is None else layer.bias)
    np.testing.assert_allclose(np.exp(scores - layer.logsumexp[..., None]), dense.numpy(), atol=1e-5)


def test_a_persons_padding_is_that_of_the_sequence_it_speaks_of():
    """An encoder's padding is not the decoder's, and a generation's mask knows more than the prompt's."""
    model = made("T5", "ForConditionalGeneration", **T5, decoder_start_token_id=0)
    ids, mask = torch.arange(18).view(2, 9) + 1, torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    with torch.no_grad(), ch.watch(model, padding=mask) as seen:
        model(input_ids=ids, attention_mask=mask, decoder_input_ids=ids)
    for call in seen.calls:
        own = call.kind == "self" and "decoder" in call.name
        assert (call.padding is None) == own, call


def test_fewer_keys_than_queries_are_another_sequence():
    class Block(torch.nn.Module):
        def forward(self, query, key, value):
            return torch.nn.functional.scaled_dot_product_attention(query, key, value)

    with ch.watch(block := Block()) as seen:
        block(torch.randn(1, 2, 7, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8))
    assert seen.calls[0].kind == "cross"


def test_another_sequence_of_the_same_length_has_no_padding():
    class Towers(torch.nn.Module):
        def forward(self, text, audio, attention_mask):
            keep = attention_mask[:, None, None].bool()
            F.scaled_dot_product_attention(text, text, text, attn_mask=keep)
            return F.scaled_dot_product_attention(audio, audio, audio, is_causal=True)

    x, mask = torch.randn(2, 2, 9, 8), torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    with ch.watch(towers := Towers()) as seen:
        towers(x, x + 1, attention_mask=mask)
    assert [call.padding is None for call in seen.calls] == [False, True]


def test_a_causal_call_of_unequal_lengths_with_padding():
    class Model(torch.nn.Module):
        def forward(self, q, k, attention_mask):
            return torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True)

    query, key = torch.randn(2, 1, 3, 4), torch.randn(2, 1, 5, 4)
    with ch.watch(model := Model()) as seen:
        output = model(query, key, attention_mask=torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]]))
    torch.testing.assert_close(seen.calls[0].weights @ key, output)
    assert "align='upper_left'" in repr(seen.calls[0])
