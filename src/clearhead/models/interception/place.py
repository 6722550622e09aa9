"""The place of a call's output, head by head, in the result of its function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clearhead.problem.record import copied


class Place:
    """The place of the output in a result: a tensor, or a tuple whose first entry is the tensor.

    `view` makes the tensor, or its gradient, (B, H, Lq, Ev), head by head; `made` makes an output a result.
    """

    def __init__(self, view: Callable[[Tensor], Tensor], made: Callable[[Tensor], Any]) -> None:
        self._view, self.made = view, made

    def tensor(self, result: Any) -> Tensor:
        """The tensor of the result that holds the output."""
        found: Tensor = result[0] if isinstance(result, tuple) else result
        return found

    def result(self, result: Any, tensor: Tensor) -> Any:
        """The same result with another tensor in its place."""
        return (tensor, *result[1:]) if isinstance(result, tuple) else tensor

    def by_head(self, tensor: Tensor) -> Tensor | None:
        """The output (B, H, Lq, Ev), a view of the tensor; None where a projection has mixed the heads."""
        return self._view(tensor)

    def kept(self) -> Place:
        """The same with copies of parameters: the model's may be freed or written to before a backward pass."""
        return self

    def gradient(self, grad: Tensor) -> Tensor:
        """The gradient of the output, (B, H, Lq, Ev), by the gradient of the tensor."""
        return self._view(grad)

    def changed(
        self, tensor: Tensor, batch: slice, heads: slice, queries: Tensor, old: Callable[[], Tensor], new: Tensor
    ) -> Tensor:
        """A copy of the tensor with the output `new` (b, h, q, Ev) in these sequences, heads and queries (q,).

        `old` computes the output that stood there.
        """
        tensor = tensor.clone(memory_format=torch.contiguous_format)  # so that `view` gives a view
        self._view(tensor)[batch, heads, queries] = new.to(tensor.dtype)
        return tensor


class Projected(Place):
    """After the last projection of `torch.nn.MultiheadAttention`: (Lq, B, E), (Lq, E), or (B, Lq, E)."""

    def __init__(self, weight: Tensor, heads: int, batch_first: bool) -> None:
        self._weight, self._heads, self._batch_first = weight, heads, batch_first

    def by_head(self, tensor: Tensor) -> None:
        return None

    def kept(self) -> Place:
        return Projected(copied(self._weight), self._heads, self._batch_first)

    def gradient(self, grad: Tensor) -> Tensor:
        grad = self._rows(grad) @ self._weight.detach().to(grad.dtype)  # (B, Lq, H · Ev)
        by_head: Tensor = grad.unflatten(-1, (self._heads, -1))  # type: ignore[no-untyped-call]
        return by_head.transpose(1, 2)

    def changed(
        self, tensor: Tensor, batch: slice, heads: slice, queries: Tensor, old: Callable[[], Tensor], new: Tensor
    ) -> Tensor:
        of_heads = self._weight.view(self._weight.shape[0], self._heads, -1)[:, heads].flatten(1)
        difference = (new - old()).transpose(1, 2).flatten(2).to(tensor.dtype)  # (B, q, h · Ev)
        tensor = tensor.clone()
        rows = self._rows(tensor)
        rows[batch, queries] = rows[batch, queries] + difference @ of_heads.to(tensor.dtype).T
        return tensor

    def _rows(self, tensor: Tensor) -> Tensor:
        """The tensor as (B, Lq, E), a view."""
        if tensor.ndim == 2:
            return tensor.unsqueeze(0)
        return tensor if self._batch_first else tensor.transpose(0, 1)


BY_HEAD = Place(lambda output: output, lambda output: output)
