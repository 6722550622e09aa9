"""Generations of one model that take turns, step by step or in threads, beside a forward over each text."""

import copy
import inspect
import os
import threading

import pytest
import torch

import clearhead as ch
from clearhead.models.recordings.calls import labels

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")
from small_models import IDS, MODELS, made  # noqa: E402

ORDER = [0, 1, 0, 2, 1, 1, 0, 2, 0, 1]  # whose step each run is


def llama():
    return made("Llama", "ForCausalLM", 10, **MODELS["Llama"])


def whole(model, name="attentions", **ids):
    slow = copy.deepcopy(model)
    slow.set_attn_implementation("eager")
    with torch.no_grad():
        return slow(**ids, output_attentions=True, use_cache=False)[name]


def close(one, other):
    torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def in_turns(model, prompts, **options):
    """The recording of generations that take turns, their texts, and the runs of each."""
    caches = [transformers.DynamicCache() for _ in prompts]
    texts, runs = [prompt[:, :0] for prompt in prompts], [[] for _ in prompts]
    with torch.no_grad(), ch.watch(model, **options) as seen:
        for run, which in enumerate(ORDER):
            new = torch.full((2, 1 + run % 2), 20 + run) if runs[which] else prompts[which]
            texts[which] = torch.cat([texts[which], new], 1)
            runs[which].append(run)
            model(new, past_key_values=caches[which])
    return seen, texts, runs


@pytest.mark.parametrize("same", [False, True])
def test_generations_that_take_turns(same):
    """Also of one prompt, after which the texts differ; a step may have two tokens."""
    model = llama()
    seen, texts, runs = in_turns(model, [IDS, IDS if same else IDS.flip(0)[:, 3:], IDS.flip(1)], values=same)
    for layer, name in enumerate(seen.names):
        for text, mine in zip(texts, runs, strict=True):
            joined = seen[name][: mine[-1] + 1].joined()
            close(joined.dense(), whole(model, input_ids=text)[layer])
        kept = sum(call.cached_key.link.new.shape[2] for call in seen[name])
        assert kept == sum(text.shape[1] for text in texts)  # each key once
    for call, weights in zip(seen.joined(), whole(model, input_ids=texts[1]), strict=True):
        close(call.weights.dense(), weights)
        assert len(call.begins) == len(runs[1])
    wanted = [f"L{layer}, run {run}, step {runs[ORDER[run]].index(run)}" for run in range(10) for layer in range(2)]
    assert list(map(str, labels(seen.calls))) == wanted


FAMILIES = ["GPTNeoX", "Falcon", "GPTBigCode", "Llama", "GPT2"]
SMALLEST = {"vocab_size": 100, "hidden_size": 32, "n_embd": 32, "d_model": 32, "n_head": 4, "n_heads": 4, "n_layer": 2}
SMALLEST |= {"num_attention_heads": 4, "n_layers": 2, "num_hidden_layers": 2, "intermediate_size": 64, "rotary_dim": 4}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_cache_by_any_keyword(name):
    """Attention modules of many families take their cache as `layer_past`: each key is kept once there too."""
    config = getattr(transformers, f"{name}Config")
    known = set(inspect.signature(config).parameters)
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    model = made(name, head, 10, **{word: size for word, size in SMALLEST.items() if word in known})
    seen, texts, _ = in_turns(model, [IDS, IDS.flip(0)[:, 3:], IDS.flip(1)])
    lengths = {text.shape[1] for text in texts}
    assert seen.names
    for module in seen.names:
        assert sum(call.cached_key.link.new.shape[2] for call in seen[module]) == sum(text.shape[1] for text in texts)
        assert {call.cached_key.chain.links[-1].filled for call in seen[module]} == lengths
        assert seen[module].joined().shape[2] == texts[1].shape[1]


class Positional(torch.nn.Module):
    """Passes its cache on as the third argument, which has no name there."""

    def __init__(self):
        super().__init__()
        self.inner = llama()

    def forward(self, *given):
        ids, _, cache = given
        return self.inner(ids, past_key_values=cache)


def test_a_cache_without_a_keyword():
    model = Positional()
    caches = [transformers.DynamicCache(), transformers.DynamicCache()]
    with torch.no_grad(), ch.watch(model) as seen:
        for ids in (IDS, IDS[:, :1], IDS[:, :2]):
            for cache in caches:
                model(ids, None, cache)
    assert {call.cached_key.number for call in seen} == {0, 1, 2}


def test_a_cache_that_another_object_goes_on_with():
    """A copy of a cache continues the generation whose keys it has; each cache's own steps go on."""
    model, first = llama(), transformers.DynamicCache()
    new = [torch.full((2, 1), 20 + n) for n in range(4)]
    with torch.no_grad(), ch.watch(model) as seen:
        model(IDS, past_key_values=first)
        model(new[0], past_key_values=first)
        other = copy.deepcopy(first)
        model(new[1], past_key_values=other)
        model(new[2], past_key_values=other)
    text = torch.cat([IDS, *new[:3]], 1)
    for call, weights in zip(seen.joined(), whole(model, input_ids=text), strict=True):
        close(call.weights.dense(), weights)


def test_generations_in_threads():
    model, prompts = llama(), [IDS[:, :6], IDS.flip(0), IDS.flip(1)[:, :4]]
    barrier, texts = threading.Barrier(len(prompts)), [None] * len(prompts)

    def meet(module, args):  # each step waits for those of the others
        barrier.wait(30)

    hook = model.register_forward_pre_hook(meet)

    def generate(number):
        options = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4, "pad_token_id": 0}
        with torch.no_grad():
            texts[number] = model.generate(prompts[number], **options)

    with ch.watch(model) as seen:
        threads = [threading.Thread(target=generate, args=(number,)) for number in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    hook.remove()
    for layer, name in enumerate(seen.names):
        calls = seen[name]
        chains = {call.cached_key.chain: place for place, call in enumerate(calls)}
        assert len(calls) == 12 and len(chains) == 3
        found = {tuple(joined.shape): joined for end in chains.values() for joined in [calls[: end + 1].joined()]}
        for text in texts:
            want = whole(model, input_ids=text[:, :-1])[layer]
            close(found[tuple(want.shape)].dense(), want)
    shapes = {call.shape for call in seen.joined()}
    assert len(shapes) == 1  # all modules are of one generation


def test_decoders_that_take_turns_from_one_source_and_from_others():
    model = made("Bart", "ForConditionalGeneration", 3, **MODELS["Bart"])
    sources, texts = [IDS, IDS, IDS.flip(1)], [torch.full((2, 1), 2) for _ in range(3)]
    caches = [transformers.EncoderDecoderCache(*(transformers.DynamicCache() for _ in "12")) for _ in sources]
    with torch.no_grad():
        encoded = [model.get_encoder()(source) for source in sources]
        with ch.watch(model.model.decoder) as seen:
            for step in range(3):
                for which, one in enumerate(encoded):
                    given = {"encoder_outputs": one, "past_key_values": caches[which]}
                    model(decoder_input_ids=texts[which][:, -1:], **given)
                    texts[which] = torch.cat([texts[which], torch.full((2, 1), 10 * which + step + 5)], 1)
    for which, source in enumerate(sources):
        for kind, name in (("decoder_attentions", "self_attn"), ("cross_attentions", "encoder_attn")):
            want = whole(model, kind, input_ids=source, decoder_input_ids=texts[which][:, :-1])
            for layer in range(2):
                close(seen[f"layers.{layer}.{name}"][: 7 + which].joined().dense(), want[layer])


def test_copies_of_one_caches_prompt_that_take_turns(tmp_path):
    """Each copy goes on with a branch; also after another generation, and in a recording that was written."""
    model, first = llama(), transformers.DynamicCache()
    order, texts, ends = [0, 1, 0, 2, 1, 0], [IDS] * 3, {}
    with torch.no_grad(), ch.watch(model, values=True) as seen:
        model(IDS, past_key_values=first)
        caches = [copy.deepcopy(first) for _ in range(3)]
        model(IDS.flip(1), past_key_values=transformers.DynamicCache())
        for run, which in enumerate(order, 2):
            new = torch.full((2, 1), 20 + run)
            texts[which], ends[which] = torch.cat([texts[which], new], 1), run + 1
            model(new, past_key_values=caches[which])
    again = ch.models.load_recording(seen.write(tmp_path / "seen.safetensors"))
    for layer, name in enumerate(seen.names):
        for which, text in enumerate(texts):
            want = whole(model, input_ids=text)[layer]
            for recording in (seen, again):
                close(recording[name][: ends[which]].joined().dense(), want)
    for call, weights in zip(seen.joined(), whole(model, input_ids=texts[0]), strict=True):
        close(call.weights.dense(), weights)
        close(call.value, seen[call.name][7].value)
    assert len(set(map(str, labels(seen.calls)))) == len(seen.calls)
    assert not any(label.call for label in labels(seen.calls))


def test_decoders_in_threads_that_meet_between_layers():
    """A cross attention stands beside the self attention of its own thread."""
    model = made("Bart", "ForConditionalGeneration", 3, **MODELS["Bart"])
    sources, texts = [IDS, IDS.flip(1)], [torch.full((2, 1), 2), torch.full((2, 1), 3)]
    barrier = threading.Barrier(2)
    with torch.no_grad():
        encoded = [model.get_encoder()(source) for source in sources]

    def decode(which):
        cache = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
        for step in range(3):
            given = {"encoder_outputs": encoded[which], "past_key_values": cache}
            with torch.no_grad():
                model(decoder_input_ids=texts[which][:, -1:], **given)
            texts[which] = torch.cat([texts[which], torch.full((2, 1), 10 * which + step + 5)], 1)

    def meet(module, args):
        barrier.wait(30)

    hooks = [
        module.register_forward_pre_hook(meet)
        for name, module in model.model.decoder.named_modules()
        if name.endswith(("self_attn", "encoder_attn"))
    ]
    with ch.watch(model.model.decoder) as seen:
        threads = [threading.Thread(target=decode, args=(which,)) for which in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    for hook in hooks:
        hook.remove()
    calls = seen["layers.1.encoder_attn"]
    ends = {call.cached_key.chain: place for place, call in enumerate(calls)}
    assert len(calls) == 6 and len(ends) == 2
    found = [calls[: end + 1].joined().dense() for end in ends.values()]
    wanted = [
        whole(model, "cross_attentions", input_ids=source, decoder_input_ids=text[:, :-1])[1]
        for source, text in zip(sources, texts, strict=True)
    ]
    if not torch.allclose(found[0], wanted[0], atol=1e-5):
        wanted.reverse()
    for one, want in zip(found, wanted, strict=True):
        close(one, want)
