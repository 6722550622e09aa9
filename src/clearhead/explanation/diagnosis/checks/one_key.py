"""Heads that send every query to one key, or to their sink."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from clearhead.explanation.diagnosis.case import Case, Check
from clearhead.explanation.diagnosis.diagnosis import Finding

MOST = 0.9  # of a query's softmax
NEARLY_ALL = 0.95
LEAST = 8  # queries a head and sequence


class OneKey(Check):
    """95% of a head's queries give 90% of their softmax to the same key of their sequence, or to the head's sink.

    It is a note: heads of trained models rest on the first token or a sink where they have nothing to do (Xiao et al.
    2024). Queries that may see only one key are left out.
    """

    name = "heads that do nothing"
    looks_for = "heads that send all queries to one key or sink"

    def find(self, case: Case) -> Iterator[Finding]:
        rows = case.rows
        choosing = rows.choosing
        strong = choosing & (rows.largest_weight >= MOST)
        votes = torch.zeros(*case.shape[:2], case.shape[3], dtype=torch.int64, device=strong.device)
        votes.scatter_add_(-1, rows.largest_key, strong.long())
        count, key = votes.max(-1)
        resting = (choosing & (rows.sink_share >= MOST)).sum(-1)
        queries = choosing.sum(-1)
        enough = (queries >= LEAST).any(0)
        for kind, found in (("key", count), ("sink", resting)):
            share = found.sum(0) / queries.sum(0)
            heads = (enough & (share >= NEARLY_ALL)).nonzero().flatten().tolist()
            if not heads:
                continue
            what = f"one key, in sequence 0 key {int(key[0, heads[0]])}" if kind == "key" else "their sinks"
            yield self.finding(
                case,
                "note",
                f"{len(heads)} of {case.shape[1]} heads give {MOST:.0%} of the softmax and more of "
                f"{float(share[heads].mean()):.0%} of their queries to {what}.",
                "Nothing, where a trained head rests so. `call.head_importance` says what such a head is worth.",
                heads=heads,
            )
