"""The calls of a recording beside the masks that were expected of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clearhead.base.errors import ClearheadError
from clearhead.base.numbers import check_number
from clearhead.base.text import said
from clearhead.models.attention_call import AttentionCall
from clearhead.models.audits._causes import described
from clearhead.models.audits._expected import Expected, expected_of
from clearhead.models.audits._pairs import KnownPairs, shares, worst_row
from clearhead.models.audits.audited_call import AuditedCall
from clearhead.models.calls import Calls

TOLERANCE = 1e-6


class Audit(Calls[AuditedCall]):
    """What each call of a recording really allowed, beside a mask. `Recording.check` gives it.

    >>> import torch, torch.nn.functional as F, clearhead as ch
    >>> class Block(torch.nn.Module):
    ...     def forward(self, x):
    ...         return F.scaled_dot_product_attention(x, x, x)             # is_causal was forgotten
    >>> block = Block()
    >>> with ch.watch(block) as seen:
    ...     output = block(torch.zeros(1, 2, 4, 8))
    >>> audit = seen.check(ch.Causal())
    >>> audit.ok()
    False
    >>> audit.worst.leaked[0, 0]                        # of each query: what goes where it should not
    tensor([0.7500, 0.5000, 0.2500, 0.0000])
    >>> audit.table()[0]["hidden"]
    0.0

    `calls`, or by number, module and run as in a `Recording`: each an `AuditedCall`, with `leaked` and `hidden`.
    `worst`: the call with the largest share. `str(audit)` names the first call that is not as expected, the head and
    the query where it is worst, where the mass went, and what may be the cause.
    """

    @property
    def worst(self) -> AuditedCall:
        """The call with the largest share of a query, leaked or hidden; one with NaN before all others."""
        return max(self.calls, key=lambda call: (call.most != call.most, call.most))

    def ok(self, tolerance: float = TOLERANCE) -> bool:
        """Whether no query of any call has more than `tolerance` of its softmax leaked or hidden; 0: not one pair."""
        most = _checked(tolerance)
        return all(call.most <= most for call in self.calls)

    def table(self) -> list[dict[str, Any]]:
        """A row for each call and head, as `pandas.DataFrame` takes them.

        Its columns: run, module, kind, backend, queries, keys, head; leaked and hidden, means over the queries that
        count; most leaked and most hidden, the largest of them.
        """
        return [row for call in self.calls for row in call.rows()]

    def __str__(self) -> str:
        return said(self, self.told)

    def told(self, tolerance: float = TOLERANCE) -> str:
        """The same as `str`, for another tolerance."""
        most = _checked(tolerance)
        wrong = [call for call in self.calls if not call.most <= most]
        if not wrong:
            return f"{len(self.calls)} calls attend as expected."
        return f"{len(wrong)} of {len(self.calls)} calls do not attend as expected. The first:\n{described(wrong[0])}"


def _checked(tolerance: float) -> float:
    number = check_number(tolerance, "tolerance")
    if not 0 <= number < 1:
        raise ClearheadError(f"tolerance is {tolerance!r}; expected a share of the softmax, from 0 to below 1.")
    return number


def audit(calls: Sequence[AttentionCall], expected: Expected) -> Audit:
    """Each call beside what is expected of it; of a mapping, those that a pattern of it fits."""
    known, masks = KnownPairs(), expected_of(calls, expected)
    found = []
    for call, mask in masks:
        pairs = known.of(call, mask)
        leaked, hidden = shares(call, pairs)
        queries = pairs.rows.expand(leaked.shape)
        found.append(
            AuditedCall(
                call=call,
                expected=mask,
                leaked=leaked,
                hidden=hidden,
                queries=queries,
                most_leaked=worst_row(call, pairs.extra, leaked, queries),
                most_hidden=worst_row(call, pairs.missing, hidden, queries),
                disjoint=pairs.both is None,
            )
        )
    return Audit(found)
