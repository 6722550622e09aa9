"""Every score × mask × engine against the reference in float64: output and all gradients."""

import pytest
import torch

import clearhead as ch
from clearhead import testing
from clearhead._engine_comparison import draw as drawn
from clearhead.masks.combined import And
from clearhead.problem import regions
from clearhead.testing import (
    LENGTHS,
    Inputs,
    biases,
    check_bias,
    check_engine,
    check_lowering,
    check_mask,
    check_precision,
    check_score,
    check_weights,
    compare,
    engines,
    masks,
    scores,
)

named = {"ids": lambda x: x.__name__ if isinstance(x, type) else str(x)}
SCORES = pytest.mark.parametrize("score", scores(), **named)
MASKS = pytest.mark.parametrize("mask", [None, *masks()], **named)
ENGINES = pytest.mark.parametrize("engine", engines())


def example(mask, score, lengths):
    return None if mask is None else mask.example(Inputs.draw(score.example(), lengths).sizes)


def test_the_suite_finds_scores_masks_and_engines():
    assert {s.__name__ for s in scores()} >= {"Dot", "Bilinear", "Additive", "Cosine", "Gaussian", "ScoreFunction"}
    found = {
        "Lengths",
        "Padding",
        "Causal",
        "SlidingWindow",
        "FirstKeys",
        "Documents",
        "PrefixLM",
        "MaskFunction",
        "DenseMask",
        "And",
    }
    assert {m.__name__ for m in masks()} >= found
    assert set(engines()) == {"native", "tiled", "sdpa"}  # on a CPU


@SCORES
@MASKS
@pytest.mark.parametrize("lengths", [*LENGTHS[:-1], (260, 300)], ids=str)
def test_every_engine_equals_the_reference(score, mask, lengths):
    compare(engines(), score.example(), example(mask, score, lengths), lengths)


@pytest.mark.parametrize(
    ("score", "mask"),
    [
        *((score, mask) for score in scores() for mask in (None, And)),
        *((ch.Dot, mask) for mask in masks() if mask is not And),
    ],
    **named,
)
def test_every_engine_equals_the_reference_on_long_sequences(score, mask):
    """Each score and each mask: those of every pair are a third as long."""
    compare(engines(), score.example(), example(mask, score, LENGTHS[-1]), LENGTHS[-1])


@ENGINES
def test_engine(engine):
    check_engine(engine)


@pytest.mark.parametrize("bias", biases(), **named)
def test_bias(bias):
    check_bias(bias)


def test_engine_in_many_small_blocks(monkeypatch):
    """Biases, dropout and sinks over several blocks: their gradients are written out by hand there."""
    monkeypatch.setattr(regions, "BUDGET", 2500)  # two for 7 queries and 63 keys of 3 sequences and 2 heads
    monkeypatch.setattr(testing, "LENGTHS", [(7, 63)])  # one query and key are one block
    assert check_engine("tiled") > 100


@SCORES
@MASKS
def test_many_small_blocks(score, mask, monkeypatch):
    """The same with blocks of a few rows, a head and a sequence at a time: what long inputs are cut into."""
    for budget in ("BUDGET", "LOOK"):
        monkeypatch.setattr(regions, budget, 150)
    lengths = (13, 29)
    compare("tiled", score.example(), example(mask, score, lengths), lengths)
    check_weights(score.example(), example(mask, score, lengths), lengths)


@SCORES
def test_second_derivatives_over_many_blocks(score, monkeypatch):
    monkeypatch.setattr(regions, "BUDGET", 20)
    module, query_dim, key_dim = score.example()
    module.double()
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        drawn(1, heads, length, width, generator=generator).requires_grad_()
        for heads, length, width in ((2, 3, query_dim), (1, 4, key_dim), (1, 4, 2))
    )
    run = lambda *inputs: ch.attention(*inputs, score=module, mask=ch.Causal(), align="lower_right", engine="tiled")
    assert torch.autograd.gradcheck(run, (query, key, value))
    assert torch.autograd.gradgradcheck(run, (query, key, value))


@pytest.mark.parametrize("engine", ["reference", "tiled"])
def test_derivatives_with_all_there_is(engine, monkeypatch):
    """First and second ones, to every input, over many blocks: softcap, sinks, both forms of bias, dropout, a mask."""
    monkeypatch.setattr(regions, "BUDGET", 20)
    draw = lambda seed, *shape: drawn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    score, relative, sinks = ch.Dot(softcap=2.0), ch.RelativeBias(2, 8, 20).double(), draw(0, 2)
    inputs = (draw(1, 1, 2, 3, 2), draw(2, 1, 1, 4, 2), draw(3, 1, 1, 4, 2), draw(4, 3, 4))

    def run(query, key, value, dense):
        torch.manual_seed(0)
        bias = ch.DenseBias(dense) + relative
        options = {"score": score, "mask": ch.Causal(), "bias": bias, "sinks": sinks, "align": "lower_right"}
        return ch.attention(query, key, value, **options, dropout_p=0.3, engine=engine)

    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)
    # to what the modules have learnt, too
    assert torch.autograd.gradcheck(lambda *_: run(*inputs), (sinks, relative.weight))


@SCORES
def test_score(score):
    check_score(score)


@pytest.mark.parametrize("score", [ch.Gaussian(0.7), ch.Cosine(0.4), ch.Dot(0.3, softcap=2.0)], ids=repr)
def test_settings_of_scores(score):
    """An example has the usual settings: many of these are 1, and a kernel that forgets them would be right."""
    for lengths in LENGTHS[:2]:
        compare(engines(), (score, 6, 6), None, lengths)


@pytest.mark.parametrize("mask", masks(), **named)
def test_mask(mask):
    check_mask(mask)


@SCORES
@MASKS
def test_lazy_weights(score, mask):
    check_weights(score.example(), example(mask, score, (63, 63)), (63, 63))


@SCORES
@MASKS
@pytest.mark.parametrize("engine", ["reference", *engines()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_precision_within_the_budget_of_eager_code(engine, score, mask, dtype):
    check_precision(engine, score.example(), example(mask, score, (63, 63)), dtype)


@SCORES
@pytest.mark.parametrize("shift", [0.0, 1000.0])
def test_lowering_preserves_the_scores(score, shift):
    check_lowering(score.example(), shift)
