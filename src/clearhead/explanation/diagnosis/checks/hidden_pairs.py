"""Functions of a pair that give NaN where the mask hides the pair."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from clearhead.engines.tiled import tiles
from clearhead.explanation.diagnosis.case import NUMBERS, ROWS, Case, Check
from clearhead.explanation.diagnosis.diagnosis import Finding
from clearhead.problem.region import EVERY, Region
from clearhead.problem.regions import cut, width
from clearhead.scores.base import ByTile


class HiddenPairs(Check):
    """A function after a score (`then`), or of a bias, gives NaN or +∞ at a pair that the mask hides.

    The output is right, because the pair is left out. The gradient of the function there is 0 · NaN, so what it learns
    gets NaN. Up to `ROWS` evenly spaced queries of the first sequence are looked at; the numbers are exact.
    """

    name = "a function that is NaN behind the mask"
    looks_for = "functions of scores and biases that give NaN where the mask hides a pair"

    def find(self, case: Case) -> Iterator[Finding]:
        problem = case.problem
        scores, bias, spans = problem.scores, problem.bias, problem.spans
        change = scores.score.changed_by if isinstance(scores, ByTile) else None
        function = None if bias is None else bias.function
        finite = all(bool(tensor.isfinite().all()) for tensor in case.inputs.values())
        if spans is None or not finite or (change is None and function is None):
            return
        _, heads, queries, keys = case.shape
        step = -(-queries // max(1, min(ROWS, NUMBERS // (heads * keys * width(problem)))))
        part = cut(problem, Region(batch=slice(0, 1), queries=slice(0, queries, step)))
        assert part.spans is not None
        hidden = ~part.spans.keep(EVERY, EVERY, EVERY, EVERY, keys)
        if change is not None:
            yield from self._of(case, "The function after the score", tiles.raw_scores(part), hidden, step)
        if part.bias is not None and part.bias.function is not None:
            numbers = part.bias.function(slice(0, 1), slice(0, heads), slice(0, part.sizes.queries), slice(0, keys))
            yield from self._of(case, "The function of the bias", numbers, hidden, step)

    def _of(self, case: Case, what: str, numbers: Tensor, hidden: Tensor, step: int) -> Iterator[Finding]:
        bad = hidden & (numbers.isnan() | (numbers == torch.inf))
        if not bool(bad.any()):
            return
        _, head, query, key = (int(n) for n in bad.nonzero()[0])
        yield self.finding(
            case,
            "warning",
            f"{what} gives NaN or +∞ at {int(bad.sum())} of {bad.numel()} pairs that were looked at, where the mask "
            "hides them: the output is right, and gradients of what the function learns are NaN, for 0 · NaN is NaN.",
            "Give sqrt, log or a division numbers that they can take at hidden pairs too: (i - j).clamp(min=0), or "
            "torch.where on what goes in. A torch.where around the result does not help.",
            **({"head": head} if bad.shape[1] > 1 else {}),
            query=query * step,
            key=key,
        )
