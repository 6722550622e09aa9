"""bfloat16 and float16 in the compiled kernels: read where they lie, and no copy of a cache is made."""

import subprocess
import sys

import pytest
import torch
from drawn import draw
from instruction_sets import SETS

import clearhead as ch
from clearhead.engines.native import bindings
from clearhead.problem.problem import make_problem

LOW = [torch.bfloat16, torch.float16]
SCORES = {
    "dot": lambda: ch.Dot(),
    "softcap": lambda: ch.Dot(softcap=2.0),
    "additive": lambda: ch.Additive.from_weights(None, None, draw(20, seed=7).bfloat16().float()),
    "gaussian": lambda: ch.Gaussian(3.0),
}


@pytest.fixture(params=SETS)
def instructions(request, monkeypatch):
    kernels = bindings.chosen(request.param)
    monkeypatch.setattr(bindings, "chosen", lambda: kernels)
    return request.param


def on_pairs(instructions, name, *dtypes):
    """Whether a score is computed on pairs of bfloat16."""
    of_dot = name in ("dot", "softcap")
    return instructions == "avx512_bf16" and of_dot and all(d is torch.bfloat16 for d in dtypes)


def every(dtype):
    """All numbers of 16 bits but those that are not finite."""
    numbers = torch.arange(2**16).to(torch.int32).to(torch.int16).view(dtype)
    return numbers[numbers.isfinite()]


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_every_number_is_read_as_it_is(instructions, dtype):
    """A dense bias is added to scores of 0: one number at a time, or whole vectors. Keys are multiplied by ones; on
    pairs a subnormal number counts as 0."""
    numbers = every(dtype)
    rows = numbers.view(1, 1, -1, 1).expand(-1, -1, -1, 2)
    zeros = torch.zeros(1, 1, numbers.numel(), 2, dtype=dtype)
    for bias in (numbers.view(1, -1), torch.stack([numbers, numbers], -1)[:, 0].view(1, -1)):
        found = bindings.scores(make_problem(zeros[:, :, :1], zeros, bias=ch.DenseBias(bias)))
        assert torch.equal(found[0, 0, 0], numbers.float())
    want = numbers.float()
    if on_pairs(instructions, "dot", dtype):
        want = want.where(want.abs() >= torch.finfo(torch.bfloat16).tiny, 0.0)
    for width in (1, 64):
        key = torch.nn.functional.pad(rows[..., :1], (0, width - 1))
        query = torch.zeros(1, 1, 1, width, dtype=dtype)
        query[..., 0] = 1
        found = bindings.scores(make_problem(query, key, score=ch.Dot(scale=1.0)))
        assert torch.equal(found[0, 0, 0], want), width


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_an_infinite_number_of_a_query_is_found_wherever_it_stands(instructions, dtype):
    """Also where the output does not tell of it: all scores of the query are −∞, so that its output is 0."""
    query, key = draw(1, 1, 5, 67).to(dtype), draw(1, 1, 9, 67, seed=1).abs().to(dtype)
    value = draw(1, 1, 9, 16, seed=2).to(dtype)

    def found(key):
        return bindings.forward(make_problem(query, key, value), rows=True, few=False)

    assert found(key).finite
    for place in range(67):
        kept = query[0, 0, 3, place].item()
        for number, against in ((-torch.inf, key), (torch.inf, -key)):
            query[0, 0, 3, place] = number
            got = found(against)
            assert bool((got.output[0, 0, 3] == 0).all())
            assert not got.finite, (place, number)
        query[0, 0, 3, place] = kept


def found_by(inputs, name, mask, bias, up):
    """The output, gradients and statistics of a call, in the dtype of its inputs."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    score = SCORES[name]().to(inputs[0].dtype)
    options = {"score": score, "mask": mask, "align": "lower_right", "engine": "native"}
    bias = bias.detach().requires_grad_()
    output = ch.attention(*leaves, bias=ch.DenseBias(bias), **options)
    grads = torch.autograd.grad(output, [*leaves, bias, *score.parameters()], up)
    with torch.no_grad():
        weights = ch.weights(*inputs[:2], bias=ch.DenseBias(bias), **options)
        cells = ch.reductions.Received(), ch.reductions.Entropy(), ch.reductions.Pool((5, 7))
        statistics = weights.reduce(*cells, ch.reductions.Output(inputs[2]))
        part = ch.partial(*inputs, **options)
    return [output, *grads, *statistics, weights.dense(), part.output, part.logsumexp]


def read_by_pairs(found, same):
    """The statistics of the weights, the weights and the log-sum-exp; the output of a pass is that of the other."""
    *_, received, entropy, peaks, output, dense, _, logsumexp = found
    assert not same or torch.equal(output.to(found[0].dtype), found[0])
    return received, entropy, peaks, dense, logsumexp


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_results_are_those_of_float32_copies(instructions, name, dtype):
    """To the bit, but for the rounding of the results: with odd widths and strides, a mask with gaps and a bias. On
    pairs statistics have the weights of float32 copies but for float32's rounding, and the output is the attention's.
    """
    for queries, keys, width, value_width in ((1, 70, 20, 11), (3, 65, 20, 16), (50, 130, 20, 33)):
        wide = draw(2, queries, 4, 2 * width), draw(2, keys, 2, width + 1), draw(2, keys, 2, value_width + 3)
        inputs = [t.to(dtype).transpose(1, 2) for t in wide]
        inputs = [inputs[0][..., ::2], inputs[1][..., 1:], inputs[2][..., 3:]]
        bias, up = draw(2, 1, queries, keys, seed=5).to(dtype), draw(2, 4, queries, value_width, seed=6).to(dtype)
        for mask in (None, ch.Causal(), ch.DenseMask(draw(queries, keys, seed=3) > 0) & ch.Lengths([keys, keys // 2])):
            got = found_by(inputs, name, mask, bias, up)
            want = found_by([t.float() for t in inputs], name, mask, bias.float(), up.float())
            if on_pairs(instructions, name, dtype):
                got, want = read_by_pairs(got, queries > 4), read_by_pairs(want, False)
                got, want = ([t.float() for t in part] for part in (got, want))
                torch.testing.assert_close(got, want, atol=1e-5, rtol=2**-7)
                continue
            for i, (a, b) in enumerate(zip(got, want, strict=True)):
                assert torch.equal(a, b.to(a.dtype)), (queries, mask, i)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_operands_of_several_types(instructions, dtype):
    """Each operand has a type of its own: one call for each of the eight mixtures."""
    shapes = (1, 2, 5, 20), (1, 2, 70, 20), (1, 2, 70, 16)
    for mixture in range(8):
        inputs = [draw(*s, seed=i).to(dtype) for i, s in enumerate(shapes)]
        inputs = [t.float() if mixture >> i & 1 else t for i, t in enumerate(inputs)]
        for few in (False, True):
            plain = make_problem(*(t.float() for t in inputs))
            scores = plain.scores._replace(query=inputs[0], key=inputs[1])
            got = bindings.forward(plain._replace(scores=scores, value=inputs[2]), rows=True, few=few)
            want = bindings.forward(plain, rows=True, few=few)
            if few or not on_pairs(instructions, "dot", *(t.dtype for t in inputs[:2])):
                assert all(map(torch.equal, got[:3], want[:3])), (mixture, few)
            else:  # the products with values are on pairs where these are bfloat16 too
                off = 2**-7 if inputs[2].dtype is torch.bfloat16 else 1e-5
                torch.testing.assert_close(got.output, want.output, atol=off, rtol=0.0)
                torch.testing.assert_close(got[1:3], want[1:3], atol=1e-5, rtol=0.0)


ROUNDING = torch.finfo(torch.bfloat16).eps / 2  # of a number, times that number
FLOAT32 = 1e-5  # what sums in float32 of numbers near 1 are off by, here


def budgets(query, key, value, grad, scale, bias, sink):
    """In float64: the output and gradients, and how far each may be off where weights and slopes are rounded to
    bfloat16 before they are multiplied, and results once more. `bias` has −∞ where a pair is not allowed."""
    query, key, value, grad = (t.double() for t in (query, key, value, grad))
    scores = scale * query @ key.mT + bias
    weights = torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], -1).softmax(-1)[..., :-1]
    output = weights @ value
    sizes = weights @ value.abs()
    delta = (grad * output).sum(-1, keepdim=True)
    off = ROUNDING * (grad.abs() * sizes).sum(-1, keepdim=True)  # of delta, which is found from the output
    slopes = weights * (grad @ value.mT - delta)
    slope_off = ROUNDING * slopes.abs() + weights * off
    found = output, scale * slopes @ key, scale * slopes.mT @ query, weights.mT @ grad
    terms = (
        ROUNDING * sizes,
        scale * slope_off @ key.abs(),
        scale * slope_off.mT @ query.abs(),
        ROUNDING * weights.mT @ grad.abs(),
    )
    return found, [1.01 * (term + ROUNDING * truth.abs()) + FLOAT32 for term, truth in zip(terms, found, strict=True)]


SIZES = [(7, 9, 1, 1), (49, 63, 20, 11), (53, 65, 33, 17), (61, 130, 64, 48), (97, 200, 80, 128), (101, 450, 24, 40)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_product_has_the_error_of_one_rounding(instructions, sizes):
    """Odd widths, strips that begin at odd rows, rows that see nothing, a bias, a sink, and more panels of keys than
    the backward pass takes at once."""
    queries, keys, width, value_width = sizes
    shapes = (1, 2, queries, width), (1, 2, keys, width), (1, 2, keys, value_width), (1, 2, queries, value_width)
    query, key, value, grad = (draw(*s, seed=i).bfloat16() for i, s in enumerate(shapes))
    bias, sink = draw(queries, keys, seed=5).bfloat16(), torch.tensor([0.5, -1.0])
    rows = torch.arange(queries)[:, None]
    some = (draw(queries, keys, seed=6) > 0.7) & (rows > 12)
    for keep, mask in (
        (torch.ones(queries, keys, dtype=torch.bool), None),
        ((torch.arange(keys) - rows).abs() < 9, ch.SlidingWindow(before=8, after=8)),
        (some, ch.DenseMask(some)),
    ):
        leaves = [t.clone().requires_grad_() for t in (query, key, value)]
        options = {"mask": mask, "bias": ch.DenseBias(bias), "sinks": sink, "align": "upper_left", "engine": "native"}
        output = ch.attention(*leaves, **options)
        got = output, *torch.autograd.grad(output, leaves, grad)
        added = bias.double().masked_fill(~keep, -torch.inf)
        want, allowed = budgets(query, key, value, grad, width**-0.5, added, sink.double()[:, None, None])
        for i, (one, truth, limit) in enumerate(zip(got, want, allowed, strict=True)):
            assert bool(((one.double() - truth).abs() <= limit).all()), (mask, i)


@pytest.mark.parametrize("width", [64, 128])
def test_errors_are_no_larger_than_those_of_pytorchs_kernel(instructions, width):
    """Root mean squares of errors against float64: the output's at most 1.1 times theirs, of gradients at most 1."""
    inputs = [draw(1, 2, 256, width, seed=i).bfloat16() for i in range(4)]
    for causal in (False, True):
        found = []
        for dtype, own in ((torch.float64, False), (torch.bfloat16, False), (torch.bfloat16, True)):
            *leaves, grad = (t.to(dtype).requires_grad_() for t in inputs)
            if own:
                output = ch.attention(*leaves, mask=ch.Causal() if causal else None, engine="native")
            else:
                output = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
            found.append([output, *torch.autograd.grad(output, leaves, grad.detach())])
        truth, torchs, own = found
        for i, (exact, theirs, ours) in enumerate(zip(truth, torchs, own, strict=True)):
            error, limit = ((t.double() - exact).square().mean().sqrt() for t in (ours, theirs))
            assert error <= (1.1 if i == 0 else 1.0) * limit, (causal, i, float(error / limit))


def test_a_sum_that_overflows_is_taken_again(instructions):
    value = torch.full((1, 1, 70, 16), 3e38).bfloat16()
    for queries in (1, 50):
        query, key = draw(1, 1, queries, 20).bfloat16(), draw(1, 1, 70, 20).bfloat16()
        assert torch.equal(
            ch.attention(query, key, value, engine="native"), value[:, :, :1].expand(-1, -1, queries, -1)
        )


@pytest.mark.parametrize(("scale", "size"), [(None, 4e18), (3e-38, 1e20), (1e30, 1e-15)], ids=str)
def test_scores_overflow_where_those_of_float32_do(instructions, scale, size):
    """The product of a query and a key may be too large for float32 where the score, which is scaled, is not."""
    query, key = (size * (1 + draw(1, 1, n, 64, seed=n).abs() / 4) for n in (50, 70))
    key = key * (torch.arange(70) % 3 == 1)[:, None]
    query, key, value = query.bfloat16().requires_grad_(), key.bfloat16(), draw(1, 1, 70, 16).bfloat16()
    score = ch.Dot(scale=scale)
    output = ch.attention(query, key, value, score=score, engine="native")
    weights = ch.weights(query, key, score=score, engine="native")
    want = ((64**-0.5 if scale is None else scale) * query.double() @ key.double().mT).softmax(-1)
    torch.testing.assert_close(weights.dense().double(), want, atol=2**-8, rtol=0.0)
    torch.testing.assert_close(output.double(), want @ value.double(), atol=2**-6, rtol=0.0)
    assert weights.reduce(ch.reductions.Entropy()).isfinite().all()
    (back,) = torch.autograd.grad(output, query, torch.ones_like(output))
    assert back.isfinite().all()


def found_with_gradients(query, key, statistic):
    """A statistic of a call, a gradient of it, and the gradients that this sends back."""
    leaves = [t.detach().requires_grad_() for t in (query, key)]
    found = ch.weights(*leaves, engine="native").reduce(statistic)
    up = draw(*found.shape, seed=3)
    return found, up, torch.autograd.grad(found, leaves, up)


@pytest.mark.parametrize("size", [1e6, 1e15], ids=str)
def test_every_pass_computes_the_same_weights(instructions, size):
    """Scores whose last digits are above 1: with other digits in one of the passes, a weight of 1 would be 0 or ∞.
    Where one key has all the weight, statistics send nothing back."""
    query, key = (size**0.5 * draw(1, 2, n, 16, seed=n) for n in (50, 70))
    query, key = query.bfloat16(), key.bfloat16()
    first, second = (0.25 * query.double() @ key.double().mT).topk(2, -1)[0].unbind(-1)
    rows = ((first - second) > 1000).all(1)[0]
    assert rows.sum() > 40
    groups = torch.arange(70) % 3
    for statistic in (ch.reductions.Received(), ch.reductions.Pool((10, 7), "mean"), ch.reductions.Mass(groups)):
        *_, back = found_with_gradients(query[:, :, rows], key, statistic)
        assert not any(map(torch.count_nonzero, back)), statistic


def test_sums_of_weights_are_in_float32(instructions):
    """The weight on groups of keys, beside an output and alone, and what it sends back."""
    query, key, value = (draw(1, 2, n, 20, seed=n).bfloat16() for n in (50, 70, 70))
    mass = ch.reductions.Mass(torch.arange(70) % 3)
    exact = [t.double().requires_grad_() for t in (query, key)]
    want = (20**-0.5 * exact[0] @ exact[1].mT).softmax(-1)
    want = torch.stack([want[..., g::3].sum(-1) for g in range(3)], -1)
    found, up, back = found_with_gradients(query, key, mass)
    both = ch.weights(query, key, engine="native").reduce(ch.reductions.Output(value), mass)
    for one in (found, both[1]):
        torch.testing.assert_close(one.double(), want, atol=1e-6, rtol=0.0)
    assert torch.equal(both[0].bfloat16(), ch.attention(query, key, value, engine="native"))
    for one, truth in zip(back, torch.autograd.grad(want, exact, up.double()), strict=True):
        torch.testing.assert_close(one.double(), truth, atol=2**-9, rtol=2**-7)


MEMORY = """
def most():
    "The most memory that this process has held, in bytes."
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])

def grown(queries, dtype, keys=2**15):
    query, key, value = (torch.ones(1, 2, n, 64, dtype=dtype) for n in (queries, keys, keys))
    open("/proc/self/clear_refs", "w").write("5")  # from here on
    before = most()
    ch.attention(query, key, value, engine="native")
    return (most() - before) / (4 * key.numel())

for queries in (1, 8):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        grown(queries, dtype, 64)
        print(grown(queries, dtype))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the memory of a process is read from Linux")
def test_decoding_holds_no_memory_of_the_caches_size():
    """In units of a cache's keys in float32: decoding holds nothing, and a prefill its panels of keys alone."""
    code = "import re, torch, clearhead as ch\n" + MEMORY
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    decoding, prefill = (list(map(float, part)) for part in (done.stdout.split()[:3], done.stdout.split()[3:]))
    assert max(decoding) < 0.05, decoding
    assert max(prefill) < 1.1, prefill


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_a_plan_counts_no_copies(dtype):
    query, key = draw(1, 4, 1, 64), draw(1, 4, 5000, 64)
    planned = [ch.plan(query.to(t), key.to(t), key.to(t), engine="native").extra_bytes for t in (torch.float32, dtype)]
    assert planned[0] == planned[1] < 0.05 * 4 * key.numel()
    planned = [ch.plan(key.to(t), key.to(t), key.to(t), engine="native").extra_bytes for t in (torch.float32, dtype)]
    assert planned[1] < 1.1 * planned[0]


@pytest.mark.parametrize("width", [1, 2, 64, 67])
def test_a_subnormal_product_leaves_its_neighbour_as_it_is(instructions, width):
    """A query times the scale's power of two may be subnormal. Two numbers share a register on pairs: such a number
    counts as 0, and the number beside it is unchanged. So outputs and gradients are those of a 0 in its place."""
    query, key, value = (draw(1, 1, 70, width, seed=i).bfloat16() for i in range(3))
    options = {"mask": ch.Causal(), "score": ch.Dot(scale=2.0**-6 / 3), "engine": "native"}

    def found(number, place):
        leaves = [t.clone().requires_grad_() for t in (query, key, value)]
        with torch.no_grad():
            leaves[0][0, 0, 60, place] = number
        output = ch.attention(*leaves, **options)
        return output, *torch.autograd.grad(output.float().square().sum(), leaves)

    for place in {0, 1 % width, width - 1}:
        want = found(0.0, place)
        for tiny in (3e-38, 1.5e-38, 1e-38, 1e-39, 9.2e-41, -1.2e-38):
            assert all(map(torch.equal, found(tiny, place), want)), (place, tiny)
