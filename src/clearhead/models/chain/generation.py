"""The calls of one module, one of a generation's steps after the other."""

from __future__ import annotations

from typing import Any, SupportsIndex, overload

from clearhead.inspection.weights import Weights
from clearhead.models.attention_call import AttentionCall
from clearhead.models.chain.joined import joined, positions


class Generation(list[AttentionCall]):
    """The calls of a module in order, as `seen[name]` gives them: a list, which can be joined.

    >>> import torch, torch.nn.functional as F, clearhead as ch
    >>> class Block(torch.nn.Module):
    ...     def forward(self, x, past):
    ...         keys = torch.cat([past, x], 2)
    ...         return F.scaled_dot_product_attention(x, keys, keys, is_causal=x.shape[2] > 1), keys
    >>> block, past = Block(), torch.rand(1, 4, 0, 8)
    >>> with ch.watch(block) as seen:
    ...     for length in (5, 1, 1):
    ...         output, past = block(torch.rand(1, 4, length, 8), past)
    >>> [tuple(call.weights.shape) for call in seen["Block"]]
    [(1, 4, 5, 5), (1, 4, 1, 6), (1, 4, 1, 7)]
    >>> seen["Block"].joined().shape
    torch.Size([1, 4, 7, 7])
    """

    def joined(self) -> Weights:
        """All steps of a generation as one lazy matrix, as a forward over the final sequence would give it.

        Of the last generation among these calls: the last call, and those whose keys it continues. A call that
        computes all keys again (`use_cache=False`) continues none, and is joined to nothing. Each step's queries are
        rows; where beams were reordered, those that the last step's rows continue; of rejected tokens none, but for
        the last step's, which nothing has rejected yet. Masks, biases and padding are those of each step, placed at
        its keys; the empty slots of a static cache are left out. In cross attention all steps see the same keys.
        Where a window had left keys before anything was recorded, these are no columns: `positions` says what is there.
        Formula: row i is that of the step which had query i, its keys at the places where they stand in the sequence.
        Gives `Weights` (B, H, Lq, Lk), Lk the keys that the cache ever held, Lq the queries of these calls.
        Raises a `ClearheadError` for calls of several modules; where the keys of before were changed, as quantised
        caches do; where steps between are missing; where beams cannot be told apart, since in each layer that was
        watched a window has left all in which they differ; and where scales, softcaps or sinks differ.
        Cost: a copy of the queries and of the keys, once.
        """
        return joined(self)

    @property
    def positions(self) -> tuple[range, range]:
        """Where the queries and the keys of `joined()` stand in the whole sequence, as the model's cache counts it.

        Of a recording that is read from a file both are counted from the first key that it holds.
        """
        return positions(self)

    @overload
    def __getitem__(self, which: SupportsIndex) -> AttentionCall: ...

    @overload
    def __getitem__(self, which: slice) -> Generation: ...

    def __getitem__(self, which: Any) -> Any:
        found = super().__getitem__(which)
        return Generation(found) if isinstance(which, slice) else found
