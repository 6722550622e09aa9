"""The compiled kernels: every instruction set, odd sizes, threads, memory, and what happens without them."""

import threading

import pytest
import torch
from apart import run
from drawn import draw
from instruction_sets import SETS

import clearhead as ch
from clearhead.engines.native import bindings, blocks
from clearhead.masks.dense import DenseMask
from clearhead.problem.problem import make_problem
from clearhead.testing import ROUNDED

SCORES = {
    "dot": lambda: ch.Dot(),
    "softcap and sinks": lambda: ch.Dot(softcap=2.0),
    "additive": lambda: ch.Additive(20, 20, hidden_dim=37),
    "gaussian": lambda: ch.Gaussian(3.0),
}
LENGTHS = [(1, 1), (3, 65), (4, 1000), (7, 9), (48, 64), (49, 63), (97, 130)]


@pytest.fixture(params=SETS)
def instructions(request, monkeypatch):
    """Run a test once for each instruction set."""
    kernels = bindings.chosen(request.param)
    monkeypatch.setattr(bindings, "chosen", lambda: kernels)
    return request.param


def gradients(inputs, **options):
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    score = options["score"]
    learnt = [p for p in score.parameters() if p.requires_grad]
    if isinstance(score, ch.Dot) and score.softcap:
        options["sinks"] = torch.tensor([0.5, -1.0], dtype=inputs[0].dtype, requires_grad=True)
        learnt.append(options["sinks"])
    out = ch.attention(*leaves, align="lower_right", **options)
    loss = draw(*out.shape, seed=9).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [*leaves, *learnt], loss)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_every_instruction_set(instructions, name, lengths):
    """Outputs and gradients of masked problems, at lengths and widths that are no multiple of anything."""
    queries, keys = lengths
    inputs = draw(2, 2, queries, 20), draw(2, 1, keys, 20, seed=1), draw(2, 1, keys, 11, seed=2)
    masks = [None, ch.Causal(), DenseMask(draw(queries, keys, seed=3) > 0) & ch.Lengths([keys, keys // 2])]
    for mask in masks:
        score = SCORES[name]()
        got = gradients(inputs, score=score, mask=mask, engine="native")
        near = gradients(inputs, score=score, mask=mask, engine="reference")
        want = gradients([t.double() for t in inputs], score=score.double(), mask=mask, engine="reference")
        for i, truth in enumerate(want):
            allowed = 2 * (near[i].double() - truth).abs().max() + 4 * ROUNDED * max(1.0, truth.abs().max())
            assert (got[i].double() - truth).abs().max() <= allowed, (mask, i)


def test_large_additive_inputs(instructions):
    """Each form of the additive score, up to inputs of 1e4: as good as a float64 tanh, rounded."""
    for scale in (1.0, 4.0, 12.0, 30.0, 50.0, 1e4):
        query, key, value = draw(70, 24) * scale, draw(90, 24, seed=1) * scale, draw(90, 8, seed=2)
        for weight in (draw(24, seed=3), torch.zeros(24), draw(24, seed=3) * (draw(24, seed=4) > 0)):
            score = ch.Additive.from_weights(None, None, weight)
            for rows in (70, 2):  # tiles, and the path of few queries
                inputs = query[:rows], key, value
                got = gradients(inputs, score=score.float(), engine="native")
                near = gradients(inputs, score=score, engine="reference")
                want = gradients([t.double() for t in inputs], score=score.double(), engine="reference")
                for i, truth in enumerate(want):
                    allowed = 2 * (near[i].double() - truth).abs().max() + 4 * ROUNDED * max(1.0, truth.abs().max())
                    assert (got[i].double() - truth).abs().max() <= allowed, (scale, rows, i)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_an_infinite_gradient_reaches_what_its_query_sees(instructions, name, dtype):
    """The gradient of one query's output is infinite: the gradients of this query, and of the keys that it sees, are
    not finite. All others are those of a gradient of 0. Some parts of a tile begin at an odd row.

    Where a tile's gradients are finite, products on pairs of bfloat16 round each weight first; where one is infinite,
    the tile's weights are in float32. So the gradient of a value may differ by what this rounding changes."""
    pairs = instructions == "avx512_bf16" and dtype == torch.bfloat16 and isinstance(SCORES[name](), ch.Dot)
    queries, keys, width = 60, 150, 11
    shapes = (1, 2, queries, 20), (1, 2, keys, 20), (1, 2, keys, width)
    inputs = [draw(*s, seed=i).to(dtype) for i, s in enumerate(shapes)]
    some = draw(queries, keys, seed=3) > 0.5
    some[12:15] = False
    causal = torch.ones(queries, keys, dtype=torch.bool).tril()
    score = SCORES[name]().to(dtype)
    for mask, keep in ((ch.Causal(), causal), (DenseMask(some), some)):
        weights = ch.weights(*inputs[:2], score=score, mask=mask, align="upper_left")[0, 0].dense().float()
        for row, entry in ((14, 3), (15, slice(None))):
            found = []
            for number in (0.0, torch.inf):
                leaves = [t.clone().requires_grad_() for t in inputs]
                output = ch.attention(*leaves, score=score, mask=mask, align="upper_left", engine="native")
                up = draw(*output.shape, seed=4).to(dtype)
                up[0, 0, row] = 0.0
                up[0, 0, row, entry] = number
                found.append(torch.autograd.grad(output, leaves, up))
            sees = keep[row]
            for reached, plain, got in zip((torch.arange(queries) == row, sees, sees), *found, strict=True):
                assert torch.equal(got[0, 1], plain[0, 1])
                allowed = 1e-5 + 2**-7 * plain[0, 0].float().abs()
                if pairs and got.shape[-1] == width:
                    allowed += 2**-8 * weights.mT @ up[0, 0].nan_to_num(posinf=0.0).float().abs()
                assert ((got - plain)[0, 0].float().abs() <= allowed)[~reached].all(), (mask, row)
                odd = ~got[0, 0].isfinite()
                assert torch.equal(odd.any(-1), reached & sees.any()), (mask, row)
            assert odd.sum() == sees.sum() * (width if row == 15 else 1)  # of the value: the other entries are finite


@pytest.mark.parametrize("k", [1, 4, 5, 16, 17, 40])
def test_looks_at_ties_and_at_parts(instructions, k):
    """Whole numbers, whose scores tie: the largest in the order of the keys. Each reduction alone, too."""
    query, key = draw(1, 3, 101, 4).mul(2).round(), draw(1, 3, 230, 4, seed=1).mul(2).round()
    cells = (
        ch.reductions.Pool((7, 23), "mean"),
        ch.reductions.Pool((101, 230)),
        ch.reductions.Received(),
        ch.reductions.Entropy(),
    )
    for mask in (None, ch.SlidingWindow(before=60), ch.Lengths([3])):
        weights = ch.weights(query, key, mask=mask, align="lower_right", engine="native")
        truth = ch.weights(query.double(), key.double(), mask=mask, align="lower_right", engine="reference")
        wanted = truth.reduce(*cells)
        (values, indices), *together = weights.reduce(ch.reductions.TopK(k), *cells)
        largest, order = (part[..., :k] for part in truth.dense().sort(dim=-1, descending=True, stable=True))
        assert torch.equal(indices[largest > 0], order[largest > 0])
        torch.testing.assert_close(values.double(), truth.dense().gather(-1, indices), atol=1e-6, rtol=1e-5)
        for cell, one, want in zip(cells, together, wanted, strict=True):
            torch.testing.assert_close(one.double(), want, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(weights.reduce(cell), one, atol=1e-6, rtol=1e-5)


def test_looks_at_scores_far_below_zero(instructions):
    """A tile whose later queries see nothing of its first keys, and then scores of which e^−score is infinite."""
    query, key = draw(1, 2, 200, 8) + 30, draw(1, 2, 200, 8, seed=1)
    cells, mask = (
        (ch.reductions.Received(), ch.reductions.Pool(10), ch.reductions.Pool(10, "mean"), ch.reductions.Entropy()),
        ch.SlidingWindow(before=20),
    )
    found = ch.weights(query, key, score=ch.Gaussian(2.0), mask=mask, engine="native").reduce(*cells)
    truth = ch.weights(query.double(), key.double(), score=ch.Gaussian(2.0), mask=mask, engine="reference").reduce(
        *cells
    )
    for one, want in zip(found, truth, strict=True):
        # e^score is off by what float32 rounds of scores near −870, and of the sums in them
        torch.testing.assert_close(one.double(), want, atol=1e-3, rtol=1e-3)


BORDER = 64


def guarded(*shape):
    """Memory filled with 7, and the array in its middle."""
    memory = torch.full((torch.Size(shape).numel() + 2 * BORDER,), 7.0)
    return memory, memory[BORDER:-BORDER].view(shape)


def test_nothing_is_written_past_a_border():
    """Outputs and gradients that lie in the middle of larger memory leave the rest as it was."""
    kernels = bindings.chosen()
    for queries, keys, width, value_width in ((1, 1, 1, 1), (5, 70, 7, 3), (50, 65, 17, 33), (96, 128, 64, 64)):
        problem = make_problem(draw(1, 2, queries, width), draw(1, 2, keys, width), draw(1, 2, keys, value_width))
        read = bindings.read_by_kernels(problem)
        out = guarded(1, 2, queries, value_width)
        rows = [guarded(1, 2, queries) for _ in range(2)]
        to = [guarded(1, 2, queries, width), guarded(1, 2, keys, width), guarded(1, 2, keys, value_width)]
        assert kernels.forward(read, False, *(inner for _, inner in (out, *rows)))
        grad, delta = draw(1, 2, queries, value_width, seed=5), draw(1, 2, queries, seed=6)
        given = grad, *(inner for _, inner in rows), delta
        kernels.backward(read, *given, *(inner for _, inner in to), None, None, None, None, False)
        for whole, inner in (out, *rows, *to):
            assert bool((whole[:BORDER] == 7).all() and (whole[-BORDER:] == 7).all()), inner.shape
            assert bool(inner.isfinite().all()), inner.shape


def test_threads_change_rounding_alone():
    x = draw(1, 3, 300, 32)
    score = ch.Additive.from_weights(None, None, draw(32, seed=1))
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 2, 3):
            torch.set_num_threads(threads)
            found.append(gradients((x, x, x), score=score, mask=ch.Causal(), engine="native"))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(found[1], found[2], strict=True))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_calls_from_several_threads():
    inputs = [draw(2, 4, 200, 16, seed=i) for i in range(8)]
    want = [ch.attention(x, x, x, engine="native") for x in inputs]
    got = [None] * len(inputs)

    def run(i):
        for _ in range(20):
            got[i] = ch.attention(inputs[i], inputs[i], inputs[i], engine="native")

    workers = [threading.Thread(target=run, args=(i,)) for i in range(len(inputs))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_memory_that_cannot_be_had_is_a_memory_error(monkeypatch):
    problem = make_problem(draw(1, 1, 5, 4), draw(1, 1, 6, 4), draw(1, 1, 6, 4))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2**44)  # each would have work memory of its own
    with pytest.raises(MemoryError):
        bindings.forward(problem, rows=False, few=False)


def test_views_and_negated_views():
    x = draw(2, 60, 3, 16)
    views = [x.transpose(1, 2), x.transpose(1, 2)[:, :, ::2], torch.complex(x, x).conj().imag.transpose(1, 2)]
    views += [x.transpose(1, 2)[..., ::2], x[:, :, :1].transpose(1, 2).expand(2, 3, 60, 16)]
    for view in views:
        plain = view.resolve_neg().contiguous()
        want = ch.attention(plain, plain, plain, engine="native", mask=ch.Causal())
        torch.testing.assert_close(ch.attention(view, view, view, engine="native", mask=ch.Causal()), want)


def test_many_keys():
    query, key, value = draw(2, 8), draw(100_000, 8, seed=1), draw(100_000, 4, seed=2)
    for rows in (query, query.repeat(30, 1)):
        got = ch.attention(rows, key, value, engine="native")
        want = ch.attention(rows.double(), key.double(), value.double(), engine="reference")
        torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=1e-5)


def test_masks_with_a_residual_go_band_by_band(monkeypatch):
    monkeypatch.setattr(blocks, "KEEP_BYTES", 100 * 48 // 8)
    inputs = draw(2, 2, 150, 8), draw(2, 1, 100, 8, seed=1), draw(2, 1, 100, 4, seed=2)
    bias = ch.RelativeBias(2) + ch.DenseBias(draw(150, 1, seed=3).requires_grad_())
    mask = ch.MaskFunction(lambda batch, head, query, key: (query + key) % 3 > 0)
    found = []
    for engine in ("native", "reference"):
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        torch.manual_seed(0)
        out = ch.attention(*leaves, mask=mask, bias=bias, align="upper_left", dropout_p=0.2, engine=engine)
        learnt = list(bias.parameters())
        found.append([out, *torch.autograd.grad(out.square().sum(), [*leaves, *learnt])])
    assert len(list(bindings.bands(make_problem(*inputs, mask=mask)))) > 2
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_without_the_compiled_part():
    """Everything else works, and the engine says what to install."""
    code = """
import sys
sys.modules["clearhead.engines.native._kernels"] = None
import torch, clearhead as ch
x = torch.rand(1, 2, 300, 8)
print(ch.plan(x, x, x).engine, ch.plan(x, x, x, score=ch.Gaussian()).engine, ch.plan(x, x, x).declined["native"][0])
ch.attention(x, x, x, mask=ch.Causal()), ch.weights(x, x).entropy()
"""
    done = run(code)
    assert done.out.startswith("sdpa tiled its kernels are missing: install"), done.out + done.errors


def test_importing_clearhead_loads_no_kernel():
    code = "import clearhead, sys; print('clearhead.engines.native._kernels' in sys.modules)"
    done = run(code)
    assert done.out.strip() == "False", done.errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_choice_in_low_precision_asks_what_the_cpu_has(dtype, monkeypatch):
    x = draw(2, 4, 128, 32).to(dtype)
    chosen = lambda **options: ch.plan(x, x, x, **options).engine
    for has, engine in ((True, "sdpa"), (False, "native")):
        monkeypatch.setattr("clearhead.engines.native.engine.has_matrix_instructions", lambda _, has=has: has)
        assert chosen() == engine
        for options in ({"sinks": torch.zeros(4, dtype=dtype)}, {"score": ch.Dot(softcap=5.0)}, {"mask": ch.Causal()}):
            assert chosen(**options) == "native"
    small = x[:, :, :8]
    assert ch.plan(small, small, small).engine == "sdpa"
    # PyTorch's kernel takes 2 to 10 times as long for one query
    monkeypatch.setattr("clearhead.engines.native.engine.has_matrix_instructions", lambda _: False)
    key = draw(1, 4, 1000, 32).to(dtype)
    assert ch.plan(key[:, :, :1], key, key).engine == "native"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{"mask": ch.Causal()}, {"score": ch.Dot(softcap=5.0)}, {"bias": ch.ALiBi(4)}], ids=str
)
def test_compiled_code_runs_the_forward_pass_once(dtype, options, monkeypatch):
    calls, own = [], bindings.forward
    monkeypatch.setattr(bindings, "forward", lambda *given: calls.append(given) or own(*given))
    x = draw(2, 4, 64, 16).to(dtype).requires_grad_()
    run = torch.compile(lambda x: ch.attention(x, x, x, **options), fullgraph=True, backend="aot_eager")
    run(x).float().sum().backward()
    assert len(calls) == 1


@pytest.mark.parametrize("queries", [1, 7, 60])
def test_a_weight_below_the_smallest_normal_number_is_0(instructions, queries):
    """Key 0 has the largest score; those of the other keys are 80 to 95 below it, and their values are huge. Terms of
    the softmax below 2⁻¹²⁶ are 0 in the output, its gradients and the statistics, and so are the weights read."""
    gaps = torch.linspace(80, 95, 150)
    gaps[0] = 0.0
    query = torch.full((1, 1, queries, 1), -1.0)
    value = torch.full((1, 1, 150, 4), 1e37)
    value[:, :, 0] = 0.0
    leaves = [t.requires_grad_() for t in (query, gaps.view(1, 1, -1, 1).clone(), value)]
    terms = torch.exp(-gaps.double())
    kept = terms * (terms >= torch.finfo(torch.float32).tiny)
    assert not kept[-20:].any() and (terms[1:] > 0).all()
    options = {"score": ch.Dot(scale=1.0)}
    output = ch.attention(*leaves, **options, engine="native")
    want = (kept[1:] * 1e37).sum()
    torch.testing.assert_close(output.double(), want.expand_as(output), rtol=1e-5, atol=0.0)
    # the gradient of a value is the sum of its weights
    (to_value,) = torch.autograd.grad(output, leaves[2], torch.full_like(output, 2.0**20))
    torch.testing.assert_close(to_value[0, 0, :, 0].double(), kept * queries * 2.0**20, rtol=2e-5, atol=0.0)
    weights = ch.weights(leaves[0].detach(), leaves[1].detach(), **options)
    (values, keys), received = weights.reduce(ch.reductions.TopK(150), ch.reductions.Received())
    for row, seen in ((weights[0, 0, 0], slice(None)), (values[0, 0, 0], keys[0, 0, 0])):
        torch.testing.assert_close(row.double(), kept[seen], rtol=1e-4, atol=0.0)
    assert torch.equal(received[0, 0] == 0, kept == 0)


def test_a_subnormal_slope_is_0(instructions):
    """Gradients of scores below 2⁻¹²⁶ are 0: the products of the backward pass meet no subnormal number."""
    gap, upstream = 60.0, 2.0**-60
    query, key = torch.ones(1, 1, 50, 1), torch.tensor([0.0, -gap]).view(1, 1, 2, 1)
    value = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1)
    leaves = [t.requires_grad_() for t in (query, key, value)]
    output = ch.attention(*leaves, score=ch.Dot(scale=1.0), engine="native")
    to_query, to_key, _ = torch.autograd.grad(output, leaves, torch.full_like(output, upstream))
    assert torch.exp(torch.tensor(-gap, dtype=torch.float64)) * upstream < torch.finfo(torch.float32).tiny
    assert not to_query.any() and not to_key[0, 0, 1].any()
