"""Checks of what single heads do: how many keys their softmax chooses, and whether their values are 0."""

from __future__ import annotations

import torch

from clearhead.explanation.diagnosis.case import Case, Check, Findings, by_head, used

LEAST = 8  # queries a head: fewer may be so by chance


class Saturation(Check):
    """The largest weight is at least 0.99 for 90% of the queries that have keys to choose from.

    The gradient of a score is at most w (1 − w) times the gradient of its weight, 0.01 times here: such a softmax
    hardly learns. It is a note, since trained models have some heads that copy one token, and a warning where all heads
    of a call are like this. Source: Zhai et al. 2023.
    """

    name = "saturation"

    def find(self, case: Case) -> Findings:
        rows, choosing = case.rows, case.rows.choosing
        enough = choosing.sum((0, 2)) >= LEAST
        share = by_head((rows.largest_weight >= 0.99), choosing)
        heads = (enough & (share >= 0.9)).nonzero().flatten().tolist()
        if heads:
            largest = float(rows.largest_score[choosing].max())
            yield self.finding(
                "warning" if len(heads) == int(enough.sum()) else "note",
                f"In {len(heads)} of {case.shape[1]} heads the largest weight is 0.99 or more for "
                f"{float(share[heads].mean()):.0%} of the queries; the largest score is {largest:.3g}.",
                "Where it is not meant: scale the scores down, normalise queries and keys, or cap the scores "
                "(Dot(softcap=50.0)). Gradients through these weights are near 0.",
                heads=heads,
            )


class FewKeys(Check):
    """The effective number of keys, exp of the mean entropy over the queries that may see 8 keys or more, is ≤ 1.1.

    1.1 is the effective number of two keys with weights 0.98 and 0.02. Queries that may see fewer keys are left out:
    among few keys a small effective number means little, and a query of one key always has 1. It is a note, since
    trained models have some heads like this, and a warning where all heads of a call are like this.
    """

    name = "few effective keys"

    def find(self, case: Case) -> Findings:
        rows = case.rows
        counted = rows.counted & (rows.visible >= 8)
        enough = counted.sum((0, 2)) >= LEAST
        effective = by_head(rows.entropy, counted).exp()
        heads = (enough & (effective <= 1.1)).nonzero().flatten().tolist()
        if heads:
            visible = float(by_head(rows.visible, counted)[heads].mean())
            yield self.finding(
                "warning" if len(heads) == int(enough.sum()) else "note",
                f"{len(heads)} of {case.shape[1]} heads attend to {float(effective[heads].min()):.3g} effective keys "
                f"of {visible:.3g} that a query may see on average.",
                "Where it is not meant, scale the scores down or normalise queries and keys. `weights(...).topk(1)` "
                "gives the keys.",
                heads=heads,
            )


class Uniform(Check):
    """The entropy divided by log n is 0.999 or more on average, where the mask allows the query n keys.

    It is always a note: a freshly initialised model has 0.9999 in every head. In a trained model such a head takes the
    mean of the values.
    """

    name = "uniform heads"

    def find(self, case: Case) -> Findings:
        rows, choosing = case.rows, case.rows.choosing
        limit = rows.visible.clamp_min(2).log().to(rows.entropy)
        normalised = by_head(torch.where(choosing, rows.entropy, 0.0) / limit, choosing)
        heads = ((choosing.sum((0, 2)) >= LEAST) & (normalised >= 0.999)).nonzero().flatten().tolist()
        if heads:
            yield self.finding(
                "note",
                f"In {len(heads)} of {case.shape[1]} heads the weights are uniform over the keys that the mask allows: "
                f"their entropy is {float(normalised[heads].mean()):.5f} of the largest possible.",
                "Nothing in a freshly initialised model. In a trained one these heads take the mean of the values.",
                heads=heads,
            )


class OneKey(Check):
    """95% of a head's queries give 90% of their softmax to the same key of their sequence, or to the head's sink.

    It is a note: heads of trained models rest on the first token or a sink where they have nothing to do (Xiao et al.
    2024). Queries that may see only one key are left out.
    """

    name = "heads that do nothing"

    def find(self, case: Case) -> Findings:
        rows, choosing = case.rows, case.rows.choosing
        strong = choosing & (rows.largest_weight >= 0.9)
        votes = torch.zeros(*case.shape[:2], case.shape[3], dtype=torch.int64, device=strong.device)
        count, key = votes.scatter_add_(-1, rows.largest_key, strong.long()).max(-1)
        resting = (choosing & (rows.sink_share >= 0.9)).sum(-1)
        queries = choosing.sum(-1)
        enough = (queries >= LEAST).any(0)  # in one sequence
        for kind, found in (("key", count), ("sink", resting)):
            share = found.sum(0) / queries.sum(0)
            heads = (enough & (share >= 0.95)).nonzero().flatten().tolist()
            if not heads:
                continue
            what = f"one key, in sequence 0 key {int(key[0, heads[0]])}" if kind == "key" else "their sinks"
            yield self.finding(
                "note",
                f"{len(heads)} of {case.shape[1]} heads give 90% of the softmax and more of "
                f"{float(share[heads].mean()):.0%} of their queries to {what}.",
                "Nothing, where a trained head rests so. `call.head_importance` says what such a head is worth.",
                heads=heads,
            )


class ZeroValues(Check):
    """A head's value is 0 at every key that some query sees, so its output is 0. The check is exact.

    It is a note: DETR's first layer begins from queries of 0, and a head may have been pruned this way.
    """

    name = "values of 0"

    def find(self, case: Case) -> Findings:
        value = case.inputs.get("value")
        if value is None or not value.shape[-1]:
            return
        counted = used(case, "value", value)
        nothing = (value == 0).all(-1) | ~counted
        seen, empty = (part.transpose(0, 1).flatten(1) for part in (counted, nothing))
        of_keys = empty.all(1) & seen.any(1)
        heads = of_keys.repeat_interleave(case.shape[1] // len(of_keys)).nonzero().flatten().tolist()
        if heads:
            yield self.finding(
                "note",
                f"The values of {len(heads)} of {case.shape[1]} heads are 0 at every key that is seen, value "
                f"{tuple(value.shape)}: their output is 0.",
                "See what makes the values, where it is not meant: a projection of 0, or a cache that is not filled.",
                heads=heads,
            )
