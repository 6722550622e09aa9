"""What the checks of several chapters share, beside what `clearhead.exercises` is made of."""

from typing import Any

import torch
from torch import Tensor

from clearhead.exercises.answers import answered as answered
from clearhead.exercises.answers import called as called
from clearhead.exercises.answers import case as case
from clearhead.exercises.answers import numbers as numbers
from clearhead.exercises.answers import same as same
from clearhead.exercises.answers import told as told

AXES = {"two axes": (), "three axes": (4,), "four axes": (2, 3)}  # the axes before the last two


def two(result: Any, what: str) -> tuple[Any, Any]:
    """Two results of one function."""
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise AssertionError(f"{what}: two results were asked for.")
    answered(what, *result)
    return result[0], result[1]


def pairs(found: Any, wanted: Tensor, what: str) -> None:
    """The matrix of a mask; the first pair that differs is named."""
    found = numbers(found, what).bool()
    found = found.expand(wanted.shape) if found.dim() == 2 else found
    if found.shape != wanted.shape:
        raise AssertionError(f"{what}: the shape is {tuple(found.shape)}, and {tuple(wanted.shape)} was asked for.")
    wrong = (found != wanted).nonzero()
    if len(wrong):
        i, j = wrong[0].tolist()
        place = {0: "which is itself", 1: "one before it", 2: "two before it"}.get(i - j, "")
        place = "the first" if j == 0 else "which comes later" if j > i else place or f"{i - j} before it"
        raise AssertionError(f"{what}: query {i} may {'' if found[i, j] else 'not '}see key {j}, {place}.")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers that do not touch the generator of the page."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
