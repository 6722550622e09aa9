"""Dot products, one object for each scale and softcap, since models ask for the same again and again."""

from __future__ import annotations

from clearhead.scores.dot import Dot

_dots: dict[tuple[float | None, float | None], Dot] = {}


def dot(scale: float | None, softcap: float | None) -> Dot:
    found = _dots.get((scale, softcap))
    if found is None:
        found = _dots[scale, softcap] = Dot(scale, softcap)
    return found
