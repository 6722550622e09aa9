"""What the exercises check an answer with: each says `right`, or raises with what was found and what was expected."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def numbers(given: Any, what: str) -> Tensor:
    """A tensor, an array, a number, or a list of numbers, as float64."""
    if given is None:
        raise AssertionError(f"{what}: still None. Write your answer in its place, or return it from your function.")
    try:
        tensor = given.detach() if isinstance(given, Tensor) else torch.as_tensor(np.asarray(given))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"{what}: found {given!r:.80}; expected is a number, an array or a tensor.") from error
    return tensor.double()


def close(found: Any, expected: Any, what: str = "the answer", tolerance: float = 1e-5) -> None:
    """Numbers, or tensors of one shape, that differ by `tolerance` at most."""
    said = (lambda x: str(bool(x))) if isinstance(expected, bool) else "{:.6g}".format
    found, expected = numbers(found, what), numbers(expected, what)
    if found.shape != expected.shape:
        raise AssertionError(f"{what}: the shape is {tuple(found.shape)}; expected is {tuple(expected.shape)}.")
    wrong = ~((found - expected).abs() <= tolerance)  # NaN is not close to anything
    if wrong.any():
        first = tuple(int(i) for i in wrong.nonzero()[0])
        place = f" at [{', '.join(map(str, first))}]" if first else ""
        mine, right = (said(t[first].item()) for t in (found, expected))
        raise AssertionError(f"{what}: found {mine}{place}; expected is {right}.")
    print(f"right: {what}")


def true(holds: Any, what: str) -> None:
    """That something holds: `what` says it in words."""
    if not bool(holds):
        raise AssertionError(f"not so: {what}")
    print(f"right: {what}")
