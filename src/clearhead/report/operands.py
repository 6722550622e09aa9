"""Queries and keys as whole multiples of a step for each feature: half the bytes of float32, and a known error.

Rounding moves the score of a pair by scale · Σ_t w_t (∂φ/∂q_t δq_t + ∂φ/∂k_t δk_t), where each δ is uniform in ± half
a step. With the step c / (w_t r_t), r_t the root of the mean square of the derivative, every feature adds as much,
whatever its size, and the standard deviation of the error is scale · c · √(2d / 12). It is ε for c = ε √12 / (scale
√(2d)): a weight moves by at most a quarter of a score's error, so the worst of many pairs is about ε.

The table of φ, `scores/pair_functions.py`, has these roots, or a bound that serves every pair. Where the step is as
long as q − k, the square of the step counts in (q − k)²: w_t step² ≤ c too, for every φ but the product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.base.shapes import unflatten
from clearhead.scores.base import Pairwise
from clearhead.scores.pair_functions import PHIS

ERROR = 1e-4  # ε
MOST = 2**22  # the largest multiple: with larger ones, steps would be finer than float32 itself


def checked_error(error: Any) -> float:
    if isinstance(error, bool) or not isinstance(error, int | float) or not 0 <= error <= 0.1:
        raise ClearheadError(
            f"error is {error!r}; pass how far a weight may be off, such as 1e-4, at most 0.1; 0 keeps float32."
        )
    return float(error)


def steps_of(scores: Pairwise, error: float) -> tuple[Tensor, Tensor] | None:
    """The steps of query (1, H, Lq, d) and key (1, Hk, Lk, d): (H, d) and (Hk, d), float64; None where no step serves.

    A key head that several heads use has the finest of their steps. No step serves numbers that are not finite, or an
    error of 0.
    """
    if error == 0:
        return None
    query, key = scores.query[0].double(), scores.key[0].double()
    features = query.shape[-1]
    c = error * 12**0.5 / (abs(scores.scale) or 1.0) / (2 * features) ** 0.5
    weight = torch.ones_like(key[0, 0]) if scores.weight is None else scores.weight.double().abs()
    steps = []
    grouped = unflatten(query, 0, len(key), -1)
    of_query, of_key = PHIS[scores.phi].slopes(grouped, key.unsqueeze(1))
    of_heads = of_query.expand_as(grouped[:, :, 0]).flatten(0, 1)
    for tensor, slope in ((query, of_heads), (key, of_key.amax(1))):  # of the heads that share a key head, the steepest
        most, slope = tensor.abs().amax(1), slope * weight
        step = torch.where(slope > 0, c / slope, most.clamp_min(1.0))  # features with weight 0 may have any step
        if scores.phi != "mul":  # the second derivatives of the product are 0 in each
            step = torch.minimum(step, torch.where(weight > 0, (c / weight).sqrt(), step))
        step = torch.maximum(step, most / MOST)
        if not bool(step.isfinite().all()):
            return None
        steps.append(step)
    return steps[0], steps[1]


def rounded(tensor: Tensor, steps: Tensor) -> Tensor:
    """The tensor (H, L, d) rounded to the nearest multiples of steps (H, d), float32, as the page uses it."""
    steps = steps.unsqueeze(1)
    return ((tensor.double() / steps).round() * steps).float()
