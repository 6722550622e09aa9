"""How far the weights of two calls are apart."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.inspection.difference import BLOCK, Aligned
from clearhead.inspection.measures.allowed import among, looked_at
from clearhead.inspection.source import FromRecord
from clearhead.inspection.weights import Weights
from clearhead.models.attention_call import AttentionCall
from clearhead.models.differences._fit import Places
from clearhead.problem.problem import Problem
from clearhead.problem.record import now
from clearhead.problem.region import Region, host_part

EVERY = slice(None)


@torch.no_grad()
def divergences(mine: AttentionCall, theirs: AttentionCall, places: Places) -> Tensor:
    """The Jensen–Shannon divergence of each query's weights, in nats, float64 (B, H, Lq); NaN for those left out.

    Raises a `ClearheadError` where the masks differ on a query that counts.
    """
    calls, of = (mine, theirs), places or (None, None)
    looked = _both_look(calls, of)
    problems = [among(call.record.problem, looked_in) for call, looked_in in zip(calls, looked, strict=True)]
    sides = [Aligned(Weights(FromRecord(now(p), {})), at) for p, at in zip(problems, of, strict=True)]
    rest = places is not None or any(problem.sinks is not None for problem in problems)
    for side in sides:
        side.weights.logsumexp()  # which they remember: a part needs no row
    batch, heads, queries, _ = sides[0].sizes.shape
    found = torch.full((batch, heads, queries), torch.nan, dtype=torch.float64, device="cpu")
    rows = max(1, BLOCK // max(heads * max(p.sizes.keys for p in problems), 1))
    for b in range(batch):
        for row in range(0, queries, rows):
            at = slice(b, b + 1), EVERY, slice(row, min(row + rows, queries))
            keys = EVERY if places is not None else _hull(problems, *at)
            masks = [_kept(p, places_of, *at, keys).cpu() for p, places_of in zip(problems, of, strict=True)]
            _check_masks(mine.name, masks, b, row, places)
            p, q = (side.part(*at, keys).cpu() for side in sides)
            sees = (masks[0].any(-1) & masks[1].any(-1)).expand(p.shape[:3])
            found[at] = torch.where(sees, jensen_shannon(p, q, rest), torch.nan)
    return found


def jensen_shannon(p: Tensor, q: Tensor, rest: bool) -> Tensor:
    """JS(p, q) = ½ Σ_j (p_j log p_j/m_j + q_j log q_j/m_j), m = (p + q) / 2; 0 to log 2, in float64.

    `rest`: what p and q lack to 1, a sink's share or that of positions that are not compared, is one key more.
    """
    found = _terms(p, q).sum(-1).double()
    if rest:
        lacking = ((1 - t.sum(-1, dtype=torch.float64)).clamp(min=0.0) for t in (p, q))
        found = found + _terms(*lacking)
    return found


def _terms(p: Tensor, q: Tensor) -> Tensor:
    """½ (p log p/m + q log q/m) = ½ m g(d), d = (p − q) / (p + q), g = (1 + d) log(1 + d) + (1 − d) log(1 − d).

    g = 2 d atanh d + log(1 − d²) is about d² where d is small: so nearly equal weights keep their digits.
    """
    total = p + q
    limits = torch.finfo(total.dtype)
    # d = ±1, where one of the two is 0, is the number before it: atanh and the logarithm would be infinite
    apart = (p - q).div_(total.clamp(min=limits.tiny)).clamp_(limits.eps / 2 - 1, 1 - limits.eps / 2)
    each = apart.atanh().mul_(apart).mul_(2.0).add_(apart.square_().neg_().log1p_())
    return each.clamp_(min=0.0).mul_(total).mul_(0.25)


def _both_look(calls: tuple[AttentionCall, ...], of: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """The queries that are words in both calls, as each of them counts its positions."""
    alone = []
    for call in calls:
        words = None if call.padding is None else call.padding.queries
        alone.append(looked_at(words, None if call.uniform is None else call.uniform[..., 0]))
    if alone == [None, None] and of[0] is None:
        return alone
    given: list[Tensor] = []
    for call, looked, at in zip(calls, alone, of, strict=True):
        queries = call.problem.sizes.queries
        every = torch.ones(1, 1, queries, dtype=torch.bool, device="cpu") if looked is None else looked.cpu()
        every = every.expand(-1, -1, queries)
        given.append(every if at is None else every[..., at])
    both = given[0] & given[1]
    found: list[Tensor | None] = []
    for call, at in zip(calls, of, strict=True):
        sizes = call.problem.sizes
        whole = both
        if at is not None:
            whole = torch.zeros(*both.shape[:2], sizes.queries, dtype=torch.bool, device="cpu")
            whole[..., at] = both
        found.append(whole.to(sizes.device))
    return found


def _hull(problems: list[Problem], batch: slice, heads: slice, queries: slice) -> slice:
    """The keys that these queries see in either problem: all others have no weight."""
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
    """Which pairs the mask allows, of those that are compared: bool (1, H or 1, rows, keys)."""
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
    what = "pair of aligned positions" if places is not None else "position"
    raise ClearheadError(
        f"compare: the masks of {name} differ: query {row + query} of sequence {sequence} may see {counts[0]} keys in "
        f"this recording and {counts[1]} in the other, counted by {what}. Weights are compared under one mask: give "
        "both the same padding and the same mask, or name the positions that correspond with aligned=."
    )
