"""The problems by which FlexAttention is proved on a device, before its first answer there."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from clearhead.base.shapes import Sizes
from clearhead.biases.base import Added
from clearhead.engines.flex.blocks import BLOCK
from clearhead.engines.proof import gaps, numbers
from clearhead.problem.problem import Problem
from clearhead.problem.visible import visible
from clearhead.scores.base import Pairwise

LENGTH, KEYS = BLOCK + 20, 2 * BLOCK + 9  # more than one block of either side, and the last ones are not whole


def row_of(problem: Problem) -> int:
    """The widest row of queries and values up to a power of two, by which PyTorch chooses the kernel's blocks."""
    assert problem.value is not None
    widest = max(problem.query.shape[-1], problem.value.shape[-1])
    return max(64, 1 << (widest - 1).bit_length())


def problems(row: int, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Problem]]:
    """A problem with all that the kernel may be given, one with a mask alone, and one query; rows are `row` wide.

    Each is compiled for itself, so they are few.
    """
    for kind, queries in (("everything", LENGTH), ("a mask", LENGTH), ("one query", 1)):
        sizes = Sizes(2, 2, queries, KEYS, device)
        query, key, value = (
            numbers((2, heads, length, row), device, seed).to(dtype)
            for seed, (heads, length) in enumerate(((2, queries), (1, KEYS), (1, KEYS)))
        )
        problem = Problem(Pairwise("mul", query, key, None, row**-0.5, None), value, sizes)
        if kind != "one query":
            problem = problem._replace(visible=visible(gaps(sizes), sizes))
        if kind == "everything":
            dense, along = numbers((1, 2, 1, KEYS), device, 4), numbers((1, 2, queries + KEYS - 1), device, 5)
            scores = Pairwise("mul", query, key, None, row**-0.5, 3.0)
            problem = problem._replace(scores=scores, bias=Added(dense, along), sinks=numbers((2,), device, 6))
        yield f"{row} wide, {kind}", problem
