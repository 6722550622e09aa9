"""The spread of a survey's statistics over its texts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

MOMENTS = 3  # of a statistic of a head: how many texts have it, their mean, and the sum of squares about the mean


class BatchSpread:
    """Adds up the texts of one batch: for each module and statistic the sum and the count of queries of each text.

    `statistics`: how many there are. A module that attends several times adds to the same texts.
    """

    def __init__(self, statistics: int) -> None:
        self._statistics = statistics
        self._added: dict[str, Tensor] = {}  # (statistics, 2, B, H)

    def add(self, module: str, place: int, total: Tensor, count: Tensor, heads: int) -> None:
        """Add the sums and counts (B, H or 1) of a statistic, by its place."""
        if module not in self._added:
            shape = self._statistics, 2, len(total), heads
            self._added[module] = torch.zeros(shape, dtype=torch.float64, device="cpu")
        self._added[module][place] += torch.stack([total.expand(-1, heads), count.expand(-1, heads)])

    @property
    def found(self) -> dict[str, Tensor]:
        """By module, the moments over the texts of the batch, (statistics, H, MOMENTS)."""
        found = {}
        for module, (total, count) in ((name, added.unbind(1)) for name, added in self._added.items()):
            known = count > 0
            value = torch.where(known, total / count, 0.0)
            texts = known.sum(1).double()
            mean = value.sum(1) / texts.clamp(min=1)
            apart = torch.where(known, value - mean.unsqueeze(1), 0.0)
            found[module] = torch.stack([texts, mean, apart.square().sum(1)], -1)
        return found


class Spread:
    """The moments of all batches. Two are merged by the formula of Chan, Golub and LeVeque 1979, so no text is read
    twice, and no digits are lost where the spread is small beside the mean."""

    def __init__(self) -> None:
        self.moments: dict[str, Tensor] = {}

    def include(self, found: Mapping[str, Tensor]) -> None:
        """Add those of a batch, or of several."""
        for module, table in found.items():
            before = self.moments.get(module)
            self.moments[module] = table if before is None else _merged(before, table)

    def of(self, module: str, place: int, head: int) -> tuple[float, int]:
        """The standard deviation of a statistic over the texts that have it, and their number. NaN for fewer than 2."""
        texts, _, squares = self.moments[module][place, head].tolist()
        return (squares / (texts - 1)) ** 0.5 if texts > 1 else float("nan"), int(texts)


def _merged(one: Tensor, other: Tensor) -> Tensor:
    (first, mean, squares), (second, other_mean, others) = one.unbind(-1), other.unbind(-1)
    texts, apart = first + second, other_mean - mean
    share = second / texts.clamp(min=1)
    return torch.stack([texts, mean + apart * share, squares + others + apart.square() * first * share], -1)
