"""No unchecked problem reaches a kernel: what comes from an edit, an engine, a source, a pickle or the operator is
refused in words where it does not fit; and the kernels' binding refuses the rest.
"""

import pickle

import malformed
import pytest
import torch
import torch.nn.functional as F
from drawn import draw

import clearhead as ch
from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.biases.base import Added
from clearhead.engines.base import Cost, Engine
from clearhead.engines.choose import ENGINES
from clearhead.engines.native import bindings
from clearhead.inspection.reductions.base import Reduction
from clearhead.inspection.source import Source
from clearhead.inspection.weights import Weights
from clearhead.problem.partial import Partial
from clearhead.problem.problem import make_problem
from clearhead.problem.record import now
from clearhead.problem.summary import Found, Summary
from clearhead.problem.visible import Memo

COUNT, PARTS = 600, 3


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("part", range(PARTS))
def test_malformed_problems_are_refused_or_right(part):
    size = COUNT // PARTS
    failures = [f for number in range(part * size, (part + 1) * size) for f in malformed.failures_of(number)]
    assert not failures, "\n".join(failures[:20])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_every_change_is_drawn_and_most_are_refused():
    """The fuzz can fail: it draws each kind of change, and what it draws is refused, but for what changes nothing."""
    words, refused, count = set(), 0, 600
    for number in range(count):
        problem, what = malformed.drawn(number)
        words.add(what.partition(": ")[2] or what.split(" of ")[0])
        try:
            malformed.checked(problem, "a test")
        except ClearheadError:
            refused += 1
    assert set(malformed.CHANGES) <= words
    assert refused > count / 2


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_wrong_answer_is_found(monkeypatch):
    """Where nothing is derived anew, a map of blocks of another mask gives a wrong output, which the fuzz sees."""
    kept = malformed.checked
    monkeypatch.setattr(malformed, "checked", lambda problem, who: kept(problem, who) and problem)
    assert any(list(malformed.failures_of(number)) for number in range(200))


# ------------------------------------------------------------------------------------------------------------- edits


class Block(torch.nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


class Own(ch.edits.Edit):
    """An edit by a function."""

    def __init__(self, change, **at):
        super().__init__(**at)
        self.change = change

    def before(self, problem, spot):
        return self.change(problem)


def _replaced(**parts):
    return lambda p: p._replace(**{name: make(p) for name, make in parts.items()})


def _scored(**parts):
    return lambda p: p._replace(scores=p.scores._replace(**{name: make(p) for name, make in parts.items()}))


WRONG = {
    "fewer values": (
        _replaced(value=lambda p: p.value[:, :, :3]),
        "value (2, 4, 3, 8) of torch.float32",
    ),
    "another batch": (_replaced(value=lambda p: p.value.repeat(3, 1, 1, 1)), "value (6, 4, 2000, 8)"),
    "one head's value": (_replaced(value=lambda p: p.value[:, :1]), "value (2, 1, 2000, 8)"),
    "a wider value": (_replaced(value=lambda p: p.value.repeat(1, 1, 1, 2)), "values of width 16"),
    "no value": (_replaced(value=lambda p: None), "values of width None"),
    "three heads of keys": (
        lambda p: _scored(key=lambda p: p.key[:, :3])(_replaced(value=lambda p: p.value[:, :3])(p)),
        "3 key heads",
    ),
    "another dtype": (_replaced(value=lambda p: p.value.double()), "of torch.float64"),
    "all of another dtype": (
        lambda p: _scored(query=lambda p: p.query.double(), key=lambda p: p.key.double())(
            _replaced(value=lambda p: p.value.double())(p)
        ),
        "values of width 8, torch.float64",
    ),
    "meta": (_replaced(value=lambda p: p.value.to("meta")), "on meta"),
    "a wider key": (_scored(key=lambda p: p.key.repeat(1, 1, 1, 2)), "key (2, 4, 2000, 16)"),
    "another width": (_scored(scale=lambda p: float("nan")), "scale is nan"),
    "a learnt scale": (_scored(scale=lambda p: torch.ones(())), "scale is tensor"),
    "an array": (_scored(key=lambda p: p.key.numpy()), "a key a ndarray"),
    "other sizes": (
        lambda p: make_problem(draw(2, 4, 9, 8), draw(2, 4, 9, 8), draw(2, 4, 9, 8)),
        "a problem of (B, H,",
    ),
    "nothing": (lambda p: None, "a NoneType; expected a Problem"),
    "a tensor": (lambda p: p.value, "a Tensor; expected a Problem"),
    "a mask of other sizes": (
        _replaced(visible=lambda p: make_problem(*[draw(2, 4, 9, 8)] * 3, mask=ch.Causal()).visible),
        "stop (1, 1, 9)",
    ),
    "a bias of other sizes": (_replaced(bias=lambda p: Added(dense=torch.zeros(1, 1, 5, 5))), "dense (1, 1, 5, 5)"),
    "a bias too long": (_replaced(bias=lambda p: Added(relative=torch.zeros(1, 1, 4000))), "relative (1, 1, 4000)"),
    "sinks of three heads": (
        _replaced(sinks=lambda p: torch.zeros(3)),
        "sinks (3,)",
    ),
    "dropout without a seed": (_replaced(dropout_p=lambda p: 0.5), "seed None"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_an_edit_gives_back_is_checked(name):
    change, said = WRONG[name]
    block, x = Block(), draw(2, 4, 2000, 8)
    plain = block(x)
    with pytest.raises(ClearheadError) as refused, ch.edit(block, Own(change)):
        block(x)
    assert "Own.before gave" in str(refused.value) and said in str(refused.value)
    assert torch.equal(block(x), plain)
    with ch.edit(block, ch.edits.ScaleHeads(heads=0)):  # and it may be edited again
        assert torch.equal(block(x)[:, 1:], plain[:, 1:])


def test_an_edit_is_given_its_own_heads():
    """A key of its head is of that head, and no other changes; heads that stand apart come by themselves."""
    block, x = Block(), draw(1, 4, 50, 8)
    seen = []

    class Turned(ch.edits.Edit):
        def before(self, problem, spot):
            seen.append((list(spot.heads), spot.all_heads, problem.query.shape[1], problem.key.shape[1]))
            return problem._replace(scores=problem.scores._replace(key=-problem.key))

    plain = block(x)
    with ch.edit(block, Turned(heads=1)):
        one = block(x)
    with ch.edit(block, Turned(heads=[0, 2, 3])):
        block(x)
    assert seen == [([1], 4, 1, 1), ([0], 4, 1, 1), ([2, 3], 4, 2, 2)]
    torch.testing.assert_close(one[:, 1], F.scaled_dot_product_attention(x, -x, x)[:, 1])
    assert torch.equal(one[:, [0, 2, 3]], plain[:, [0, 2, 3]])


def test_masks_biases_and_tensors_of_all_heads_are_cut_for_an_edit():
    block, x, heads = Block(), draw(2, 4, 12, 8), [1, 3]
    keep, bias = draw(1, 4, 12, 12, seed=1) > -0.3, draw(2, 4, 12, 12, seed=2)

    class Both(ch.edits.Edit):
        def before(self, problem, spot):
            added = spot.bias(ch.ALiBi(4), problem.sizes).plus(Added(dense=spot.tensor(bias, "bias")))
            return problem._replace(visible=spot.mask(ch.DenseMask(keep), problem.sizes), bias=added)

    wanted = ch.attention(x, x, x, mask=ch.DenseMask(keep), bias=ch.ALiBi(4) + ch.DenseBias(bias), engine="reference")
    for edits in (
        [Both(heads=heads)],
        [
            ch.edits.ForceMask(keep, heads=heads),
            ch.edits.AddBias(bias, heads=heads),
            ch.edits.AddBias(ch.ALiBi(4), heads=heads),
        ],
    ):
        with ch.edit(block, *edits):
            got = block(x)
        torch.testing.assert_close(got[:, heads], wanted[:, heads], rtol=1e-5, atol=1e-5)
        assert torch.equal(got[:, [0, 2]], block(x)[:, [0, 2]])
    with (
        pytest.raises(ShapeError, match=r"of 2 heads\. Pass one of all heads of the module"),
        ch.edit(block, ch.edits.AddBias(bias[:, :2], heads=heads)),
    ):
        block(x)


def test_an_error_in_an_edit_leaves_all_as_it_was():
    block, x, after = Block(), draw(1, 4, 9, 8), []

    def once(problem):
        if not after:
            after.append(problem)
            raise KeyError("mine")
        return problem._replace(value=2 * problem.value)

    plain = block(x)
    with ch.edit(block, Own(once, heads=2)):
        with pytest.raises(KeyError, match="mine"):
            block(x)
        torch.testing.assert_close(block(x)[:, 2], 2 * plain[:, 2])  # the next call is edited
    assert torch.equal(block(x), plain)
    with ch.watch(block) as seen:
        block(x)
    assert len(seen.calls) == 1


# -------------------------------------------------------------------- engines, sources, reductions, pickles, operator


class Plain(Engine):
    """An engine of one's own by PyTorch's softmax, one of whose results is changed."""

    name = "plain"

    def __init__(self, wrong=lambda found: found):
        self.wrong = wrong

    def objections(self, problem):
        return []

    def cost(self, problem):
        return Cost(0, 0)

    def forward(self, problem, rows=False):
        weights = self.scores(problem).softmax(-1)
        return self.wrong(Partial(weights @ problem.value))

    def scores(self, problem):
        return problem.query @ problem.key.mT * problem.lowered.scale


class WithBackward(Plain):
    name = "with a backward pass"

    def forward(self, problem, rows=False):
        return ENGINES[-2].forward(problem, rows)

    def backward(self, problem, rows, grad, wanted):
        return self.wrong(ENGINES[-2].backward(problem, rows, grad, wanted))


def test_a_right_engine_of_ones_own_runs():
    q = draw(1, 2, 5, 8).requires_grad_()
    torch.testing.assert_close(ch.attention(q, q, q, engine=Plain()), ch.attention(q, q, q, engine="reference"))
    found = [torch.autograd.grad(ch.attention(q, q, q, engine=e).sum(), q)[0] for e in (WithBackward(), "reference")]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda f: f._replace(output=f.output[:, :, :2]),
        lambda f: f._replace(output=f.output.to("meta")),
        lambda f: f._replace(output=f.output.long()),
        lambda f: f._replace(output=None),
        lambda f: f.output,
        lambda f: f._replace(output=f.output[0]),
        lambda f: f._replace(maximum=f.output),
        lambda f: f._replace(log_sum=3),
    ],
)
def test_what_an_engine_gives_back_is_checked(wrong):
    q = draw(1, 2, 5, 8)
    with pytest.raises(ClearheadError, match=r"the engine 'plain', Plain.forward, gave"):
        ch.attention(q, q, q, engine=Plain(wrong))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda f: f._replace(key=f.key[:, :, :2]),
        lambda f: f._replace(value=None),
        lambda f: tuple(f),
        lambda f: f._replace(query=f.query.to("meta")),
        lambda f: f._replace(query=f.query.int()),
    ],
)
def test_gradients_of_an_engine_are_checked(wrong):
    q = draw(1, 2, 5, 8).requires_grad_()
    output = ch.attention(q, q, q, engine=WithBackward(wrong))
    with pytest.raises(ClearheadError, match=r"WithBackward.backward, gave"):
        output.sum().backward()


def test_scores_and_statistics_of_an_engine_are_checked():
    class Wrong(Plain):
        def scores(self, problem):
            return super().scores(problem)[..., :2]

        def summarise(self, problem, summary):
            return Found(entropy=torch.zeros(3))

    weights = ch.weights(draw(1, 2, 5, 8), draw(1, 2, 5, 8), engine=Wrong())
    for look in (lambda: weights.dense(), lambda: weights.entropy()):
        with pytest.raises(ClearheadError, match=r"Wrong\.\w+, gave"):
            look()


def test_a_source_of_ones_own_is_checked():
    problem = make_problem(draw(1, 2, 5, 8), draw(1, 2, 7, 8))

    class Mine(Source):
        wrong = None

        def problem(self):
            return problem if self.wrong is None else self.wrong(problem)

        def with_value(self, value):
            return problem._replace(value=value)

        def said(self):
            return {}

    source = Mine()
    weights = Weights(source)
    assert weights.dense().shape == (1, 2, 5, 7)
    with pytest.raises(ShapeError, match=r"Mine.with_value gave a value \(2, 7, 4\)"):
        weights @ draw(2, 7, 4)
    source.wrong = lambda p: p._replace(scores=p.scores._replace(key=p.key[:, :, :3]))
    with pytest.raises(ShapeError, match=r"Mine.problem gave a key"):
        weights.entropy()


def test_the_problem_of_a_reduction_is_checked():
    class Mine(Reduction):
        def of(self, problem):
            return problem._replace(scores=problem.scores._replace(key=problem.key[:, :, :3]))

        def summary(self, problem):
            return Summary(entropy=True)

    with pytest.raises(ShapeError, match=r"Mine.of gave a key"):
        ch.weights(draw(1, 2, 5, 8), draw(1, 2, 7, 8)).reduce(Mine())


def test_an_unpickled_record_is_checked():
    record = now(make_problem(draw(1, 2, 5, 8), draw(1, 2, 7, 8), mask=ch.Lengths([3])))
    assert pickle.loads(pickle.dumps(record)).problem.sizes == record.problem.sizes
    wrong = record.problem._replace(scores=record.problem.scores._replace(key=draw(1, 2, 3, 8)))
    with pytest.raises(ShapeError, match="a record that was unpickled gave a key"):
        pickle.loads(pickle.dumps(record._replace(problem=wrong)))


def test_the_operator_is_checked():
    """It can be called by name, as a program that was exported does."""
    x, none = draw(1, 2, 5, 8), [None] * 9
    edge = torch.zeros(1, 1, 1, dtype=torch.int64)
    numbers = ["mul", 0.3, None, 0.0, None, [False] * 7, False]
    assert torch.ops.clearhead.attend(x, x, x, *none, None, *numbers)[0].shape == x.shape
    wrong = [
        (x, x, x[:, :, :3], *none, None),
        (x, x[:, :, :3], x, *none, None),
        (x, x, x.double(), *none, None),
        (x, x, x, None, None, None, None, edge, edge + 9, None, None, None, None),
        (x, x, x, None, torch.zeros(1, 1, 3, 3), *[None] * 8),
    ]
    for tensors in wrong:
        with pytest.raises(ClearheadError, match="clearhead::attend gave"):
            torch.ops.clearhead.attend(*tensors, *numbers)


# ---------------------------------------------------------------- what masks, biases and scores of one's own lower to


class Odd(ch.extend.Mask):
    def __init__(self, make):
        self.make = make

    def lower(self, sizes):
        return self.make(torch.zeros(1, 1, 1, dtype=torch.int64), sizes.keys)


@pytest.mark.parametrize(
    "make",
    [
        lambda at, n: ch.extend.Spans(at, at + n, lambda *s: torch.ones(3, 3, dtype=torch.bool)),
        lambda at, n: ch.extend.Spans(at, at + n, lambda *s: torch.ones(5, 7)),
        lambda at, n: ch.extend.Spans(at.to_sparse(), at + n),
        lambda at, n: ch.extend.Spans(at, at + n, gaps=(at, at)),
        lambda at, n: ch.extend.Spans(at, at + n, gaps=at),
        lambda at, n: (at, at),
        lambda at, n: ch.extend.Spans(at.int(), at + n),
        lambda at, n: ch.extend.Spans(None, at + n),
        lambda at, n: ch.extend.Spans(at[0], at + n),
    ],
)
@pytest.mark.parametrize(
    "join", [lambda m: m, lambda m: ~m, lambda m: m & ch.Lengths([7]), lambda m: ch.Lengths([2]) | m]
)
def test_masks_of_ones_own(make, join):
    q, k = draw(1, 2, 5, 8), draw(1, 2, 7, 8)
    for engine in ("native", "tiled", "sdpa"):
        with pytest.raises(ClearheadError):
            ch.attention(q, k, k, mask=join(Odd(make)), engine=engine)


@pytest.mark.parametrize(
    "make", [lambda at, n: ch.extend.Spans(at, at + n + 1), lambda at, n: ch.extend.Spans(at - 1, at + n)]
)
def test_spans_of_ones_own_that_reach_outside(make):
    """Refused; with others, what is left of them inside."""
    q, k = draw(1, 2, 5, 8), draw(1, 2, 7, 8)
    for engine in ("native", "tiled", "sdpa"):
        with pytest.raises(ShapeError, match="and there are 7 keys"):
            ch.attention(q, k, k, mask=Odd(make), engine=engine)
        both = ch.attention(q, k, k, mask=Odd(make) & ch.Lengths([7]), engine=engine)
        torch.testing.assert_close(both, ch.attention(q, k, k))
        assert not ch.attention(q, k, k, mask=~Odd(make), engine=engine).any()


def test_an_interval_that_lies_outside_allows_nothing_in_an_expression():
    def make(at, keys):
        start, stop = torch.tensor([-5, -5, 9, 7, 3]), torch.tensor([-2, 0, 12, 7, 30])
        return ch.extend.Spans(start.view(1, 1, -1), stop.view(1, 1, -1))

    q, k = draw(1, 2, 5, 8), draw(1, 2, 7, 8)
    keep = torch.zeros(5, 7, dtype=torch.bool)
    keep[4, 3:] = True
    for mask, want in ((~Odd(make), ~keep), (Odd(make) | ch.FirstKeys(2), keep | (torch.arange(7) < 2))):
        assert torch.equal(mask.dense(5, 7), want)
        torch.testing.assert_close(ch.attention(q, k, k, mask=mask), ch.attention(q, k, k, mask=want))


def test_an_interval_of_nothing_may_stand_anywhere():
    """Where stop ≤ start nothing is seen, wherever that is; queries that see nothing give 0."""
    q, k = draw(1, 2, 5, 8), draw(1, 2, 7, 8)
    start = torch.tensor([0, 90, 0, 7, 3]).view(1, 1, -1)
    stop = torch.tensor([7, 2, 3, 7, 2]).view(1, 1, -1)
    mask = Odd(lambda at, n: ch.extend.Spans(start, stop))
    for engine in ("native", "tiled", "sdpa"):
        got = ch.attention(q, k, k, mask=mask, engine=engine)
        torch.testing.assert_close(got[:, :, 2], ch.attention(q[:, :, 2:3], k[:, :, :3], k[:, :, :3])[:, :, 0])
        assert not got[:, :, [1, 3, 4]].any()


class OddBias(ch.extend.Bias):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def lower(self, sizes):
        return self.make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Added(relative=torch.zeros(1, 1, 1)),
        lambda: Added(dense=torch.zeros(5, 7)),
        lambda: Added(dense=1.0),
        lambda: Added(dense=torch.zeros(1, 1, 5, 7).to_sparse()),
        lambda: Added(),
        lambda: None,
        lambda: Added(function=lambda *s: torch.zeros(1, 1, 3, 3)),
        lambda: Added(function=lambda *s: None),
        lambda: Added(function=lambda *s: torch.zeros(1, 1, 5, 7, dtype=torch.int64)),
    ],
)
@pytest.mark.parametrize(
    "join", [lambda b: b, lambda b: b + ch.DenseBias(torch.zeros(5, 7)), lambda b: ch.DenseBias(torch.zeros(5, 7)) + b]
)
def test_biases_of_ones_own(make, join):
    q, k = draw(1, 2, 5, 8), draw(1, 2, 7, 8)
    with pytest.raises(ClearheadError):
        ch.attention(q, k, k, bias=join(OddBias(make)))
    with pytest.raises(ClearheadError):
        join(OddBias(make))(q, k)


@pytest.mark.parametrize("scale", [None, "1", float("nan"), 1j])
def test_a_scale_that_a_score_lowers_to(scale):
    class Mine(ch.extend.Score):
        def tile(self, query, key):
            return query @ key.mT

        def lower(self, query, key):
            return ch.extend.Pairwise("mul", query, key, scale=scale)

    with pytest.raises(ClearheadError, match=r"Mine\.lower gave"):
        ch.attention(*[draw(1, 2, 5, 8)] * 3, score=Mine())


# ---------------------------------------------------------------------------------------------------------- the binding


def _call(problem):
    """Every call of the kernels with right arrays, and those arrays by name."""
    b, h, q, k = problem.sizes.shape
    kernels, module = bindings.chosen(), bindings.kernels()
    new = lambda *shape, dtype=torch.float32: torch.zeros(shape, dtype=dtype)
    rows = {"maximum": new(b, h, q), "log_sum": new(b, h, q)}
    out = {"out": new(b, h, q, problem.value.shape[-1]), **rows}
    read = bindings.read_by_kernels(problem)
    sums = {
        "query": problem.query,
        "key": problem.key,
        "value": problem.value,
        "dense": problem.bias.dense,
        "relative": problem.bias.relative,
    }
    sums = {name: torch.zeros_like(t, memory_format=torch.contiguous_format) for name, t in sums.items()}
    numbers = {"entropy": new(b, h, q), "distance": new(b, h, q), "best": new(b, h, q), "factors": new(b, h, q)}
    keys = {"position": new(b, h, q, dtype=torch.int64), "best_key": new(b, h, q, dtype=torch.int64)}
    largest = {"values": new(b, h, q, 3), "indices": new(b, h, q, 3, dtype=torch.int64), "received": new(b, h, k)}
    cells = {"mean": new(b, h, -(-q // 2), -(-k // 5))}
    summary = numbers | keys | largest | cells | {"scores": new(b, h, q, 3), "peak": cells["mean"].clone()}
    sent = keys | largest | cells | numbers | {"log_weight": new(b, h, q)}
    del sent["entropy"]

    def backward(t):
        named = {n[2:]: x for n, x in t.items() if n.startswith("s:")}
        grads = [t[n] for n in ("query", "key", "value")], [t[n] for n in ("dense", "relative")]
        args = t["grad"], t["maximum"], t["log_sum"], t["delta"], *grads[0], None, *grads[1]
        kernels.backward(read, *args, module.Sent(named, 3, 2, 5), False)

    upstream = {"grad": out["out"].clone(), **rows, "delta": new(b, h, q)}
    prefixed = {f"s:{name}": t for name, t in sent.items()}
    yield "forward", out, lambda t: kernels.forward(read, False, t["out"], t["maximum"], t["log_sum"])
    yield "decode", out, lambda t: kernels.forward(read, True, t["out"], t["maximum"], t["log_sum"])
    yield "merge", out, lambda t: kernels.merge(read, t["out"], t["maximum"], t["log_sum"])
    yield "scores", {"out": new(b, h, q, k)}, lambda t: kernels.scores(read, t["out"])
    yield "backward", upstream | sums | prefixed, backward
    yield (
        "contributions",
        {n: t for n, t in upstream.items() if n != "delta"}
        | {"by_query": new(b, h, q), "by_key": new(b, h, k)}
        | prefixed,
        lambda t: kernels.contributions(
            read,
            t["grad"],
            t["maximum"],
            t["log_sum"],
            module.Sent({n[2:]: x for n, x in t.items() if n.startswith("s:")}, 3, 2, 5),
            t["by_query"],
            t["by_key"],
            False,
        ),
    )
    yield (
        "summarise",
        out | {f"s:{name}": t for name, t in summary.items()},
        lambda t: kernels.summarise(
            read,
            t["out"],
            t["maximum"],
            t["log_sum"],
            module.Summary({n[2:]: x for n, x in t.items() if n.startswith("s:")}, 3, 2, 5),
        ),
    )


SPOILT = {
    "fewer": lambda t: t[..., :-1],
    "more": lambda t: torch.cat([t, t], -1),
    "fewer sequences": lambda t: t[:1].clone() if t.shape[0] > 1 else t[:0],
    "a dimension more": lambda t: t[None],
    "a dimension less": lambda t: t[0],
    "float64": lambda t: t.double(),
    "int32": lambda t: t.int(),
    "meta": lambda t: t.to("meta"),
    "turned": lambda t: t.mT if t.shape[-1] != t.shape[-2] else t[..., :-1],
}
LAID = {
    "steps of two": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2],
    "one number": lambda t: t.flatten()[:1].expand(t.numel()).view(t.shape),
}


def _problem():
    q, k, v = draw(2, 4, 7, 8), draw(2, 2, 71, 8, seed=1), draw(2, 2, 71, 6, seed=2)
    return make_problem(
        q, k, v, bias=ch.ALiBi(4) + ch.DenseBias(draw(2, 4, 7, 71)), mask=ch.Causal(), align="lower_right"
    )


def test_every_array_of_every_call_is_compared():
    tried = 0
    for call, arrays, run in _call(_problem()):
        run(arrays)
        for name, tensor in arrays.items():
            for how, spoil in SPOILT.items():
                read_over_all = how == "fewer sequences" and name not in (
                    "out",
                )  # one may stand for all where it is read
                if read_over_all or (tensor.ndim == 1 and how == "turned"):
                    continue
                with pytest.raises(ShapeError, match="the kernels read memory as a problem's sizes say, and"):
                    run(arrays | {name: spoil(tensor)})
                    pytest.fail(f"{call} took {name}, {how}")
                tried += 1
        for name in arrays.keys() & {"out", "query", "key", "value", "by_key", "s:mean", "s:received"}:
            for how, lay in LAID.items():
                with pytest.raises(ShapeError, match="strides"):
                    run(arrays | {name: lay(arrays[name])})
                    pytest.fail(f"{call} took {name}, {how}")
    assert tried > 400


def test_missing_arrays_are_refused():
    for _, arrays, run in _call(_problem()):
        needed = arrays.keys() & {
            "out",
            "grad",
            "query",
            "key",
            "value",
            "maximum",
            "s:values",
            "s:indices",
            "s:position",
            "s:best",
        }
        for name in needed - ({"out"} if "s:entropy" in arrays else set()):
            given = {n: t for n, t in arrays.items() if n != name} if name.startswith("s:") else arrays | {name: None}
            with pytest.raises((ShapeError, TypeError)):
                run(given)


def test_numbers_and_keys_that_reach_outside():
    """Keys in no order and beyond the keys, positions far off: nothing is written outside; and too many of them."""
    problem = _problem()
    _, arrays, run = next(one for one in _call(problem) if one[0] == "backward")
    for far in (-(2**62), -70, 5, 71, 2**62):
        spoilt = {name: torch.where(draw(*t.shape) > 0, far, t) for name, t in arrays.items() if t.dtype == torch.int64}
        run(arrays | spoilt)
    module, kernels = bindings.kernels(), bindings.chosen()
    read, lead = bindings.read_by_kernels(problem), problem.sizes.shape[:3]
    many = {"values": torch.zeros(*lead, 72), "indices": torch.zeros(*lead, 72, dtype=torch.int64)}
    with pytest.raises(ShapeError, match="71 keys, and 72 largest"):
        kernels.summarise(read, None, None, None, module.Summary(many, 72, 1, 1))
    for numbers in ((-1, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(ShapeError):
            module.Summary({}, *numbers)
    long = make_problem(draw(1, 2, 60, 8), draw(1, 2, 60, 8), draw(1, 2, 60, 8))
    with pytest.raises(ShapeError, match="more than a few queries"):
        kernels.forward(bindings.read_by_kernels(long), True, torch.zeros(1, 2, 60, 8), None, None)


def test_edges_that_reach_outside_of_the_keys_see_what_is_inside():
    """The kernels clamp them, as the map of blocks does."""
    q, k = draw(1, 2, 5, 8), draw(1, 2, 70, 8)
    whole = make_problem(q, k, k, mask=ch.Lengths([70]) & ch.DenseMask(torch.ones(5, 70, dtype=torch.bool)))
    for far in (1, 1000, 2**62):
        spans = whole.visible.spans._replace(start=whole.spans.start - far, stop=whole.spans.stop + far)
        for residual in (None, spans.residual):
            problem = whole._replace(
                visible=whole.visible._replace(spans=spans._replace(residual=residual), memo=Memo())
            )
            torch.testing.assert_close(ENGINES[0].forward(problem).output, ch.attention(q, k, k))


def test_a_map_of_blocks_of_other_sizes_is_refused():
    other = make_problem(*[draw(1, 2, 9, 8)] * 3, mask=ch.DenseMask(draw(9, 9) > 0))
    ENGINES[0].forward(other)
    problem = make_problem(*[draw(1, 2, 130, 8)] * 3, mask=ch.DenseMask(draw(130, 130) > 0))
    with pytest.raises(ShapeError, match=r"map of blocks was made for a mask of \(1, 1, 9, 9\)"):
        ENGINES[0].forward(problem._replace(visible=problem.visible._replace(memo=other.visible.memo)))


def test_blocks_compare_their_arrays():
    whole = torch.zeros(1, 1, 100, dtype=torch.int64)
    right = {"start": whole, "stop": whole + 70, "low": None, "high": None, "keep": None}
    right |= {"first_key": 0, "last_key": 70, "first": 0, "last": 100}
    add = lambda **t: bindings.kernels().Blocks(1, 1, 100, 70).add(*(right | t).values())
    add()
    add(keep=torch.ones(1, 1, 100, 70, dtype=torch.bool))
    gap = torch.zeros(1, 1, 100, 2, dtype=torch.int64)
    add(low=gap, high=gap)
    wrong = [
        {"start": whole[..., :5]},
        {"stop": whole.int()},
        {"low": gap},
        {"low": gap, "high": gap[..., :1]},
        {"first": 3},
        {"last": 101},
        {"keep": torch.ones(1, 1, 100, 69, dtype=torch.bool)},
        {"keep": torch.ones(1, 1, 100, 70)},
        {"keep": torch.ones(1, 1, 100, 70, dtype=torch.bool), "first_key": 64},
        {"first_key": 3},
        {"first_key": -64},
        {"last_key": 71},
        {"last_key": 66},
        {"first_key": 64, "last_key": 0},
        {"first": -48},
        {"start": whole[0]},
        {"keep": torch.ones(1, 1, 100, 70, dtype=torch.bool), "last": 96},
    ]
    for change in wrong:
        with pytest.raises(ShapeError):
            add(**change)
            pytest.fail(f"{change}")
    with pytest.raises(ShapeError):
        bindings.kernels().Blocks(1, 1, -1, 3)
