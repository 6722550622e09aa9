"""watch(keep=…): calls reduced when they happen, of models as they are; running means over texts; which calls."""

import gc
import os

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.models.loading import bundled

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")

IDS = torch.randint(0, 100, (2, 9), generator=torch.Generator().manual_seed(0))
LEFT = torch.tensor([[1] * 9, [0] * 4 + [1] * 5])
KEEP = [ch.Entropy(), ch.TopK(3), ch.Received(), ch.Pool(4), ch.MaxScore(), ch.SinkShare()]
TEXTS = ["The pump in Broad Street was closed.", "It was.", "Nobody had asked the water where it came from, or why."]


def llama(**more):
    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        **more,
    )
    torch.manual_seed(0)
    return transformers.LlamaModel(config).eval()


def t5():
    config = transformers.T5Config(vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    torch.manual_seed(0)
    return transformers.T5Model(config).eval()


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
        with ch.watch(model, keep=KEEP) as seen:
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
    with torch.no_grad(), ch.watch(model, keep=[ch.Entropy(), ch.TopK(5)]) as seen:
        model(ids)
    gc.collect()
    held = [t for t in gc.get_referents(*[r for c in seen.calls for r in gc.get_referents(c)]) if torch.is_tensor(t)]
    flat = [t for call in seen.calls for r in call.results for t in (r if isinstance(r, tuple) else (r,))]
    assert {id(t) for t in flat} >= {id(t) for t in held if t.is_floating_point()}
    assert sum(t.numel() for t in flat) == 3 * 4 * 300 * (1 + 5 + 5)
    with pytest.raises(ch.ClearheadError, match="were not kept"):
        _ = seen.calls[0].weights


def test_gradients_of_a_watched_training_step_are_bit_identical():
    model = llama().train()

    def gradients():
        model.zero_grad()
        model(IDS).last_hidden_state.square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients()
    with ch.watch(model, keep=[ch.Entropy(), ch.MaxScore()]) as seen:
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
@pytest.mark.parametrize("keep", [None, [ch.Entropy()]])
def test_layers_by_number_name_and_pattern(layers, numbers, keep):
    with torch.no_grad(), ch.watch(model := llama(), keep=keep, layers=layers) as seen:
        model(IDS)
    assert list(seen) == [f"layers.{number}.self_attn" for number in numbers]


@pytest.mark.parametrize("heads", [2, -1, slice(1, 3), [3, 0], range(4), (1, 2, 0)])
def test_heads_are_those_of_all(heads):
    model = llama()
    with torch.no_grad(), ch.watch(model, keep=KEEP) as every:
        model(IDS, attention_mask=LEFT)
    with torch.no_grad(), ch.watch(model, keep=KEEP, heads=heads) as some:
        model(IDS, attention_mask=LEFT)
    places = np.arange(4)[heads if isinstance(heads, slice) else [heads] if isinstance(heads, int) else list(heads)]
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
    with pytest.raises(ch.ClearheadError, match="there is no call 9"):
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
    model, means, halves = bert(), ch.Means(), [ch.Means(), ch.Means()]
    keep = [ch.Entropy(), ch.TopK(1), ch.Received()]
    for i, batch in enumerate(batches):
        with torch.no_grad(), ch.watch(model, keep=keep, merge=means) as seen:
            model(**batch)
        assert seen.calls == []
        with torch.no_grad(), ch.watch(model, keep=keep, merge=halves[i % 2]):
            model(**batch)
    assert len(means) == 6
    for layer, name in enumerate(means):
        for found, truth in zip(means[name], want[:, layer], strict=True):
            torch.testing.assert_close(found.reshape(truth.shape), truth, atol=1e-5, rtol=1e-5)
        count = sum(int(batch["attention_mask"].sum()) for batch in batches)
        assert all(c.eq(count).all() for c in means.counts[name])
    a, b = (half.state_dict() for half in halves)
    both = ch.Means()
    both.load_state_dict({key: a[key] + b[key] for key in a})
    for name in means:
        assert all(torch.allclose(x, y, rtol=1e-12) for x, y in zip(both[name], means[name], strict=True))


def test_queries_that_see_nothing_are_no_part_of_a_mean():
    class Block(torch.nn.Module):
        def forward(self, x, keep):
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=keep)

    keep = torch.tensor([[False] * 3, [True, True, False], [True] * 3])
    with ch.watch(block := Block(), keep=[ch.Entropy(), ch.LogSumExp()]) as seen:
        block(torch.zeros(1, 2, 3, 4), keep)
    entropy, logsumexp = seen.calls[0].means
    want = torch.tensor([2.0, 3.0]).log().mean().double().expand(2)
    torch.testing.assert_close(entropy, want)
    torch.testing.assert_close(logsumexp, want)


def test_a_text_shorter_than_k_has_weights_of_0():
    model, means = llama(), ch.Means()
    with torch.no_grad(), ch.watch(model, keep=[ch.TopK(4)]) as seen:
        model(IDS[:, :2])
    values, keys = seen.calls[0].results[0]
    assert values.shape == (2, 4, 2, 4) and (values[..., 2:] == 0).all() and (keys[..., 2:] == -1).all()
    torch.testing.assert_close(values.sum(-1), torch.ones(2, 4, 2))
    with torch.no_grad(), ch.watch(model, keep=[ch.TopK(4)], merge=means):
        model(IDS[:, :2])
        model(IDS)
    assert means.counts["layers.0.self_attn"][0].eq(2 * (2 + 9)).all()


def test_a_number_that_is_none_stays_in_a_mean():
    class Block(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    x = torch.zeros(1, 1, 3, 4)
    x[0, 0, 1, 2] = torch.nan
    with ch.watch(block := Block(), keep=[ch.Entropy()]) as seen:
        block(x)
    assert seen.calls[0].means[0].isnan().all()


def test_the_table_has_a_row_a_head():
    model = t5()
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS[:, :5]}
    with torch.no_grad(), ch.watch(model) as seen:
        model(**inputs)
    rows = seen.table()
    assert len(rows) == 6 * 4 and [row["head"] for row in rows[:5]] == [0, 1, 2, 3, 0]
    for row in rows:
        (call,) = seen[row["module"]]
        assert row["Entropy"] == pytest.approx(call.weights.entropy()[:, row["head"]].mean().item(), rel=1e-5)
        assert ("MeanDistance" in row) == (call.kind == "self")
    with torch.no_grad(), ch.watch(model, keep=[ch.Entropy(), ch.TopK(1)]) as kept:
        model(**inputs)
    for few, row in zip(kept.table(), rows, strict=True):
        assert few["Entropy"] == pytest.approx(row["Entropy"]) and few["module"] == row["module"]


BAD = {
    "no reductions": ({"keep": []}, r"keep is \(\); expected reductions"),
    "a class": ({"keep": [ch.Entropy]}, "expected reductions"),
    "heads alone": ({"heads": 2}, "heads goes with keep"),
    "merge alone": ({"merge": ch.Means()}, "merge goes with keep"),
    "merge of another kind": ({"keep": [ch.Entropy()], "merge": {}}, r"merge is a dict; expected a ch\.Means"),
    "every 0": ({"every": 0}, "every is 0"),
    "no head 7": (
        {"keep": [ch.Entropy()], "heads": [0, 7]},
        r"heads is \[0, 7\], and layers\.0\.self_attn has 4 heads",
    ),
    "no heads": ({"keep": [ch.Entropy()], "heads": []}, "has 4 heads"),
    "a word for heads": ({"keep": [ch.Entropy()], "heads": "all"}, "heads is 'all'; expected a number"),
    "words for heads": ({"keep": [ch.Entropy()], "heads": ["a"]}, "heads is"),
    "layers that are none": (
        {"layers": "encoder.*"},
        r"layers is \('encoder\.\*',\), and no call is of these; .*'layers\.0",
    ),
    "layers of another kind": ({"layers": 1.5}, "layers is"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_error(case):
    options, message = BAD[case]
    with pytest.raises(ch.ClearheadError, match=message), torch.no_grad(), ch.watch(model := llama(), **options):
        model(IDS)


def test_means_keep_the_dimensions_that_count_nothing():
    keep = [ch.Mass(np.arange(9) % 2), ch.TopK(2), ch.Pool(3, queries=slice(0, 3)), ch.Received(slice(0, 3))]
    with torch.no_grad(), ch.watch(model := llama(), keep=keep) as seen:
        model(IDS)
    assert [tuple(mean.shape) for mean in seen.calls[0].means] == [(4, 2), (4, 2), (4, 3, 3), (4,)]
    torch.testing.assert_close(seen.calls[0].means[0].sum(-1), torch.ones(4, dtype=torch.float64))


def test_means_of_other_shapes_are_an_error_and_leave_the_means_alone():
    model, means = llama(), ch.Means()
    with torch.no_grad():
        with ch.watch(model, keep=[ch.Pool(8)], merge=means):
            model(IDS)
        before = means.state_dict()
        with (
            pytest.raises(ch.ShapeError, match="Means go on over the same"),
            ch.watch(model, keep=[ch.Pool(8)], merge=means),
        ):
            model(IDS[:, :4])
        with pytest.raises(ch.ShapeError), ch.watch(model, keep=[ch.Pool(8), ch.Entropy()], merge=means):
            model(IDS)
    assert all(torch.equal(means.state_dict()[key], tensor) for key, tensor in before.items())
