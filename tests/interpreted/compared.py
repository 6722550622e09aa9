"""The engine in Triton against the formula, in the strict interpreter. tests/test_triton.py runs it; explored.py says
which of it `make test` runs.
"""

import math
from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from interpreted import strict

import clearhead as ch
from clearhead._engine_comparison import Error, compare
from clearhead.engines import proof
from clearhead.engines.choose import choose
from clearhead.engines.tiled.engine import Tiled
from clearhead.engines.triton import blocks, launch
from clearhead.engines.triton.blocks import Blocks
from clearhead.engines.triton.engine import Triton, _proved, problems
from clearhead.engines.triton.kernels.numbers import product
from clearhead.engines.triton.ranges import ranges
from clearhead.masks import Intervals
from clearhead.problem.guard import guard
from clearhead.problem.packing import operands
from clearhead.problem.partial import Rows
from clearhead.problem.problem import make_problem
from clearhead.problem.summary import Sent, Summary

SCORES = {
    "mul": (ch.Dot, 10),
    "tanh_add": (lambda: ch.Additive.from_weights(None, None, torch.linspace(-1, 1.5, 10)), 10),
    "sq_diff": (lambda: ch.Gaussian(bandwidth=1.5), 6),
}
MASKS = {
    "none": None,
    "causal": ch.Causal(),
    "window": ch.SlidingWindow(before=4, after=2),
    "gaps": ch.SlidingWindow(before=3) | ch.PrefixLM(torch.tensor([2, 0, 5])),
    "lengths": ch.Lengths(torch.tensor([9, 0, 63])),
    "documents": ~ch.Documents(torch.tensor([[0] * 20 + [1] * 43] * 3)),
}
SEEN = torch.arange(6).view(1, 6, 1) * 5
BY_HEAD = Intervals(SEEN, SEEN + 20) | Intervals(SEEN + 30, SEEN + 37)
SIZES = ((7, 63), (63, 63))
PHI = pytest.mark.parametrize("phi", SCORES)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks of either side at small sizes."""
    monkeypatch.setattr(launch, "_blocks", lambda problem, pass_: Blocks(16, 32))


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(got, want, near, about):
    """As near to float64 as the contract asks: twice the error of PyTorch's operations in the same precision."""
    largest = max(1.0, want.abs().max().item())
    error = Error((got.double() - want).abs().max().item(), (near.double() - want).abs().max().item(), largest)
    assert error.within(torch.float32), f"{about} is off by {error.got:.3g}; eager code by {error.near:.3g}"


def example(phi):
    make, width = SCORES[phi]
    return make(), width, width


def test_a_phi_without_a_case_is_an_error(monkeypatch):
    monkeypatch.setitem(launch.NUMBERS, "sq_diff", len(launch.NUMBERS))
    with pytest.raises(triton.runtime.errors.InterpreterError, match="AssertionError"), torch.no_grad():
        ch.attention(*[draw(1, 1, 4, 6)] * 3, score=ch.Gaussian(), engine="triton")


@PHI
@pytest.mark.parametrize("lengths", SIZES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask(phi, mask, lengths):
    if mask == "documents" and lengths[0] != lengths[1]:
        lengths = (63, 63)
    compare("triton", example(phi), MASKS[mask], lengths)


@PHI
@pytest.mark.parametrize("bias", ["distance", "every pair", "of keys"])
def test_every_bias(phi, bias):
    shapes = {"every pair": (3, 2, 7, 63), "of keys": (1, 2, 1, 63)}
    added = ch.RelativeBias(2) if bias == "distance" else ch.DenseBias(torch.nn.Parameter(draw(*shapes[bias])))
    compare("triton", example(phi), ch.Causal(), (7, 63), added)


@PHI
def test_sinks_dropout_and_softcap(phi):
    score, *widths = example(phi)
    score.softcap = 2.0
    compare("triton", (score, *widths), MASKS["gaps"], (7, 63), dropout_p=0.3, sinks=torch.tensor([0.5, -1.0]))


@PHI
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision(phi, dtype):
    """Each gradient within some roundings of the operands' dtype."""
    score, width, _ = example(phi)
    given = [draw(1, heads, 40, width, dtype=dtype, seed=seed) for seed, heads in enumerate((2, 1, 1))]
    found = []
    for engine, type_ in (("triton", dtype), ("reference", torch.float64)):
        leaves = [t.to(type_).requires_grad_() for t in given]
        output = ch.attention(*leaves, score=score.to(type_), mask=ch.Causal(), engine=engine)
        grads = torch.autograd.grad(output, leaves, draw(*output.shape, seed=5).to(type_))
        found.append([output.detach(), *grads])
    for got, want in zip(*found, strict=True):
        assert got.dtype is dtype
        off = (got.double() - want).norm() / want.norm()
        assert off < 4 * torch.finfo(dtype).eps, off


@triton.jit
def multiply(x, y, to, shape):
    places = tl.arange(0, 16)
    at = places[:, None] * 16 + places[None, :]
    tl.store(to + at, product(tl.load(x + at), tl.load(y + at), tl.zeros((16, 16), tl.float32), shape))


def test_a_product_in_tf32_has_the_digits_of_float32():
    """Each term to 2^−21, where the other terms are 0: also at the largest rests, and at the largest number."""
    odd = torch.tensor([1 + 2**-10 - 2**-23, 1 + 2**-11, 1.5 - 2**-23, 1e-15, -1 / 3])
    x, factors, found = draw(16, 16), draw(16, seed=1), torch.empty(16, 16)
    x[:, :5], factors[:5] = odd, odd
    x[0, 5], factors[5] = torch.finfo(torch.float32).max, 1.0
    shape = launch.given(make_problem(x[None], x[None], x[None]), Blocks(16, 16)).shape
    assert shape.PRODUCTS.value == 3
    multiply[(1,)](x, factors.diag(), found, shape)
    want = x.double() * factors.double()
    assert ((found.double() - want).abs() <= 2**-21 * want.abs()).all()


def test_a_gradient_that_is_0_is_nearly_0():
    """One key has all the weight: Ṗ and δ are one number, each a sum of products that is rounded in its own way."""
    query, key, value, grad = (draw(1, 1, 20, width, seed=seed) for seed, width in enumerate((3, 3, 16, 16)))
    query.requires_grad_()
    output = ch.attention(query, key[:, :, :1], value[:, :, :1], scale=100.0, engine="triton")
    (found,) = torch.autograd.grad(output, query, grad)
    sizes = 100.0 * (grad.abs() @ value[0, 0, 0].abs())[..., None] * key[0, 0, 0].abs()
    assert (found.abs() <= 2 * torch.finfo(torch.float32).eps * sizes).all()


@PHI
@pytest.mark.parametrize("factor", [0.01, 30.0, 1000.0])
def test_any_size_of_number(phi, factor):
    """Small sums, which have a form of their own, and those of which e^2x is no float."""
    score, width, _ = example(phi)
    query, key, value = (draw(1, 1, 20, width, seed=seed) for seed in range(3))
    given = (factor * query, factor * key, value)
    want = ch.attention(*(t.double() for t in given), score=score.double(), engine="reference")
    score.float()
    near = ch.attention(*given, score=score, engine="reference")
    close(ch.attention(*given, score=score, engine="triton"), want, near, phi)


@PHI
def test_what_is_not_finite(phi):
    """NaN reaches who may see it and nobody else; infinite sums of values do not arise."""
    score, width, _ = example(phi)
    query, key, value = (draw(1, 1, 40, width, seed=seed) for seed in range(3))
    key[0, 0, 35], value[0, 0, 38], query[0, 0, 3] = torch.nan, torch.inf, torch.nan
    given = {"score": score, "mask": ch.Causal()}
    got, want = (ch.attention(query, key, value, engine=engine, **given) for engine in ("triton", "tiled"))
    assert torch.equal(got.isnan(), want.isnan())
    huge = torch.full((1, 1, 40, width), 3e38)
    got = ch.attention(query[:, :, 4:35], key[:, :, :35], huge[:, :, :35], score=score, engine="triton")
    assert got.isfinite().all()


@PHI
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, torch.finfo(torch.float32).max])
def test_what_no_query_sees_may_hold_anything(phi, bad):
    """Keys that none sees, and a query that sees none, whose differences and products may overflow."""
    score, width, _ = example(phi)
    score.softcap = 2.0
    query, key, value = (draw(1, 1, 40, width, seed=seed) for seed in range(3))
    query[0, 0, 5], key[0, 0, 30:], value[0, 0, 30:] = -bad, bad, bad
    stop = torch.where(torch.arange(40) == 5, 0, 30).view(1, 1, 40)
    found = []
    for engine in ("triton", "tiled"):
        leaves = [t.clone().requires_grad_() for t in (query, key, value)]
        output = ch.attention(*leaves, score=score, mask=Intervals(torch.zeros_like(stop), stop), engine=engine)
        found.append([output, *torch.autograd.grad(output.sum(), [*leaves, *score.parameters()])])
    for got, want in zip(*found, strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@PHI
def test_a_problem_that_is_guarded_before_keeps_its_poison(phi):
    """As where ranks or an inspection have guarded it: the operands are finite then."""
    score, width, _ = example(phi)
    query, key, value = (draw(1, 1, 40, width, seed=seed) for seed in range(3))
    key[0, 0, 35], query[0, 0, 3] = torch.nan, torch.inf
    problem = make_problem(query, key, value, score=score, mask=ch.Causal())
    got, want = (Triton().forward(p, rows=True) for p in (guard(problem), problem))
    for one, other in zip(got[:3], want[:3], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert want.output.isnan().any() and not want.output.isnan().all()


@PHI
@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0), (0, 1)], ids=str)
@pytest.mark.parametrize("bias", ["distance", "every pair"])
def test_a_part_without_pairs(phi, lengths, bias):
    """A reduction may cut a part of no queries, whose objections are not asked for. All its gradients are 0."""
    score, width, _ = example(phi)
    added = ch.RelativeBias(2) if bias == "distance" else ch.DenseBias(draw(1, 2, *lengths))
    query, key, value = (draw(3, 2, length, width) for length in (lengths[0], lengths[1], lengths[1]))
    problem = make_problem(query, key, value, score=score, bias=added, align="lower_right")
    wanted, found = tuple(t is not None for t in operands(problem)), []
    for engine in (Triton(), Tiled()):
        partial = engine.forward(problem, rows=True)
        rows = Rows(partial.maximum, partial.log_sum, torch.zeros_like(partial.maximum))
        gradients = engine.backward(problem, rows, torch.ones_like(partial.output), wanted, Sent())
        found.append([*partial[:3], *(t for t in gradients if t is not None)])
    assert len(found[0]) > 3
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


@PHI
@pytest.mark.parametrize("mask", ["none", "gaps"])
def test_statistics(phi, mask):
    """Every statistic in one call against the blocks of PyTorch's operations."""
    score, width, _ = example(phi)
    query, key, value = (draw(3, heads, length, width, seed=heads) for heads, length in ((2, 20), (1, 40), (1, 40)))
    problem = make_problem(query, key, value, score=score, mask=MASKS[mask], align="lower_right", sinks=draw(2))
    summary = Summary(
        output=True,
        groups=draw(3, 40, 2).abs(),
        rows=True,
        distance=torch.arange(20).expand(3, 1, 20),
        best=True,
        top=5,
        scores=True,
        received=True,
        mean=(16, 16),
        peak=(16, 16),
        factors=draw(3, 1, 20).abs(),
    )
    alone = Summary(entropy=True)
    for sinks, wanted in ((problem.sinks, summary), (None, alone)):
        asked = problem._replace(sinks=sinks)
        launches = strict.launches
        got, want = (choose(asked, engine).summarise(asked, wanted) for engine in ("triton", "tiled"))
        assert strict.launches > launches
        for name, one, other in zip(got._fields[:-1], got, want, strict=False):
            assert (one is None) == (other is None), name
            if one is None or name == "indices":
                continue
            assert one.dtype is other.dtype, name
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, msg=name)
        if want.indices is not None:
            seen = want.values > 0
            assert torch.equal(got.indices[seen], want.indices[seen])
            assert got.indices.sort(-1).values.diff(dim=-1).gt(0).all()  # each key once


@PHI
def test_gradients_of_statistics(phi):
    """What every statistic sends back, against the same blocks."""
    found = []
    for engine in ("triton", "tiled"):
        score, width, _ = example(phi)
        query, key = (draw(1, heads, 40, width, seed=heads).requires_grad_() for heads in (2, 1))
        weights = ch.weights(query, key, score=score, mask=ch.Causal(), engine=engine)
        looked = (
            ch.reductions.Entropy(),
            ch.reductions.MeanDistance(),
            ch.reductions.TopK(3),
            ch.reductions.MaxScore(),
            ch.reductions.Received(),
            ch.reductions.Pool(4, how="mean"),
        )
        results = weights.reduce(*looked)
        loss = sum((t * draw(*t.shape, seed=7)).sum() for t in _floats(results))
        found.append(torch.autograd.grad(loss, [query, key, *score.parameters()]))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def _floats(results):
    for one in results:
        if isinstance(one, tuple):
            yield from _floats(one)
        elif one.is_floating_point() and one.requires_grad:
            yield one


@PHI
@pytest.mark.parametrize("sinks", [False, True])
def test_decoding_shares_out_the_keys(phi, sinks, monkeypatch):
    monkeypatch.setattr(launch, "SPLIT", 64)
    score, width, _ = example(phi)
    query, key, value = (draw(2, heads, length, width, seed=heads) for heads, length in ((4, 1), (2, 500), (2, 500)))
    given = {"score": score, "sinks": draw(4) if sinks else None, "mask": ch.Lengths(torch.tensor([0, 300]))}
    assert launch._shares(make_problem(query, key, value, **given), Blocks(16, 32)) > 1
    got, want = (ch.attention(query, key, value, engine=engine, **given) for engine in ("triton", "tiled"))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert not got[0].any()  # it sees nothing


GROUPED = {
    "lengths": {"mask": ch.Lengths(torch.tensor([0, 40]))},
    "gaps by head, sinks": {"mask": BY_HEAD, "sinks": draw(6)},
    "each pair": {"bias": ch.DenseBias(draw(2, 6, 2, 63))},
    "by distance": {"bias": ch.ALiBi(6), "mask": ch.Causal(), "align": "lower_right"},
}


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("name", GROUPED)
def test_a_key_is_read_once_for_the_heads_of_its_group(name, queries, monkeypatch):
    """One program for a key head and a share of the keys; where the rows stay apart, one for each query head."""
    given = dict(GROUPED[name])
    query, key, value = (draw(2, heads, length, 8, seed=heads) for heads, length in ((6, queries), (2, 63), (2, 63)))
    key[1, 1, 50] = torch.nan  # which some see
    if name == "each pair":
        given["bias"] = ch.DenseBias(draw(2, 6, queries, 63))
    started, right = {}, launch.start

    def start(kernel, programs, *given, **more):
        started[kernel.fn.__name__] = programs
        right(kernel, programs, *given, **more)

    monkeypatch.setattr(launch, "start", start)
    got, want = (ch.attention(query, key, value, engine=engine, **given) for engine in ("triton", "tiled"))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert started["forward_kernel"][0] == (12 if name == "by distance" and queries > 1 else 4)


def test_the_bits_do_not_change_from_run_to_run():
    query, key, value = (draw(1, 2, 40, 10, seed=seed).requires_grad_() for seed in range(3))

    def once():
        output = ch.attention(query, key, value, mask=ch.Causal(), bias=ch.RelativeBias(2), engine="triton")
        return torch.autograd.grad(output.sum(), [query, key, value])

    torch.manual_seed(0)
    first = once()
    torch.manual_seed(0)
    assert all(map(torch.equal, first, once()))


@pytest.mark.parametrize("mask", MASKS)
def test_ranges_hold_what_is_seen(mask):
    """Each block of keys that some query of a block sees is in one range, and in one alone."""
    if MASKS[mask] is None:
        return
    problem = make_problem(torch.zeros(3, 2, 63, 4), torch.zeros(3, 2, 63, 4), mask=MASKS[mask])
    found = ranges(problem, 16, 8)
    keep = problem.spans.keep(*(slice(None),) * 4, 63)
    keep = torch.nn.functional.pad(keep.expand(*keep.shape[:2], 63, 63), (0, 1, 0, 1))
    seen = keep.unflatten(-1, (8, 8)).any(-1).unflatten(-2, (4, 16)).any(-2)  # (b, h, blocks, key blocks)
    places = torch.arange(8)
    times = ((places >= found[..., :1]) & (places < found[..., 1:])).sum(-2)
    assert times.max() <= 1
    assert (times.bool() | ~seen).all()


def test_objections_are_in_words():
    query = torch.zeros(1, 1, 5, 4)
    cases = {
        "does not consist of intervals": {"mask": ch.DenseMask(~torch.eye(5).bool())},
        "only tile()": {"score": lambda q, k: q @ k.mT},
        "it computes in float32": {"dtype": torch.float64},
        "values are 300 wide": {"value": torch.zeros(1, 1, 5, 300)},
    }
    for words, given in cases.items():
        dtype, value = given.pop("dtype", torch.float32), given.pop("value", query)
        problem = make_problem(query.to(dtype), query.to(dtype), value.to(dtype), **given)
        assert any(words in why for why in Triton().objections(problem)), words


def test_blocks_are_powers_of_two():
    for phi in SCORES:
        for pass_ in ("forward", "backward", "summarise"):
            for width in (1, 64, 100, 256):
                found = blocks.blocks_for(phi, pass_, width, width, 4, 1000)
                assert all(math.log2(number).is_integer() for number in found)


PROVED = [(dtype, 16, phi) for phi in SCORES for dtype in (torch.float32, torch.bfloat16, torch.float16)]


@pytest.mark.parametrize(("dtype", "row", "phi"), [*PROVED, (torch.bfloat16, 128, "mul")], ids=str)
def test_the_proof_of_a_device_passes(dtype, row, phi, monkeypatch):
    """The interpreter is a device too, and a slow one: of wide rows it proves one kind."""
    monkeypatch.undo()  # the blocks of a device
    assert proof.differences(Triton(), torch.device("cpu"), dtype, partial(problems, phi, row)) == []


def test_each_width_and_each_score_is_proved_when_it_is_first_used(monkeypatch):
    """Once for each: the widest row up to a power of two, of a dot product's operands or of the values."""
    monkeypatch.setattr(proof, "_found", {})
    monkeypatch.setattr(proof, "_read", lambda file: None)
    monkeypatch.setattr(proof, "_write", lambda file, lines: None)
    proved = []
    monkeypatch.setattr(proof, "differences", lambda engine, device, dtype, about: proved.append(about.args) or [])

    def asked(score, width, columns):
        query, value = draw(1, 1, 5, width), draw(1, 1, 5, columns)
        _proved(Triton(), make_problem(query, query, value, score=score))
        return len(proved)

    gaussian = ch.Gaussian()
    assert [asked(None, 20, 16), asked(None, 30, 32), asked(None, 16, 40), asked(None, 100, 16)] == [1, 1, 2, 3]
    assert [asked(gaussian, 100, 16), asked(gaussian, 16, 10)] == [4, 4]
    assert proved == [("mul", 32), ("mul", 64), ("mul", 128), ("sq_diff", 16)]


def test_a_device_that_computes_otherwise_is_objected_to(monkeypatch, tmp_path):
    """The proof runs once for a device, is kept for other processes, and its words are the engine's."""
    one_query = [pair for pair in problems("mul", 16, torch.device("cpu"), torch.float32) if "one query" in pair[0]]
    right, proved = launch.output, []

    def wrong(problem, rows):
        proved.append(problem)
        found = right(problem, rows)
        return found._replace(output=1.001 * found.output)

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    asked = Triton(), torch.device("cpu"), torch.float32, "mul, rows up to 16", lambda *about: one_query
    monkeypatch.setattr(proof, "_found", {})
    monkeypatch.setattr(launch, "output", wrong)
    first = proof.objections(*asked)
    assert len(first) == 1 and "mul 10 wide, one query: output, by 0.001 of its size" in first[0]
    monkeypatch.setattr(proof, "_found", {})  # as another process finds it
    assert proof.objections(*asked) == first
    assert len(proved) == 1
