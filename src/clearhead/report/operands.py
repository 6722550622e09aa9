"""Queries and keys as whole multiples of a step for each feature: half the bytes of float32, and a known error.

Rounding moves the score of a pair by scale · Σ_t (k_t δq_t + q_t δk_t), where each δ is uniform in ± half a step. With
the step of feature t of the query c / rms(k_t), and that of the key c / rms(q_t), every feature adds as much, whatever
its size, and the standard deviation of the error is scale · c · √(2d / 12). It is ε for c = ε √12 / (scale √(2d)): a
weight moves by at most a quarter of a score's error, so the worst of many pairs is about ε.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError

ERROR = 1e-4  # ε
MOST = 2**22  # the largest multiple: finer steps would be finer than float32 itself


def checked_error(error: Any) -> float:
    if isinstance(error, bool) or not isinstance(error, int | float) or not 0 <= error <= 0.1:
        raise ClearheadError(
            f"error is {error!r}; pass how far a weight may be off, such as 1e-4, at most 0.1; 0 keeps float32."
        )
    return float(error)


def steps_of(query: Tensor, key: Tensor, scale: float, error: float) -> tuple[Tensor, Tensor] | None:
    """The steps of query (H, Lq, d) and key (Hk, Lk, d): (H, d) and (Hk, d), float64; None where they do not serve.

    Key heads that several heads use have the step of the largest query. They do not serve numbers that are not finite,
    nor an error of 0.
    """
    if error == 0:
        return None
    query, key = query.double(), key.double()
    group, features = query.shape[0] // key.shape[0], query.shape[-1]
    of_query, of_key = (t.square().mean(1).sqrt() for t in (query, key))
    largest = of_query.unflatten(0, (key.shape[0], group)).amax(1)  # type: ignore[no-untyped-call]
    c = error * 12**0.5 / (abs(scale) or 1.0) / (2 * features) ** 0.5
    steps = []
    for tensor, other in ((query, of_key.repeat_interleave(group, 0)), (key, largest)):
        most = tensor.abs().amax(1)
        step = torch.where(other > 0, c / other, most.clamp_min(1.0))  # what is multiplied by 0 may be anything
        step = torch.maximum(step, most / MOST)
        if not bool(step.isfinite().all()):
            return None
        steps.append(step)
    return steps[0], steps[1]


def rounded(tensor: Tensor, steps: Tensor) -> Tensor:
    """(H, L, d) as the nearest multiples of steps (H, d), float32: what the page computes with."""
    steps = steps.unsqueeze(1)
    return ((tensor.double() / steps).round() * steps).float()
