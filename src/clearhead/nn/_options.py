"""The options of multi-head attention beside its projections: norms, positions, scale, bias and gate."""

from __future__ import annotations

from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor, nn

from clearhead.base.arrays import check_float, to_tensor
from clearhead.base.errors import ClearheadError, ShapeError, UnsupportedError
from clearhead.base.numbers import check_number, check_positive
from clearhead.base.output.text import brief
from clearhead.base.shapes import one_or
from clearhead.base.torch_state.tensor_kind import is_dtensor
from clearhead.biases.base import Bias
from clearhead.biases.dense import DenseBias
from clearhead.nn._heads import has_one_batch, split_heads
from clearhead.nn._positions import every_position, places_of
from clearhead.nn.rotary_embedding import RotaryEmbedding
from clearhead.scores.base import Score
from clearhead.scores.bilinear import Bilinear
from clearhead.scores.dot import Dot

Gate = Literal["elementwise", "headwise"]
NORMS = (nn.RMSNorm, nn.LayerNorm)
NORMS_OR_NONE = (type(None), *NORMS)


class Rotary(Protocol):
    """A rotation by positions of one's own: a module or a function."""

    def __call__(self, x: Tensor, /, *, positions: Tensor) -> Tensor:
        """x (B, H, L, head_dim) turned, for positions (B, L), integers: of x's shape."""


def check_norm(name: str, norm: Any, head_dim: int) -> nn.Module | None:
    """The argument `query_norm` or `key_norm`: a module that takes the vectors of a head, or None."""
    if norm is not None and not isinstance(norm, nn.Module):
        raise ClearheadError(f"{name} is {brief(norm)}; expected a module, such as torch.nn.RMSNorm({head_dim}).")
    return norm


def apply_norm(name: str, norm: nn.Module | None, heads: Tensor) -> Tensor:
    """Apply a norm to projected queries or keys (B, H, L, head_dim), in the dtype of its parameters."""
    return heads if norm is None else _keep_form(name, norm, norm(heads.to(find_norm_dtype(norm, heads))), heads)


def find_norm_dtype(norm: nn.Module, heads: Tensor) -> torch.dtype:
    """Return the dtype in which a norm computes: that of its parameters, which is wider than autocast's."""
    return next((p.dtype for p in norm.parameters() if p.is_floating_point()), heads.dtype)


def _keep_form(name: str, part: Any, found: Any, heads: Tensor) -> Tensor:
    """Return what a norm or a rotary made of the heads, which have its shape, in their dtype."""
    if not isinstance(found, Tensor) or found.shape != heads.shape:
        what = tuple(found.shape) if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise ShapeError(
            f"{name} ({type(part).__name__}) gave {what}; it was given (B, H, L, head_dim) {tuple(heads.shape)}, and "
            "keeps this shape."
        )
    return found if found.dtype == heads.dtype else found.to(heads.dtype)


def check_rotary(rotary: Any, head_dim: int) -> Any:
    """The argument `rotary`: a `RotaryEmbedding`, another module or a function of positions, or None."""
    if rotary is not None and not callable(rotary):
        raise ClearheadError(
            f"rotary is {brief(rotary)}; expected RotaryEmbedding(dim={head_dim}), or a module or a function "
            "f(x, positions=...) on x (B, H, L, head_dim) and positions (B, L)."
        )
    return rotary


def apply_rotary(rotary: Any, heads: Tensor, past: int | Tensor, positions: Tensor | None) -> Tensor:
    """Turn queries or keys (B, H, L, head_dim) by their positions, (L,) or (B, L), or from `past` on."""
    if rotary is None:
        return heads
    if isinstance(rotary, RotaryEmbedding):
        return rotary(heads, past) if positions is None else rotary(heads, positions=positions)
    return _keep_form("rotary", rotary, rotary(heads, positions=places_by_row(heads, past, positions)), heads)


def places_by_row(heads: Tensor, past: int | Tensor, positions: Tensor | None) -> Tensor:
    """Return the position of each vector of (B, H, L, E), (B, L)."""
    places = every_position(heads, 0 if positions is not None else past, positions, "rotary")
    return places.expand(heads.shape[0], -1)


def validate_positions(positions: Any, name: str, x: Tensor, rotary: Any) -> Tensor | None:
    """Validate the argument `positions` or `key_positions` for an input x (B, L, E), or (L, E)."""
    if positions is None:
        return None
    if rotary is None:
        raise ClearheadError(
            f"{name} is given, and the module has no rotary, which alone reads it. Masks and biases count the places "
            "of queries and keys in the call: for packed documents pass mask=Documents.from_lengths(...)."
        )
    places = places_of(x, 0, positions, "MultiHeadAttention", name)
    assert isinstance(places, Tensor)
    return places


def validate_key_positions(
    positions: Any, key_positions: Any, query: Tensor, key: Tensor, rotary: Any
) -> Tensor | None:
    """Return the positions of the keys: `key_positions`, or else `positions`, which are those of the queries too."""
    if key_positions is not None:
        return validate_positions(key_positions, "key_positions", key, rotary)
    if positions is not None and rotary is not None and query.shape[:-1] != key.shape[:-1]:
        raise ShapeError(
            f"positions is given for queries {tuple(query.shape)}, and the keys are {tuple(key.shape)}: pass "
            "key_positions too, one position for each key."
        )
    return validate_positions(positions, "positions", key, rotary)


def validate_factor(name: str, given: Any, heads: int, score: Score) -> float | Tensor | None:
    """Validate the argument `scale` or `temperature`: a number, or a tensor of 1 or H numbers."""
    if given is None:
        return None
    is_tensor, own = isinstance(given, Tensor | np.ndarray), score._scale_argument()
    if is_tensor and type(score) not in (Dot, Bilinear):
        raise ClearheadError(
            f"{name} is a tensor, which multiplies the queries, and {score} is not proportional to them. Pass a number"
            f"{f' as its {own}' if own else ''}, or score=Dot()."
        )
    if own is not None:
        raise ClearheadError(f"{name} is given, and {score} has its own, by its {own}: pass one of the two.")
    if not is_tensor:
        return check_number(given, name) if name == "scale" else check_positive(given, name)
    factor = to_tensor(given, name)
    check_float(factor, name)
    if not any(tuple(factor.shape) == each for each in ((), (1,), (heads,), (heads, 1, 1))):
        raise ShapeError(f"{name} has shape {tuple(factor.shape)}; expected one number, or one a head, ({heads},).")
    return factor


def split_factors(
    score: Score, scale: float | Tensor | None, temperature: float | Tensor | None, width: int
) -> tuple[float | None, Tensor | None]:
    """Split scale and temperature into a number for the scores and a tensor for the queries, (1 or H, 1, 1).

    The number is None where it is the score's own.
    """
    number, tensor = (1.0, scale.reshape(-1, 1, 1)) if isinstance(scale, Tensor) else (scale, None)
    if isinstance(temperature, Tensor):
        apart = temperature.reshape(-1, 1, 1)
        if tensor is not None and not has_one_batch(len(tensor), len(apart)):
            raise ShapeError(
                f"scale holds {len(tensor)} numbers and temperature {len(apart)}, one for each head: cut both as the "
                "layers were."
            )
        tensor = 1 / apart if tensor is None else tensor / apart
    elif temperature is not None:
        number = (score._default_scale(width) if number is None else number) / temperature
    return number, tensor


def scale_query(query: Tensor, factor: Tensor | None) -> Tensor:
    """Multiply queries (B, H, L, E) by the tensor of `split_factors`."""
    if factor is None:
        return query
    if not one_or(len(factor), query.shape[1]):
        raise ShapeError(
            f"scale and temperature hold {len(factor)} numbers, one for each head that the module was built with, "
            f"and the layers made {query.shape[1]} heads, {tuple(query.shape)}: cut them as the layers were."
        )
    return (query * factor).to(query.dtype)


def add_bias(bias: Any, own: Bias) -> Any:
    """Add the bias of a module to that of a call, which may have none."""
    if bias is None:
        return own
    if isinstance(bias, Tensor | np.ndarray):
        bias = DenseBias(bias)
    return bias + own if isinstance(bias, Bias) else bias  # attention() raises for anything else


def check_gate(gate: Any) -> Gate | None:
    if gate is None or (isinstance(gate, str) and gate in get_args(Gate)):
        return gate  # type: ignore[return-value]
    raise ClearheadError(
        f'gate is {brief(gate)}; expected "elementwise" (a factor for each number of a head), "headwise" (one a head), '
        "or None."
    )


def compute_gate(kind: Gate, logits: Tensor, heads: Tensor) -> Tensor:
    """Return the factors of the heads' outputs (B, H, Lq, E), from 0 to 1: (B, H, Lq, E or 1).

    `logits`: what W_g made of the queries, (B, Lq, H·E), or (B, Lq, H).
    """
    split = split_heads(logits, "W_g", heads.shape[3] if kind == "elementwise" else 1)
    if split.shape[1] != heads.shape[1]:
        raise ShapeError(
            f"W_g gave gates {tuple(logits.shape)}, for {split.shape[1]} heads, and attention has {heads.shape[1]} "
            f"heads, {tuple(heads.shape)}: cut W_g, or share it out over ranks, as W_q."
        )
    return torch.sigmoid(split)


def check_shared_parameters(module: Any, heads: int) -> None:
    """Raise where a rank of tensor parallelism, which computes `heads` heads, trains parameters that all heads share.

    It would have the gradients of its own heads alone. The parameters of W_q are DTensors on such a rank.
    """
    if not torch.is_grad_enabled() or not any(map(is_dtensor, module.W_q.parameters())):
        return
    for name in ("query_norm", "key_norm", "rotary", "score", "scale", "temperature", "score_bias"):
        part, given = getattr(module, name), module._given.get(name) or ()  # the numbers that it had at first
        is_by_head = isinstance(part, Tensor) and part.numel() == heads and (heads > 1 or len(given) > 1)
        tensors = [*part.parameters()] if isinstance(part, nn.Module) else [part] if isinstance(part, Tensor) else []
        if not is_by_head and any(t.requires_grad and not is_dtensor(t) for t in tensors):
            raise UnsupportedError(
                f"{name} has parameters that all heads share, and this rank computes {heads} heads: the gradients "
                "would be those of its heads alone.\nShare out a norm by SequenceParallel(sequence_dim=1, "
                f"use_local_output=True), give a scale one number a head, or call {name}.requires_grad_(False)."
            )
