"""The weights of a call whose batch has padding."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from clearhead.inspection.reductions.base import Reduction
from clearhead.inspection.source import FromRecord
from clearhead.inspection.weights import Weights
from clearhead.models._padding import Real
from clearhead.problem.visible import seen_by


class PaddedWeights(Weights):
    """The weights of a recorded call, where some positions are padding. `AttentionCall.weights` gives it.

    >>> import torch, torch.nn.functional as F, clearhead as ch
    >>> class Block(torch.nn.Module):
    ...     def forward(self, x, attention_mask):
    ...         return F.scaled_dot_product_attention(x, x, x, attn_mask=attention_mask[:, None, None].bool())
    >>> block = Block()
    >>> with ch.watch(block) as recording:
    ...     output = block(torch.zeros(1, 1, 4, 8), attention_mask=torch.tensor([[1, 1, 1, 0]]))
    >>> recording.calls[0].weights.entropy()                    # of the words alone
    tensor([[[1.0986, 1.0986, 1.0986,    nan]]])
    >>> recording.calls[0].weights.received()
    tensor([[[1., 1., 1., nan]]])
    >>> recording.calls[0].weights[0, 0, 3]                     # the model's own numbers
    tensor([0.3333, 0.3333, 0.3333, 0.0000])

    `w[index]`, `dense()`, `scores`, `logsumexp` and `w @ value` are the model's own. `reduce`, and so
    `entropy`, `received`, `topk` and `pool`, leave padding out: a padding query has NaN (the keys of its `topk` mean
    nothing) and adds nothing to a sum or a map; a padding key has NaN in `received`. A word's row of weights is never
    cut: where a model let it see padding, that padding stays in the row.
    """

    def __init__(self, source: FromRecord, padding: Real) -> None:
        super().__init__(source)
        self._recorded, self._padding = source.record, padding

    @cached_property
    def _of_words(self) -> Weights:
        """The same weights, but that a padding query sees nothing."""
        problem = self._recorded.problem
        words = self._padding.queries
        if words is not None:
            problem = problem._replace(visible=seen_by(words, problem.visible, problem.sizes))
        return Weights(FromRecord(self._recorded._replace(problem=problem), {}))

    def reduce(self, *reductions: Reduction) -> tuple[Any, ...]:
        results = self._of_words.reduce(*reductions)
        return tuple(
            tuple(self._without(part, reduction.along) for part in result)
            if isinstance(result, tuple)
            else self._without(result, reduction.along)
            for result, reduction in zip(results, reductions, strict=True)
        )

    def _map(self, pick: tuple[int, ...], most: int) -> Tensor:
        return self._of_words._map(pick, most)

    def _without(self, result: Tensor, along: str | None) -> Tensor:
        """A (B, H, L, ...) result with NaN at the positions of padding."""
        words = None if along is None else getattr(self._padding, along)
        if words is None or not result.is_floating_point():
            return result
        hole = ~words.unsqueeze(1)
        return result.masked_fill(hole.reshape(*hole.shape, *(1,) * (result.ndim - 3)), torch.nan)
