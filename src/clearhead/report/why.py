"""The steps of `explain` from a query and the keys to a weight, for which the page computes its own numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from clearhead.explanation.of_problem import attention_parts, input_steps
from clearhead.explanation.shown import choose
from clearhead.masks.dense import DenseMask
from clearhead.problem.problem import make_problem
from clearhead.report.layer import Layer
from clearhead.report.score_of_terms import ScoreOfTerms
from clearhead.scores.base import ByTile
from clearhead.scores.dot import Dot


def with_steps(layer: Layer) -> Layer:
    """The layer with name, formula and tree of each step that leads to a weight, in order.

    A step without a tree is given: "query", "key", "weight", "bias", "mask", "sink". The first step with a tree is the
    sum of the terms, whose numbers the page already has. A query that sees nothing has steps of its own.
    """
    if layer.scores is not None:
        return layer
    numbers = [] if layer.bias is None else layer.bias.numbers
    holes = bool(layer.holes) or any(np.isneginf(array).any() for array in numbers)
    biased = any((np.isfinite(array) & (array != 0)).any() for array in numbers)
    masked = holes or bool((layer.start > 0).any() or (layer.stop < layer.key.shape[1]).any())
    blind = bool(np.isneginf(layer.logsumexp).any() or (layer.stop <= layer.start).any())
    blind_steps = _steps(layer, True, True, biased) if blind else ()
    return replace(layer, steps=_steps(layer, masked, False, biased), blind_steps=blind_steps)


def _steps(layer: Layer, masked: bool, blind: bool, biased: bool) -> tuple[dict[str, Any], ...]:
    """The steps of an explanation of two keys with the parts of the layer. No step depends on the number of keys."""
    keep = torch.tensor([[not blind, not masked]], device="cpu")
    mask = DenseMask(keep) if masked else None
    key = torch.zeros(1, 1, 2, layer.query.shape[-1], dtype=torch.float32, device="cpu")
    query = key[:, :, :1]
    score = Dot() if layer.phi == "mul" and layer.weight is None else ScoreOfTerms(layer.phi, layer.weight is not None)
    bias = torch.zeros_like(keep, dtype=torch.float32) if biased else None
    sinks = None if layer.sinks is None else query[0, :, 0, 0]
    problem = make_problem(query, key, key, score=score, mask=mask, bias=bias, sinks=sinks)
    problem = problem._replace(scores=ByTile(score, query, key, layer.scale, layer.softcap), value=None)
    shown = choose(None, problem.sizes)
    given = input_steps(problem, shown)
    parts, _, _ = attention_parts(problem, mask, shown, given)
    steps = given + [step for part in parts for step in part.steps if not step.aside]
    return tuple({"name": step.name, "formula": step.formula, "tree": step.tree} for step in steps)
