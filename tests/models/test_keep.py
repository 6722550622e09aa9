"""statistics(): calls reduced when they happen, of models as they are; running means over texts; which calls."""

import copy
import gc
import os
import pickle
import types
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.models.loading import bundled

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")
from small_models import SIZES, T5, made  # noqa: E402

IDS = torch.randint(0, 100, (2, 9), generator=torch.Generator().manual_seed(0))
LEFT = torch.tensor([[1] * 9, [0] * 4 + [1] * 5])
KEEP = [
    ch.reductions.Entropy(),
    ch.reductions.TopK(3),
    ch.reductions.Received(),
    ch.reductions.Pool(4),
    ch.reductions.MaxScore(),
    ch.reductions.SinkShare(),
]
TEXTS = ["The pump in Broad Street was closed.", "It was.", "Nobody had asked the water where it came from, or why."]


def llama(**more):
    return made("Llama", **SIZES | {"num_hidden_layers": 3}, num_key_value_heads=2, **more)


def t5():
    return made("T5", **T5)


class Own(torch.nn.Module):
    """clearhead's module, its function with another score, and a layer of torch."""

    def __init__(self):
        super().__init__()
        self.heads, self.layer = (
            ch.nn.MultiHeadAttention(16, 4),
            torch.nn.TransformerEncoderLayer(16, 2, batch_first=True),
        )

    def forward(self, x):
        x = self.heads(x, x, x)
        return self.layer(ch.attention(x, x, x, score=ch.Gaussian(2.0), mask=ch.Causal()))


def own_layers():
    torch.manual_seed(0)
    return Own().eval()


def bert():
    return transformers.AutoModel.from_pretrained(bundled(), local_files_only=True).eval()


def words(texts):
    tokenizer = transformers.AutoTokenizer.from_pretrained(bundled(), local_files_only=True)
    return dict(tokenizer(texts, padding=True, return_tensors="pt"))


MODELS = {
    "llama": (llama, lambda: {"input_ids": IDS}),
    "llama, left padding": (llama, lambda: {"input_ids": IDS, "attention_mask": LEFT}),
    "llama, eager": (lambda: llama(attn_implementation="eager"), lambda: {"input_ids": IDS, "attention_mask": LEFT}),
    "t5": (t5, lambda: {"input_ids": IDS, "attention_mask": LEFT.flip(1), "decoder_input_ids": IDS[:, :5]}),
    "bert": (bert, lambda: words(TEXTS)),
    "clearhead's own and torch's": (own_layers, lambda: {"x": torch.ones(2, 5, 16).cumsum(1).sin()}),
}


def equal(a, b):
    if isinstance(a, tuple):
        return all(equal(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(torch.nan_to_num(a, nan=-7.0), torch.nan_to_num(b, nan=-7.0))


@pytest.mark.parametrize("name", MODELS)
def test_results_are_those_of_the_record_and_outputs_stay_bit_identical(name):
    make, inputs = MODELS[name]
    model, inputs = make(), inputs()
    first = lambda output: output if isinstance(output, torch.Tensor) else output[0]
    with torch.no_grad():
        plain = first(model(**inputs))
        with ch.watch(model) as recorded:
            model(**inputs)
        with ch.models.statistics(model, KEEP) as seen:
            output = first(model(**inputs))
    assert torch.equal(plain, output)
    assert [call.name for call in seen.calls] == [call.name for call in recorded.calls] and len(seen.calls) > 1
    for call, whole in zip(seen.calls, recorded.calls, strict=True):
        want = whole.weights.reduce(*KEEP)
        assert all(equal(a, b) for a, b in zip(call.results, want, strict=True)), call
        assert (call.kind, call.backend) == (whole.kind, whole.backend)
        assert call.shape == (*whole.query.shape[:3], whole.key.shape[2])


def test_query_and_key_are_not_kept():
    model, ids = llama(), torch.randint(0, 100, (1, 300))
    with torch.no_grad(), ch.models.statistics(model, [ch.reductions.Entropy(), ch.reductions.TopK(5)]) as seen:
        model(ids)
    gc.collect()
    held = [t for t in gc.get_referents(*[r for c in seen.calls for r in gc.get_referents(c)]) if torch.is_tensor(t)]
    flat = [t for call in seen.calls for r in call.results for t in (r if isinstance(r, tuple) else (r,))]
    assert {id(t) for t in flat} >= {id(t) for t in held if t.is_floating_point()}
    assert sum(t.numel() for t in flat) == 3 * 4 * 300 * (1 + 5 + 5)
    with pytest.raises(ch.ClearheadError, match="Name all statistics"):
        _ = seen.calls[0].weights


def test_gradients_of_a_watched_training_step_are_bit_identical():
    model = llama().train()

    def gradients():
        model.zero_grad()
        model(IDS).last_hidden_state.square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients()
    with ch.models.statistics(model, [ch.reductions.Entropy(), ch.reductions.MaxScore()]) as seen:
        watched = gradients()
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert not any(result.requires_grad for call in seen.calls for result in call.results)


@pytest.mark.parametrize(
    ("layers", "numbers"),
    [
        (1, [1]),
        ([0, 2], [0, 2]),
        (range(2), [0, 1]),
        ("layers.2.self_attn", [2]),
        ("layers.[12].*", [1, 2]),
        (["*.0.*", 2], [0, 2]),
    ],
)
@pytest.mark.parametrize("keep", [None, [ch.reductions.Entropy()]])
def test_layers_by_number_name_and_pattern(layers, numbers, keep):
    model = llama()
    watching = ch.models.statistics(model, keep, layers=layers) if keep else ch.watch(model, layers=layers)
    with torch.no_grad(), watching as seen:
        model(IDS)
    assert seen.names == [f"layers.{number}.self_attn" for number in numbers]


@pytest.mark.parametrize("heads", [2, -1, slice(1, 3), [3, 0], range(4), (1, 2, 0)])
def test_heads_are_those_of_all(heads):
    model = llama()
    with torch.no_grad(), ch.models.statistics(model, KEEP) as every:
        model(IDS, attention_mask=LEFT)
    with torch.no_grad(), ch.models.statistics(model, KEEP, heads=heads) as some:
        model(IDS, attention_mask=LEFT)
    places = np.arange(4)[heads if isinstance(heads, slice) else [heads] if isinstance(heads, int) else list(heads)]
    assert [row["head"] for row in some.table()[: len(places)]] == list(places)
    for call, whole in zip(some.calls, every.calls, strict=True):
        assert call.shape[1] == len(places)
        for result, all_heads in zip(call.results, whole.results, strict=True):
            for part, full in zip(*(r if isinstance(r, tuple) else (r,) for r in (result, all_heads)), strict=True):
                torch.testing.assert_close(part, full[:, places], equal_nan=True)


def test_every_second_run_and_runs_apart():
    model = llama()
    with torch.no_grad(), ch.watch(model, every=2) as seen:
        for length in (3, 4, 5, 6, 7):
            model(IDS[:, :length])
    assert [run.calls[0].query.shape[2] for run in seen.runs] == [3, 5, 7]
    assert [len(run.calls) for run in seen.runs] == [3, 3, 3]
    assert seen[3] is seen.runs[1].calls[0] and seen[-1] is seen.calls[-1] and seen[:2] == seen.calls[:2]
    assert [call.run for call in seen["*.1.*"]] == [0, 2, 4]
    with pytest.raises(IndexError):
        seen[9]


def eager_means(model, batches):
    """For each layer and head the entropy, the largest weight and what a key received, over all words, by hand."""
    sums, words_seen = 0.0, 0
    for batch in batches:
        real = batch["attention_mask"].bool()
        with torch.no_grad():
            weights = torch.stack(model(**batch, output_attentions=True).attentions).double()  # (layers, B, H, L, L)
        entropy = -torch.xlogy(weights, weights).sum(-1)
        largest = weights.amax(-1)
        received = (weights * real[:, None, :, None]).sum(-2)  # from words alone
        each = torch.stack([entropy, largest, received])  # (3, layers, B, H, L)
        sums = sums + (each * real[:, None, :]).sum((2, 4))
        words_seen += real.sum()
    return sums / words_seen


def test_means_over_a_corpus_weigh_every_word_alike():
    batches = [words(TEXTS), words(TEXTS[1:2]), words(TEXTS[::2])]
    eager = transformers.AutoModel.from_pretrained(bundled(), local_files_only=True, attn_implementation="eager").eval()
    want = eager_means(eager, batches)
    model, means, halves = bert(), ch.models.Means(), [ch.models.Means(), ch.models.Means()]
    keep = [ch.reductions.Entropy(), ch.reductions.TopK(1), ch.reductions.Received()]
    for i, batch in enumerate(batches):
        with torch.no_grad(), ch.models.statistics(model, keep, merge=means) as seen:
            model(**batch)
        assert seen.calls == []
        with torch.no_grad(), ch.models.statistics(model, keep, merge=halves[i % 2]):
            model(**batch)
    assert len(means) == 6
    for layer, name in enumerate(means):
        for found, truth in zip(means[name], want[:, layer], strict=True):
            torch.testing.assert_close(found.reshape(truth.shape), truth, atol=1e-5, rtol=1e-5)
        count = sum(int(batch["attention_mask"].sum()) for batch in batches)
        assert all(c.eq(count).all() for c in means.counts[name])
    a, b = (half.state_dict() for half in halves)
    both = ch.models.Means()
    both.load_state_dict({key: a[key] + b[key] for key in a})
    for name in means:
        assert all(torch.allclose(x, y, rtol=1e-12) for x, y in zip(both[name], means[name], strict=True))


def test_queries_that_see_nothing_are_no_part_of_a_mean():
    class Block(torch.nn.Module):
        def forward(self, x, keep):
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=keep)

    keep = torch.tensor([[False] * 3, [True, True, False], [True] * 3])
    with ch.models.statistics(block := Block(), [ch.reductions.Entropy(), ch.reductions.LogSumExp()]) as seen:
        block(torch.zeros(1, 2, 3, 4), keep)
    entropy, logsumexp = seen.calls[0].means
    want = torch.tensor([2.0, 3.0]).log().mean().double().expand(2)
    torch.testing.assert_close(entropy, want)
    torch.testing.assert_close(logsumexp, want)


def test_a_text_shorter_than_k_has_weights_of_0():
    model, means = llama(), ch.models.Means()
    with torch.no_grad(), ch.models.statistics(model, [ch.reductions.TopK(4)]) as seen:
        model(IDS[:, :2])
    values, keys = seen.calls[0].results[0]
    assert values.shape == (2, 4, 2, 4) and (values[..., 2:] == 0).all() and (keys[..., 2:] == -1).all()
    torch.testing.assert_close(values.sum(-1), torch.ones(2, 4, 2))
    with torch.no_grad(), ch.models.statistics(model, [ch.reductions.TopK(4)], merge=means):
        model(IDS[:, :2])
        model(IDS)
    assert means.counts["layers.0.self_attn"][0].eq(2 * (2 + 9)).all()


def test_a_number_that_is_none_stays_in_a_mean():
    class Block(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    x = torch.zeros(1, 1, 3, 4)
    x[0, 0, 1, 2] = torch.nan
    with ch.models.statistics(block := Block(), [ch.reductions.Entropy()]) as seen:
        block(x)
    assert seen.calls[0].means[0].isnan().all()


def test_the_table_has_a_row_a_head():
    model = t5()
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS[:, :5]}
    with torch.no_grad(), ch.watch(model) as seen:
        model(**inputs)
    rows = seen.table()
    assert {"Entropy (nats)", "TopK"} < rows[0].keys()
    assert len(rows) == 6 * 4 and [row["head"] for row in rows[:5]] == [0, 1, 2, 3, 0]
    for row in rows:
        (call,) = seen[row["module"]]
        assert row["Entropy (nats)"] == pytest.approx(call.weights.entropy()[:, row["head"]].mean().item(), rel=1e-5)
        assert row["TopK"] == pytest.approx(call.weights.topk(1)[0][:, row["head"]].mean().item(), rel=1e-5)
        assert ("MeanDistance (positions)" in row) == (call.kind == "self")
    with torch.no_grad(), ch.models.statistics(model, [ch.reductions.Entropy(), ch.reductions.TopK(1)]) as kept:
        model(**inputs)
    for few, row in zip(kept.table(), rows, strict=True):
        assert few["Entropy (nats)"] == pytest.approx(row["Entropy (nats)"]) and few["module"] == row["module"]


BAD = {
    "no reductions": ({"keep": []}, r"reductions is \[\]; expected reductions"),
    "a class": ({"keep": [ch.reductions.Entropy]}, "expected reductions"),
    "merge of another kind": (
        {"keep": [ch.reductions.Entropy()], "merge": {}},
        r"merge is a dict; expected a ch\.models\.Means",
    ),
    "every 0": ({"every": 0}, "every is 0"),
    "no heads": ({"keep": [ch.reductions.Entropy()], "heads": []}, r"heads is \[\]; expected a number"),
    "a word for heads": ({"keep": [ch.reductions.Entropy()], "heads": "all"}, "heads is 'all'; expected a number"),
    "words for heads": ({"keep": [ch.reductions.Entropy()], "heads": ["a"]}, "heads is"),
    "heads by words": ({"keep": [ch.reductions.Entropy()], "heads": slice("a", None)}, "expected a number, a slice"),
    "heads by 0": ({"keep": [ch.reductions.Entropy()], "heads": slice(None, None, 0)}, "expected a number, a slice"),
    "the values of one call": ({"keep": [ch.reductions.Output(torch.ones(9, 8))]}, "whose values are of one call"),
    "k that is none": ({"keep": [ch.reductions.TopK(2.5)]}, "k of TopK"),
    "k without end": ({"keep": [ch.reductions.TopK(10**30)]}, "k of TopK"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_error(case):
    options, message = BAD[case]
    keep, model = options.get("keep"), llama()
    others = {name: value for name, value in options.items() if name != "keep"}
    watch = ch.watch if keep is None else lambda model, **others: ch.models.statistics(model, keep, **others)
    with pytest.raises(ch.ClearheadError, match=message), torch.no_grad(), watch(model, **others):
        model(IDS)


def test_means_keep_the_dimensions_that_count_nothing():
    keep = [
        ch.reductions.Mass(np.arange(9) % 2),
        ch.reductions.TopK(2),
        ch.reductions.Pool(3, queries=slice(0, 3)),
        ch.reductions.Received(slice(0, 3)),
    ]
    with torch.no_grad(), ch.models.statistics(model := llama(), keep) as seen:
        model(IDS)
    assert [tuple(mean.shape) for mean in seen.calls[0].means] == [(4, 2), (4, 2), (4, 3, 3), (4,)]
    torch.testing.assert_close(seen.calls[0].means[0].sum(-1), torch.ones(4, dtype=torch.float64))


def test_heads_that_no_layer_has_leave_it_out():
    model = llama()
    said = r"heads is \[0, 7\], and layers\.0\.self_attn has 4 heads"
    with pytest.warns(UserWarning, match=said), torch.no_grad():  # noqa: SIM117
        with ch.models.statistics(model, ch.reductions.Entropy(), heads=[0, 7]) as seen:
            model(IDS)
    assert len(seen) == 0 and len(seen.missing) == len(model.layers)


def test_means_of_other_shapes_are_told_of_and_leave_the_means_alone():
    model, means = llama(), ch.models.Means()
    with torch.no_grad():
        with ch.models.statistics(model, [ch.reductions.Pool(8)], merge=means):
            model(IDS)
        before = means.state_dict()
        with (
            pytest.warns(UserWarning, match="depends on the length"),
            ch.models.statistics(model, [ch.reductions.Pool(8)], merge=means),
        ):
            model(IDS[:, :4])
        for others in (
            {"reductions": [ch.reductions.Pool(8), ch.reductions.Entropy()]},
            {"reductions": [ch.reductions.Pool(8)], "heads": 1},
        ):
            own = pytest.warns(UserWarning, match=r"need a ch\.models\.Means\(\) of their own")
            with own, ch.models.statistics(model, **others, merge=means):
                model(IDS)
    assert all(torch.equal(means.state_dict()[key], tensor) for key, tensor in before.items())


def test_heads_of_clearheads_own_attention_with_a_mask_that_reads_tensors():
    blocks = torch.rand(3, 3) > 0.3
    mask = ch.MaskFunction(lambda b, h, i, j: blocks[i // 2, j // 2] | (i == j), reads=[blocks])

    class Near(torch.nn.Module):
        def forward(self, x):
            x = ch.attention(x, x, x, score=ch.Gaussian(1.0), mask=mask)
            return ch.attention(x[:, :, -3:], x, x, mask=ch.Lengths([5]))

    x = torch.randn(1, 4, 6, 8, requires_grad=True)
    with ch.models.statistics(model := Near(), [ch.reductions.Entropy(), ch.reductions.TopK(2)], heads=[3, 1]) as some:
        model(x)
    with ch.watch(model) as seen:
        model(x)
    for call, whole in zip(some.calls, seen.calls, strict=True):
        torch.testing.assert_close(call.results[0], whole.weights.entropy()[:, [3, 1]])
    assert [row["queries"] for row in seen.table()] == [6] * 4 + [3] * 4  # of the second no distances are known


def test_runs_are_those_that_compute_attention():
    model = llama().train()
    model.activation_checkpointing_enable()
    with ch.watch(model, every=2) as seen:
        for _ in range(4):
            embedded = model.get_input_embeddings()(IDS)
            model(inputs_embeds=embedded).last_hidden_state.sum().backward()
    assert [run.calls[0].run for run in seen.runs] == [0, 2] and len(seen.calls) == 6


def test_every_counts_each_threads_runs():
    model, ids = llama(), IDS
    with ch.models.statistics(model, [ch.reductions.Entropy()], every=2) as seen, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: model(ids).last_hidden_state.detach(), range(12)))
    assert len(seen.calls) == 6 * 3 and len(seen.runs) == 6


def test_layers_are_named_as_calls_are():
    layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad(), ch.watch(model) as seen:  # the fast path
        model(x)
    for names, count in ((seen.names[1], 1), ("*.self_attn", 2), (0, 1)):
        with torch.no_grad(), ch.models.statistics(model, [ch.reductions.Entropy()], layers=names) as some:
            model(x)
        assert len(some.calls) == count


def test_a_decoders_padding_is_left_out_of_cross_attention():
    real = torch.tensor([[1] * 5, [1] * 3 + [0] * 2])
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS[:, :5], "decoder_attention_mask": real}
    for source in ({}, {"attention_mask": torch.ones_like(IDS)}, {"attention_mask": LEFT.flip(1)}):
        with torch.no_grad(), ch.models.statistics(model := t5(), [ch.reductions.Entropy()]) as seen:
            model(**inputs, **source)
        counts = {call.name.split(".")[0] + call.kind: int(call.queries[:, 0].sum()) for call in seen.calls}
        assert counts["decodercross"] == counts["decoderself"] == 8


def test_slots_of_a_static_cache_are_no_keys():
    model = transformers.LlamaForCausalLM(llama().config).eval()
    found = []
    for cache in ("dynamic", "static"):
        means = ch.models.Means()
        with torch.no_grad(), ch.models.statistics(model, [ch.reductions.Received()], merge=means):
            model.generate(IDS, max_new_tokens=6, cache_implementation=cache, do_sample=False, pad_token_id=0)
        found.append(means)
    a, b = found
    for name in a:
        assert torch.equal(a.counts[name][0], b.counts[name][0])
        torch.testing.assert_close(a[name][0], b[name][0], atol=1e-6, rtol=1e-5)


def test_reductions_of_ones_own():
    class Keys(ch.reductions.TopK):
        """The keys alone, and an attention of its own in between."""

        def found(self, found, problem):
            x = torch.ones(1, 2, 4)
            return found.indices.double() * ch.attention(x, x, x).mean()

    with torch.no_grad(), ch.models.statistics(model := llama(), [Keys(2), ch.reductions.TopK(2)]) as seen:
        model(IDS)
    assert len(seen.calls) == 3
    for call in seen.calls:
        torch.testing.assert_close(call.results[0], call.results[1][1].double())


def test_means_are_copied_saved_and_loaded_whole():
    model, means = llama(), ch.models.Means()
    with torch.no_grad(), ch.models.statistics(model, [ch.reductions.Entropy(), ch.reductions.TopK(2)], merge=means):
        model(IDS)
    (name, *_) = means
    state, again = means.state_dict(), ch.models.Means()
    again.load_state_dict(state)
    state[f"{name}:0:sum"] += 5
    for other in (copy.deepcopy(means), pickle.loads(pickle.dumps(means)), again):
        assert torch.equal(other[name][1], means[name][1]) and torch.equal(other[name][0], means[name][0])
    one = torch.ones(4)
    for bad in (
        None,
        [1],
        {"a": one},
        {3: one},
        {"a:1:sum": one, "a:1:count": one},
        {"a:0:sum": 1.0, "a:0:count": 1.0},
        {"a:0:sum": one},
        {"a:0:sum": one, "a:0:count": torch.ones(3)},
    ):
        with pytest.raises(ch.ClearheadError, match="state of Means"):
            again.load_state_dict(bad)
    assert torch.equal(again[name][0], means[name][0])
    with pytest.raises(ch.ClearheadError, match="there are those of: none"):
        ch.models.Means()["layers.0"]


def test_masks_of_many_lengths_are_not_kept():
    model, means = t5().encoder, ch.models.Means()

    def held(texts):
        with torch.no_grad(), ch.models.statistics(model, [ch.reductions.Entropy()], merge=means):
            for i in range(texts):
                ids = torch.ones(2, 140 - i, dtype=torch.long)
                model(ids, attention_mask=(torch.arange(140 - i) < torch.tensor([[50], [90]])).long())
            gc.collect()
            return sum(t.numel() for t in gc.get_objects() if type(t) is torch.Tensor)

    assert held(40) < 1.1 * held(10)


def test_a_model_with_a_forward_of_its_own_is_freed():
    model = llama()

    def wrap(inner, before):
        inner.forward = types.MethodType(lambda self, *args, **kwargs: before(*args, **kwargs), inner)

    wrap(model.layers[0], model.layers[0].forward)
    with torch.no_grad(), ch.watch(model):
        model(IDS, LEFT)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
