"""What a survey keeps of its texts beside means: spreads, and for each head and measure the strongest examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from clearhead.inspection.measures import Found, Measure, Subject
from clearhead.inspection.measures.base import OnKeys
from clearhead.models.recordings.attention_call import AttentionCall

NUMBERS = 5  # of an example: the measure at its query, that of uniform attention, text in the batch, query, key
AROUND = 8  # tokens on each side of the query, and of the key, that are kept


class Example(NamedTuple):
    """A query of a text at which a measure of a head is far from uniform attention.

    `value`, `uniform`: the measure of this query alone; for the sink, of the text. `query`, `key`: positions in the
    text; `query` is None for the sink. `places`, `tokens`: positions and ids of the tokens around both.
    """

    value: float
    uniform: float
    query: int | None
    key: int
    places: tuple[int, ...]
    tokens: tuple[int, ...]


Kept = list[tuple[float, Example]]  # of one head and measure, each with how far it is from uniform attention


class BatchExamples:
    """The strongest examples of one batch: by module, (measures, H, count, NUMBERS), NaN where there are fewer.

    `ids`: the tokens, (B, L), −1 for padding. Of equal texts the first counts.
    """

    def __init__(self, measures: Sequence[Measure], count: int, ids: Tensor) -> None:
        self._measures, self._count = measures, count
        rows = [tuple(row) for row in ids.tolist()] if count else []
        first = {row: number for number, row in reversed(list(enumerate(rows)))}
        self._again = torch.tensor([first[row] != number for number, row in enumerate(rows)], device="cpu")
        self.found: dict[str, Tensor] = {}

    def look(self, call: AttentionCall, subject: Subject, found: Mapping[int, Found]) -> None:
        """Add a call. `found`: its measures, by their places among the survey's."""
        heads = call.problem.sizes.heads
        if not self._count or not found:
            return
        shape = len(self._measures), heads, self._count, NUMBERS
        table = torch.full(shape, math.nan, dtype=torch.float64, device="cpu")
        for place, one in found.items():
            measure = self._measures[place]
            peak = one.peak()
            if peak is None:
                continue
            value, uniform, query = (side.expand(-1, heads) for side in peak)
            apart = _apart(value, uniform, measure).nan_to_num(nan=-torch.inf)
            apart = apart.masked_fill(self._again[:, None], -torch.inf)
            best = apart.sort(dim=0, descending=True, stable=True).indices[: self._count]
            asked = query.gather(0, best)
            keys = one.key.gather(0, best) if one.key is not None else self._keys(measure, call, subject, best, asked)
            known = apart.gather(0, best) > -torch.inf
            sides = value.gather(0, best), uniform.gather(0, best), best, asked, keys
            numbers = torch.stack([side.double() for side in sides], -1)
            table[place, :, : len(best)] = torch.where(known[..., None], numbers, math.nan).transpose(0, 1)
        before = self.found.get(call.name)
        self.found[call.name] = table if before is None else _best(before, table, self._measures)

    def _keys(self, measure: Measure, call: AttentionCall, subject: Subject, texts: Tensor, queries: Tensor) -> Tensor:
        """The key of each example, from texts and queries (count, H): the measure's own, else the strongest one."""
        if isinstance(measure, OnKeys):
            near = measure.keys(subject).cpu()
            return near[texts if len(near) > 1 else 0, queries]
        words = None if call.padding is None else call.padding.keys
        found = torch.zeros_like(queries)
        for rank, (row, asked) in enumerate(zip(texts.tolist(), queries.tolist(), strict=True)):
            for head, (text, query) in enumerate(zip(row, asked, strict=True)):
                weights = cast(Tensor, call.weights[text, head, query])
                own = weights if words is None else weights.masked_fill(~words[text], -1.0)
                found[rank, head] = int(own.argmax())
        return found


def _apart(value: Tensor, uniform: Tensor, measure: Measure) -> Tensor:
    return uniform - value if measure.least else value - uniform


def _best(one: Tensor, other: Tensor, measures: Sequence[Measure]) -> Tensor:
    """The best of two tables, for a module that attends several times."""
    both = torch.cat([one, other], 2)
    apart = torch.stack([_apart(table[..., 0], table[..., 1], one) for table, one in zip(both, measures, strict=True)])
    order = apart.nan_to_num(nan=-torch.inf).sort(dim=2, descending=True, stable=True).indices
    return both.gather(2, order[:, :, : one.shape[2], None].expand(-1, -1, -1, NUMBERS))


class Examples:
    """The strongest examples of all batches, added in their order: equal ones keep the order of the texts."""

    def __init__(self, measures: Sequence[Measure], count: int) -> None:
        self._measures, self._count = measures, count
        self._kept: dict[tuple[str, int, str], Kept] = {}

    def include(self, found: Mapping[str, Tensor], ids: Tensor) -> None:
        """Add those of a batch. `ids`: its tokens, (B, L), −1 for padding."""
        for module, table in found.items():
            for measure, by_head in zip(self._measures, table.tolist(), strict=True):
                for head, ranks in enumerate(by_head):
                    kept = self._kept.setdefault((module, head, measure.name), [])
                    for value, uniform, *at in ranks:
                        if not math.isnan(value):
                            apart = uniform - value if measure.least else value - uniform
                            self._add(kept, apart, (value, uniform), ids[int(at[0])], int(at[1]), int(at[2]))

    def _add(self, kept: Kept, apart: float, values: tuple[float, float], row: Tensor, query: int, key: int) -> None:
        if len(kept) == self._count and apart <= kept[-1][0]:
            return
        length = int((row >= 0).sum())
        ends = [end for end in (query, key) if end >= 0]
        near = {i for end in ends for i in range(max(0, end - AROUND), min(length, end + AROUND + 1))}
        places = tuple(sorted(near))
        example = Example(*values, None if query < 0 else query, key, places, tuple(row[list(places)].tolist()))
        if any(one[2:] == example[2:] for _, one in kept):  # a text that was read before
            return
        kept.append((apart, example))
        kept.sort(key=lambda one: -one[0])  # stable
        del kept[self._count :]

    def of(self, module: str, head: int) -> Iterator[tuple[str, list[Example]]]:
        """The examples of a head by measure, the strongest first."""
        for measure in self._measures:
            kept = self._kept.get((module, head, measure.name))
            if kept:
                yield measure.name, [example for _, example in kept]

    def words(self, spelled: Callable[[int], str]) -> dict[int, str]:
        """The spelling of each token of the examples."""
        every = {token for kept in self._kept.values() for _, one in kept for token in one.tokens}
        return {token: spelled(token) for token in sorted(every)}


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
