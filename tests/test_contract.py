"""Every score × mask × engine against the reference in float64: output and all gradients."""

import pytest
import torch

from clearhead.testing import (
    LENGTHS,
    Inputs,
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
    assert {s.__name__ for s in scores()} >= {"Dot", "Bilinear", "Additive", "Cosine", "Gaussian", "Function"}
    found = {"Lengths", "Padding", "Causal", "SlidingWindow", "DenseMask", "And", "Or", "Not"}
    assert {m.__name__ for m in masks()} >= found
    assert set(engines()) == {"tiled", "sdpa"}


@SCORES
@MASKS
@ENGINES
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_engine_equals_reference(engine, score, mask, lengths):
    compare(engine, score.example(), example(mask, score, lengths), lengths)


@SCORES
def test_score(score):
    check_score(score)


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
