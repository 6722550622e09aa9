"""The given test of `audit`: leaked and hidden shares beside dense softmaxes, of models and calls of all kinds."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

import clearhead as ch
from clearhead.models import bundled, load

transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")
from small_models import IDS, RIGHT, SIZES, T5, made  # noqa: E402

from clearhead.models.audits import given  # noqa: E402
from clearhead.models.audits.expected_masks import ExpectedMasks  # noqa: E402

DOCUMENTS = ch.Documents([0, 0, 0, 1, 1, 1, 1, 2, 2])


def model_of(kind, **more):
    return made(kind, **SIZES, **more)


def llama(**more):
    return model_of("Llama", num_key_value_heads=2, **more)


def t5():
    return made("T5", **T5)


def gpt_oss():
    more = {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
    return model_of("GptOss", sliding_window=4, layer_types=["sliding_attention", "full_attention"], **more)


class Block(torch.nn.Module):
    """Direct calls of SDPA; `mask`, what to give it."""

    def __init__(self, **given):
        super().__init__()
        self.given = given

    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, **self.given)


def seen_of(model, padding=None, **inputs):
    with torch.no_grad(), ch.watch(model, padding) as seen:
        model(**inputs)
    return seen


def oracle(call, keep):
    """Leaked and hidden by the dense matrices in float64, and which queries count."""
    problem = call.problem
    scores = call.weights.scores().double()
    bias = problem.bias
    if bias is not None:
        every = (slice(None),) * 4
        added = bias.tile(*every, problem.sizes).double().expand(scores.shape)
        scores = scores + added.masked_fill(added == -torch.inf, 0.0)
    keep = keep.expand(scores.shape)
    allowed = torch.ones_like(keep)
    if problem.spans is not None:
        allowed = problem.spans.keep(*(slice(None),) * 4, problem.sizes.keys).expand(scores.shape).clone()
    if bias is not None:
        allowed &= added != -torch.inf
    counted = torch.ones(scores.shape[:3], dtype=torch.bool)
    if call.padding is not None:
        if call.padding.keys is not None:
            keep = keep & call.padding.keys[:, None, None]
        if call.padding.queries is not None:
            counted &= call.padding.queries[:, None]
    counted &= (allowed | keep).any(-1)
    exp = scores.exp()
    sink = 0.0 if problem.sinks is None else problem.sinks.double().exp()[:, None]
    leaked = (exp * (allowed & ~keep)).sum(-1) / ((exp * allowed).sum(-1) + sink)
    hidden = (exp * (keep & ~allowed)).sum(-1) / ((exp * keep).sum(-1) + sink)
    return [t.nan_to_num(0.0).masked_fill(~counted, 0.0) for t in (leaked, hidden)], counted


def measure(seen, mask):
    """For each call: the call, leaked, hidden, and which queries count."""
    known = given.KnownPairs()
    for call, expected in ExpectedMasks(mask).pair(seen.calls):
        pairs = known.find(call, expected)
        yield call, *given.compute_shares(call, pairs), pairs.rows


def agree(seen, mask, keep):
    """The shares beside the oracle; `keep`: the expected matrix, or a function of Lq and Lk that gives it."""
    for call, found_leaked, found_hidden, rows in measure(seen, mask):
        _, _, queries, keys = call.problem.sizes.shape
        (leaked, hidden), counted = oracle(call, keep(queries, keys) if callable(keep) else keep)
        assert torch.equal(rows.expand(counted.shape), counted)
        for got, want in ((found_leaked, leaked), (found_hidden, hidden)):
            torch.testing.assert_close(got.double().masked_fill(~counted, 0.0), want, atol=1e-6, rtol=1e-4)


def is_ok(seen, mask):
    return ch.audit(seen, mask).tests[0].holds


MASKS = {
    "every key": (None, torch.ones(9, 9, dtype=torch.bool)),
    "causal": (ch.Causal(), torch.ones(9, 9).tril().bool()),
    "documents": (ch.Causal() & DOCUMENTS, (torch.ones(9, 9).tril().bool() & DOCUMENTS.dense(9, 9))),
    "a window": (ch.SlidingWindow(before=2), ch.SlidingWindow(before=2).dense(9, 9)),
    "a rule": (
        ch.MaskFunction(lambda batch, head, query_index, key_index: (query_index + key_index) % 3 != 1),
        (torch.arange(9)[:, None] + torch.arange(9)) % 3 != 1,
    ),
    "a tensor": (torch.eye(9).bool(), torch.eye(9).bool()),
    "by head and sequence": (torch.rand(2, 4, 9, 9) > 0.5,) * 2,
    "nothing": (torch.zeros(9, 9).bool(),) * 2,
}
MODELS = {
    "llama": (llama, {"input_ids": IDS}),
    "llama, left padding": (llama, {"input_ids": IDS, "attention_mask": RIGHT.flip(1)}),
    "llama, left padding, eager": (
        lambda: llama(attn_implementation="eager"),
        {"input_ids": IDS, "attention_mask": RIGHT.flip(1)},
    ),
    "bert, right padding": (lambda: model_of("Bert"), {"input_ids": IDS, "attention_mask": RIGHT}),
    "sinks": (gpt_oss, {"input_ids": IDS}),
    "t5": (t5, {"input_ids": IDS, "attention_mask": RIGHT, "decoder_input_ids": IDS}),
}


@pytest.mark.parametrize("name", MODELS)
def test_shares_are_those_of_the_dense_softmax(name):
    make, inputs = MODELS[name]
    seen = seen_of(make(), **inputs)
    for mask, keep in MASKS.values():
        agree(seen, mask, keep)


def test_shares_by_transformers_own_weights():
    model = llama(attn_implementation="eager")
    seen = seen_of(model, input_ids=IDS)
    with torch.no_grad():
        own = model(input_ids=IDS, output_attentions=True).attentions
    mask, keep = MASKS["documents"]
    for (_, leaked, hidden, _), weights in zip(measure(seen, mask), own, strict=True):
        torch.testing.assert_close(leaked, weights.masked_fill(keep, 0.0).sum(-1), atol=1e-6, rtol=0)
        assert not hidden.any()


def test_masks_that_agree_cost_no_pass_and_give_exact_zeros(monkeypatch):
    seen = seen_of(llama(), input_ids=IDS, attention_mask=RIGHT)
    monkeypatch.setattr(ch.results.Weights, "logsumexp", lambda self: pytest.fail("a pass over the pairs"))
    assert is_ok(seen, ch.Causal())


@pytest.mark.parametrize("length", [9, 20])
def test_a_leak_far_below_what_float32_tells_from_1(length):
    bias = torch.zeros(length, length)
    bias[:, 4:] = -25.0
    seen = seen_of(Block(attn_mask=bias), x=torch.zeros(1, 1, length, 8))
    ((_, leaked, _, _),) = measure(seen, torch.arange(length)[None] < 4)
    torch.testing.assert_close(
        leaked.double(), torch.full_like(leaked, (length - 4) / 4 * 1.3887943864964021e-11).double()
    )
    assert is_ok(seen, torch.arange(length)[None] < 4)


def test_steps_of_a_generation_are_rows_of_the_whole_mask():
    model = llama()
    with torch.no_grad(), ch.watch(model) as seen:
        cache = model(IDS[:, :5], use_cache=True).past_key_values
        for i in range(5, 9):
            cache = model(IDS[:, i : i + 1], past_key_values=cache, use_cache=True).past_key_values
    whole = ch.Causal() & ch.SlidingWindow(before=2)
    keep = whole.dense(9, 9)
    for expected in (whole, keep, lambda call: keep[call.key.shape[2] - call.query.shape[2] : call.key.shape[2]]):
        if callable(expected) and not isinstance(expected, torch.Tensor):
            rows = expected
            expected = lambda call, rows=rows: rows(call)[:, : call.key.shape[2]]
        agree(seen, expected, lambda queries, keys: keep[keys - queries : keys, :keys])
    assert is_ok(seen, ch.Causal())


def test_slots_of_a_static_cache_by_a_function():
    model, length = llama(), 16
    cache = transformers.StaticCache(config=model.config, max_cache_len=length)
    with torch.no_grad(), ch.watch(model) as seen:
        model(IDS[:, :5], past_key_values=cache, use_cache=True)
        model(IDS[:, 5:7], past_key_values=cache, use_cache=True)
    first = {0: 0, 1: 5}
    keep = torch.ones(length, length).tril().bool()
    assert {call.key.shape[2] for call in seen.calls} == {length}
    assert is_ok(seen, lambda call: keep[first[call.run] :][: call.query.shape[2]])
    assert not is_ok(seen, ch.Causal())


def test_layers_that_differ_have_masks_by_name():
    seen = seen_of(gpt_oss(), input_ids=IDS)
    window = ch.Causal() & ch.SlidingWindow(before=3)
    assert is_ok(seen, {"layers.0.*": window, "*": ch.Causal()})
    (finding,) = ch.audit(seen, {"*.self_attn": ch.Causal()}).findings
    assert (finding.module, finding.code) == ("layers.0.self_attn", "mask-too-narrow")
    assert is_ok(seen, {"layers.1.self_attn": ch.Causal()})
    assert is_ok(seen, {"*": lambda call: window if call.name == "layers.0.self_attn" else ch.Causal()})


def test_an_encoder_decoder_by_kinds_of_calls():
    inputs = {"input_ids": IDS, "attention_mask": RIGHT, "decoder_input_ids": IDS[:, :4]}
    seen = seen_of(t5(), **inputs)
    assert is_ok(seen, lambda call: ch.Causal() if "decoder" in call.name and call.kind == "self" else None)
    assert {call.kind for call, *_ in measure(seen, {"*EncDec*": None})} == {"cross"}


def test_layers_share_the_pairs_of_a_mask(monkeypatch):
    made = []
    resolve = given.resolve
    monkeypatch.setattr(given, "resolve", lambda *args, **more: made.append(1) or resolve(*args, **more))
    for inputs in ({"input_ids": IDS}, {"input_ids": IDS, "attention_mask": RIGHT}):
        seen = seen_of(model_of("Bert"), **inputs)
        made.clear()
        ch.audit(seen, ch.Causal())
        assert len(made) == 3


def test_padding_that_was_not_passed_to_the_model_leaks():
    model, tokenizer = load(bundled())
    batch = dict(tokenizer(["It was.", "The pump in Broad Street was closed."], padding=True, return_tensors="pt"))
    assert ch.audit(model, batch, None).ok
    mask = batch.pop("attention_mask")
    assert ch.audit(model, batch, None).ok  # nothing tells what is padding
    report = ch.audit(model, batch, None, padding=mask)
    assert {"padding-mask-lost", "padding-reaches-outputs"} <= {finding.code for finding in report.findings}
    shares = [
        float(leaked[0, :, : int(mask[0].sum())].mean())
        for _, leaked, _, _ in measure(seen_of(model, mask, **batch), None)
    ]
    assert all(share > 0.05 for share in shares)


def test_clearheads_own_calls_with_a_float_mask():
    class Own(torch.nn.Module):
        def forward(self, x):
            hole = torch.zeros(9, 9).masked_fill(torch.ones(9, 9).triu(2).bool(), -torch.inf)
            return ch.attention(x, x, x, score=ch.Gaussian(2.0), mask=hole)

    seen = seen_of(Own(), x=torch.rand(2, 3, 9, 4))
    assert is_ok(seen, torch.ones(9, 9).tril(1).bool())
    for mask, keep in MASKS.values():
        if getattr(mask, "ndim", 2) == 2:
            agree(seen, mask, keep)


def test_the_finding_says_where_the_mass_went():
    x = torch.zeros(2, 3, 6, 4)
    x[1, 2] = torch.eye(6, 4) * 20
    (finding,) = ch.audit(seen_of(Block(), x=x), ch.Causal()).findings
    assert (finding.code, finding.layer, finding.module) == ("not-causal", "L0", "Block")
    assert (finding.heads, finding.output, finding.source) == ((0,), (0, 0), (0, 1))
    assert "given no mask; expected Causal()" in finding.text
    assert "0.833 of the softmax goes to 5 keys of 1 … 5, most to key 1" in finding.text


def test_nan_is_never_ok():
    x = torch.rand(1, 2, 6, 4)
    x[0, 1, 3] = torch.nan
    report = ch.audit(seen_of(Block(), x=x), ch.Causal())
    assert not report.ok and "nan" in str(report)
    assert is_ok(seen_of(Block(is_causal=True), x=x), ch.Causal())


class Cached(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = llama()

    def forward(self, ids, cache=None):
        return self.model(ids, past_key_values=cache, use_cache=True).past_key_values


def test_inputs_stay_as_they_are():
    model = Cached()
    with torch.no_grad():
        cache = model(IDS[:, :5])
    ch.audit(
        model,
        {"ids": IDS[:, 5:], "cache": cache},
        ch.Causal(),
        inputs="ids",
        output=lambda found: found.layers[0].keys[:, 0, 5:],
    )
    assert cache.get_seq_length() == 5


def test_surroundings_change_nothing():
    model = llama()
    want = str(ch.audit(seen_of(model, input_ids=IDS), DOCUMENTS))
    with torch.inference_mode():
        assert str(ch.audit(seen_of(model, input_ids=IDS), DOCUMENTS)) == want
    seen = seen_of(model, input_ids=IDS)
    with ThreadPoolExecutor(4) as pool:
        reports = [pool.submit(ch.audit, seen, DOCUMENTS) for _ in range(8)]
    assert all(str(report.result()) == want for report in reports)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            text = str(ch.audit(seen, DOCUMENTS))
    finally:
        torch.set_default_dtype(torch.float32)
    assert text == want


def test_a_recording_in_a_file_gives_the_same(tmp_path):
    seen = seen_of(llama(), input_ids=IDS, attention_mask=RIGHT)
    again = ch.models.load_recording(seen.write(tmp_path / "seen.safetensors"))
    mask, keep = MASKS["documents"]
    agree(again, mask, keep)
    assert str(ch.audit(seen, mask)) == str(ch.audit(again, mask))


def test_bfloat16_and_an_empty_batch():
    seen = seen_of(llama().to(torch.bfloat16), input_ids=IDS)
    agree(seen, DOCUMENTS, DOCUMENTS.dense(9, 9))
    for shape in ((0, 2, 4, 8), (1, 2, 0, 8)):
        assert is_ok(seen_of(Block(), x=torch.zeros(shape)), ch.Causal())


@pytest.mark.parametrize(
    ("expected", "match"), [(ch.Documents.from_lengths([3, 3]), "Documents"), (lambda call: 1.0, "1.0 is expected")]
)
def test_what_is_no_mask_is_refused(expected, match):
    seen = seen_of(llama(), input_ids=IDS)
    with pytest.raises(ch.ClearheadError, match=match):
        ch.audit(seen, expected)


def test_documents_by_their_edges_beside_padding():
    """The masks that the audit joins with the expected one count in the row, and not inside its documents."""
    x, edges = torch.randn(1, 2, 7, 4), [0, 3, 5, 7]
    expected = ch.Causal() & ch.Documents.from_cu_seqlens(edges)
    keep = expected.dense(7, 7) & (torch.arange(7) < 6)
    seen = seen_of(Block(attn_mask=keep), padding=torch.tensor([[1, 1, 1, 1, 1, 1, 0]]), x=x)
    assert is_ok(seen, expected)
    assert not is_ok(seen, ch.Causal() & ch.Documents.from_cu_seqlens([0, 3, 7]))
