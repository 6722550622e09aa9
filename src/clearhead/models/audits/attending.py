"""A test of what a model's calls allow."""

from __future__ import annotations

from typing import Any

from torch import nn

from clearhead.models.audits._expected import Expected
from clearhead.models.audits._running import run
from clearhead.models.audits.audit import TOLERANCE
from clearhead.models.watch import watch


def assert_attends(
    model: nn.Module, inputs: Any, mask: Expected, *, padding: Any = None, tolerance: float = TOLERANCE
) -> None:
    """Raise an AssertionError, unless every attention call of the model allows what the mask allows, and no more.

    >>> import torch, torch.nn.functional as F, clearhead as ch
    >>> class Block(torch.nn.Module):
    ...     def forward(self, x):
    ...         return F.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> ch.assert_attends(Block(), torch.rand(1, 2, 4, 8), ch.Causal())
    >>> ch.assert_attends(Block(), torch.rand(1, 2, 4, 8), ch.Causal() & ch.SlidingWindow(before=1))
    Traceback (most recent call last):
        ...
    AssertionError: 1 of 1 calls do not attend as expected. The first:
    ...

    `model` is run once on `inputs`, without gradients, in the mode that it is in: a dict of keywords, such as a
    tokenizer gives, a tuple of arguments, or one argument. `mask`: as for `Recording.check`. `padding`: as for `watch`.
    `tolerance`: how much of a query's softmax may be leaked or hidden; 0 allows not one pair.
    The message names the first call that differs, its worst head and query, where the mass went, and what may be the
    cause. Raises a `ClearheadError` where no call is seen, or the mask does not fit one. Cost: a run of the model under
    `watch`, and that of `check`.
    """
    with watch(model, padding) as seen:
        run(model, inputs)
    audit = seen.check(mask)
    if not audit.ok(tolerance):
        raise AssertionError(audit.told(tolerance))
