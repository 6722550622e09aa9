"""Weights as whole numbers on a log scale, for maps: fine enough for colours, and small."""

from __future__ import annotations

import numpy as np

from clearhead.report.layer import Array

OCTAVES = 8  # a thumbnail reaches from uniform / 2^8 to uniform · 2^8
FINE = 128  # codes for an octave in the map of a long head
LEAST = -48  # the smallest weight of such a map is 2^-48
NO_NUMBER = 65535


def thumbnail_codes(times: Array) -> Array:
    """Multiples of uniform attention as bytes: 0 where no pair is allowed (below 0), 1 to 255 for 2^-8 to 2^8.

    times = 2^((code − 128) / 127 · 8). Multiples beyond an end have the code of this end; NaN has that of the upper
    end.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        octaves = np.log2(np.nan_to_num(times.astype(np.float64), nan=np.inf))
    codes = 128 + np.rint(127 * np.clip(np.nan_to_num(octaves, nan=0.0, neginf=-np.inf), -OCTAVES, OCTAVES) / OCTAVES)
    return np.where(times < 0, 0, codes).astype(np.uint8)


def map_codes(weights: Array, allowed: Array) -> Array:
    """Weights as 16 bits: 0 where no pair is allowed, 1 for 0, then weight = 2^((code − 2) / 128 − 48).

    Weights below 2^-48 have the code of 0, and NaN has the code 65535.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        fine = np.rint((np.log2(weights.astype(np.float64)) - LEAST) * FINE)
    codes = np.where(fine >= 0, 2 + np.nan_to_num(fine, nan=0.0, posinf=0.0, neginf=0.0), 1)
    codes = np.where(np.isnan(weights), NO_NUMBER, codes)
    return np.where(allowed, codes, 0).astype(np.uint16)
