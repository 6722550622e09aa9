"""explain()."""

from __future__ import annotations

from typing import Any

import torch

from clearhead._attention import Arguments, ScoreLike
from clearhead.base.arrays import is_numpy
from clearhead.base.errors import UnsupportedError
from clearhead.base.tracing import readable, without_autocast
from clearhead.explanation.explanation import Explanation
from clearhead.explanation.inputs import drawn
from clearhead.explanation.of_problem import explain_problem
from clearhead.scores.base import ByTile


def explain(
    query: Any,
    key: Any,
    value: Any,
    *,
    score: ScoreLike = None,
    mask: Any = None,
    bias: Any = None,
    scale: float | None = None,
    sinks: Any = None,
    align: Any = None,
    at: Any = None,
) -> Explanation:
    """How attention comes to its output, step by step: formulas, shapes, numbers, and why.

    >>> import torch, clearhead as ch
    >>> query, key, value = torch.rand(2, 4), torch.rand(3, 4), torch.rand(3, 2)
    >>> explanation = ch.explain(query, key, value)
    >>> [step.name for step in explanation.steps if not step.given]
    ['products', 'scores', 'maximum', 'above', 'total', 'weights', 'wrong_axis', 'output']
    >>> torch.allclose(explanation["output"], ch.attention(query, key, value))
    True

    Formula: output_i = Σ_j softmax_j(score(query_i, key_j)) value_j, one step at a time, by the functions that the
    engine `tiled` is made of.
    Arguments as for `attention`. `at`: which part, an index of the weights (..., Lq, Lk) such as `(0, 3, 17)`: sequence
    0, head 3, query 17. None is the whole where it is small, else the first of it; the explanation says what it left
    out.
    Returns an `Explanation`; print it. Its numbers are float32, or float64 where the inputs are.
    Raises `ClearheadError` or `ShapeError`, as `attention` does, and for an index that names no pair.
    Cost: the scores of the chosen queries with every key.
    """
    is_numpy(query=query, key=key, value=value)
    call = Arguments(query, key, value, score, mask, bias, scale, sinks, align)
    problem = call.problem(by_tile=True)
    assert isinstance(problem.scores, ByTile)
    if not readable(problem.query):
        raise UnsupportedError(
            "explain() shows numbers, and here are none: the inputs have a shape alone (meta or fake tensors), or the "
            "code is being compiled or vectorized. Call it outside of torch.compile and torch.func.vmap."
        )
    shapes = {name: tuple(array.shape) for name, array in (("query", query), ("key", key), ("value", value))}
    with torch.no_grad(), without_autocast(problem.sizes.device):
        title = f"Attention by {problem.scores.score}, step by step"
        return explain_problem(problem, mask, at, drawn=drawn(shapes, problem.sizes), title=title)
