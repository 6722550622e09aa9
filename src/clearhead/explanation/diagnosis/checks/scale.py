"""A scale that is missing, or that was applied twice."""

from __future__ import annotations

import math

from torch import Tensor

from clearhead.explanation.diagnosis.case import Case, Check, Findings
from clearhead.scores.base import ByTile, Pairwise
from clearhead.scores.score_function import ScoreFunction

WIDTH = {"missing": 8, "twice": 16}  # the fewest dimensions: of fewer, 1/√E changes little
WIDE = 2.5  # up to this spread a query still attends to several keys
USUAL = (0.6, 2.5)  # the spread that the right scale should give
ALIKE = 1.5  # factor within which two numbers are taken for the same


class Scale(Check):
    """A scale, judged by the spread σ of the scores: their standard deviation over the keys of a query, as a median.

    Vectors with entries of variance 1 have products of spread √E, and a scale of 1/√E brings σ to 1, where a softmax is
    neither uniform nor one key.
    A scale is missing where σ > 2.5 and another factor of 1/√E would bring σ to 0.6 … 2.5. A scale that is 1/√E or less
    already is not missing, however wide the scores.
    A scale was applied twice where σ is below 2/√E and one factor of 1/√E less would bring σ to 0.6 … 2.5, but only
    where the second factor shows: as a scale of about 1/E, or as a scale of 1/√E with queries √E times smaller than the
    keys, or the reverse. So three kinds of model are not findings: small vectors at the start of training (a small σ),
    T5 (a scale of 1, and σ of about 1), and Whisper (a scale of 1, and queries that are divided before).
    """

    name = "the scale"

    def find(self, case: Case) -> Findings:
        spread, width = float(case.spread.nanmedian()), case.inputs["query"].shape[-1]
        if width < min(WIDTH.values()) or not math.isfinite(spread) or not _product(case):
            return
        scores, root = case.problem.scores, math.sqrt(width)
        applied = scores.scale if isinstance(scores, Pairwise) else None  # the own scale of a function is unknown
        told = f"The scores of a query have a standard deviation of {spread:.3g} (median), with {width} dimensions"
        missing = applied is None or abs(applied) > ALIKE / root
        if width >= WIDTH["missing"] and missing and spread > WIDE and _usual(spread / root):
            yield self.finding(
                "warning",
                f"{told}; divided by √{width} it would be {spread / root:.3g}.",
                f"Pass scale={1 / root:.4g}, which is 1/√E and the default of Dot(), or divide in your own score.",
            )
        if width >= WIDTH["twice"] and applied is not None and spread < 2 / root and _usual(spread * root):
            twice, remedy = _twice(case, applied, root)
            if twice:
                yield self.finding(
                    "warning",
                    f"{told}; times √{width} it would be {spread * root:.3g}. {twice}",
                    remedy,
                )


def _usual(spread: float) -> bool:
    return USUAL[0] <= spread <= USUAL[1]


def _product(case: Case) -> bool:
    """Whether the scores are products of the given vectors, or come from a function, which may compute a product."""
    scores = case.problem.scores
    if isinstance(scores, ByTile):
        return isinstance(scores.score, ScoreFunction)
    given = math.isclose(_size(case.inputs["query"]), _size(scores.query), rel_tol=1e-3)  # else it was projected
    return scores.phi == "mul" and scores.weight is None and given and scores.softcap is None


def _twice(case: Case, applied: float, root: float) -> tuple[str, str]:
    """A sentence that says where the second factor of 1/√E is, and the remedy; empty where there is none."""
    if _alike(applied * root**2):
        said = f"The scale is {applied:.4g}, which is about 1/{root**2:.0f}."
        return said, f"Scale once: pass scale={1 / root:.4g}, which is 1/√E and the default of Dot()."
    query, key = _size(case.inputs["query"]), _size(case.inputs["key"])
    if not _alike(applied * root) or not query or not key:
        return "", ""
    for small, large, ratio in (("query", "key", query / key), ("key", "query", key / query)):
        if _alike(ratio * root):
            return (
                f"The scale is {applied:.4g}, and entries of {small} are {ratio:.3g} times those of {large}: each is "
                f"about 1/√{root**2:.0f}.",
                f"Scale once: leave the division of the {small} out, or pass scale=1.0.",
            )
    return "", ""


def _alike(ratio: float) -> bool:
    return 1 / ALIKE < ratio < ALIKE


def _size(tensor: Tensor) -> float:
    """The root mean square of the entries that are finite."""
    finite = tensor.isfinite()
    total = tensor.masked_fill(~finite, 0.0).double().square().sum() / finite.sum().clamp_min(1)
    return float(total.sqrt())
