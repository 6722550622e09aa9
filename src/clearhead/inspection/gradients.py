"""The gradients of the weights as a lazy matrix."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from clearhead.base.arrays import ArrayT, accumulated
from clearhead.base.errors import ClearheadError
from clearhead.base.numbers import check_flag
from clearhead.base.torch_state.contexts import without_autocast
from clearhead.base.torch_state.versions import Versions
from clearhead.engines.base import Engine
from clearhead.engines.tiled.tiles import grouped_product
from clearhead.inspection.index import Heads
from clearhead.inspection.matrix import LazyMatrix
from clearhead.problem.guard import guard
from clearhead.problem.partial import Rows
from clearhead.problem.problem import Problem
from clearhead.problem.record import tensors_of
from clearhead.problem.region import Region
from clearhead.problem.regions import cut


class WeightGradients(LazyMatrix[ArrayT]):
    """How much the loss changes with each weight, computed where it is looked at. `Weights.gradients` makes it.

    >>> import torch, clearhead as ch
    >>> query, key, value = (torch.rand(2, 8, 50, 16, requires_grad=True) for _ in range(3))
    >>> output = ch.attention(query, key, value, mask=ch.Causal())
    >>> grad, = torch.autograd.grad(output.square().sum(), output)
    >>> g = ch.weights(query, key, mask=ch.Causal()).gradients(value, grad)
    >>> g.shape, g[0, 3, 17].shape                        # one exact row of ∂L/∂A
    (torch.Size([2, 8, 50, 50]), torch.Size([50]))
    >>> g.by_key(positive=True).shape                     # how much each key's weights raise the loss
    torch.Size([2, 8, 50])

    Formula: ∂L/∂A_ij = Ȯ_i · V_j, with A the weights, Ȯ = ∂L/∂O the gradient of the output O = A·V. `by_query` and
    `by_key` sum A ∘ ∂A, the weights times their gradients, without the matrix. The results have no gradients. Indices,
    sums, extremes and operators are those of `Weights`; indices give pairs that are not allowed, too.
    Memory is O(Lq + Lk) and the result. Source: Chefer, Gur and Wolf 2021, "Transformer Interpretability Beyond
    Attention Visualization", who roll (A ∘ ∂A)⁺ out over the layers.
    """

    _instead = "Index the part you need (g[..., -1, :]), use by_query() or by_key()"
    _limits_parts = True

    def __init__(
        self, problem: Problem, engine: Engine, rows: tuple[Tensor, Tensor], grad: Tensor, numpy: bool
    ) -> None:
        self._given, self._problem, self._sizes = problem, guard(problem), problem.sizes
        self._engine, self._grad, self._numpy = engine, grad, numpy
        self._rows = Rows(*rows, grad)  # the kernels read no δ for this
        self._read = Versions([("grad", grad), ("value", problem.value), *tensors_of(problem)])  # type: ignore[list-item]

    @property
    def dtype(self) -> torch.dtype:
        return accumulated(self._problem.query.dtype)

    def _head(self) -> str:
        return f"WeightGradients({tuple(self.shape)}, {self.dtype}, engine={self._engine.name!r})"

    def _tile(self, batch: slice, heads: slice, queries: slice, keys: slice) -> Tensor:
        """∂L/∂A, of pairs that are not allowed, too."""
        self._check()
        value = cut(self._given, Region(batch, heads, queries, keys, masked=False)).value
        grad = self._grad[batch, heads, queries]
        assert value is not None
        with torch.no_grad(), without_autocast(self.device):
            return grouped_product(grad, value.to(grad.dtype).transpose(-1, -2))

    def _of_heads(self, heads: Heads) -> WeightGradients[ArrayT]:
        self._check()
        at = heads.batch, heads.heads
        rows, numpy = (self._rows.maximum[at], self._rows.log_sum[at]), self._numpy
        return WeightGradients(heads.of(self._given), self._engine, rows, self._grad[at], numpy)

    def by_query(self, positive: bool = False) -> ArrayT:
        """Σ_j A_ij ∂L/∂A_ij, (..., Lq); with `positive`, of the products above 0 alone.

        Cost: two of the five products of a backward pass.
        """
        return self._summed(positive, by_key=False)

    def by_key(self, positive: bool = False) -> ArrayT:
        """Σ_i A_ij ∂L/∂A_ij, (..., Lk); with `positive`, of the products above 0 alone. Cost: as `by_query`."""
        return self._summed(positive, by_key=True)

    def _summed(self, positive: bool, by_key: bool) -> ArrayT:
        self._check()
        positive = check_flag(positive, "positive")
        problem = self._problem
        with torch.no_grad(), without_autocast(self.device):
            found = self._engine.contributions(problem, self._rows, self._grad, None, by_key, positive)
        return self._out(self._sizes.restore(found))

    def _check(self) -> None:
        """Raise where a tensor has been written to since."""
        found = self._read.written()
        if found is not None:
            raise ClearheadError(f"the {found[0]} of gradients() was modified in place after it; pass tensor.clone().")

    def _out(self, tensor: Tensor) -> ArrayT:
        return cast(ArrayT, tensor.detach().numpy() if self._numpy else tensor.detach())
