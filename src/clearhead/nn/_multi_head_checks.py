"""The checks of the multi-head modules: of their sizes, their inputs, and torch's keywords."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from clearhead.base.arrays import check_float
from clearhead.base.errors import ClearheadError, ShapeError, columns
from clearhead.base.numbers import check_count
from clearhead.nn._heads import check_dtype, check_linear


class Projection(NamedTuple):
    """The projection of an input. `width`, `weight`: None for a layer that is no nn.Linear and checks its input."""

    name: str
    width: int | None
    weight: Tensor | None

    @classmethod
    def by(cls, name: str, layer: nn.Module) -> Projection:
        weight = check_linear(name, layer)
        width = getattr(layer, "in_features", 0) or None if weight is None else weight.shape[1]  # a lazy layer has 0
        return cls(f"{name}.weight", width, weight)


def check_sizes(embed_dim: Any, num_heads: Any, head_dim: Any) -> tuple[int, int, int]:
    """The three sizes, checked; head_dim None is embed_dim / num_heads, which must be whole."""
    width, heads = check_count(embed_dim, 1, "embed_dim"), check_count(num_heads, 1, "num_heads")
    if head_dim is not None:
        return width, heads, check_count(head_dim, 1, "head_dim")
    if width % heads:
        raise ClearheadError(
            f"embed_dim is {width}, which num_heads = {heads} does not divide; embed_dim comes first, as in torch.\n"
            f"Pass head_dim, the width of a head, which is free: MultiHeadAttention({width}, {heads}, "
            f"head_dim={-(-width // heads)})."
        )
    return width, heads, width // heads


def check_inputs(inputs: dict[str, Any], projections: tuple[Projection, ...], batch_first: bool = True) -> None:
    """Check inputs: vectors (B, L, E), or (L, B, E), or each without B; a value for each key; one batch size, or 1."""
    order = "B, L" if batch_first else "L, B"
    query_ndim = getattr(next(iter(inputs.values())), "ndim", 0)
    for (name, tensor), (weight_name, width, weight) in zip(inputs.items(), projections, strict=True):
        if not isinstance(tensor, Tensor):
            raise ClearheadError(f"{name} is a {type(tensor).__name__}; expected a tensor: torch.as_tensor({name}).")
        check_float(tensor, name)
        wrong_width = width is not None and (not tensor.ndim or tensor.shape[-1] != width)
        if tensor.ndim not in (2, 3) or wrong_width or tensor.ndim != query_ndim:
            _refuse_shape(name, inputs, order, "E" if width is None else str(width))
        if weight is not None:
            check_dtype(name, tensor, weight, weight_name)
    rows = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
    if "key" in rows and rows["key"][:-1] != rows["value"][:-1]:
        raise ShapeError("key and value disagree in batch or length: each key needs its value.\n" + columns(rows))
    if len(rows) == 3 and query_ndim == 3:
        _check_batch(rows, batch_first)


def _check_batch(rows: dict[str, tuple[int, ...]], batch_first: bool) -> None:
    """Check that queries and keys have one batch size, or that one of them has 1."""
    at = -3 if batch_first else -2
    if one_batch(rows["query"][at], rows["key"][at]):
        return
    place = "first: (B, L, E)" if batch_first else "second: (L, B, E)"
    advice = (
        "For inputs (L, B, E), the default of torch's modules, pass tensor.transpose(0, 1)."
        if batch_first
        else "For inputs (B, L, E) build the module with batch_first=True."
    )
    raise ShapeError(f"query and key disagree in the batch, which comes {place}.\n{columns(rows, at)}\n{advice}")


def one_batch(queries: int, keys: int) -> bool:
    """Whether the sizes are the same, or one of them 1; not by a set, since compiled code has sizes without a hash."""
    return queries == keys or queries == 1 or keys == 1


def _refuse_shape(name: str, inputs: dict[str, Any], order: str, width: str) -> None:
    raise ShapeError(
        f"{name} has shape {tuple(inputs[name].shape)}; expected ({order}, {width}), or (L, {width}) as all three.\n"
        + columns({n: tuple(t.shape) for n, t in inputs.items() if isinstance(t, Tensor)})
        + f"\nThe module makes the heads by itself, of a {name} of width {width}; it was built for that."
    )


_OF_TORCH = {
    "attn_mask": "a bool attn_mask, True where a query may not attend, is mask=~attn_mask here; a float one "
    "mask=attn_mask; of shape (B·H, Lq, Lk), .unflatten(0, (B, H)) first",
    "key_padding_mask": "mask=Padding(~key_padding_mask), since True means here that a key may be seen",
    "need_weights": "nothing: the output is never a tuple, and module.attention_weights has the weights of the call",
    "average_attn_weights": "nothing: module.attention_weights[...].mean(1) is the mean over the heads",
    "is_causal": "mask=Causal()",
}


def refuse_keywords(given: dict[str, Any]) -> None:
    """Raise an error that says what to pass for torch's keywords; for other keywords, Python's TypeError."""
    for name in given:
        if name not in _OF_TORCH:
            raise TypeError(f"MultiHeadAttention.forward() got an unexpected keyword argument {name!r}")
    raise ClearheadError(
        f"{', '.join(given)}: torch.nn.MultiheadAttention is called so, and MultiHeadAttention is not. Pass instead:\n"
        + "\n".join(f"  - for {name}: {_OF_TORCH[name]}" for name in given)
        + "\nTorchMultiheadAttention takes torch's call as it is, also inside torch's Transformer layers."
    )
