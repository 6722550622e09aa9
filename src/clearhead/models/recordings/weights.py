"""The weights of recorded calls that have padding, or whose rows an edit has multiplied."""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from clearhead.base.arrays import to_tensor
from clearhead.base.errors import UnsupportedError
from clearhead.inspection.gradients import WeightGradients
from clearhead.inspection.index import Heads
from clearhead.inspection.reductions import by_query
from clearhead.inspection.reductions.base import Queries, Reduction
from clearhead.inspection.reductions.over_queries import Pool, Received
from clearhead.inspection.source import DerivedSource, FromRecord, Source
from clearhead.inspection.weights import Weights
from clearhead.problem.regions import hide_from_padding
from clearhead.problem.words import ALL_WORDS, Words


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

    `w[index]`, `dense()`, `scores`, `logsumexp` and `w @ value` are the model's own numbers. `reduce`, and so
    `entropy`, `received`, `topk` and `pool`, leave padding out: a padding query has NaN (the keys of its `topk` mean
    nothing) and adds nothing to a sum or a map; a padding key has NaN in `received`. A word's row of weights keeps all
    its keys: where a model let the word see padding, the row has the padding too.
    """

    def __init__(self, source: Source, padding: Words) -> None:
        super().__init__(source)
        self._padding = padding

    @cached_property
    def _of_words(self) -> Weights:
        """The same weights, except that a padding query sees no key."""
        of_words = partial(hide_from_padding, words=self._padding.queries)
        return Weights(DerivedSource(self._source, of_words))

    def _of_heads(self, heads: Heads) -> PaddedWeights:
        return PaddedWeights(DerivedSource(self._source, heads.of), self._padding.of(heads.batch))

    def _reduced(self, *reductions: Reduction[Any]) -> tuple[Any, ...]:
        results = self._of_words._reduced(*reductions)
        return tuple(self._without(result, one.along) for result, one in zip(results, reductions, strict=True))

    def _map(self, pick: tuple[int, ...], most: int) -> Tensor:
        return self._of_words._map(pick, most)

    def _without(self, result: Any, along: str | None) -> Any:
        """A (B, H, L, ...) result, or a tuple of these, with NaN at the positions of padding."""
        if isinstance(result, tuple):
            return tuple(self._without(part, along) for part in result)
        words = None if along is None else getattr(self._padding, along)
        if words is None or not result.is_floating_point():
            return result
        hole = self._sizes.restore((~words).unsqueeze(1).expand(-1, self._sizes.heads, -1))
        return result.masked_fill(hole.reshape(*hole.shape, *(1,) * (result.ndim - hole.ndim)), torch.nan)


# Reductions of scores, or of weights divided by their sum, which a factor does not change.
OF_SCORES = by_query.LogSumExp | by_query.MaxScore | by_query.Entropy | by_query.MeanDistance
LINEAR = by_query.Output | by_query.Mass | by_query.SinkShare  # a factor multiplies these


def weights_of(source: FromRecord, padding: Words | None, factor: Tensor | None) -> Weights:
    """The weights of a record. `factor`: as in `AttentionCall`."""
    if factor is not None:
        return MultipliedWeights(source, padding or ALL_WORDS, factor)
    return Weights(source) if padding is None else PaddedWeights(source, padding)


class MultipliedWeights(PaddedWeights):
    """The weights of a recorded call, whose rows an edit multiplied after the softmax: `AttentionCall.weights`.

    >>> import torch, clearhead as ch
    >>> block, x = ch.nn.DotProductAttention(), torch.zeros(1, 1, 2, 8)
    >>> with ch.watch(block) as seen, ch.edit(block, ch.edits.ScaleHeads(factor=0.5, queries=1)):
    ...     output = block(x, x, x)
    >>> seen[0].weights[0, 0].dense()
    tensor([[0.5000, 0.5000],
            [0.2500, 0.2500]])

    A row is `factor` · softmax. Weights, output, masses and received weights are of the product; entropy and mean
    distance are of weights divided by their sum, and `scores`, `logsumexp` and `MaxScore` of the scores alone.
    """

    def __init__(self, source: Source, padding: Words, factor: Tensor) -> None:
        super().__init__(source, padding)
        self._by_head, self._factor = factor, self._sizes.restore(factor)

    def _of_heads(self, heads: Heads) -> MultipliedWeights:
        factor = self._by_head[heads.batch, heads.heads]
        return MultipliedWeights(DerivedSource(self._source, heads.of), self._padding.of(heads.batch), factor)

    def _tile(self, batch: slice, heads: slice, queries: slice, keys: slice) -> Tensor:
        return super()._tile(batch, heads, queries, keys) * self._by_head[batch, heads, queries].unsqueeze(-1)

    def _whole(self) -> Tensor:
        found = super()._whole()
        if self._by_parts():
            return found  # parts were multiplied by the factor
        return found.mul_(self._factor.unsqueeze(-1))

    def _reduced(self, *reductions: Reduction[Any]) -> tuple[Any, ...]:
        results = super()._reduced(*map(self._meant, reductions))
        return tuple(map(self._of_product, results, reductions))

    def gradients(self, value: Any, grad: Any) -> WeightGradients:
        raise UnsupportedError(
            "an edit multiplied these weights after the softmax: their gradients are not known. Watch without it."
        )

    def _map(self, pick: tuple[int, ...], most: int) -> Tensor:
        raise UnsupportedError(
            "an edit multiplied these weights after the softmax: look at parts, or at Pool(size, 'mean')."
        )

    def _times(self, value: Any) -> Any:
        return self._product(super()._times(value), self._factor.unsqueeze(-1))

    def _meant(self, reduction: Reduction[Any]) -> Reduction[Any]:
        """The reduction of the softmax from which `_of_product` makes this reduction of the product."""
        if type(reduction) is Received:
            return Received(self._of_queries(reduction.queries))
        if type(reduction) is Pool and reduction.how == "mean":
            return Pool(reduction.size, "mean", self._of_queries(reduction.queries))
        if isinstance(reduction, by_query.TopK | OF_SCORES | LINEAR):
            return reduction
        raise UnsupportedError(
            f"an edit multiplied these weights after the softmax: look at parts, not at {type(reduction).__name__}."
        )

    def _of_product(self, result: Any, reduction: Reduction[Any]) -> Any:
        factor = self._factor
        if isinstance(reduction, by_query.TopK):
            values, keys = result
            return self._product(values, factor.unsqueeze(-1)), keys
        if isinstance(reduction, LINEAR):
            return self._product(result, factor.reshape(*factor.shape, *(1,) * (result.ndim - factor.ndim)))
        return result

    def _product(self, result: Any, factor: Tensor) -> Any:
        """The product of a result and a factor, an array or a tensor as the weights give them."""
        found = to_tensor(result, "a result")
        found = found * factor.to(found.dtype)
        return found.numpy() if self._source.numpy else found

    def _of_queries(self, queries: Queries) -> Tensor:
        """The weight of each query times its factor."""
        if queries is None:
            return self._factor
        if isinstance(queries, slice):
            chosen = torch.zeros_like(self._factor)
            chosen[..., queries] = self._factor[..., queries]
            return chosen
        return self._factor * torch.as_tensor(queries, device=self._factor.device)
