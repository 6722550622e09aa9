"""The checks of chapter 11: a score and a mask of one's own."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import clearhead as ch
from checks.compared import answered, called, drawn, pairs, same
from clearhead.testing import check_mask, check_score


def made(cls: Any, base: type, method: str, what: str) -> Any:
    """An object of a class of the reader's, which has to have a method."""
    if getattr(cls, method, None) is getattr(base, method, None):
        answered(what, None)
    return called(cls, what=what)


def angle(cls: Any) -> None:
    score = made(cls, ch.extend.Score, "tile", "the score")
    learnt = list(score.parameters())
    if len(learnt) != 1 or learnt[0].numel() != 1:
        raise AssertionError(f"the score: it has {len(learnt)} parameters, and u alone is learnt: an `nn.Parameter`.")
    if abs(learnt[0].item() - 2) > 1e-6:
        raise AssertionError(f"the score: u begins at {learnt[0].item():.4g}, and not where it was asked to.")
    query, key = drawn(3, 4, 5), drawn(3, 6, 5)
    unit_query, unit_key = (x / x.norm(dim=-1, keepdim=True) for x in (query, key))
    grown = torch.tensor(2.0).exp()
    but = {
        "the key is not divided by its length": unit_query @ key.mT * grown,
        "the query is not divided by its length": query @ unit_key.mT * grown,
        "neither query nor key is divided by its length": query @ key.mT * grown,
        "the cosine is multiplied by u, not by e to the power of u": unit_query @ unit_key.mT * 2,
        "the cosine is divided by e to the power of u": unit_query @ unit_key.mT / grown,
        "u is not used": unit_query @ unit_key.mT,
        "exp(u) is added, not multiplied": unit_query @ unit_key.mT + grown,
    }
    same(called(score.tile, query, key, what="tile"), unit_query @ unit_key.mT * grown, "the scores", but=but)
    check_score(cls)
    print("right: the score passes")


def lowered_angle(cls: Any) -> None:
    score = made(cls, ch.extend.Score, "lower", "the lowering")
    query, key = drawn(1, 2, 4, 5), drawn(1, 2, 6, 5)
    form = called(score.lower, query, key, what="lower")
    if not isinstance(form, ch.extend.Pairwise):
        raise AssertionError("the lowering: it gives no `ch.extend.Pairwise`.")
    if form.phi != "mul":
        raise AssertionError(f"the lowering: {form.phi!r} is not the φ of a product.")
    weight = 1.0 if form.weight is None else form.weight
    scores: Tensor = form.scale * ((form.query * weight) @ form.key.mT)
    expected = score.tile(query, key)
    grown = torch.tensor(2.0).exp()
    but = {
        "e to the power of u is missing": expected / grown,
        "e to the power of u is there twice, on either side": expected * grown,
        "the lengths were not divided out": query @ key.mT * grown,
        "u is there, and not e to the power of u": expected / grown * 2,
    }
    same(scores, expected, "the lowered scores", but=but)
    (gradient,) = torch.autograd.grad(expected.sum(), list(score.parameters()))
    found = (
        torch.autograd.grad(scores.sum(), list(score.parameters()), allow_unused=True)
        if scores.requires_grad
        else [None]
    )
    if found[0] is None:
        raise AssertionError(
            "the lowering: no gradient reaches u. It was taken out of its tensor, by `item` or `detach`."
        )
    same(found[0], gradient, "the gradient of u", 1e-3)
    check_score(cls)
    engine = ch.plan(query, key, key, score=cls(), mask=ch.Lengths([3]), engine="native").engine
    same(engine == "native", True, "the fused kernel takes it")
    print("right: the fused kernel takes it")


def growing(cls: Any, rule: Any) -> None:
    mask = made(cls, ch.extend.Mask, "lower", "the mask")
    answered("the rule", rule)
    if not isinstance(rule, ch.extend.Mask):
        raise AssertionError("the rule: this is no mask. Give your function to `ch.MaskFunction`.")
    check: Callable[..., None] = pairs
    for length in (9, 16):
        i, j = torch.arange(length)[:, None], torch.arange(length)[None, :]
        wanted = (j >= i - i // 2) & (j <= i)
        check(called(rule.dense, length, length, what="the rule"), wanted, "the rule")
        check(called(mask.dense, length, length, what="the mask"), wanted, "the mask")
        last = called(partial(mask.dense, 3, length, align="lower_right"), what="the last three queries")
        if not last.expand(3, length).equal(wanted[-3:]):
            raise AssertionError(
                "the mask: the last three queries alone see other keys. Where do they stand? `query_offset` says it."
            )
    check_mask(cls)
    print("right: the mask passes")
