"""Measures of heads, held to dense eager weights in NumPy; the table; the most distinctive head."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from head_oracle import measures

import clearhead as ch
from clearhead.inspection.measures import MEASURES, Measure

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")

from small_models import IDS, MODELS, OWN_EAGER, PADDINGS, flat, inputs_of, made, pair  # noqa: E402

from clearhead.models.loading import bundled, load  # noqa: E402

TEXT = "The pump in Broad Street was closed. Nobody had asked the water where it came from, or why the pump was closed."
SHARES = {"previous", "next", "itself", "first", "same word", "induction", "sink"}


def watched(model, **inputs):
    with torch.no_grad(), ch.watch(model, values=True) as seen:
        output = model(**inputs)
    return seen, output


def norms_of(model, call, head):
    """The lengths of a head's values, and of what its last layer makes of them, by the names of the model's modules."""
    modules = dict(model.named_modules())
    own = modules[call.name]
    layer = modules.get(f"{call.name.removesuffix('.self')}.output.dense")  # BERT's is in another module
    if layer is None:
        layer = next(getattr(own, name) for name in ("o_proj", "c_proj", "o", "out_proj") if hasattr(own, name))
    weight = layer.weight.T if type(layer).__name__ == "Conv1D" else layer.weight
    heads = call.query.shape[1]
    value = call.value[:, head * call.value.shape[1] // heads].double()
    part = weight.detach().double().unflatten(1, (heads, -1))[:, head]
    return {
        "weighted value norm": value.norm(dim=-1).numpy(),
        "weighted transformed norm": (value @ part.T).norm(dim=-1).numpy(),
    }


def causal(length, window=None):
    far = np.arange(length)[:, None] - np.arange(length)
    return (far >= 0) & (far < (window or length))


def allowed_by(config, layer, shape, padding, is_causal):
    """The mask by its rule, from the configuration alone."""
    batch, _, queries, keys = shape
    kinds = getattr(config, "layer_types", None)
    windowed = kinds is None or kinds[layer] == "sliding_attention"
    window = getattr(config, "sliding_window", None) if windowed else None
    square = causal(queries, window) if is_causal else np.ones((queries, keys), bool)
    keep = np.broadcast_to(square, (batch, queries, keys))
    return keep if padding is None else keep & padding[:, None]


def hold(row, want, tolerance=1e-5):
    known = {measure.name for measure in MEASURES} & row.keys()
    assert want.keys() <= known
    assert all(np.isnan(row[name]) for name in known - want.keys())  # as the next token under a causal mask
    for name, (value, uniform) in want.items():
        assert row[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name
        assert row[f"{name} uniform"] == pytest.approx(uniform, rel=tolerance, abs=tolerance), name


ONE_TEXT = ["Bert", "Llama", "Mistral", "GPT2", "Gemma2", "GptOss"]


@pytest.mark.parametrize("padded", PADDINGS)
@pytest.mark.parametrize("name", ONE_TEXT)
def test_every_measure_is_that_of_the_eager_weights(name, padded):
    fast, slow = pair(name, (MODELS | OWN_EAGER)[name])
    mask = PADDINGS[padded]
    ids = IDS % 5 + 3  # tokens that repeat
    inputs = {"input_ids": ids} | ({} if mask is None else {"attention_mask": mask})
    seen, _ = watched(slow if name in OWN_EAGER else fast, **inputs)
    with torch.no_grad():
        eager = flat(slow(**inputs, output_attentions=True))
    words = None if mask is None else mask.numpy().astype(bool)
    table = seen.table(tokens=ids)
    for layer, (call, dense) in enumerate(zip(seen.calls, eager, strict=True)):
        keep = allowed_by(slow.config, layer, dense.shape, words, name != "Bert")
        for head in range(4):
            row = table[layer * 4 + head]
            tokens, norms = ids.tolist(), norms_of(slow if name in OWN_EAGER else fast, call, head)
            want = measures(dense[:, head].numpy(), keep, (words, words), (tokens, tokens), norms)
            hold(row, want)
    if name == "GptOss":  # of the first sequence, which has no padding, where there is any
        assert all(0 < row["SinkShare"] < 1 for row in table)


@pytest.mark.parametrize("name", ["T5", "Bart"])
def test_cross_attention_has_no_positions_and_two_texts(name):
    fast, slow = pair(name, MODELS[name])
    mask = PADDINGS["right padding"]
    ids = IDS % 5 + 3
    inputs = inputs_of(name, mask) | {"input_ids": ids, "decoder_input_ids": ids[:, 2:7]}
    seen, _ = watched(fast, **inputs)
    with torch.no_grad():
        output = slow(**inputs, output_attentions=True)
    table = seen.table(tokens=ids[:, 2:7], source_tokens=ids)
    rows = {kind: [row for row in table if row["kind"] == kind] for kind in ("self", "cross")}
    words = mask.numpy().astype(bool)
    for layer, dense in enumerate(output.cross_attentions):
        keep = np.broadcast_to(words[:, None], (2, 5, 9))
        for head in range(4):
            row = rows["cross"][layer * 4 + head]
            tokens = ids[:, 2:7].tolist(), ids.tolist()
            (call,) = seen[row["module"]]
            norms = norms_of(fast, call, head)
            want = measures(dense[:, head].numpy(), keep, (None, words), tokens, norms, kind="cross")
            hold(row, want)
    encoder = [row for row in rows["self"] if "encoder" in row["module"].split(".")]
    for i, row in enumerate(encoder):
        dense = output.encoder_attentions[i // 4][:, i % 4].numpy()
        (call,) = seen[row["module"]]
        keep = np.broadcast_to(words[:, None], (2, 9, 9))
        hold(row, measures(dense, keep, (words, words), (ids.tolist(),) * 2, norms_of(fast, call, i % 4)))
    assert len(encoder) == 8


class Block(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, x, value=None):
        return F.scaled_dot_product_attention(x, x.roll(1, 2), x if value is None else value, **self.options)


def seen_of(x, *values, **options):
    with ch.watch(block := Block(**options), values=True) as seen:
        block(x, *values)
    return seen


@pytest.mark.parametrize("options", ["causal", "a mask for each head", "−∞ added"])
def test_in_float64_they_are_exact(options):
    torch.manual_seed(0)
    x, length = torch.randn(2, 3, 300, 8, dtype=torch.float64), 300
    keep = torch.rand(2, 3, length, length) > 0.4
    keep[:, :, 7] = False  # a query that sees nothing
    added = torch.randn(2, 3, length, length, dtype=torch.float64).masked_fill(~keep, -torch.inf)
    given = {"causal": {"is_causal": True}, "a mask for each head": {"attn_mask": keep}}
    given["−∞ added"] = {"attn_mask": added}
    seen = seen_of(x, **given[options])
    scores = (x @ x.roll(1, 2).transpose(-1, -2) / 8**0.5).numpy()
    may = np.broadcast_to(causal(length), scores.shape) if options == "causal" else keep.numpy()
    scores = scores + added.numpy() if options == "−∞ added" else np.where(may, scores, -np.inf)
    weights = np.exp(scores - np.where(may.any(-1, keepdims=True), scores.max(-1, keepdims=True), 0))
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    ids = torch.randint(0, 9, (2, length))
    table = seen.table(tokens=ids)
    norms = x.norm(dim=-1).numpy()
    for head in range(3):
        want = measures(
            weights[:, head], may[:, head], tokens=(ids.tolist(),) * 2, norms={"weighted value norm": norms[:, head]}
        )
        hold(table[head], want, 1e-11)


def test_a_score_without_a_normal_form_has_measures():
    class Own(torch.nn.Module):
        def forward(self, x):
            return ch.attention(x, x, x, score=lambda q, k: -(q[..., :, None, :] - k[..., None, :, :]).abs().sum(-1))

    torch.manual_seed(0)
    x = torch.randn(1, 2, 20, 4, dtype=torch.float64)
    with ch.watch(model := Own()) as seen:
        model(x)
    scores = -(x[..., :, None, :] - x[..., None, :, :]).abs().sum(-1)
    ids = [[i % 4 for i in range(20)]]
    for head, row in enumerate(seen.table(tokens=torch.tensor(ids))):
        want = measures(scores.softmax(-1)[:, head].numpy(), np.ones((1, 20, 20), bool), tokens=(ids, ids))
        hold(row, want, 1e-11)


def test_later_steps_of_a_generation_stand_at_the_end():
    fast, slow = pair("Llama", MODELS["Llama"], "ForCausalLM")
    with torch.no_grad(), ch.watch(fast) as seen:
        ids = fast.generate(IDS[:1], max_new_tokens=3, do_sample=False, eos_token_id=None)
    with torch.no_grad():
        eager = slow(ids, output_attentions=True).attentions
    tokens = ids.tolist()
    for number, call in enumerate(seen.calls):
        queries, keys = call.weights.shape[-2:]
        table = ch.models.Recording([call]).table(tokens=ids[:, :keys])
        for head, row in enumerate(table):
            dense = eager[number % 2][:, head, keys - queries : keys, :keys].numpy()
            own = [tokens[0][keys - queries : keys]], [tokens[0][:keys]]
            want = measures(dense, causal(keys)[None, keys - queries :], tokens=own)
            hold(row, {name: pair for name, pair in want.items() if name in row})
            assert "previous" in row and "same word" in row


def test_measures_say_what_they_are():
    table = seen_of(torch.randn(1, 2, 6, 4)).table()
    names = [measure.name for measure in MEASURES]
    assert len(set(names)) == 11
    for measure in MEASURES:
        assert isinstance(measure, Measure)
        assert all(part in table.about(measure.name) for part in (measure.says, measure.formula, measure.source))
    assert table.about("sink uniform") == table.about("sink")
    assert {measure.name for measure in MEASURES if measure.does} == SHARES
    with pytest.raises(ch.ClearheadError, match="'banana' is no measure of a head; the measures are previous, next"):
        table.about("banana")
    assert not SHARES - {"same word", "induction"} - table[0].keys() and "same word" not in table[0]
    assert list(seen_of(torch.randn(1, 1, 6, 4)).table(ch.reductions.Entropy())[0])[-2:] == ["head", "Entropy (nats)"]


def test_a_frame_has_the_rows():
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    table = seen_of(torch.randn(1, 2, 6, 4)).table()
    frame = table.to_pandas()
    assert isinstance(frame, pandas.DataFrame) and frame.to_dict("records") == table


# ------------------------------------------------------------------------------------------ the most distinctive head


def test_a_head_made_to_look_back_is_found():
    length, strong = 40, 6.0
    x = torch.eye(length).repeat(1, 3, 1, 1)
    query = torch.zeros(1, 3, length, length)
    query[0, 1] = torch.eye(length).roll(-1, 1)  # query i is key i − 1
    query[0, 1, 0] = 0

    class Back(torch.nn.Module):
        def forward(self, query, key):
            return F.scaled_dot_product_attention(query, key, key, is_causal=True, scale=strong)

    with ch.watch(model := Back()) as seen:
        model(query, x)
    found = seen.distinctive()
    value = np.mean([np.exp(strong) / (np.exp(strong) + i) for i in range(1, length)])
    uniform = np.mean([1 / (i + 1) for i in range(1, length)])
    assert (found.layer, found.head, found.measure, found.queries) == (0, 1, "previous", 39)
    assert found.value == pytest.approx(value, rel=1e-5) and found.uniform == pytest.approx(uniform, rel=1e-5)
    said = f"L0H1 attends to the previous token: {100 * value:.0f}%, uniform would be {100 * uniform:.0f}%"
    assert str(found) == f"{said} (a mean over 39 queries of Back)." and not found.near_uniform


def looks_at(targets):
    """A head whose queries each give nearly all of their weight to one key, or, for None, the same to all."""
    length = len(targets)
    query = torch.zeros(1, 1, length, length)
    for number, target in enumerate(targets):
        if target is not None:
            query[0, 0, number, target] = 20.0

    class One(torch.nn.Module):
        def forward(self, query):
            return F.scaled_dot_product_attention(query, torch.eye(length)[None, None], query, scale=1.0)

    with ch.watch(model := One()) as seen:
        model(query)
    return seen


@pytest.mark.parametrize(
    ("words", "targets", "named"),
    [
        ("a b c d a b e f", [4, 5, None, None, 0, 1, None, None], False),  # four queries have their word elsewhere
        ("a b c d a b c f", [4, 5, 6, None, 0, 1, 2, None], True),
    ],
)
def test_no_head_is_named_by_fewer_than_five_queries(words, targets, named):
    seen, words = looks_at(targets), words.split()
    [row] = seen.table(tokens=words)
    repeated = sum(words.count(word) > 1 for word in words)
    assert row["same word"] > 0.99 and row["same word queries"] == repeated == (6 if named else 4)
    assert row["induction queries"] == sum(any(a == b for a in words[:i]) for i, b in enumerate(words))
    assert row["previous queries"] == 7 and row["normalised entropy queries"] == row["sink queries"] == 8
    assert (seen.distinctive(words).measure == "same word") is named
    measures = seen.view(tokens=words).page.meta()
    figure = dict(
        zip([m["name"] for m in measures["measures"]], measures["layers"][0]["heads"][0]["measures"], strict=True)
    )
    assert figure["same word"][2:] == [None, repeated]


def test_a_text_of_four_queries_names_no_head():
    with pytest.raises(ch.ClearheadError, match="in no call 5 queries see several keys"):
        looks_at([1, 2, 3, 0]).distinctive()


def test_the_bundled_bert_has_a_head_that_looks_back():
    model, tokenizer = load(bundled())
    given = tokenizer(TEXT, return_tensors="pt")
    seen, _ = watched(model, **given)
    found = seen.distinctive(tokenizer.convert_ids_to_tokens(given["input_ids"][0]))
    table = seen.table(tokens=given["input_ids"])
    departures = {
        (i // 12, row["head"], name): row[name] - row[f"{name} uniform"]
        for i, row in enumerate(table)
        for name in SHARES - {"same word", "induction"}
    }
    assert max(departures, key=departures.get)[:2] == (found.layer, found.head)
    assert found.measure == "previous" and found.value > 0.9 and found.uniform == pytest.approx(1 / 28, abs=0.01)


@pytest.mark.parametrize("name", ["GPT2", "Bert"])
def test_a_random_model_is_said_to_be_near_uniform(name):
    model = made(name, **MODELS[name])
    ids = torch.randint(3, 100, (1, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), ch.watch(model) as seen:
        model(ids)
    found = seen.distinctive(tokens=ids)
    assert found.near_uniform
    assert str(found).startswith("All 8 heads are near uniform: their entropies are at least 99.9")
    assert f"The furthest from it is L{found.layer}H{found.head} by {found.measure!r}: " in str(found)
    assert all(row["sink"] - row["sink uniform"] < 0.02 for row in seen.table())  # no sink by construction


def test_a_sink_is_named_by_its_word_and_a_first_token_as_such():
    x = torch.zeros(1, 2, 20, 4)
    key = x.clone()
    key[:, 0, 0], key[:, 1, 5] = 2.25, 2.5  # scores of 4.5 and 5

    class Sinks(torch.nn.Module):
        def forward(self, query, key):
            return F.scaled_dot_product_attention(query + 1, key, key)

    words = [f"w{i}" for i in range(20)]
    with ch.watch(model := Sinks()) as seen:
        model(x, key)
    assert seen.distinctive().measure == "sink"
    assert str(seen.distinctive(words)).startswith("L0H1 gives one key much of its weight, key 5 ('w5'): 89%, uniform")
    with ch.watch(model) as seen:
        model(x[:, :1], key[:, :1])
    assert str(seen.distinctive(words)).startswith("L0H0 attends to the first token: ")


def test_focus_of_no_kind_is_said_by_its_entropy():
    length = 64
    x, far = torch.eye(length), torch.arange(length).roll(17)  # each query one key, of no kind

    class Permuted(torch.nn.Module):
        def forward(self, query, key):
            return F.scaled_dot_product_attention(query, key, key, scale=9.0)

    with ch.watch(model := Permuted()) as seen:
        model(x[far][None, None], x[None, None])
    found = seen.distinctive()
    assert found.measure == "normalised entropy" and found.value < 0.2
    assert "attends to few keys, of no one kind: its entropy is" in str(found)


def test_long_texts_take_memory_of_their_length():
    """A program of its own, whose peak of memory is its own; half the dense matrix of 6,000 tokens is 72 MB."""
    code = """
import resource, sys, torch, torch.nn.functional as F, clearhead as ch
class Block(torch.nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)
def run(length):
    x = torch.randn(1, 1, length, 16, generator=torch.Generator().manual_seed(0))
    with ch.watch(block := Block(), values=True) as seen:
        block(x)
    ids = torch.arange(length)[None] % 50
    seen.table(tokens=ids), seen.distinctive(ids), seen.compare(seen)
run(2000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(6000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 40_000, "KiB more"


def test_a_table_as_text_fits_a_screen():
    rows = [
        {"module": "x" * 60, "head": head, "nan": float("nan")} | {str(i): 1e9 + head for i in range(40)}
        for head in range(50)
    ]
    lines = str(ch.models.Table(rows)).splitlines()
    assert len(lines) == 24 and max(map(len, lines)) <= 100
    assert lines[0].split()[:3] == ["head", "0", "1"] and lines[1].split()[:2] == ["0", "1e+09"]
    assert repr(ch.models.Table(rows)).splitlines() == lines
    assert lines[21:] == [
        "30 more rows",
        f"27 more columns: {', '.join(map(str, range(13, 33)))}, …",
        f"the same in every row: module {'x' * 39}…, nan nan",
    ]
    assert str(ch.models.Table()) == "no rows"
    many = [{str(i): "y" * 30 for i in range(9)} | {"head": head} for head in range(2)]
    assert max(map(len, str(ch.models.Table(many)).splitlines())) <= 100


def test_a_printed_table_shows_what_differs():
    """Of a model: layer, head and every measure, in this order; what is equal in all rows stands below, once."""
    model = made("Bert", **MODELS["Bert"])
    ids = torch.randint(3, 9, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), ch.watch(model) as seen:
        model(ids)
    table = seen.table(tokens=ids)
    head, *lines = str(table).splitlines()
    measures = "previous  next  itself  first  same word  induction  normalised entropy   sink"
    assert head.split() == ["layer", "head", *measures.split()]
    for row, line in zip(table, lines, strict=False):
        values = [row[name] for name in ("previous", "next", "itself", "first", "same word", "induction")]
        assert line.split()[:8] == [str(row["layer"]), str(row["head"]), *(f"{value:.3f}" for value in values)]
    assert lines[-1] == "the same in every row: run 0, kind self, backend sdpa, queries 12, keys 12, …"
    assert "distance" in lines[-2] and "module" in table[0] and "module" not in head
    ordered = str(table.top("distance", 1)).splitlines()[0]
    assert ordered.split()[:4] == ["layer", "head", "distance", "previous"]
    one = str(ch.models.Table(table[:1])).splitlines()[0]
    assert one.split()[:3] == ["layer", "head", "previous"]  # of one row the numbers are shown
    twice = [row | {"run": run} for run in (0, 1) for row in table]
    assert str(ch.models.Table(twice)).splitlines()[0].split()[:3] == ["layer", "run", "head"]


def test_columns_and_orders_are_those_of_pandas():
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    numbers = torch.randn(40, generator=torch.Generator().manual_seed(0)).round(decimals=1).tolist()
    numbers[3] = numbers[17] = float("nan")
    rows = [
        {"layer": i, "module": f"m{i % 3}", "tokens": [i], "x": x} | ({"some": i} if i % 4 else {})
        for i, x in enumerate(numbers)
    ]
    table, frame = ch.models.Table(rows), pandas.DataFrame(rows)
    for name in ("layer", "module", "x", "some"):
        np.testing.assert_array_equal(table[name], frame[name].to_numpy())
        for up in (True, False):
            want = frame.sort_values(name, ascending=up, kind="stable")
            assert table.sort_values(name, up)["layer"].tolist() == want["layer"].tolist()
    assert table["layer"].dtype.kind == "i" and table["x"].dtype == table["some"].dtype == np.float64
    assert table["tokens"].tolist() == [[i] for i in range(40)]
    assert table.top("x", 0) == []
    for count in (5, 39, 40, 60):
        assert table.top("x", count)["layer"].tolist() == frame.nlargest(count, "x")["layer"].tolist()[:count]
    assert [row["layer"] for row in table.top("x", 40)[-2:]] == [3, 17]
    assert isinstance(table[:3], ch.models.Table) and table[:3] == rows[:3] and table[-1] == rows[-1]
    assert pandas.DataFrame(table).equals(frame) and table == rows
    numbers = ch.models.Table(
        {"head": n, "a": one} for n, one in enumerate((np.int64(2), np.float32(3), torch.tensor(1)))
    )
    assert numbers.sort_values("a")["head"].tolist() == [2, 0, 1]
    assert ch.models.Table(numbers[:2])["a"].tolist() == [2, 3]
    with pytest.raises(ch.ClearheadError, match=r"no column 'first'; it has no rows"):
        ch.models.Table().top("first")
