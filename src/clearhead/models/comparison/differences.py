"""The differences between two recordings."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from clearhead.base.errors import ClearheadError, ShapeError, UnsupportedError, columns
from clearhead.base.output.text import said
from clearhead.inspection.by_blocks import NUMBERS
from clearhead.inspection.difference import Aligned, WeightDifference
from clearhead.inspection.measures.allowed import among, looked_at
from clearhead.inspection.source import FromRecord
from clearhead.models.interception.layers import FIRST, LayerName
from clearhead.models.interception.modules import Kind
from clearhead.models.recordings.attention_call import AttentionCall
from clearhead.models.recordings.call import Call
from clearhead.models.recordings.calls import Calls, HeadNumbers, Label, labels
from clearhead.models.recordings.weights import weights_of
from clearhead.problem.problem import Problem
from clearhead.problem.record import now
from clearhead.problem.region import Region, host_part
from clearhead.problem.words import ALL_WORDS

Places = tuple[Tensor, Tensor] | None


def checked_places(matched: Any) -> Places:
    """The positions to compare, of this text and of the other, ascending; None is all of them."""
    if matched is None:
        return None
    try:
        mine, theirs = ([operator.index(position) for position in side] for side in matched)
        fits = len(mine) == len(theirs) and min(*mine, *theirs) >= 0
        fits = fits and all(a < b for side in (mine, theirs) for a, b in pairwise(side))
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise ClearheadError(
            f"compare: matched is {matched!r:.60}; expected two lists of as many positions, ascending from 0 on, those "
            "of this recording's text and those of the other's: matched=([0, 1, 3], [0, 1, 2])."
        )
    return torch.tensor(mine, device="cpu"), torch.tensor(theirs, device="cpu")


def check_calls(mine: Sequence[AttentionCall], theirs: Sequence[AttentionCall]) -> None:
    """Raise where two recordings have different numbers of calls, or none."""
    if len(mine) != len(theirs) or not mine:
        raise ClearheadError(
            f"compare: this recording has {len(mine)} calls and the other {len(theirs)}; record one run of one "
            "architecture in each, or pass some of them: seen.runs[0], ch.models.Recording(seen.calls[:12])."
        )


def check_pair(number: int, mine: AttentionCall, theirs: AttentionCall, places: Places) -> None:
    """Raise where the two calls of a number can't be compared pair by pair."""
    one, other = mine.problem.sizes.shape, theirs.problem.sizes.shape
    who = f"compare: call {number} is {mine.name}, {mine.kind}, and {theirs.name}, {theirs.kind}, in the other"
    shapes = columns({"this": ("B", "H", "Lq", "Lk"), "": one, "the other": other})
    if mine.kind != theirs.kind:
        raise ClearheadError(f"{who}: self attention is compared with self attention, cross with cross.")
    if one[:2] != other[:2]:
        raise ShapeError(f"{who}, with other heads or sequences; compare models of one architecture.\n{shapes}")
    if places is None:
        if one != other:
            raise ShapeError(f"{who}, of other lengths: pass matched=([0, 1, 3], [0, 1, 2]).\n{shapes}")
        return
    if mine.kind != "self" or one[2] != one[3] or other[2] != other[3]:
        raise ClearheadError(f"{who}: matched= takes self attention, as many queries as keys.\n{shapes}")
    for shape, side in zip((one, other), places, strict=True):
        if int(side[-1]) >= shape[3]:
            raise ShapeError(f"{who}: matched holds {int(side[-1])}, and there are {shape[3]} positions.\n{shapes}")


EVERY = slice(None)
CACHED = 2**15 - 1  # so many weights in float64 at once stay in the processor's cache


class MasksDiffer(ClearheadError):
    """The masks of two calls differ on a query that counts."""


@torch.no_grad()
def divergences(mine: AttentionCall, theirs: AttentionCall, places: Places) -> Tensor:
    """The Jensen–Shannon divergence of each query's weights, in nats, float64 (B, H, Lq); NaN for those left out.

    Raises `MasksDiffer` where the masks differ on a query that counts, unless an edit changed one of the calls.
    """
    edited = mine.edited or theirs.edited
    calls, of = (mine, theirs), places or (None, None)
    looked = _both_look(calls, of)
    problems = [among(call.record.problem, looked_in) for call, looked_in in zip(calls, looked, strict=True)]
    sides = [
        Aligned(weights_of(FromRecord(now(p), {}), None, call.factor), at)
        for call, p, at in zip(calls, problems, of, strict=True)
    ]
    rest = places is not None or edited or any(problem.sinks is not None for problem in problems)
    for side in sides:
        side.weights.logsumexp()  # the weights keep it, and then compute parts of rows
    batch, heads, queries, _ = sides[0].sizes.shape
    found = torch.full((batch, heads, queries), torch.nan, dtype=torch.float64, device="cpu")
    rows = max(1, NUMBERS // max(heads * max(p.sizes.keys for p in problems), 1))
    for b in range(batch):
        for row in range(0, queries, rows):
            at = slice(b, b + 1), EVERY, slice(row, min(row + rows, queries))
            keys = EVERY if places is not None else _hull(problems, *at)
            masks = [_kept(p, places_of, *at, keys).cpu() for p, places_of in zip(problems, of, strict=True)]
            if not edited:
                _check_masks(mine.name, masks, b, row, places)
            p, q = (side.part(*at, keys).cpu() for side in sides)
            found[at] = jensen_shannon(p, q, rest).masked_fill_(~(masks[0].any(-1) | masks[1].any(-1)), torch.nan)
    return found


def jensen_shannon(p: Tensor, q: Tensor, rest: bool) -> Tensor:
    """JS(p, q) = ½ Σ_j (p_j log p_j/m_j + q_j log q_j/m_j), m = (p + q) / 2; 0 to log 2, in float64.

    `rest`: whether the weight that p and q lack to 1, on a sink or on positions that are not compared, counts as one
    more key.
    """
    rows = max(1, CACHED // max(p.shape[-1], 1))
    found = torch.zeros(p.shape[:-1], dtype=torch.float64, device=p.device)
    mine, theirs, out = p.flatten(0, -2), q.flatten(0, -2), found.view(-1)
    for row in range(0, len(out), rows):
        some = slice(row, row + rows)
        both = mine[some].double(), theirs[some].double()
        sums = _terms(*both).sum(-1)
        if rest:
            sums = sums + _terms(*((1 - t.sum(-1)).clamp(min=0.0) for t in both))
        out[some] = sums.div(2).clamp(min=0.0)
    return found


def _terms(p: Tensor, q: Tensor) -> Tensor:
    """p log p/m + q log q/m, where p/m = 1 + d, d = (p − q) / (p + q): nearly equal weights keep their digits."""
    limits = torch.finfo(p.dtype)
    # where p or q is 0, d = ±1 is replaced by the float next to it, because the logarithm would be infinite
    apart = (p - q).div_((p + q).clamp_(min=limits.tiny)).clamp_(limits.eps / 2 - 1, 1 - limits.eps / 2)
    first = apart.log1p().mul_(p)
    return first.add_(apart.neg_().log1p_().mul_(q))


def _both_look(calls: tuple[AttentionCall, ...], of: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """For each call the queries that are words in both calls, at the call's own positions; None: all."""
    alone = []
    for call in calls:
        words = (call.padding or ALL_WORDS).queries
        alone.append(looked_at(words, None if call.uniform is None else call.uniform[..., 0]))
    if alone == [None, None] and of[0] is None:
        return alone
    places = [EVERY if at is None else at for at in of]
    given = []
    for call, looked, at in zip(calls, alone, places, strict=True):
        every = torch.ones(1, 1, call.problem.sizes.queries, dtype=torch.bool, device="cpu")
        given.append((every if looked is None else every & looked.cpu())[..., at])
    both = given[0] & given[1]
    found: list[Tensor | None] = []
    for call, at in zip(calls, places, strict=True):
        sizes = call.problem.sizes
        whole = both.new_zeros(*both.shape[:2], sizes.queries)
        whole[..., at] = both
        found.append(whole.to(sizes.device))
    return found


def _hull(problems: list[Problem], batch: slice, heads: slice, queries: slice) -> slice:
    """A slice of the keys that these queries see in either problem: all other keys have weight 0."""
    lows, highs = [], []
    for problem in problems:
        low, high = 0, problem.sizes.keys
        if problem.edges is not None:
            start, stop = (host_part(edge, Region(batch, heads, queries)) for edge in problem.edges)
            some = stop > start
            low, high = (int(start[some].min()), int(stop[some].max())) if some.any() else (high, 0)
        lows.append(low)
        highs.append(high)
    return slice(min(lows), max(min(lows), *highs))


def _kept(problem: Problem, places: Tensor | None, batch: slice, heads: slice, queries: slice, keys: slice) -> Tensor:
    """Which of the compared pairs the mask allows, bool (1, H or 1, rows, keys)."""
    sizes, rows = problem.sizes, queries
    if places is not None:
        rows = slice(int(places[queries][0]), int(places[queries][-1]) + 1)
    height, width = rows.stop - rows.start, len(range(sizes.keys)[keys])
    if problem.spans is None:
        keep = torch.ones(1, 1, height, width, dtype=torch.bool, device=sizes.device)
    else:
        keep = problem.spans.keep(batch, heads, rows, keys, sizes.keys).expand(-1, -1, height, width)
    if places is None:
        return keep
    return keep[:, :, (places[queries] - rows.start).to(keep.device)][..., places.to(keep.device)]


def _check_masks(name: str, masks: list[Tensor], sequence: int, row: int, places: Places) -> None:
    differ = (masks[0] != masks[1]).any(-1)
    if not bool(differ.any()):
        return
    query = int(differ.flatten(0, 1).any(0).nonzero()[0])
    counts = [int(mask[..., query, :].sum(-1).max()) for mask in masks]
    what = "pair of matched positions" if places is not None else "position"
    raise MasksDiffer(
        f"compare: the masks of {name} differ: query {row + query} of sequence {sequence} may see {counts[0]} keys in "
        f"this recording and {counts[1]} in the other, counted by {what}. Give both the same padding and mask, or name "
        "the positions that correspond with matched=."
    )


UNNAMED = Label(FIRST)


@dataclass(frozen=True, eq=False)
class CallDifference(Call):
    """The differences between the calls of one number in two recordings. `Recording.compare` gives it.

    `weights`: the signed difference, the other call's weights less this call's, a lazy matrix. `by_query`: the
    Jensen–Shannon divergence of each query's weights in nats, float64 (B, H, Lq), 0 to log 2; NaN for queries that do
    not count.
    `divergence`: its mean for each head, (H,); NaN where no query counts.
    """

    name: str
    kind: Kind
    number: int
    weights: WeightDifference
    by_query: Tensor
    run: int = 0
    label: Label = UNNAMED
    _columns = "layer", "call", "run", "module", "kind"

    @property
    def layer(self) -> LayerName:  # type: ignore[override]
        return self.label.layer

    @property
    def divergence(self) -> Tensor:
        return self.by_query.transpose(0, 1).flatten(1).nanmean(-1)

    def _by_head(self) -> Mapping[str, Iterable[object]]:
        return {"head": range(len(self.divergence)), "divergence": self.divergence.tolist()}

    def __repr__(self) -> str:
        return f"CallDifference({self.name!r}, {self.kind}, {tuple(self.weights.shape)})"


class Differences(HeadNumbers, Calls[CallDifference]):
    """The differences between the calls of two recordings. `Recording.compare` gives it.

    Calls are found as in a `Recording`, by number, module and run: each is a `CallDifference`. `most`: the number of
    the call and the head that differ most. `str()` names them in a sentence. `values`, (calls, heads): the divergences
    as a tensor, whose meaning `name`, `unit` and `sentence` say, for a picture of every head, as `plot()` is. The
    columns of `table()`: layer, call (its number), run, module, kind, head, divergence.
    """

    name = "divergence"
    unit = "nats"
    _colour_map = "GnBu"
    _scale = "linear"
    _meaning = "divergence, nats"
    sentence = (
        "The Jensen–Shannon divergence of this head's weights in one recording from those in the other, a mean over "
        "the queries."
    )

    @property
    def _labels(self) -> list[Label]:  # type: ignore[override]
        return [call.label for call in self.calls]

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        """The divergences, float64 (calls, heads); NaN where no query counts, and where a call has no such head."""
        return pad_sequence([call.divergence for call in self.calls], batch_first=True, padding_value=torch.nan)

    @property
    def most(self) -> tuple[int, int]:
        """(call, head) of the largest divergence; NaN is left out."""
        return divmod(int(self.values.nan_to_num(-1.0).argmax()), self.values.shape[1])

    def __str__(self) -> str:
        return said(self, self._said)

    def __repr__(self) -> str:
        return said(self, self._brief)

    def _brief(self) -> str:
        shown = ", ".join(f"{name} {number:.3g}" for name, number in self._strongest().items())
        return f"Differences({self.name} in {self.unit}, the largest of {len(self)} calls: {shown})"

    def _said(self) -> str:
        place, head = self.most
        call = self.calls[place]
        most = torch.log(torch.tensor(2.0, device="cpu"))
        every = torch.cat([one.divergence for one in self.calls])
        return (
            f"{call.label.head(head)} differs most: a Jensen–Shannon divergence of {float(call.divergence[head]):.3g} "
            f"nats, of at most {most:.3f}; the mean over {int(every.isfinite().sum())} heads is "
            f"{float(every.nanmean()):.3g} ({call.name})."
        )


def compare_calls(mine: list[AttentionCall], theirs: list[AttentionCall], matched: Any) -> Differences:
    """See `Recording.compare`."""
    places = checked_places(matched)
    check_calls(mine, theirs)
    for call in (*mine, *theirs):
        if call.factor is not None and bool(((call.factor < 0) | (call.factor > 1)).any()):
            low, high = float(call.factor.min()), float(call.factor.max())
            raise UnsupportedError(
                f"compare: an edit multiplied weights of {call.name} after the softmax by {low:.3g} … {high:.3g}, and "
                "the divergence is of weights from 0 on whose sum is at most 1. Compare parts by hand: "
                "seen[0].weights[index]."
            )
    found = []
    for number, (one, other, label) in enumerate(zip(mine, theirs, labels(mine), strict=True)):
        check_pair(number, one, other, places)
        found.append(difference_of(number, one, other, places, label))
    return Differences(found)


def difference_of(
    number: int, mine: AttentionCall, theirs: AttentionCall, places: Places, label: Label
) -> CallDifference:
    """The differences of two calls, which `check_pair` has compared."""
    by_query = divergences(mine, theirs, places)
    sides = []
    for call, at in zip((mine, theirs), places or (None, None), strict=True):
        problem = call.record.problem._replace(sizes=call.record.problem.sizes._replace(leading=None))
        record = call.record._replace(problem=problem)
        sides.append(Aligned(weights_of(FromRecord(record, {}), None, call.factor), at))
    return CallDifference(mine.name, mine.kind, number, WeightDifference(*sides), by_query, mine.run, label)
