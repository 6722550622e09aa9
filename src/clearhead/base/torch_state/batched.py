"""Gradients by autograd, and those for a batch of losses (`is_grads_batched`, vmap), computed one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from clearhead.base.arrays import check_memories
from clearhead.base.torch_state.active import add_batch_dim, is_batch_of_losses, is_wrapped, remove_batch_dim
from clearhead.base.torch_state.mode import count_loss_batches
from clearhead.base.torch_state.tensor_kind import has_vmap_dimension

Gradients = tuple[Tensor | None, ...]
Compute = Callable[..., Gradients]


def views(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """A view of each: where two are one tensor, or one is made of the other, each gets its own gradient."""
    return [None if t is None else t.view_as(t) for t in tensors]


def followed_back(
    results: Any,
    grads: Any,
    tensors: Iterable[Tensor | None],
    wanted: Iterable[bool],
    create_graph: bool = False,
    retain_graph: bool = False,
) -> Gradients:
    """The gradients of the tensors that are wanted, by autograd; None for the others, and where there is none."""
    wanted = tuple(wanted)
    some = [t for t, want in zip(tensors, wanted, strict=True) if want and t is not None]
    retain_graph = retain_graph or create_graph
    found = iter(torch.autograd.grad(results, some, grads, retain_graph, create_graph, allow_unused=True))
    return tuple(next(found) if want else None for want in wanted)


def unbatched(compute: Compute, *grads: Tensor | None) -> Gradients:
    """`compute(*grads)`, computed one by one where some of the gradients are batches. None means no gradient."""
    given = [g for g in grads if g is not None]
    if any(map(is_batch_of_losses, given)):
        return _each_of(compute, grads)
    if any(map(is_wrapped, given)):
        if any(map(has_vmap_dimension, given)):
            found: Gradients = _OneByOne.apply(compute, *grads)  # type: ignore[no-untyped-call]
            return found
        given = [g for g in given if not is_wrapped(g)]  # a wrapper has no storage
    check_memories(zip(repeat("the gradient that the backward pass of attention() is given"), given, strict=False))
    return compute(*grads)


def _each_of(compute: Compute, grads: Gradients) -> Gradients:
    """The gradients for each gradient of the results that `is_grads_batched=True` has batched."""
    level = count_loss_batches()
    known = [g is not None and is_batch_of_losses(g) for g in grads]
    plain: list[Tensor | None] = [
        remove_batch_dim(g, level, 0, 0) if b and g is not None else g for g, b in zip(grads, known, strict=True)
    ]
    each = [unbatched(compute, *one) for one in _ones(plain, [0 if b else None for b in known])]
    joined = (None if parts[0] is None else torch.stack(parts) for parts in zip(*each, strict=True))
    return tuple(None if whole is None else add_batch_dim(whole, 0, level) for whole in joined)


def _ones(grads: Any, dims: Any) -> Any:
    """The gradients of each loss, in turn. A gradient without a dimension of losses is the same for all losses."""
    count = next(g.shape[dim] for g, dim in zip(grads, dims, strict=True) if dim is not None)
    columns = [[g] * count if dim is None else g.unbind(dim) for g, dim in zip(grads, dims, strict=True)]
    return zip(*columns, strict=True)


class _OneByOne(torch.autograd.Function):
    """The same for a batch of `torch.func.vmap`."""

    @staticmethod
    def forward(compute: Compute, *grads: Tensor | None) -> Gradients:
        return unbatched(compute, *grads)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, compute: Compute, *grads: Tensor | None) -> tuple[Any, Any]:
        each = [_OneByOne.apply(compute, *one) for one in _ones(grads, in_dims[1:])]  # type: ignore[no-untyped-call]
        joined = [None if parts[0] is None else torch.stack(parts) for parts in zip(*each, strict=True)]
        return tuple(joined), tuple(None if whole is None else 0 for whole in joined)
