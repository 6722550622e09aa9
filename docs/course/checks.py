"""What the exercises check an answer with: each says `right`, or raises with what was found and what was expected."""

from typing import Any

import torch
from torch import Tensor


def close(found: Any, expected: Any, what: str = "the answer", tolerance: float = 1e-5) -> None:
    """Numbers, or tensors of one shape, that differ by `tolerance` at most."""
    found, expected = (
        t.detach().double() if isinstance(t, Tensor) else torch.as_tensor(t).double() for t in (found, expected)
    )
    if found.shape != expected.shape:
        raise AssertionError(f"{what} has shape {tuple(found.shape)}; expected is {tuple(expected.shape)}.")
    apart = (found - expected).abs()
    if not (apart <= tolerance).all():  # NaN is not close to anything
        worst = tuple(int(i) for i in (~(apart <= tolerance)).nonzero()[0])
        raise AssertionError(
            f"{what} is {found[worst].item():.6g} at {worst}; expected is {expected[worst].item():.6g}."
        )
    print(f"right: {what}")


def true(holds: Any, what: str) -> None:
    """That something holds: `what` says it in words."""
    if not bool(holds):
        raise AssertionError(f"not so: {what}")
    print(f"right: {what}")
