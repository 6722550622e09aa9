"""A mask that means the opposite of what was meant."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.base.positions import query_offset
from clearhead.explanation.diagnosis.case import Case, Check, Findings, sees_neighbours
from clearhead.masks.base import Spans

LEAST = 3  # queries: a mask of fewer has no shape to judge by
LEAST_HOLE = 8  # queries: a few of them may skip themselves by chance
MEANS = "True means 'may attend' here, in SDPA and in transformers; in torch.nn's modules it means 'may not'. "
TURN = MEANS + "Pass ~mask."
CAUSAL = MEANS + "Pass Causal(), or ~mask."
TRIANGLE = (
    "Pass Causal(), or mask.mT where the mask is a triangle alone. ~mask would hide from each query its own key, and "
    "leave the first with none."
)


class OppositeMask(Check):
    """A mask judged by the keys that it hides, in four ways:

    upside down: no query sees an earlier key, and the first query sees all keys, as under an inverted causal mask. (A
    window into the future does not show the first query all keys.)
    a hole around each query: there are `LEAST_HOLE` queries or more, none of them sees itself, and half of them skip
    the key beside them and see keys further away, as under an inverted window or inverted documents. (A mask that hides
    the diagonal alone skips no neighbour.)
    padding by position: all queries of a sequence see the same keys. Some sequences see no key, and the others only
    their last keys. (A batch is padded to its longest sequence, and an inverted padding mask hides all of that one.)
    padding by content: the keys that all queries see are 0, not finite or equal to the key beside them, and the keys
    that they do not see are none of these.
    """

    name = "a mask of the opposite polarity"

    def find(self, case: Case) -> Findings:
        spans = case.problem.spans
        if spans is None:
            return
        told = _turned_over(case)
        alike = spans.plain and all(bool((edge == edge[..., :1]).all()) for edge in (spans.start, spans.stop))
        if told is None and alike:  # all queries see the same keys
            told = _padding_by_position(case, spans) or _padding_by_content(case)
        if told is not None:
            certain, evidence, remedy = told
            yield self.finding("error" if certain else "warning", f"In {case.shape}, {evidence}", remedy)


Told = tuple[bool, str, str]  # whether it is certain, what was seen, and what to do


def _turned_over(case: Case) -> Told | None:
    problem, sizes = case.problem, case.problem.sizes
    unknown = problem.documents is not None or not problem.has_positions
    if sizes.queries < LEAST or unknown or isinstance(sizes.align, Tensor):
        return None
    offset = query_offset(sizes, "the mask")
    assert isinstance(offset, int)
    first, stop, count = (t.expand(case.real.shape) for t in case.extent)
    some = (count > 0) & case.real
    if not bool(some.any()):
        return None
    place = torch.arange(sizes.queries, device=count.device) + offset
    length = torch.where(some, stop, 0).amax(-1) - offset  # of each sequence
    turned = bool((first >= place)[some].all()) and bool((count[..., 0] >= length - 1).all())
    if offset >= 0 and turned and bool((length >= LEAST).any()):
        own = bool((first == place)[some].any())
        at = "its own and later ones" if own else "later ones alone, and not its own"
        return not own, f"each query sees {at}: a causal mask upside down.", TRIANGLE if own else CAUSAL
    if sizes.queries != sizes.keys or sizes.queries < LEAST_HOLE:
        return None
    before, itself, after = (t.expand(case.real.shape) for t in sees_neighbours(problem, offset))
    skips = (~before & (first < place - 1)) | (~after & (stop > place + 2))
    if bool((itself & some).any()) or bool((skips & some).sum() * 2 < some.sum()):
        return None
    evidence = (
        "no query sees itself, and most skip a key beside them and see others further away: a window or documents "
        "turned over."
    )
    return False, evidence, TURN


def _padding_by_position(case: Case, spans: Spans) -> Told | None:
    batch = case.shape[0]
    start, stop = (edge[:, :1, :1].expand(batch, -1, -1).flatten() for edge in (spans.start, spans.stop))
    nothing = stop <= start
    last = (start > 0) & (stop == case.shape[3])
    if not bool(nothing.any()) or bool(nothing.all()) or not bool((nothing | last).all()):
        return None
    evidence = (
        f"{int(nothing.sum())} of {batch} sequences see no key, and the others only their last ones, from key "
        f"{int(start[~nothing].min())} on: a padding mask turned over."
    )
    return False, evidence, TURN


def _padding_by_content(case: Case) -> Told | None:
    batch, _, _, keys = case.shape
    visible = case.seen[0].any(1)
    key = case.inputs["key"].transpose(1, 2).flatten(2)
    same = torch.zeros(batch, keys, dtype=torch.bool, device=key.device)
    same[:, 1:] = (key[:, 1:] == key[:, :-1]).all(-1)
    same[:, :-1] |= same[:, 1:].clone()
    alike = same | (key == 0).all(-1) | ~key.isfinite().all(-1)
    alike = alike.expand(batch, keys)
    inverted = visible.any(-1) & ~visible.all(-1) & (alike | ~visible).all(-1) & ~(alike & ~visible).any(-1)
    if not bool(inverted.any()):
        return None
    number = int(inverted.int().argmax())
    evidence = (
        f"the {int(visible[number].sum())} keys that queries of sequence {number} see are all 0, not finite or "
        f"equal to each other, as padding is, and the {int((~visible[number]).sum())} that they don't see are not."
    )
    return True, evidence, TURN
