"""The problems by which the kernels in Triton are proved on a device, before their first answer there."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from clearhead.base.shapes import Sizes
from clearhead.biases.base import Added
from clearhead.engines.proof import gaps, numbers
from clearhead.problem.problem import Problem
from clearhead.problem.visible import visible
from clearhead.scores.base import Pairwise, Phi

LENGTH, KEYS = 70, 75  # more than one block of either side, and none of them whole


def problems(phi: Phi, row: int, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Problem]]:
    """A problem with all that the kernels of this φ may have code for, one with little of it, and one query.

    `row`: see `blocks.widest`; queries and keys are as wide as values, for the φ that hold no rows of them up to 64.
    """
    values = row - 6
    width = values if phi == "mul" else min(values, 58)
    for kind, queries in (("everything", LENGTH), ("statistics", LENGTH), ("one query", 1)):
        sizes = Sizes(2, 2, queries, KEYS if queries > 1 else 1200, device)
        query, key, value = (
            numbers((2, heads, length, columns), device, seed).to(dtype)
            for seed, (heads, length, columns) in enumerate(
                ((2, queries, width), (1, sizes.keys, width), (1, sizes.keys, values))
            )
        )
        weight = None if phi == "mul" else numbers((width,), device, 3).abs().to(dtype)
        scale = {"mul": width**-0.5, "tanh_add": 5 / width, "sq_diff": -0.5 / width}[phi]
        scores = Pairwise(phi, query, key, weight, scale, None)
        problem = Problem(scores, value, sizes)
        if kind != "one query":
            problem = problem._replace(visible=visible(gaps(sizes), sizes))
        if kind == "everything":
            dense, along = numbers((1, 2, 1, KEYS), device, 4), numbers((1, 2, queries + KEYS - 1), device, 5)
            seed = torch.tensor(1234567, dtype=torch.int64, device=device)
            problem = problem._replace(scores=scores._replace(softcap=3.0), bias=Added(dense, along))
            problem = problem._replace(sinks=numbers((2,), device, 6), dropout_p=0.25, seed=seed)
        yield f"{phi} {width} wide, {kind}", problem
