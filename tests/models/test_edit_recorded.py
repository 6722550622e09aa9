"""What is recorded of an edited model is what ran: beside weights that are changed by hand in float64."""

import contextlib
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import clearhead as ch
from clearhead.biases.base import Added

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra [models] is not installed")
from small_models import SIZES, made  # noqa: E402

SMALL = {**SIZES, "max_position_embeddings": 64, "num_key_value_heads": 2}
IDS = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(0))
B, H, L, E = 2, 4, 9, 8


class Block(torch.nn.Module):
    def forward(self, q, k, v, **more):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **more)


class Sharpen(ch.edits.Edit):
    """An edit of one's own that can be said of the query."""

    def before(self, problem, spot):
        return problem._replace(scores=problem.scores._replace(scale=2 * problem.scores.scale))


class OtherKeys(ch.edits.Edit):
    """One that cannot: other keys."""

    def before(self, problem, spot):
        return problem._replace(scores=problem.scores._replace(key=problem.key.flip(2)))


def drawn_edit(rng):
    """An edit, what it does to the scores, and what it does to the weights: functions of float64 rows by hand."""
    heads = sorted(rng.choice(H, size=rng.integers(1, H + 1), replace=False).tolist())
    queries = sorted(rng.choice(L, size=rng.integers(1, L + 1), replace=False).tolist())
    at = {"heads": heads, "queries": queries} if rng.random() < 0.8 else {}
    heads, queries = at.get("heads", list(range(H))), at.get("queries", list(range(L)))
    here = torch.zeros(1, H, L, 1, dtype=torch.bool)
    for head in heads:
        here[0, head, queries] = True
    keys = sorted(rng.choice(L, size=rng.integers(1, 5), replace=False).tolist())
    column = torch.zeros(L, dtype=torch.bool)
    column[keys] = True
    bias = torch.from_numpy(rng.normal(size=(L, L)))
    keep = torch.from_numpy(rng.random((L, L)) < 0.6)
    factor = float(rng.choice([0.0, 0.5, -1.5, 3.0]))
    kinds = {
        "knockout": (ch.edits.Knockout(**at, keys=keys), lambda s, raw: s.masked_fill(column, -torch.inf), None),
        "after": (ch.edits.Knockout(**at, keys=keys, after=True), None, lambda w: w.masked_fill(column, 0.0)),
        "scale": (ch.edits.ScaleHeads(**at, factor=factor), None, lambda w: w * factor),
        "bias": (ch.edits.AddBias(bias.float(), **at), lambda s, raw: s + bias, None),
        "force": (ch.edits.ForceMask(keep, **at), lambda s, raw: raw.masked_fill(~keep, -torch.inf), None),
        "map": (ch.edits.MapWeights(lambda w: (w**3).sqrt(), **at), None, lambda w: w**1.5),
        "sharpen": (Sharpen(**at), lambda s, raw: s + raw, None),
        "other keys": (OtherKeys(**at), "flipped", None),
    }
    name = rng.choice(list(kinds))
    return name, here, *kinds[name]


def by_hand(q, k, allowed, edits):
    """The edited weights, float64 (B, H, L, L)."""
    q, k = q.double(), k.double().repeat_interleave(H // k.shape[1], 1)
    raw = q @ k.mT / E**0.5
    scores = torch.where(allowed, raw, -torch.inf)
    for _, here, _, before, _ in edits:
        if before == "flipped":
            new = torch.where(allowed, q @ k.flip(2).mT / E**0.5, -torch.inf)
        elif before is not None:
            new = before(scores, raw)
        else:
            continue
        scores = torch.where(here, new, scores)
    weights = scores.softmax(-1).nan_to_num(0.0)  # a query that sees nothing gives 0
    for _, here, _, _, after in sorted(edits, key=lambda one: one[0] == "scale"):  # factors are of the output
        if after is not None:
            weights = torch.where(here, after(weights), weights)
    return weights


class Nested(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Block()

    def forward(self, x):
        return self.inner(x, x, x) + 1


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_a_part_of_a_model(around, whole):
    """The edit is of a module inside the watched one, or the other way round."""
    model, x = Nested(), torch.randn(1, 2, 6, 4, generator=torch.Generator().manual_seed(0))
    edited, watched = (model, model.inner) if whole else (model.inner, model)
    watching, editing = ch.watch(watched, values=True), ch.edit(edited, ch.edits.Knockout(heads=1, keys=2))
    with watching if around else editing as one, editing if around else watching as other:
        ran = model(x)
    call = (one if around else other)[0]
    scores = x.double() @ x.double().mT / 2
    scores[:, 1, :, 2] = -torch.inf
    torch.testing.assert_close(call.weights.dense().double(), scores.softmax(-1), rtol=1e-5, atol=1e-6)
    assert torch.equal(call.output + 1, ran)


def llama(**more):
    return made("Llama", "ForCausalLM", 4, **SMALL, **more)


@pytest.mark.parametrize(
    "edit", [ch.edits.Knockout(0, [0, 2], [7, 13], [3, 6]), ch.edits.ScaleHeads(0, 1, 0.5, [9, 14])]
)
def test_joined_steps_of_an_edited_generation(edit):
    model = llama()
    with torch.no_grad(), ch.edit(model, edit):
        with ch.watch(model) as seen:
            ids = model.generate(IDS, do_sample=False, max_new_tokens=5, min_new_tokens=5)
        with ch.watch(model) as whole:
            model(ids[:, :-1], use_cache=False)
    for name in whole.names:
        torch.testing.assert_close(seen[name].joined().dense(), whole[name][0].weights.dense(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("around", [False, True])
def test_weights_that_the_model_returns(implementation, around):
    model = llama(attn_implementation=implementation)
    edits = ch.edits.Knockout(0, [0, 2], slice(5, None), [1, 3]), ch.edits.ScaleHeads(1, 1, 0.5)
    lazily = ch.models.lazy_attentions(model) if implementation == "sdpa" else contextlib.nullcontext()
    editing = ch.edit(model, *edits)
    with torch.no_grad(), editing if around else lazily, lazily if around else editing, ch.watch(model) as seen:
        returned = model(IDS, output_attentions=True).attentions
    for call, weights in zip(seen.calls, returned, strict=True):
        torch.testing.assert_close(call.weights.dense(), weights[...], rtol=1e-4, atol=1e-5)
    assert float(returned[0][:, [0, 2], 5:][..., [1, 3]].abs().max()) == 0.0
    torch.testing.assert_close(returned[1][:, 1].sum(-1), torch.full((2, 12), 0.5))


@pytest.mark.parametrize("average", [False, True])
def test_weights_that_torchs_module_returns(average):
    torch.manual_seed(0)
    model, x = torch.nn.MultiheadAttention(12, 3, batch_first=True).eval(), torch.randn(2, 7, 12)
    with ch.edit(model, ch.edits.Knockout(heads=1, queries=[2, 3], keys=0)), ch.watch(model) as seen:
        _, weights = model(x, x, x, average_attn_weights=average)
    mine = seen[0].weights.dense()
    assert float(mine[:, 1, 2:4, 0].abs().max()) == 0.0
    torch.testing.assert_close(weights, mine.mean(1) if average else mine, rtol=1e-5, atol=1e-6)


def test_what_is_made_of_a_recording(tmp_path):
    """Tables, audits, reports and explanations are of what ran; what cannot follow a factor says so."""
    model = llama()
    with torch.no_grad():
        with ch.watch(model) as seen, ch.edit(model, ch.edits.Knockout(0, 1, keys=0)):
            model(IDS)
        with (
            ch.watch(model, values=True) as scaled,
            ch.edit(model, ch.edits.ScaleHeads(0, 2, 0.25), ch.edits.ScaleHeads(1, 3)),
        ):
            model(IDS)
        with ch.watch(model, values=True) as plain:
            model(IDS)
    assert np.isnan(seen.table()[1]["first"]) and seen.table()[0]["first"] > 0.0  # no query of head 1 may see it
    found = ch.audit(seen, ch.Causal())
    assert "Causal(), edited" in str(found) and "should go" in str(found)
    seen.view().write(tmp_path / "page.html")
    assert float(seen.explain(0, 1, 5, 1)["weights"][..., 0].abs().max()) == 0.0
    rows, before = (recording.table() for recording in (scaled, plain))
    for name in ("weighted value norm", "weighted transformed norm"):
        assert rows[2][name] == pytest.approx(before[2][name] / 4, rel=1e-4)
    assert rows[2]["normalised entropy"] == pytest.approx(before[2]["normalised entropy"], rel=1e-4)
    assert np.isnan(rows[7]["first"])  # its weights are all 0: no query sees a key
    assert "after the softmax, by 0.25" in " ".join(str(scaled.explain(0, 2, 5, 0)).split())
    with (
        torch.no_grad(),
        ch.watch(model) as doubled,
        ch.edit(model, ch.edits.ScaleHeads(0, 2, 2.0), ch.edits.ScaleHeads(1, 3, -0.5)),
    ):
        model(IDS)
    for call in doubled.calls:  # no weights of a softmax, even with a sink
        with pytest.raises(ch.UnsupportedError, match="after the softmax by"):
            ch.models.Recording([call]).compare(ch.models.Recording([call.unedited]))
    with pytest.raises(ch.UnsupportedError, match="after the softmax"):
        scaled[0].weights.pool(2)
    assert "after the softmax" in scaled.view().write(tmp_path / "scaled.html").read_text()


def test_a_monitor_sees_what_ran():
    model = llama().train()
    with ch.models.monitor(model, every=1) as seen, ch.edit(model, ch.edits.Knockout(0, 1, keys=0)):
        model(IDS)
    with ch.edit(model, ch.edits.Knockout(0, 1, keys=0)), ch.models.monitor(model, every=1) as inside:
        model(IDS)
    with (
        ch.models.statistics(model, [ch.reductions.Entropy()]) as kept,
        ch.edit(model, ch.edits.Knockout(0, 1, keys=0)),
    ):
        model(IDS)
    wanted = kept.calls[0].means[0].tolist()
    for rows in (seen.table(), inside.table()):
        assert [row["entropy"] for row in rows[:4]] == pytest.approx(wanted, rel=1e-4)


class Restless(ch.edits.Edit):
    """Another answer at each call, in one of its three methods."""

    def __init__(self, where):
        super().__init__(heads=[0, 2])
        self.where, self.calls, self.draws = where, 0, torch.Generator().manual_seed(0)

    def before(self, problem, spot):
        if self.where == "query":
            noise = torch.randn(problem.query.shape, generator=self.draws)
            return problem._replace(scores=problem.scores._replace(query=problem.query + noise))
        if self.where == "mask":
            keep = torch.rand(problem.sizes.shape, generator=self.draws) > 0.5
            return ch.edits.ForceMask(keep[:1, :1]).before(problem, spot)
        if self.where == "bias":
            noise = torch.randn(1, 1, *problem.sizes.shape[2:], generator=self.draws)
            return problem._replace(bias=Added(dense=noise))
        return problem

    def removed(self, spot):
        if self.where != "removed":
            return None
        self.calls += 1
        return np.arange(len(spot.keys)) == self.calls


@pytest.mark.parametrize("where", ["query", "mask", "bias", "removed"])
@pytest.mark.parametrize("around", [False, True])
def test_an_edit_that_gives_another_answer_each_time_is_not_recorded(where, around):
    """A record would be of other random numbers than those that ran; without a record such an edit works."""
    block, x = Block(), torch.randn(1, 4, L, E, generator=torch.Generator().manual_seed(1))
    with ch.edit(block, Restless(where)):
        assert not torch.equal(block(x, x, x), F.scaled_dot_product_attention(x, x, x))
    watching, editing = ch.watch(block), ch.edit(block, Restless(where))
    first, second = (editing, watching) if around else (watching, editing)
    with pytest.warns(UserWarning, match="Restless gives other results"), first, second:
        assert not torch.equal(block(x, x, x), F.scaled_dot_product_attention(x, x, x))


@pytest.mark.parametrize("part", ["query", "key", "value"])
def test_an_edit_that_writes_to_the_models_tensors_is_refused(part):
    class Writes(ch.edits.Edit):
        def before(self, problem, spot):
            getattr(problem, part).mul_(2)
            return problem

    block, tensors = Block(), torch.randn(3, 1, 4, L, E)
    tensors = [tensor.clone() for tensor in tensors]
    with pytest.raises(ch.ClearheadError, match=f"wrote to the model's {part}"), ch.edit(block, Writes(heads=1)):
        block(*tensors)


def test_edited_weights_of_arrays_are_arrays():
    attend, x = ch.nn.DotProductAttention().eval(), torch.rand(1, 3, 4)
    with ch.edit(attend, ch.edits.ScaleHeads(factor=0.5, queries=1)):
        attend(x, x, x)
        of_tensors = attend.attention_weights
        attend(x.numpy(), x.numpy(), x.numpy())
        of_arrays = attend.attention_weights
    looks = [
        lambda w, v: w.dense(),
        lambda w, v: w[0, 0].dense(),
        lambda w, v: w @ v,
        lambda w, v: w.entropy(),
        lambda w, v: w.received(),
        lambda w, v: w.topk(2)[0],
        lambda w, v: w.reduce(ch.reductions.Output(v)),
        lambda w, v: w.sum(-1),
    ]
    for look in looks:
        found, want = look(of_arrays, x.numpy()[None]), look(of_tensors, x[None])
        assert isinstance(found, np.ndarray)
        np.testing.assert_allclose(found, want.numpy(), atol=1e-6)


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_a_call_without_its_edit(seed, around):
    """The same inputs, without what the edit did: beside the weights and the outputs by hand without edits."""
    rng = np.random.default_rng(seed)
    q, k, v = torch.randn(3, B, H, L, E, generator=torch.Generator().manual_seed(seed))
    k, v = (t[:, : [2, 4][seed % 2]] for t in (k, v))
    edits = [drawn_edit(rng)[2] for _ in range(rng.integers(1, 4))]
    edits = [ch.edits.Patch(v.flip(0), part="value")] if seed % 2 else [*edits, ch.edits.Ablate(heads=1)]
    model, allowed = Block(), torch.ones(L, L, dtype=torch.bool).tril()
    wanted = by_hand(q, k, allowed, [])
    watching, editing = ch.watch(model, values=True), ch.edit(model, *edits)
    with watching if around else editing as a, editing if around else watching as b:
        ran = model(q, k, v, is_causal=True)
    call = (a if around else b)[0]
    before = call.unedited
    assert call.edited and not before.edited and before.unedited is before and torch.equal(call.output, ran)
    torch.testing.assert_close(before.weights.dense().double(), wanted, rtol=1e-4, atol=1e-5)
    plain = model(q, k, v, is_causal=True)
    torch.testing.assert_close(before.output, plain, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(ran, plain, atol=1e-3)
    assert torch.equal(before.value, v) and torch.equal(before.query, q) and torch.equal(before.key, k)
    with ch.watch(model) as seen:
        model(q, k, v, is_causal=True)
    assert seen[0].unedited is seen[0] and before.mask.title() == seen[0].mask.title()


def test_layers_without_their_edits_have_the_inputs_of_this_run():
    """Layer 1 reads what layer 0's edit did; a layer that no edit names is itself."""
    model = llama()
    with torch.no_grad(), ch.edit(model, ch.edits.Knockout(0, [1, 2], keys=0)), ch.watch(model, values=True) as seen:
        model(IDS)
    with torch.no_grad(), ch.watch(model, values=True) as plain:
        model(IDS)
    first, second = seen.calls
    torch.testing.assert_close(first.unedited.weights.dense(), plain[0].weights.dense(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(first.unedited.output, plain[0].output, rtol=1e-4, atol=1e-5)
    assert second.unedited is second and not torch.allclose(second.output, plain[1].output, atol=1e-4)


def test_steps_of_a_generation_without_their_edits():
    model = llama()
    with torch.no_grad(), ch.edit(model, ch.edits.Knockout(0, 1, keys=3)), ch.watch(model, values=True) as seen:
        ids = model.generate(IDS, do_sample=False, max_new_tokens=4, min_new_tokens=4)
    with torch.no_grad(), ch.watch(model, values=True) as whole:
        model(ids[:, :-1], use_cache=False)
    first = whole.calls[0]
    at = 0
    for call in seen[seen.names[0]]:
        rows, keys = call.shape[2:]
        mine = call.unedited
        torch.testing.assert_close(
            mine.weights.dense(), first.weights.dense()[:, :, at : at + rows, :keys], rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(mine.output, first.output[:, :, at : at + rows], rtol=1e-4, atol=1e-5)
        assert float(call.weights.dense()[:, 1, :, 3].abs().max()) == 0.0
        at += rows


def test_what_keeps_no_call_without_its_edit_says_so(tmp_path):
    block, x = Block(), torch.randn(1, 4, L, E, generator=torch.Generator().manual_seed(1))
    editing = lambda: ch.edit(block, ch.edits.Knockout(heads=1, keys=2))
    with editing(), ch.models.statistics(block, [ch.reductions.Entropy()]) as kept:
        block(x, x, x)
    with pytest.raises(ch.ClearheadError, match="reduced by statistics"):
        _ = kept.calls[0].unedited
    with ch.watch(block, values=True) as seen, editing():
        block(x, x, x)
    again = ch.models.load_recording(seen.write(tmp_path / "seen"))
    assert again[0].edited
    with pytest.raises(ch.ClearheadError, match="read from a file"):
        _ = again[0].unedited
    before = ch.models.Recording([call.unedited for call in seen.calls])
    whole = ch.models.load_recording(before.write(tmp_path / "before"))
    assert whole[0].unedited is whole[0]
    torch.testing.assert_close(whole[0].weights.dense(), before[0].weights.dense())


def shannon(p, q):
    """The Jensen–Shannon divergence of rows, with what they lack to 1 as one more key, by its words."""
    p, q = (torch.cat([t, (1 - t.sum(-1, keepdim=True)).clamp(min=0)], -1) for t in (p, q))
    m = (p + q) / 2
    return sum(torch.xlogy(t, t / m.clamp(min=1e-300)).sum(-1) for t in (p, q)) / 2


@pytest.mark.parametrize("file", [False, True])
@pytest.mark.parametrize(
    "edit",
    [
        ch.edits.Knockout(heads=1, keys=[0, 2]),
        ch.edits.Knockout(heads=1, keys=slice(None)),
        ch.edits.Knockout(heads=1, keys=[0, 2], after=True),
        ch.edits.ScaleHeads(heads=1, factor=0.25, queries=[3, 4]),
        ch.edits.ScaleHeads(heads=1),
        ch.edits.AddBias(torch.randn(L, L, generator=torch.Generator().manual_seed(5)), heads=1),
        ch.edits.ForceMask(torch.ones(L, L, dtype=torch.bool).tril(-1), heads=1),
        Sharpen(heads=1),
    ],
    ids=["knockout", "all keys", "after", "part", "ablated", "bias", "mask", "own"],
)
def test_an_edited_layer_is_compared(edit, file, tmp_path):
    """The edited head differs from the plain run's by as much as the weights by hand do; the others do not."""
    block, x = Block(), torch.randn(2, 4, L, E, generator=torch.Generator().manual_seed(1))
    with ch.watch(block) as plain:
        block(x, x, x, is_causal=True)
    with ch.watch(block) as seen, ch.edit(block, edit):
        block(x, x, x, is_causal=True)
    if file:
        seen = ch.models.load_recording(seen.write(tmp_path / "seen"))
    weights = [one[0].weights.dense().double() for one in (plain, seen)]
    wanted = shannon(*weights)
    assert (wanted[:, 1] > 1e-3).any() and wanted[:, [0, 2, 3]].abs().max() < 1e-9
    for one, other, sign in ((plain, seen, 1), (seen, plain, -1)):
        found = one.compare(other)
        torch.testing.assert_close(found[0].by_query, wanted, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found[0].weights[...].double(), sign * (weights[1] - weights[0]), atol=1e-6, rtol=0)
        assert found.most == (0, 1)
    if not file:
        local = ch.models.Recording([seen[0].unedited]).compare(seen)
        torch.testing.assert_close(local[0].by_query, wanted, rtol=1e-5, atol=1e-6)


EDITS_OF_WEIGHTS = {
    "scaled": ch.edits.ScaleHeads(heads=0, factor=0.5),
    "scaled, some queries": ch.edits.ScaleHeads(heads=0, factor=-2.0, queries=[1, 4]),
    "mapped": ch.edits.MapWeights(lambda w: w.square(), heads=0),
    "knocked out after": ch.edits.Knockout(heads=0, keys=1, after=True),
}


class Attending(torch.nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.bias = bias

    def forward(self, x):
        return ch.attention(x, x, x, mask=ch.Causal(), bias=self.bias)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", EDITS_OF_WEIGHTS)
def test_all_columns_of_a_table_are_of_the_weights_that_ran(name, biased):
    """Each column beside a plain sum over `seen.weights`. A bias sends equal words through a pass of its own."""
    torch.manual_seed(0)
    block, x, words = Attending(ch.ALiBi(2) if biased else None), torch.randn(1, 2, 6, 8), list("abcabc")
    with ch.watch(block, values=True) as seen, ch.edit(block, EDITS_OF_WEIGHTS[name]):
        block(x)
    assert seen[0].factor is not None
    i, j = torch.arange(6)[:, None], torch.arange(6)
    same = torch.tensor([[one == other for other in words] for one in words])
    after = torch.cat([torch.zeros(6, 1, dtype=torch.bool), same[:, :-1]], 1)  # the key before is the query's word
    pairs = {"previous": j == i - 1, "itself": j == i, "first": j == 0, "same word": same & (j != i)}
    pairs["induction"] = after & (j < i)
    rows = seen.table(tokens=words)
    for row, w, v in zip(rows, seen[0].weights.dense()[0].double(), x[0].double(), strict=True):
        allowed = (j <= i) & (w != 0)  # a key that was knocked out is in no mean
        for column, some in pairs.items():
            some = some & allowed
            assert row[column] == pytest.approx(float((w * some).sum(-1)[some.any(-1)].mean()), rel=1e-5), column
        assert row["weighted value norm"] == pytest.approx(float((w @ v.norm(dim=-1)).mean()), rel=1e-5)
        received, even = w.sum(0), (allowed / allowed.sum(-1, keepdim=True)).double().sum(0)
        assert row["sink"] == pytest.approx(float(received[(received - even).argmax()] / 6), rel=1e-5)
        total = w.sum(-1, keepdim=True)
        entropy = torch.special.entr(w / total).sum(-1).mean()  # of weights that sum to 1, as of the mean distance
        assert row["Entropy (nats)"] == pytest.approx(float(entropy), rel=1e-5)
        assert row["distance"] == pytest.approx(float((w / total * (i - j).abs()).sum(-1).mean()), rel=1e-5)
    assert not [found for found in seen.diagnose() if found.name == "precision"]  # the output is the product's
