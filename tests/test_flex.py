"""The engine "flex" on a CPU: forward by PyTorch's compiled kernel, and all by the same operator as it is written.

What runs on CUDA is another kernel of the same name: of that, these tests show what goes into it.
"""

import functools
import math

import pytest
import torch
from drawn import draw
from torch.nn.attention import flex_attention

import clearhead as ch
from clearhead.base.shapes import Sizes
from clearhead.base.torch_state.mode import CURRENT
from clearhead.engines import proof
from clearhead.engines.choose import ENGINES
from clearhead.engines.flex import kernel
from clearhead.engines.flex.blocks import BLOCK, blocks_of
from clearhead.engines.flex.engine import problems
from clearhead.masks.base import dense
from clearhead.problem.problem import make_problem
from clearhead.problem.visible import Later, visible
from clearhead.testing import masks

# PyTorch's compiler looks at an attribute that warns, and hides the warning, unless warnings are errors
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
FLEX = next(engine for engine in ENGINES if engine.name == "flex")
SHAPE = (2, 4, 150, 24)  # more queries and keys than a block has, and no multiple of it


def inputs(keys=290, heads=2, width=24):
    return draw(*SHAPE), draw(2, heads, keys, 24, seed=1), draw(2, heads, keys, width, seed=2)


@pytest.fixture
def as_written(monkeypatch):
    """FlexAttention as an operator in plain PyTorch, with its own gradients, which it refuses on a CPU otherwise."""
    monkeypatch.setattr(kernel, "BACKEND", "aot_eager")
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *inputs: None)
    monkeypatch.setattr(kernel, "_compiled", {})


def found(engine, given, learnt=(), **options):
    """The output and the gradients to the inputs and to what is learnt beside them."""
    leaves = [t.detach().clone().requires_grad_() for t in given]
    output = ch.attention(*leaves, **options, align="lower_right", engine=engine)
    grad = draw(*output.shape, seed=3).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, [*leaves, *learnt], grad)]


def compare(given, learnt=(), doubled=None, **options):
    """With the reference in float64."""
    exact = {name: part.double() if isinstance(part, torch.Tensor) else part for name, part in options.items()}
    exact |= doubled or {}
    beside = (
        [part for part in exact.values() if isinstance(part, torch.Tensor) and part.requires_grad] if learnt else []
    )
    got = found("flex", given, learnt, **options)
    want = found("reference", [t.double() for t in given], beside, **exact)
    assert len(got) == len(want)
    for mine, right in zip(got, want, strict=True):
        size = float(right.abs().max())
        torch.testing.assert_close(mine.double(), right, rtol=1e-5, atol=2e-6 * max(size, 1.0))


@pytest.mark.parametrize("mask", masks(), ids=lambda mask: mask.__name__)
def test_masks(mask, as_written):
    query, key, value = inputs()
    compare((query, key, value), mask=mask.example(Sizes(2, 4, 150, 290)))


@pytest.mark.parametrize(
    "mask",
    [
        ch.Causal() & (ch.SlidingWindow(before=50) | ch.PrefixLM([5, 7])),
        ~ch.SlidingWindow(before=200) & ch.Lengths([290, 0]),
        ch.Causal() & ch.MaskFunction(lambda batch, head, i, j: (i + head - j) % 7 < 5),
    ],
    ids=["gaps", "not", "rule of heads"],
)
def test_masks_that_are_expressions(mask, as_written):
    compare(inputs(), mask=mask)


def leaf(*shape):
    return draw(*shape, seed=5).requires_grad_()


@pytest.mark.parametrize("shape", [(1, 4, 150, 290), (2, 1, 1, 290), (1, 1, 150, 1)], ids=str)
def test_a_learnt_bias(shape, as_written):
    bias = leaf(*shape)
    compare(inputs(), [bias], bias=bias, mask=ch.Causal())


def test_a_learnt_bias_by_distance(as_written):
    bias = ch.RelativeBias(4, 16, 64)
    got = found("flex", inputs(), [bias.weight], bias=bias, mask=ch.Causal())
    double = ch.RelativeBias(4, 16, 64).double()
    double.load_state_dict(bias.state_dict())
    want = found("reference", [t.double() for t in inputs()], [double.weight], bias=double, mask=ch.Causal())
    for mine, right in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-5, atol=2e-5 * float(right.abs().max()))


def test_a_bias_that_is_a_view_has_its_gradient(as_written):
    """FlexAttention itself leaves it out: of views it gives None."""
    whole = leaf(4, 150, 290)
    got = found("flex", inputs(), [whole], bias=whole[None])
    want = found("tiled", inputs(), [whole], bias=whole[None])
    torch.testing.assert_close(got[-1], want[-1], rtol=1e-4, atol=1e-5)


def test_a_row_of_a_bias_as_low_as_a_mask_of_finfo_min(as_written):
    """Its weights are those of the scores alone, and so are the gradients: the log-sum-exp has kept its digits."""
    bias = torch.zeros(1, 1, 150, 1)
    bias[:, :, 7] = -1e9
    got, want = found("flex", inputs(), bias=bias), found("flex", inputs())
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_softcap_sinks_and_grouped_heads(as_written):
    sinks = leaf(4)
    compare(inputs(heads=1), [sinks], score=ch.Dot(softcap=2.0), sinks=sinks, mask=ch.Causal() & ch.Lengths([290, 0]))


def test_other_widths_and_a_scale(as_written):
    query, key, value = inputs(width=40)
    compare((query[..., :5], key[..., :5], value[..., :5]), scale=-0.3, mask=ch.SlidingWindow(before=30))
    compare((query, key, value), scale=0.0, mask=ch.SlidingWindow(before=30))


def test_other_scores_that_are_dot_products(as_written):
    compare(inputs(), score=ch.Cosine(0.4), mask=ch.Causal())


def test_keys_that_none_may_see_may_hold_anything(as_written):
    query, key, value = inputs()
    mask = ch.Lengths([200, 100])
    want = found("flex", (query, key, value), mask=mask)
    for tensor in (key, value):
        tensor[1, :, 100:] = math.nan
    torch.testing.assert_close(found("flex", (query, key, value), mask=mask), want, rtol=0, atol=0)


def test_compiled_for_the_cpu():
    """PyTorch's own code for a CPU, forward: spans with gaps and a rule, and a bias beside a softcap."""
    gaps = (
        ch.Causal()
        & (ch.SlidingWindow(before=50) | ch.PrefixLM([5, 7]))
        & ch.MaskFunction(lambda b, h, i, j: j % 9 != 4)
    )
    for options in ({"mask": gaps}, {"score": ch.Dot(softcap=3.0), "bias": ch.ALiBi(4)}):
        given = {**options, "align": "lower_right"}
        got = ch.attention(*inputs(), **given, engine="flex")
        torch.testing.assert_close(got, ch.attention(*inputs(), **given, engine="reference"), rtol=1e-5, atol=2e-6)


def test_lengths_are_left_open(as_written):
    """A kernel for every length would be compiled for each: PyTorch stops after some."""
    for keys in range(200, 212):
        query, key, value = inputs(keys)
        got = ch.attention(query, key, value, mask=ch.Lengths([keys, 60]), engine="flex")
        torch.testing.assert_close(got, ch.attention(query, key, value, mask=ch.Lengths([keys, 60])))
    assert len(kernel._compiled) == 1


def test_rows(as_written):
    """The log-sum-exp of each query, as `Partial` has it; a query that sees nothing has a log_sum of infinity."""
    options = {"mask": ch.Lengths([290, 0]), "bias": draw(1, 1, 150, 290, seed=4)}
    problem = make_problem(*inputs(), **options)
    output, maximum, log_sum, _ = FLEX.forward(problem, rows=True)
    _, other, other_sum, _ = ENGINES[-2].forward(problem, rows=True)
    assert output.dtype == torch.float32
    torch.testing.assert_close(maximum[0] + log_sum[0], other[0] + other_sum[0])
    assert bool((maximum[1] == 0).all()) and bool((log_sum[1] == torch.inf).all())


def test_inside_compiled_code(as_written):
    """The one operation, with its gradients."""

    def attend(query, key, value):
        return ch.attention(query, key, value, mask=ch.Causal(), align="lower_right", sinks=SINKS, engine="flex")

    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    leaves = [t.requires_grad_() for t in inputs()]
    got = torch.autograd.grad(compiled(*leaves).sin().sum(), leaves)
    want = torch.autograd.grad(attend(*leaves).sin().sum(), leaves)
    torch.testing.assert_close(got, want)


SINKS, LEARNT = torch.zeros(4), torch.ones((), requires_grad=True)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"score": ch.Additive(24, 24, 8)}, "no dot product"),
        ({"score": lambda query, key: query @ key.mT}, "tile"),
        ({"dropout_p": 0.5}, "has no dropout"),
        ({"bias": ch.BiasFunction(lambda b, h, i, j: LEARNT * (i - j))}, "reads a tensor which requires grad"),
        ({"bias": ch.BiasFunction(lambda b, h, i, j: (j - j.max()) / 2)}, "may read a tensor which requires grad"),
    ],
    ids=["additive", "tile", "dropout", "a function that learns", "a function of many pairs"],
)
def test_objections(options, why):
    assert why in " ".join(ch.plan(*inputs(), **options, align="lower_right").declined["flex"])
    with pytest.raises(ch.UnsupportedError, match=why):
        ch.attention(*inputs(), **options, align="lower_right", engine="flex")


def test_objections_to_dtypes_devices_and_surroundings():
    query, key, value = inputs()
    for given, why in (
        ([t.double() for t in inputs()], "no float64"),
        ([t.to("meta") for t in inputs()], "kernels are for CUDA"),
        ([t.requires_grad_() for t in inputs()], "no gradients on a CPU"),
    ):
        assert why in " ".join(ch.plan(*given).declined["flex"])
    run = lambda query: ch.attention(query, key, value, engine="flex").sum()
    with pytest.raises(ch.UnsupportedError, match=r"torch\.func"):
        torch.func.grad(run)(query)
    problem = make_problem(query, key, value)._replace(value=None)
    assert FLEX.objections(problem) == ["FlexAttention gives neither weights nor their statistics"]


TABLE, IDS = draw(4, 300, seed=6), torch.arange(290).mul(7).remainder(5).expand(2, -1)
WORDS = torch.arange(290)[:, None] % torch.tensor([3, 5]) == 0
RULES = {
    "of indices": (
        ch.MaskFunction(lambda batch, head, i, j: (i + head - j) % 7 < 5),
        lambda batch, head, i, j: -(i + head - j).abs() / 50,
    ),
    "that read tensors": (
        ch.MaskFunction(lambda batch, head, i, j: IDS[batch, i] == IDS[batch, j]),
        lambda batch, head, i, j: TABLE[head, (i - j).abs()],
    ),
    "joined": (
        ~ch.MaskFunction(lambda batch, head, i, j: j % 9 == 4) & (ch.Padding(IDS > 0) | ch.SlidingWindow(before=5)),
        lambda batch, head, i, j: torch.where(i > j, 0.5, -0.5),
    ),
    "documents": (ch.Documents(IDS), lambda batch, head, i, j: (i - j).double() / 100),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_go_into_the_kernel(name, as_written, monkeypatch):
    """None is made in full, forward and backward: strips of it say which blocks it touches."""
    mask, fn = RULES[name]
    monkeypatch.setattr("clearhead.engines.flex.blocks.STRIP", 1)  # a strip a block of queries
    options = {"mask": mask & ch.Causal(), "bias": ch.BiasFunction(fn)}
    compare(inputs(), **options)
    assert "in full" not in " ".join(ch.plan(*inputs(), **options, align="lower_right", engine="flex").notes)


def test_a_change_of_scores_goes_into_the_kernel(as_written):
    """After the softcap, before the bias; what cannot go there is an objection."""
    change = lambda score, batch, head, i, j: 4 * torch.tanh((score - TABLE[head, (i - j).abs()]) / 4) / (1 + batch)
    score = ch.Dot(softcap=3.0).then(change)
    compare(inputs(), score=score, mask=ch.Causal(), bias=ch.ALiBi(4))
    query, key, value = inputs()
    for other in (ch.Cosine().then(change), ch.Dot().then(lambda s, b, h, i, j: s - s.max())):
        with pytest.raises(ch.UnsupportedError, match="function"):
            ch.attention(query, key, value, score=other, engine="flex")


def test_rules_that_are_made_in_full(as_written):
    """`plan` says so, with their bytes; the numbers are the same."""
    bias = ch.BiasFunction(lambda batch, head, i, j: torch.take(TABLE, (i - j).abs()))
    edges = torch.tensor([40, 90, 200])
    options = {"mask": ch.MaskFunction(lambda batch, head, i, j: torch.bucketize(j, edges) % 2 == i % 2), "bias": bias}
    with torch.no_grad():
        got, want = (ch.attention(*inputs(), **options, engine=engine) for engine in ("flex", "tiled"))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)
        notes = "\n".join(ch.plan(*inputs(), **options, engine="flex").notes)
        of_rows = ch.MaskFunction(lambda batch, head, i, j: (WORDS[i] & WORDS[j]).any())
        got, want = (ch.attention(*inputs(), mask=of_rows, engine=engine) for engine in ("flex", "tiled"))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)
        rows = "\n".join(ch.plan(*inputs(), mask=of_rows, engine="flex").notes)
    assert "a part of the mask is computed in full, 43,500 bytes: it computes aten.bucketize" in notes
    assert "the bias is computed in full, up to 1,392,000 bytes: it computes aten.take" in notes
    assert "a part of the mask is computed in full, 43,500 bytes: it is known only in parts" in rows


@pytest.mark.parametrize("mask", masks(), ids=lambda mask: mask.__name__)
def test_no_block_of_the_mask_is_missed(mask):
    sizes = Sizes(2, 4, 2 * BLOCK + 40, 3 * BLOCK - 9, align="lower_right")
    spans = mask.example(sizes)._resolve(sizes)
    blocks = blocks_of(visible(spans, sizes), sizes, CURRENT)
    keep = torch.nn.functional.pad(dense(spans, sizes), (0, 9, 0, BLOCK - 40))
    each = keep.unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    some = each.any(5).any(3)
    rows, columns = torch.arange(keep.shape[2]) < sizes.queries, torch.arange(keep.shape[3]) < sizes.keys
    inside = rows[:, None] & columns
    every = (keep | ~inside).unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).all(5).all(3)
    partial, full = (_matrix(*listed, some.shape) for listed in (blocks.partial, blocks.full))
    assert not (partial & full).any()
    assert bool((~some | partial | full).all()), "a block that some query sees is missing"
    assert bool((~full | every).all()), "a block is taken for one of which every pair is allowed"
    by_key = [_matrix(*listed, some.mT.shape).mT for listed in (blocks.partial_by_key, blocks.full_by_key)]
    assert torch.equal(by_key[0], partial) and torch.equal(by_key[1], full)


def _matrix(count, which, shape):
    """The blocks that are listed, as a matrix."""
    listed = torch.arange(which.shape[-1]) < count.unsqueeze(-1)
    return torch.zeros_like(which, dtype=torch.bool).scatter(-1, which.long(), listed).expand(shape)


def test_what_is_asked_of_cuda(monkeypatch):
    problem = make_problem(*inputs())
    problem = problem._replace(sizes=problem.sizes._replace(device=torch.device("cuda")))
    monkeypatch.setattr("clearhead.engines.flex.engine.has_triton", lambda: True)
    monkeypatch.setattr(proof, "objections", lambda *about: ["it was wrong there"])
    assert FLEX.objections(problem) == ["it was wrong there"]
    monkeypatch.setattr(proof, "objections", lambda *about: [])
    assert FLEX.objections(problem) == []
    assert "nothing is masked" in FLEX.reservations(problem)[0]
    monkeypatch.setattr("clearhead.engines.flex.engine.has_triton", lambda: False)
    assert "pip install triton" in FLEX.objections(problem)[0]


def test_edges_of_another_device_are_read_when_they_are_asked_for(monkeypatch):
    monkeypatch.setattr("clearhead.problem.visible.is_on_host", lambda tensor: False)
    sizes = Sizes(1, 1, 4, 6)
    seen = visible(ch.Lengths([3])._resolve(sizes), sizes)
    assert isinstance(seen.known, Later) and not seen.read and seen.unseen == "inside"
    assert int(seen.edges[1].max()) == 3 and seen.read
    wrong = visible(seen.spans._replace(stop=seen.spans.stop + 9), sizes)
    with pytest.raises(ch.ShapeError, match="reach from 0 to 12"):
        wrong.edges  # noqa: B018


@pytest.mark.parametrize("row", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_proof_of_a_device_passes(dtype, row, as_written):
    assert proof.differences(FLEX, torch.device("cpu"), dtype, functools.partial(problems, row)) == []


def test_a_device_that_computes_otherwise_is_objected_to(as_written, monkeypatch, tmp_path):
    """The engine objects in the words of the proof, which runs once and is kept for other processes."""
    right, asked = kernel.attend, []

    def wrong(*given):
        asked.append(given)
        output, log_sum_exp = right(*given)
        return 1.001 * output, log_sum_exp

    monkeypatch.setattr(kernel, "attend", wrong)
    monkeypatch.setattr(proof, "_found", {})
    monkeypatch.setattr(proof, "_file", lambda *about: tmp_path / "result.json")
    one = [pair for pair in problems(64, torch.device("cpu"), torch.float32) if "one query" in pair[0]]
    about = FLEX, torch.device("cpu"), torch.float32, "rows up to 64", lambda *about: one
    first = proof.objections(*about)
    assert (
        len(first) == 1
        and "on cpu it differs from tiled in 64 wide, one query: output, by 0.001 of its size" in first[0]
    )
    monkeypatch.setattr(proof, "_found", {})  # as another process finds it
    assert proof.objections(*about) == first and len(asked) == 1


def test_partial_results(as_written):
    """The output and the log-sum-exp of some of the keys, and the gradients of both."""
    query, key, value = leaves = [t.requires_grad_() for t in inputs()]
    options = {"mask": ch.Causal() & ch.Lengths([200, 0]), "bias": ch.ALiBi(4), "align": "lower_right"}

    def parts(engine):
        each = [
            ch.partial(query, key[:, :, at], value[:, :, at], keys=(at.start, 290), engine=engine, **options)
            for at in (slice(0, 140), slice(140, 290))
        ]
        whole = each[0].merge(each[1])
        seen = whole.logsumexp.masked_fill(whole.logsumexp.isinf(), 0.0)
        return whole.finish(), seen, *torch.autograd.grad(whole.finish().sin().sum() + seen.cos().sum(), leaves)

    torch.testing.assert_close(parts("flex"), parts("tiled"), rtol=1e-4, atol=1e-5)


def test_partial_results_in_compiled_code(as_written):
    def attend(query, key, value):
        found = ch.partial(query, key, value, mask=ch.Causal(), align="lower_right", engine="flex")
        return found.output, found.logsumexp

    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    leaves = [t.requires_grad_() for t in inputs()]
    found = [run(*leaves) for run in (compiled, attend)]
    got, want = (torch.autograd.grad(output.sin().sum() + rows.cos().sum(), leaves) for output, rows in found)
    torch.testing.assert_close(got, want)


def test_second_derivatives_are_refused(as_written):
    query, key, value = (t.requires_grad_() for t in inputs())
    output = ch.attention(query, key, value, mask=ch.Causal(), align="lower_right", engine="flex")
    (slope,) = torch.autograd.grad(output.square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(slope.sum(), query)
