"""The table of a survey beside the models' own weights, one text at a time, in NumPy and float64."""

import copy
import string

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import clearhead as ch
from clearhead.models import bundled, load

TEXTS = [
    "The pump in Broad Street, 1854, was closed.",
    "A map!",
    "Doctor Snow had drawn deaths around it; the committee uncharacteristically listened to 2 unforgettable talks.",
    "Water and water again, the pump and the pump.",
]
KEEP = ["normalised entropy", "first", "sink", "previous", "distance"]


def letters(texts, **options):
    """A tokenizer of letters."""
    rows = [[string.printable.index(c) for c in text] for text in texts]
    return {"input_ids": [row[: options.get("max_length", len(row))] for row in rows]}


def llama(layers=2):
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval()


def of_one_text(w):
    """Of a text's weights (H, L, L): for each statistic its sum over the queries that count, (H,), and their number."""
    length = w.shape[-1]
    seen = w > 0 if (w[0, 0, 1:] == 0).all() else np.ones_like(w, dtype=bool)  # causal, or all
    uniform = seen / seen.sum(-1, keepdims=True)
    logs = np.log(np.where(w > 0, w, 1))
    count = seen[0].sum(-1)
    far = np.abs(np.arange(length)[:, None] - np.arange(length))
    found = {"queries": (np.full(len(w), length), 1)}
    several = count > 1
    found["normalised entropy"] = ((-(w * logs).sum(-1)[:, several] / np.log(count[several])).sum(-1), several.sum())
    for name, a in (("", w), (" uniform", uniform)):
        found["first" + name] = a[..., 0].sum(-1), length
        found["previous" + name] = np.diagonal(a, -1, 1, 2).sum(-1), length - 1
        found["distance" + name] = (a * far).sum((1, 2)), length
        key = (w.sum(1) - uniform.sum(1)).argmax(-1)
        found["sink" + name] = np.take_along_axis(a.sum(1), key[:, None], -1)[:, 0], length
        found["received" + name] = a.sum(1), length
    return found


def wanted(model, ids):
    """By statistic, the means (layers, H)."""
    plain = copy.deepcopy(model).double()
    plain.set_attn_implementation("eager")
    sums, counts, received = {}, {}, []
    for row in ids:
        with torch.no_grad():
            weights = plain(torch.tensor([row]), output_attentions=True).attentions
        layers = [of_one_text(w[0].numpy()) for w in weights]
        for name in layers[0]:
            total = np.stack([layer[name][0] for layer in layers])
            if name.startswith("received"):
                received.append((name, row, total))
                continue
            sums[name] = sums.get(name, 0) + total
            counts[name] = counts.get(name, 0) + layers[0][name][1]
    return {name: sums[name] / (1 if name == "queries" else counts[name]) for name in sums}, received


def columns(survey):
    rows = survey.table()
    shape = (len(survey.means), -1)
    return {name: np.array([row[name] for row in rows]).reshape(shape) for name in rows[0] if name != "module"}


@pytest.fixture(scope="module")
def bert():
    return load(bundled())


def test_the_table_of_bert_is_that_of_its_own_weights(bert):
    model, tokenizer = bert
    survey = ch.models.survey(model, TEXTS, tokenizer, batch=64)
    got, (want, received) = columns(survey), wanted(model, tokenizer(TEXTS)["input_ids"])
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, atol=2e-5, rtol=2e-5, err_msg=name)
    assert survey.tokens == got["queries"][0, 0]
    for name, kind in (("special", lambda t: t[0] == "["), ("punctuation", lambda t: t in string.punctuation)):
        check_class(got, received, tokenizer, f"to {name}", kind)
    check_class(got, received, tokenizer, "to number", str.isdecimal)
    check_class(got, received, tokenizer, "to part", lambda t: t.startswith("##"))
    check_class(got, received, tokenizer, "to word", str.isalpha)
    classes = [got[f"to {name}"] for name in ("special", "punctuation", "number", "word", "part")]
    np.testing.assert_allclose(sum(classes), 1, atol=1e-5)


def check_class(got, received, tokenizer, column, kind):
    for beside in ("", " uniform"):
        total = queries = 0
        for name, row, sums in received:
            if name == "received" + beside:
                members = np.array([kind(token) for token in tokenizer.convert_ids_to_tokens(row)])
                total, queries = total + sums[..., members].sum(-1), queries + len(row)
        np.testing.assert_allclose(got[column + beside], total / queries, atol=2e-5, err_msg=column)
    assert got[column].max() > 0


def test_the_table_of_a_causal_model_is_that_of_its_own_weights():
    model = llama()
    survey = ch.models.survey(model, TEXTS, letters, keep=KEEP, batch=128)
    want, _ = wanted(model, letters(TEXTS)["input_ids"])
    got = columns(survey)
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, atol=2e-5, rtol=1e-4, err_msg=name)


def test_reductions_and_other_measures_are_those_of_a_watch():
    model = llama()
    kept = [ch.reductions.Entropy(), ch.reductions.TopK(3), "same word", "induction"]
    survey = ch.models.survey(model, TEXTS[:1], letters, keep=kept)
    ids = torch.tensor(letters(TEXTS[:1])["input_ids"])
    means = ch.models.Means()
    with torch.no_grad(), ch.watch(model) as seen, ch.models.statistics(model, kept[:2], merge=means):
        model(ids)
    table, rows = survey.table(), seen.table(tokens=ids)
    names = list(survey.means)
    assert names == list(means)
    for row, same in zip(table, rows, strict=True):
        assert row["same word"] == pytest.approx(same["same word"], abs=1e-6, nan_ok=True)
        assert row["induction"] == pytest.approx(same["induction"], abs=1e-6, nan_ok=True)
    for name in names:
        torch.testing.assert_close(survey.means[name][-2], means[name][0], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(survey.means[name][-1], means[name][1], atol=1e-6, rtol=1e-6)


def test_batches_do_not_change_the_numbers_and_padding_does_not_count():
    model = llama(1)
    alone, together = (ch.models.survey(model, TEXTS, letters, keep=KEEP, batch=most) for most in (1, 100_000))
    assert (alone.batches, together.batches) == (4, 1)
    for one, other in zip(alone.table(), together.table(), strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def spread_of(model, ids):
    """By statistic, for each text the mean over its queries (texts, layers, H)."""
    plain = copy.deepcopy(model).double()
    plain.set_attn_implementation("eager")
    texts = []
    for row in ids:
        with torch.no_grad():
            weights = plain(torch.tensor([row]), output_attentions=True).attentions
        texts.append([of_one_text(w[0].numpy()) for w in weights])
    return {
        name: np.array([[layer[name][0] / max(layer[name][1], 1) for layer in text] for text in texts]) for name in KEEP
    }


@pytest.mark.parametrize("batch", [1, 64, 100_000])
def test_the_spread_over_texts(batch):
    """Beside NumPy's standard deviation of each text's mean; a text of one token has no previous token."""
    model, texts = llama(), [*TEXTS, "a", *TEXTS[1:2]]
    got = columns(ch.models.survey(model, texts, letters, keep=KEEP, batch=batch))
    want = spread_of(model, letters(texts)["input_ids"])
    for name, values in want.items():
        some = np.delete(values, 4, 0) if name in ("previous", "normalised entropy") else values
        np.testing.assert_array_equal(got[f"{name} texts"], len(some), err_msg=name)
        np.testing.assert_allclose(got[f"{name} sd"], some.std(0, ddof=1), atol=2e-5, rtol=1e-4, err_msg=name)


def test_the_spread_of_classes_of_words(bert):
    model, tokenizer = bert
    survey = ch.models.survey(model, TEXTS, tokenizer, batch=64)
    got, (_, received) = columns(survey), wanted(model, tokenizer(TEXTS)["input_ids"])
    shares = []
    for name, row, sums in received:
        if name == "received":
            special = np.array([token[0] == "[" for token in tokenizer.convert_ids_to_tokens(row)])
            shares.append(sums[..., special].sum(-1) / len(row))
    np.testing.assert_allclose(got["to special sd"], np.std(shares, 0, ddof=1), atol=2e-5)
    assert (got["to special texts"] == len(TEXTS)).all()


def test_few_texts_and_modules_that_attend_several_times():
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one = Reader()

        def forward(self, input_ids, attention_mask):
            self.one(input_ids, attention_mask, 1.0)
            return self.one(input_ids, attention_mask, 3.0)

    class Reader(torch.nn.Module):
        def forward(self, ids, words, scale):
            x = torch.nn.functional.one_hot(ids, 100).float()[:, None]
            mask = words[:, None, None].bool()
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask, scale=scale)

    [alone] = ch.models.survey(Twice().eval(), TEXTS[:1], letters, keep="first").table()
    assert alone["first texts"] == 1 and np.isnan(alone["first sd"])
    [row] = ch.models.survey(Twice().eval(), TEXTS, letters, keep="first", batch=100).table()
    each = []
    for ids in letters(TEXTS)["input_ids"]:
        same = np.array(ids)[:, None] == np.array(ids)
        both = [np.exp(scale * same) / np.exp(scale * same).sum(-1, keepdims=True) for scale in (1.0, 3.0)]
        each.append(np.mean([w[:, 0].mean() for w in both]))  # a text counts once
    assert row["first texts"] == 4 and row["first sd"] == pytest.approx(np.std(each, ddof=1), rel=1e-5)


def test_a_small_spread_beside_a_large_mean_keeps_its_digits():
    from clearhead.models.surveys.examples import BatchSpread, Spread

    values = 1e6 + torch.randn(1000, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1e-3
    spread, empty = Spread(), BatchSpread(1)
    empty.add("m", 0, torch.zeros(2, 1).double(), torch.zeros(2, 1).double(), 1)
    spread.include(empty.found)
    assert np.isnan(spread.of("m", 0, 0)[0]) and spread.of("m", 0, 0)[1] == 0
    for part in values.split([1, 7, 500, 492]):
        batch = BatchSpread(1)
        batch.add("m", 0, part * 5, torch.full_like(part, 5.0), 1)
        spread.include(batch.found)
        spread.include(empty.found)
    found, texts = spread.of("m", 0, 0)
    assert texts == 1000 and found == pytest.approx(float(values.numpy().std(ddof=1)), rel=1e-6)


def test_long_texts_are_cut_and_counted(bert):
    model, tokenizer = bert
    survey = ch.models.survey(model, [*TEXTS, "word " * 1000], tokenizer, keep="first", max_length=8)
    assert (survey.texts, survey.truncated, survey.tokens) == (5, 4, 8 * 4 + 5)
    assert ch.models.survey(model, ["word " * 1000], tokenizer, keep="first").max_length == 512


def test_a_marking_vocabulary_has_words_and_their_parts():
    from clearhead.models.surveys.looks import CLASSES, WordClasses

    class Vocabulary:
        tokens = ("<s>", "Ġthe", "re", "12", "Ġ7", ",", "Ċ", "The", "Ã©", "Ġ")
        texts = ("<s>", " the", "re", "12", " 7", ",", "\n", "The", "é", " ")
        all_special_ids = (0,)
        get_vocab = lambda self: {token: number for number, token in enumerate(self.tokens)}
        convert_ids_to_tokens = lambda self, ids: [self.tokens[i] for i in ids]
        convert_tokens_to_string = lambda self, tokens: self.texts[self.tokens.index(tokens[0])]

    ids = torch.tensor([[0, 7, 2, 1, 2, 5, 2, 3, 4, 6, 7, 8, 9]])
    names = [CLASSES[i] for i in WordClasses(Vocabulary()).of(ids)[0].tolist()]
    first = ["special", "word", "part", "word", "part", "punctuation", "word"]
    assert names == [*first, "number", "number", "punctuation", "word", "part", "punctuation"]


def test_layers_of_unlike_masks_have_each_their_own_uniform_attention():
    class Block(torch.nn.Module):
        def __init__(self, before):
            super().__init__()
            self.before = before

        def forward(self, x, words):
            away = torch.arange(x.shape[-2])
            near = (away[:, None] - away).abs() <= self.before
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=words[:, None, None] & near)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(map(Block, (1, 50, 3)))

        def forward(self, input_ids, attention_mask):
            x = torch.nn.functional.one_hot(input_ids, 128).float()[:, None]
            for block in self.blocks:
                x = block(x, attention_mask.bool())
            return x

    model = Model().eval()
    survey = ch.models.survey(model, TEXTS[:1], letters, keep=KEEP)
    ids = torch.tensor(letters(TEXTS[:1])["input_ids"])
    with ch.watch(model) as seen:
        model(ids, torch.ones_like(ids))
    names = [*KEEP, *(f"{name} uniform" for name in KEEP)]
    rows = zip(survey.table(), seen.table(), strict=True)
    for row, same in rows:
        assert {name: row[name] for name in names} == pytest.approx({name: same[name] for name in names}, abs=1e-6)
    assert len({row["distance uniform"] for row in survey.table()}) == 3


def lengths_by_hand(model, texts, grouped):
    """By column the mean over all queries of Σ_j w_ij ‖v_j‖, and of ‖v_j W_O‖, with the uniform ones, (layers, H)."""
    plain = copy.deepcopy(model).double()
    plain.set_attn_implementation("eager")
    layers = [module for name, module in plain.named_modules() if name.endswith(("v_proj", "value"))]
    given = []
    for layer in layers:
        layer.register_forward_hook(lambda module, args, result: given.append(result.detach()[0]))
    writes = [m.weight for n, m in plain.named_modules() if n.endswith(("o_proj", "attention.output.dense"))]
    found = {}
    for row in texts:
        given.clear()
        with torch.no_grad():
            weights = plain(torch.tensor([row]), output_attentions=True).attentions
        for w, v, out in zip(weights, given, writes, strict=True):
            heads = w.shape[1]
            values = v.unflatten(1, (heads // grouped, -1)).repeat_interleave(grouped, 1).transpose(0, 1)  # (H, L, E)
            each = out.detach().unflatten(1, (heads, -1)).transpose(0, 1)  # (H, d, E)
            may = (w[0] > 0).double() if grouped > 1 else torch.ones_like(w[0])
            for name, norms in (("value", values.norm(dim=-1)), ("transformed", (values @ each.mT).norm(dim=-1))):
                for column, some in (("", w[0]), (" uniform", may / may.sum(-1, keepdim=True))):
                    moved = (some @ norms.unsqueeze(-1)).squeeze(-1)  # (H, L)
                    found.setdefault(f"weighted {name} norm{column}", []).append(moved)
    layered = {name: [all_of[n :: len(layers)] for n in range(len(layers))] for name, all_of in found.items()}
    return {name: np.stack([torch.cat(of, 1).mean(1).numpy() for of in each]) for name, each in layered.items()}


LENGTHS = ["weighted transformed norm", "first", "weighted value norm", "examples"]


@pytest.mark.parametrize("batch", [64, 1])
def test_lengths_of_what_heads_write(bert, batch):
    """With padding and without, beside other measures; with grouped heads, and with biases of the layers."""
    model = llama()
    got = columns(survey := ch.models.survey(model, TEXTS, letters, keep=LENGTHS, batch=batch))
    ids = letters(TEXTS)["input_ids"]
    for name, value in lengths_by_hand(model.model, ids, 2).items():
        np.testing.assert_allclose(got[name], value, rtol=2e-5, err_msg=name)
    alone = columns(ch.models.survey(model, TEXTS, letters, keep=["first"], batch=batch))
    assert all((got[f"first{more}"] == alone[f"first{more}"]).all() for more in ("", " uniform", " sd"))
    assert len(survey.means) == 2 and (got["weighted value norm queries"] == sum(map(len, ids))).all()
    if batch > 1:
        model, tokenizer = bert
        found = columns(ch.models.survey(model, TEXTS[:2], tokenizer, keep=LENGTHS, batch=batch))
        for name, value in lengths_by_hand(model, tokenizer(TEXTS[:2])["input_ids"], 1).items():
            np.testing.assert_allclose(found[name], value, rtol=2e-5, err_msg=name)


def test_lengths_over_texts_and_their_examples(tmp_path):
    """The spread and the examples are those of each text by itself, as `seen.table` has it; the page shows lengths."""
    model, name = llama(), "weighted transformed norm"
    got = ch.models.survey(model, TEXTS, letters, keep=LENGTHS)
    each = []
    for row in letters(TEXTS)["input_ids"]:
        with torch.no_grad(), ch.watch(model, values=True) as seen:
            model(torch.tensor([row]))
        each.append([call.weighted_transformed_norms[0] for call in seen])
        np.testing.assert_allclose(seen.table()[name], [norms.mean() for c in each[-1] for norms in c], rtol=1e-4)
    by_text = np.array([[norms.mean() for call in text for norms in call] for text in each])
    np.testing.assert_allclose(got.table()[f"{name} sd"], by_text.std(0, ddof=1), rtol=1e-3)
    assert (got.table()[f"{name} texts"] == len(TEXTS)).all()
    rows = [row for row in got.examples() if row["measure"] == name]
    assert len(rows) == 3 * 8
    for row in rows:
        of = [text[row["layer"]][row["head"]] for text in each]
        assert min(abs(float(norms[row["query"]]) - row["value"]) for norms in of if len(norms) > row["query"]) < 1e-4
    assert "how much the head writes" in got.write(tmp_path / "page.html").read_text(encoding="utf-8").lower()


def test_lengths_of_edited_heads():
    """Weights that an edit multiplies count so much more, as `seen.table` has it; those of other heads stay."""
    model = llama()
    plain = columns(ch.models.survey(model, TEXTS, letters, keep=LENGTHS))
    twice = ch.edits.ScaleHeads(layers=1, heads=2, factor=2.0), ch.edits.MapWeights(lambda w: 3 * w, layers=1, heads=3)
    with ch.edit(model, *twice):
        found = columns(ch.models.survey(model, TEXTS, letters, keep=LENGTHS))
    factors = np.ones_like(plain["first"])
    factors[1, 2:4] = 2, 3
    for name in ("first", "weighted value norm", "weighted transformed norm"):
        np.testing.assert_allclose(found[name], factors * plain[name], rtol=1e-5)


def test_lengths_where_no_layer_is_given_the_heads():
    """Values have a length, and what is written is not known: NaN, as for every measure that nothing counts for."""

    class Reader(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(100, 8)

        def forward(self, input_ids, attention_mask):
            x, mask = self.embed(input_ids)[:, None], attention_mask[:, None, None].bool()
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    torch.manual_seed(0)
    [row] = ch.models.survey(Reader().eval(), TEXTS, letters, keep=LENGTHS).table()
    assert np.isnan(row["weighted transformed norm"]) and row["weighted transformed norm queries"] == 0
    assert 1 < row["weighted value norm"] < 5 and row["weighted value norm queries"] == sum(map(len, TEXTS))
