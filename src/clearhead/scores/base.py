"""What a score is, and the normal form the engines compute."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from clearhead._errors import ClearheadError, ShapeError
from clearhead._shapes import as_inputs, columns, to_tensor

Phi = Literal["mul", "tanh_add", "sq_diff"]


class Pairwise(NamedTuple):
    """The normal form of a score: s_ij = softcap(scale · Σ_d weight_d · φ(query_id, key_jd)).

    φ(a, b) is a·b (`mul`), tanh(a + b) (`tanh_add`) or (a − b)² (`sq_diff`); softcap(s) is c·tanh(s/c).
    `sinks`, one logit a head in the softmax's denominator, has its place here.
    """

    phi: Phi
    query: Tensor  # (B, H, Lq, D)
    key: Tensor  # (B, Hk, Lk, D)
    weight: Tensor | None = None  # (D,); None: ones
    scale: float = 1.0
    softcap: float | None = None
    sinks: Tensor | None = None  # (H,)


class Score(nn.Module, ABC):
    """How a query meets a key. A score of your own is a subclass with `tile()`; that is enough for every use.

    >>> import torch, clearhead as ch
    >>> class Manhattan(ch.Score):
    ...     def tile(self, query, key):
    ...         return -(query.unsqueeze(-2) - key.unsqueeze(-3)).abs().sum(-1)
    >>> ch.attention(torch.rand(3, 2), torch.rand(5, 2), torch.rand(5, 4), score=Manhattan()).shape
    torch.Size([3, 4])

    The score of a pair may depend on that query and that key alone: the engines ask for any part of the matrix.
    `lower()`, where a score has it, rewrites it in the normal form that the fused kernels take. It must preserve the
    scores themselves, not only their softmax.
    """

    @abstractmethod
    def tile(self, query: Tensor, key: Tensor) -> Tensor:
        """Raw scores of a part: (..., Lq, Eq) and (..., Lk, Ek) give (..., Lq, Lk)."""

    def lower(self, query: Tensor, key: Tensor) -> Pairwise | None:
        """The normal form over query (B, H, Lq, Eq) and key (B, Hk, Lk, Ek), or None if there is none."""
        return None

    def check(self, query: Tensor, key: Tensor) -> None:
        """Raise a `ClearheadError` for widths or dtypes this score cannot take."""
        for name, parameter in self.named_parameters():
            if parameter.dtype != query.dtype or parameter.device != query.device:
                dtype = str(query.dtype).removeprefix("torch.")
                raise ClearheadError(
                    f"the score's parameter {name} is {parameter.dtype} on {parameter.device}, and the query is "
                    f"{query.dtype} on {query.device}, shape {tuple(query.shape)}.\n"
                    f"Pass score.to(torch.{dtype}), or query and key as {parameter.dtype} on {parameter.device}."
                )

    @classmethod
    def example(cls) -> tuple[Score, int, int]:
        """A score to try this class with, and the widths (Eq, Ek) it takes."""
        return cls(), 4, 4

    def forward(self, query: Any, key: Any) -> Any:
        """Raw scores (..., Lq, Lk), before any mask or bias; leading dimensions broadcast, key heads are grouped.

        NumPy in, NumPy out. Makes the whole matrix: for long inputs see `clearhead.weights(...).scores(index)`.
        """
        queries, keys, _, sizes = as_inputs(to_tensor_float(query, "query"), to_tensor_float(key, "key"), None)
        self.check(queries, keys)
        keys = keys.repeat_interleave(sizes.heads // keys.shape[1], dim=1)
        scores = sizes.restore(checked_tile(self, queries, keys))
        return scores.detach().numpy() if isinstance(query, np.ndarray) else scores


def to_tensor_float(array: Any, name: str) -> Tensor:
    """As `to_tensor`; integer and boolean NumPy arrays become float64."""
    if isinstance(array, Tensor):
        return array
    tensor = to_tensor(array, name)
    return tensor if tensor.is_floating_point() else tensor.double()


def checked_tile(score: Score, query: Tensor, key: Tensor) -> Tensor:
    """`score.tile`, its result's shape checked: a score of a person's own may be wrong."""
    tile = score.tile(query, key)
    expected = (*query.shape[:-1], key.shape[-2])
    if not isinstance(tile, Tensor) or tile.shape != expected:
        got = tuple(tile.shape) if isinstance(tile, Tensor) else type(tile).__name__
        raise ShapeError(
            f"{type(score).__name__}.tile gave {got} for query {tuple(query.shape)} and key {tuple(key.shape)}; "
            f"expected a tensor {expected}: one score for each query and key, over any leading dimensions."
        )
    return tile


def check_width(score: Score, tensor: Tensor, width: int, name: str) -> None:
    if tensor.shape[-1] != width:
        raise ShapeError(
            f"{name} has width {tensor.shape[-1]}, shape {tuple(tensor.shape)}; {score} takes {name}s of "
            f"width {width}.\nBuild the score with {name}_dim={tensor.shape[-1]}, or project the {name} first."
        )


def check_equal_width(score: Score, query: Tensor, key: Tensor) -> None:
    """Raise where a score that compares vectors is given two widths."""
    if query.shape[-1] != key.shape[-1]:
        widths = f"query_dim={query.shape[-1]}, key_dim={key.shape[-1]}"
        raise ShapeError(
            f"{type(score).__name__} needs query and key of one width E, and they differ.\n"
            + columns({"query": tuple(query.shape), "key": tuple(key.shape)}, -1)
            + f"\nPass score=Bilinear({widths}) or Additive({widths}, hidden=...), which take two widths."
        )


def check_positive(value: float, name: str) -> float:
    if not value > 0:
        raise ClearheadError(f"{name} is {value}; expected a number above 0.")
    return float(value)


def given_parameter(weight: Any, name: str, ndim: int) -> nn.Parameter:
    """A parameter from given weights: a Parameter is shared, anything else is copied."""
    if isinstance(weight, nn.Parameter):
        parameter = weight
    else:
        parameter = nn.Parameter(to_tensor_float(weight, name).detach().clone())
    if parameter.ndim != ndim:
        expected = {1: "(hidden,)", 2: "(out, in), as nn.Linear has it"}[ndim]
        raise ShapeError(f"{name} has shape {tuple(parameter.shape)}; expected {expected}.")
    return parameter


def linear_weight(out: int, width: int) -> nn.Parameter:
    """A fresh (out, in) weight, initialised as nn.Linear does."""
    for name, size in (("hidden", out), ("width", width)):
        if size < 1:
            raise ClearheadError(f"{name} is {size}; expected a size of at least 1.")
    weight = nn.Parameter(torch.empty(out, width))
    bound = width**-0.5
    nn.init.uniform_(weight, -bound, bound)
    return weight
