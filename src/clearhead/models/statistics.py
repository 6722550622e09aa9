"""statistics(): reduce every attention call of a model when it happens, and keep the results alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from clearhead.base.errors import ClearheadError
from clearhead.base.managers import Managed
from clearhead.inspection.reductions.base import Reduction
from clearhead.models.tap.choice import Heads, Layers
from clearhead.models.tap.padding import checked
from clearhead.models.tap.refused import refuse_compiled
from clearhead.models.use.asked import asked_to_reduce
from clearhead.models.use.means import Means
from clearhead.models.use.recorded import recorded
from clearhead.models.use.recorder import Recorder
from clearhead.models.use.reduced import Statistics


def statistics(
    model: nn.Module,
    reductions: Sequence[Reduction] | Reduction,
    padding: Any = None,
    *,
    every: int = 1,
    layers: Layers = None,
    heads: Heads = None,
    merge: Means | None = None,
    fuse: bool = False,
) -> AbstractContextManager[Statistics]:
    """Reduce every attention call that the model makes inside the `with`, its outputs bit-identical.

    >>> import torch, torch.nn.functional as F, clearhead as ch
    >>> class Block(torch.nn.Module):
    ...     def forward(self, x):
    ...         return F.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> block = Block()
    >>> with ch.models.statistics(block, [ch.reductions.Entropy(), ch.reductions.TopK(5)]) as seen:
    ...     output = block(torch.rand(1, 4, 10, 8))
    >>> entropy, (largest, keys) = seen.calls[0].results
    >>> entropy.shape, largest.shape
    (torch.Size([1, 4, 10]), torch.Size([1, 4, 10, 5]))

    `reductions`: those of `clearhead.reductions`, or of your own. Each call is reduced when it happens, and query and
    key are not kept: `calls[i].results` are in the order of `reductions`, in O(Lq + Lk) memory a call.
    `model`, `padding`, `every`, `layers`: as for `clearhead.watch`, which keeps the calls themselves. `heads`: which
    heads are reduced, a number, a slice or some numbers. `merge`: a `Means`, to which each call is added instead of
    being listed.
    `fuse`: take each call's output from the pass of its statistics, in place of the backend's: within 1e-5 of it, and
    faster on long sequences. Of calls on "sdpa" and "clearhead" without padding, dropout, gradients and autocast, where
    nothing else (an edit, a watch) looks at the model; all others are computed as without it.
    Gives `Statistics`. Raises as `watch` does, and a `ClearheadError` for what is no reduction.
    Cost: a pass over each call's weights, for all of its reductions.
    """
    if not isinstance(model, nn.Module):
        raise ClearheadError(f"statistics takes a torch.nn.Module; got a {type(model).__name__}.")
    refuse_compiled(model)
    wanted = asked_to_reduce(reductions, every, layers, heads, merge, fuse)
    words = None if padding is None else checked(padding)
    return Managed("models.statistics(...)", lambda: recorded(Recorder(model, wanted, words), _given))


def _given(recorder: Recorder) -> Statistics:
    return Statistics(recorder.reduced)
