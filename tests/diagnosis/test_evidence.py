"""The numbers that findings are judged by, against the whole matrix; where they say it is; and how grave it is."""

import math

import pytest
import torch

import clearhead as ch
from clearhead._attention import Arguments
from clearhead.explanation.diagnosis import case as cases
from clearhead.explanation.diagnosis.case import sees_neighbours
from clearhead.explanation.diagnosis.checks.axes import _variance
from clearhead.explanation.diagnosis.reading import case_of
from clearhead.problem.extent import extent
from diagnosis.planted import (
    FILLED,
    FIRST_TOKEN,
    FLAT,
    LAST_BLIND,
    LENGTH,
    ONES,
    UPPER,
    WORDS,
    draw,
    projected,
    put,
    qkv,
)

RANDOM = torch.rand(2, 3, LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.3
MASKS = {
    "intervals": ch.SlidingWindow(before=3, after=2),
    "gaps": ~ch.SlidingWindow(before=3, after=2),
    "lengths": ch.Lengths([5, 20]),
    "a matrix": ch.DenseMask(RANDOM),
    "a rule": ch.MaskFunction(lambda b, h, i, j: (i + 2 * j + b) % 3 == 0),
}


def case(*inputs, **options):
    inputs = inputs or qkv(2, 3)
    return case_of(Arguments(*inputs, **options))


@pytest.mark.parametrize("name", MASKS)
def test_what_a_mask_allows(name):
    query, key, value = qkv(2, 3)
    dense = MASKS[name].dense(query, key)
    problem = case(query, key, value, mask=MASKS[name]).problem
    first, stop, count = (t.expand(2, 3, LENGTH) for t in extent(problem))
    assert torch.equal(count, dense.sum(-1))
    place = torch.arange(LENGTH)
    assert torch.equal(first, torch.where(dense, place, LENGTH).amin(-1))
    assert torch.equal(stop, torch.where(dense, place + 1, 0).amax(-1))
    for seen, shift in zip(sees_neighbours(problem, 0), (-1, 0, 1), strict=True):
        want = torch.zeros(2, 3, LENGTH, dtype=torch.bool)
        there = torch.arange(max(0, -shift), LENGTH - max(0, shift))
        want[..., there] = dense[..., there, there + shift]
        assert torch.equal(seen.expand(2, 3, LENGTH), want)


@pytest.mark.parametrize("offset", [0, 4, 11, -2])
def test_neighbours_at_an_offset(offset, monkeypatch):
    monkeypatch.setattr("clearhead.explanation.diagnosis.case.WIDE", 4)
    query, key, value = qkv(2, 3, queries=13)
    dense = RANDOM[..., :13, :]
    problem = case(query, key, value, mask=dense, align=offset).problem
    for seen, shift in zip(sees_neighbours(problem, offset), (-1, 0, 1), strict=True):
        at = torch.arange(13) + offset + shift
        there = (at >= 0) & (at < LENGTH)
        want = dense[..., torch.arange(13), at.clamp(0, LENGTH - 1)] & there
        assert torch.equal(seen.expand(2, 3, 13), want)


@pytest.mark.parametrize("pairs", [2**27, 2 * 3 * LENGTH * 5])
@pytest.mark.parametrize("name", MASKS)
def test_statistics_are_those_of_the_matrix(name, pairs, monkeypatch):
    monkeypatch.setattr(cases, "PAIRS", pairs)
    query, key, value = (t.double() for t in qkv(2, 3))
    rows = case(query, key, value, mask=MASKS[name]).rows
    weights = ch.weights(query, key, mask=MASKS[name], engine="reference").dense()[:, :, rows.queries]
    assert len(rows.queries) == (LENGTH if pairs == 2**27 else 5)
    torch.testing.assert_close(rows.entropy, -torch.special.xlogy(weights, weights).sum(-1))
    torch.testing.assert_close(rows.largest_weight, weights.amax(-1))
    some = rows.counted
    assert torch.equal(some, weights.sum(-1) > 0)
    assert torch.equal(rows.largest_key[some], weights.argmax(-1)[some])
    assert torch.equal(rows.visible, MASKS[name].dense(query, key).sum(-1)[:, :, rows.queries])


@pytest.mark.parametrize("score", [None, ch.Additive(64, 64, hidden_dim=4).double(), lambda q, k: q @ k.mT])
def test_the_spread_is_that_of_the_scores_that_the_mask_leaves(score):
    query, key, value = (t.double() for t in qkv(2, 3))
    spread = case(query, key, value, score=score, mask=MASKS["a matrix"], bias=draw(LENGTH, LENGTH).double()).spread
    scores = ch.weights(query, key, score=score).scores()
    for b, h, i in [(0, 0, 0), (1, 2, 23), (0, 1, 7)]:
        seen = scores[b, h, i][RANDOM[b, h, i]].detach()
        torch.testing.assert_close(
            spread[b, h, i], seen.std(correction=0) if len(seen) >= 4 else spread.new_tensor(math.nan), equal_nan=True
        )


def test_a_float_mask_is_read_as_what_it_hides_and_what_it_adds():
    query, key, value = qkv(2, 3)
    added = draw(LENGTH, LENGTH, seed=7)
    found = case(query, key, value, mask=FILLED + added, bias=ch.ALiBi(3))
    want = ch.weights(query, key, mask=FILLED + added, bias=ch.ALiBi(3))
    allowed = extent(found.problem).allowed.expand(2, 3, LENGTH)
    assert torch.equal(allowed, (~UPPER).sum(-1).expand(2, 3, LENGTH))
    torch.testing.assert_close(found.rows.entropy, want.entropy())


def only(diagnosis, name):
    found = [finding for finding in diagnosis if finding.name == name]
    assert len(found) == 1, diagnosis
    return found[0]


def test_where_a_number_is_not_finite():
    query, key, value = qkv(2, 3)
    key[1, 2, 5, 7] = math.inf
    key[1, 2, 6, 0] = math.nan
    found = only(ch.diagnose(query, key, value), "inputs that are not finite")
    assert found.severity == "error"
    assert found.where == {"input": "key", "sequence": 1, "head": 2, "key": 5}
    assert "has 1 NaN and 1 infinite numbers, in 2 vectors" in found.evidence
    hidden = ch.diagnose(query, key, value, mask=ch.Lengths([20, 5]))
    assert only(hidden, "inputs that are not finite").severity == "note"
    assert only(hidden, "NaN behind the mask").severity == "warning"


def test_what_sdpa_leaks_is_leaked_by_it():
    """The reason for the finding: PyTorch's own function gives NaN where clearhead does not."""
    query, key, value = qkv(2, 3)
    put(2, (0, 0, 20, 4), math.nan)(query, key, value)
    keep = WORDS.flip(0)[:, None, None].clone()
    keep[0, ..., 20] = False
    theirs = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=keep)
    assert theirs[0, 0].isnan().any() and ch.attention(query, key, value, mask=keep).isfinite().all()
    assert only(ch.diagnose(query, key, value, mask=keep), "NaN behind the mask").where["key"] == 20


def test_how_grave_it_is_to_see_nothing():
    inputs, name = qkv(2, 3), "queries that see nothing"
    assert only(ch.diagnose(*inputs, mask=ONES.bool() & False), name).severity == "error"
    found = only(ch.diagnose(*inputs, mask=LAST_BLIND), name)
    assert found.severity == "warning" and found.where["query"] == 5
    assert found.evidence.startswith("6 of 144 queries")
    assert only(ch.diagnose(*inputs, mask=ch.Lengths([0, 24])), name).severity == "warning"
    padded = WORDS[:, None, :, None] & WORDS[:, None, None]  # what is padding sees nothing, and is seen by nobody
    found = only(ch.diagnose(*inputs, mask=padded), name)
    assert found.severity == "note" and found.evidence.startswith("27 of 144")


def test_a_row_that_is_filled_is_as_if_there_were_no_mask():
    query, key, value = qkv(2, 3)
    mask = FILLED.index_fill(0, torch.tensor([5]), -1e9)
    found = [f for f in ch.diagnose(query, key, value, mask=mask) if f.name == "a finite fill"]
    assert [f.severity for f in found] == ["warning", "note"] and found[0].where["query"] == 5
    row = ch.weights(query, key, mask=mask)[0, 0, 5]
    assert row.count_nonzero() == LENGTH  # so it sees all of them


def test_the_finding_of_precision_is_the_error():
    query, key, value = qkv(1, 2)
    key += 3e4
    found = only(ch.diagnose(query, key, value), "precision")
    exact = ch.attention(query.double(), key.double(), value.double(), engine="reference")
    error = (ch.attention(query, key, value).double() - exact).abs().max() / value.abs().max()
    assert found.severity == "warning"
    told = float(found.evidence.split(" by ")[1].split()[0])
    assert 0.2 * error <= told <= 1.05 * error  # of some of the rows, in two digits


def test_the_scale_is_judged_by_the_spread():
    query, key, value = qkv(2, 3)
    assert only(ch.diagnose(query, key, value, scale=1.0), "the scale").severity == "warning"
    assert len(ch.diagnose(query / 8, key, value, scale=1.0)) == 0  # T5 and Whisper: the same constant
    assert len(ch.diagnose(query / 8, key / 8**0.5, value, scale=1.0)) == 0
    small = ch.diagnose(query / 50, key / 50, value)  # a small model that was not trained: no fault
    assert {finding.severity for finding in small} == {"note"}


def test_a_score_of_zeros_and_ones_given_as_bias_is_meant():
    assert "a mask of 0 and 1" not in [f.name for f in ch.diagnose(*qkv(2, 3), bias=ONES.tril())]


def test_rows_that_a_fill_leaves_blind_are_those_of_the_keys_that_the_mask_shows():
    """Left padding by a fill, under a causal mask: the first queries see nothing but filled keys."""
    query, key, value = qkv(1, 1)
    fill = torch.zeros(1, LENGTH).masked_fill(torch.arange(LENGTH) < 4, -1e4)
    found = case(query, key, value, mask=ch.Causal(), bias=fill)
    assert found.blind.flatten().tolist() == [True] * 4 + [False] * 20
    assert extent(found.problem).allowed.flatten().tolist() == [1, 2, 3, 4, *range(1, 21)]
    weights = ch.weights(query, key, mask=ch.Causal(), bias=fill).dense()[0, 0]
    assert torch.equal(weights.count_nonzero(-1), extent(found.problem).allowed.flatten())
    hidden = case(query, key, value, mask=ch.Causal(), bias=fill.masked_fill(fill < 0, -math.inf))
    assert not hidden.blind.any() and extent(hidden.problem).allowed.flatten().tolist() == [0] * 4 + [*range(1, 21)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_berts_old_fill_is_a_mask(dtype):
    words = (1.0 - WORDS[:, None, None].to(dtype)) * -10000.0
    found = case(*qkv(2, 3, dtype=dtype), bias=words)
    assert found.rows.visible[..., 0].tolist() == [[15] * 3, [24] * 3]


def test_the_variance_of_means_is_that_of_a_formula_by_hand():
    rows, group = draw(2, 3, 4, 5).double(), torch.arange(12).view(3, 4) % 3
    between = inside = 0.0
    for number in range(3):
        members = torch.stack(
            [rows[b, h, i] for b in (0, 1) for h in range(3) for i in range(4) if group[h, i] == number]
        )
        between += 8 * (members.mean(0) - rows.mean((0, 1, 2))).square().sum() / 2
        inside += (members - members.mean(0)).square().sum() / (24 - 3)
    assert _variance(rows, group) == pytest.approx(float(between / inside))


def test_heads_are_certain_by_memory_and_likely_by_means():
    found = [f for f in ch.diagnose(*(part.reshape(2, 3, LENGTH, 64) for part in FLAT)) if "transposition" in f.name]
    assert [f.where["input"] for f in found] == ["query", "key", "value"]
    assert {f.severity for f in found} == {"error"} and "view of a tensor of shape (2, 24, 192)" in found[0].evidence
    copied = projected().reshape(2, 4, LENGTH, 16).clone()
    found = [f for f in ch.diagnose(copied, *qkv(2, 4, width=16)[1:]) if "transposition" in f.name]
    assert [(f.severity, f.where["input"]) for f in found] == [("warning", "query")]


def test_length_and_batch_are_a_note_without_a_sign():
    attend = torch.nn.MultiheadAttention(64, 4)
    for inputs, severity, sign in (
        (draw(3, LENGTH, 64), "note", "shape and numbers don't say"),
        (FIRST_TOKEN, "warning", "(24, 64) at [:, 0] are equal"),
        (FIRST_TOKEN[:5], "warning", "(5, 64) at [:, 0] are equal"),
    ):
        [finding] = [f for f in ch.diagnose(attend, *[inputs] * 3) if f.name == "length and batch exchanged"]
        assert finding.severity == severity and sign in finding.evidence
        assert f"{inputs.shape[1]} sequences of {len(inputs)} positions" in finding.evidence


def test_a_broken_parameter_is_blamed_and_not_the_inputs_that_it_made():
    attend, x = ch.nn.MultiHeadAttention(8, 2), draw(2, 5, 8)
    attend.W_k.weight.data[0, 0] = math.nan
    (found,) = ch.diagnose(attend, x, x, x).errors
    assert found.evidence == "parameter W_k.weight (8, 8) holds 1 NaN; the call's inputs are finite."
    assert found.where == {"parameter": "W_k.weight"}
    with torch.no_grad(), ch.watch(attend, values=True) as seen:
        attend(x, x, x)
    (found,) = seen.diagnose().errors
    assert found.where["parameter"] == "W_k.weight" and found.evidence.endswith("inputs are finite.")
    bad = x.index_fill(0, torch.tensor(1), math.inf)
    parameter, *inputs = ch.diagnose(attend, bad, bad, bad).errors
    assert parameter.evidence.endswith("the call's inputs are not finite either.") and len(inputs) == 3


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: ch.nn.MultiHeadAttention(8, 2), "W_o.weight"),
        (lambda: ch.nn.MultiHeadAttention(8, 2), "W_o.bias"),
        (lambda: ch.nn.MultiHeadAttention(8, 2), "W_v.weight"),
        (lambda: torch.nn.MultiheadAttention(8, 2, batch_first=True).eval(), "out_proj.weight"),
        (lambda: torch.nn.MultiheadAttention(8, 2, batch_first=True).eval(), "out_proj.bias"),
        (lambda: ch.nn.TorchMultiheadAttention(8, 2, batch_first=True).eval(), "out_proj.weight"),
        (lambda: ch.nn.AdditiveAttention(4, query_dim=8, key_dim=8), "w_v"),
        (lambda: ch.nn.AdditiveAttention(4, query_dim=8, key_dim=8), "W_q.weight"),
    ],
)
def test_every_broken_parameter_of_a_module_is_named(make, name, number):
    attend, x = make(), draw(2, 5, 8)
    with torch.no_grad():
        attend.get_parameter(name).view(-1)[0] = number
    assert [found.where for found in ch.diagnose(attend, x, x, x).errors] == [{"parameter": name}]
    with torch.no_grad(), ch.watch(attend, values=True) as seen:
        attend(x, x, x)
    (found,) = seen.diagnose().errors
    assert found.where["parameter"] in (name, f"score.{name.removesuffix('.weight')}")  # a recorded score has its own


@pytest.mark.parametrize("number", [math.nan, -math.inf], ids=str)
def test_a_broken_parameter_of_a_score_is_named(number):
    score, x = ch.Bilinear(8, 8), draw(1, 2, 20, 8)
    with torch.no_grad():
        score.W[0, 0] = number
    (found,) = ch.diagnose(x, x, x, score=score).errors
    what = "NaN" if math.isnan(number) else "infinite numbers"
    assert found.evidence == f"parameter score.W (8, 8) holds 1 {what}; the call's inputs are finite."


def test_a_score_of_ones_own_may_hold_minus_infinity():
    class Blocked(ch.extend.Score):
        def __init__(self):
            super().__init__()
            self.added = torch.nn.Parameter(torch.tensor([0.0, -math.inf]))

        def tile(self, query, key):
            return query @ key.mT + self.added[(key[..., 0] > 0).long()].unsqueeze(-2)

    x = draw(1, 1, 5, 8)
    assert not ch.diagnose(x, x, x, score=Blocked()).errors


def test_a_sink_of_minus_infinity_is_no_fault():
    attend, x = ch.nn.MultiHeadAttention(8, 2, sinks=True), draw(2, 5, 8)
    attend.sinks.data.fill_(-math.inf)
    assert not ch.diagnose(attend, x, x, x).errors
