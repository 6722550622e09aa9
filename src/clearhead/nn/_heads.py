"""The inputs, projections, heads and masks of the multi-head modules, checked.

The heads of a call are counted in the tensors that the layers make: a rank, or a pruned layer, may have fewer.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from clearhead.base.arrays import FLOATS, check_kind, check_memories, owned
from clearhead.base.contexts import is_autocasting, is_cast_together
from clearhead.base.errors import ClearheadError, ShapeError, UnsupportedError, columns
from clearhead.base.mode import get_mode
from clearhead.base.numbers import check_count
from clearhead.base.shapes import Sizes, broadcasts
from clearhead.base.tensor_kind import holds_all_bytes, is_dtensor
from clearhead.base.torch_private import has_hooks, read_linear
from clearhead.biases.base import Bias
from clearhead.masks.base import Mask
from clearhead.masks.dense import check_keep
from clearhead.problem.lengths import check_mask

LINEAR = (nn.Linear, NonDynamicallyQuantizableLinear)  # torch's attention has the second
SHARE_OUT = "Under tensor parallelism share out W_q, W_k and W_v by ColwiseParallel, and W_o by RowwiseParallel."
DIVIDES = "The number of ranks must divide num_heads and num_kv_heads."


def is_plain_linear(layer: nn.Module) -> bool:
    """Whether a layer computes x · weightᵀ + bias, without a hook or an adapter."""
    return type(layer) in LINEAR and not has_hooks(layer)


def reset_modules(*modules: nn.Module | None) -> None:
    """Call `reset_parameters` of these modules and of those inside, where they have it."""
    for module in modules:
        for part in () if module is None else module.modules():
            drawn = getattr(part, "reset_parameters", None)
            if callable(drawn):
                drawn()


def check_linear(name: str, layer: nn.Module) -> Tensor | None:
    """Validate and return the weight of an nn.Linear; None for other layers, which validate their own."""
    if type(layer) not in LINEAR:
        return None
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    if not isinstance(weight, Tensor):
        return None
    check_weight(f"{name}.weight", weight, f"{name}.bias", bias)
    return weight


def check_weight(name: str, weight: Tensor, bias_name: str, bias: Any) -> None:
    """Check a matrix (out, in), and a bias (out,) beside it, or none."""
    if weight.ndim != 2:
        raise ShapeError(f"{name} has shape {tuple(weight.shape)}; expected (out, in).")
    if not isinstance(bias, Tensor):
        return
    if bias.shape != weight.shape[:1]:
        raise ShapeError(
            f"{bias_name} has shape {tuple(bias.shape)} and {name} {tuple(weight.shape)}, (out, in); expected one "
            f"number for each row, ({weight.shape[0]},)."
        )
    if bias.device != weight.device or not have_one_dtype(bias, weight):
        raise ClearheadError(
            f"{bias_name} is {bias.dtype} on {bias.device}, and {name} {weight.dtype} on {weight.device}: the module "
            f"was converted in part. Convert all of it: module.to({str(weight.device)!r}, {weight.dtype})."
        )


def have_one_dtype(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one device have one dtype, or autocast gives them one."""
    return a.dtype == b.dtype or is_cast_together(a.device, a.dtype, b.dtype)


def check_dtype(name: str, tensor: Tensor, weight: Tensor, weight_name: str) -> None:
    """Check that a tensor has the dtype and the device of the weight that projects it."""
    if tensor.device != weight.device or not have_one_dtype(tensor, weight):
        raise ClearheadError(
            f"{name}, shape {tuple(tensor.shape)}, is {tensor.dtype} on {tensor.device}, and the module's weights are "
            f"{weight.dtype} on {weight.device}.\nPass module.to({name}) once, or {name}.to(module.{weight_name})."
        )


def check_shared_out(name: str, weight: Any, head_dim: int) -> None:
    """Check that a DTensor gives each rank the same number of whole heads.

    All ranks raise alike, because one that raises alone blocks the others.
    """
    ranks = prod(weight.device_mesh.size(n) for n, placed in enumerate(weight.placements) if placed.is_shard(0))
    if weight.shape[0] % (ranks * head_dim):
        raise ShapeError(
            f"{name}, shape {tuple(weight.shape)}, (out, in), is shared out over {ranks} ranks, and makes no whole "
            f"heads of head_dim = {head_dim}, as many on each.\n{DIVIDES}"
        )


class Projection(NamedTuple):
    """The projection of an input; `width` and `weight` are None for a layer that is no nn.Linear."""

    name: str
    width: int | None
    weight: Tensor | None

    @classmethod
    def by(cls, name: str, layer: nn.Module, head_dim: int = 1) -> Projection:
        weight = check_linear(name, layer)
        if weight is not None and is_dtensor(weight) and not get_mode().compiled:  # the compiler traces no device mesh
            check_shared_out(f"{name}.weight", weight, head_dim)
        width = getattr(layer, "in_features", 0) or None if weight is None else weight.shape[1]  # a lazy layer has 0
        return cls(f"{name}.weight", width, weight)


def check_sizes(embed_dim: Any, num_heads: Any, head_dim: Any) -> tuple[int, int, int]:
    """Validate the three sizes; `head_dim` None is embed_dim / num_heads."""
    width, heads = check_count(embed_dim, 1, "embed_dim"), check_count(num_heads, 1, "num_heads")
    if head_dim is not None:
        return width, heads, check_count(head_dim, 1, "head_dim")
    if width % heads:
        raise ClearheadError(
            f"embed_dim is {width}, which num_heads = {heads} does not divide; embed_dim comes first, as in torch.\n"
            f"Pass the width of a head: MultiHeadAttention({width}, {heads}, head_dim={-(-width // heads)})."
        )
    return width, heads, width // heads


def fits_plain_layers(inputs: tuple[Any, Any, Any], layers: tuple[tuple[nn.Module, int], ...]) -> bool:
    """Whether plain tensors meet plain linear layers that fit them, in eager code: then no check below can fail.

    Args:
        inputs: query, key and value.
        layers: W_q, W_k, W_v and W_o, each with the width that it makes.
    """
    mode = get_mode()
    if mode.autocast or not mode.eager:
        return False
    first, last, widths = inputs[0], None, []
    for tensor, (layer, _) in zip(inputs, layers, strict=False):
        if (
            type(layer) not in LINEAR
            or type(tensor) is not Tensor
            or tensor.is_nested
            or tensor.layout is not torch.strided
        ):
            return False
        if tensor is not last:  # one tensor is all three in self-attention
            fits = tensor.dtype is first.dtype and tensor.dtype in FLOATS and tensor.device == first.device
            if not fits or not holds_all_bytes(tensor):
                return False
            last = tensor
        widths.append(tensor.shape[-1] if tensor.ndim in (2, 3) else -1)
    query, key, value = inputs
    if query.shape[:-2] != key.shape[:-2] or key.shape[:-1] != value.shape[:-1] or type(layers[-1][0]) not in LINEAR:
        return False
    parameters = read_linear(*layers)
    for (weight, bias), (_, width), taken in zip(parameters, layers, (*widths, layers[0][1]), strict=False):
        for parameter, shape in ((weight, (width, taken)), (bias, (width,))):
            if parameter is not None and not (
                parameter.shape == shape and parameter.dtype is first.dtype and parameter.device == first.device
            ):
                return False
    return bool(parameters)


def check_inputs(inputs: dict[str, Any], projections: tuple[Projection, ...], batch_first: bool = True) -> None:
    """Check inputs (B, L, E), or (L, B, E), or each without B: a value for each key, and one batch size, or 1."""
    order = "B, L" if batch_first else "L, B"
    query_ndim = getattr(next(iter(inputs.values())), "ndim", 0)
    last = None
    for (name, tensor), (weight_name, width, weight) in zip(inputs.items(), projections, strict=True):
        if not isinstance(tensor, Tensor):
            raise ClearheadError(f"{name} is a {type(tensor).__name__}; expected a tensor: torch.as_tensor({name}).")
        if tensor is not last:  # one tensor is all three in self-attention
            check_kind(tensor, name)
        last = tensor
        wrong_width = width is not None and (not tensor.ndim or tensor.shape[-1] != width)
        if tensor.ndim not in (2, 3) or wrong_width or tensor.ndim != query_ndim:
            _refuse_shape(name, inputs, order, "E" if width is None else str(width))
        if weight is not None:
            check_dtype(name, tensor, weight, weight_name)
    check_memories(inputs.items())
    if "key" in inputs and inputs["key"].shape[:-1] != inputs["value"].shape[:-1]:
        rows = columns({name: tuple(tensor.shape) for name, tensor in inputs.items()})
        raise ShapeError(f"key and value disagree in batch or length: each key needs its value.\n{rows}")
    if len(inputs) == 3 and query_ndim == 3:
        _check_batch(inputs, batch_first)


def _check_batch(inputs: dict[str, Tensor], batch_first: bool) -> None:
    """Check that queries and keys have one batch size, or that one of them has 1."""
    at = -3 if batch_first else -2
    if has_one_batch(inputs["query"].shape[at], inputs["key"].shape[at]):
        return
    rows = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
    place = "first: (B, L, E)" if batch_first else "second: (L, B, E)"
    advice = (
        "For inputs (L, B, E), the default of torch's modules, pass tensor.transpose(0, 1)."
        if batch_first
        else "For inputs (B, L, E) build the module with batch_first=True."
    )
    raise ShapeError(f"query and key disagree in the batch, which comes {place}.\n{columns(rows, at)}\n{advice}")


def has_one_batch(queries: int, keys: int) -> bool:
    """Whether the sizes are the same, or one of them is 1; without a set: sizes of compiled code have no hash."""
    return queries == keys or queries == 1 or keys == 1


def _refuse_shape(name: str, inputs: dict[str, Any], order: str, width: str) -> None:
    raise ShapeError(
        f"{name} has shape {tuple(inputs[name].shape)}; expected ({order}, {width}), or (L, {width}) as all three.\n"
        + columns({n: tuple(t.shape) for n, t in inputs.items() if isinstance(t, Tensor)})
        + f"\nThe module makes the heads by itself, of a {name} of width {width}; it was built for that."
    )


def split_heads(projected: Any, name: str, head_dim: int) -> Tensor:
    """Split (B, L, H·head_dim) into (B, H, L, head_dim), with as many heads as fit the width."""
    if not isinstance(projected, Tensor) or projected.ndim != 3:
        what = tuple(projected.shape) if isinstance(projected, Tensor) else type(projected).__name__
        raise ShapeError(f"{name} gave {what}; expected a tensor (B, L, heads · {head_dim}).")
    width = projected.shape[2]
    if width % head_dim:
        raise ShapeError(
            f"{name} gave vectors of width {width}, shape {tuple(projected.shape)}, which are no whole heads of "
            f"head_dim = {head_dim}.\n{DIVIDES}"
        )
    try:
        heads: Tensor = projected.unflatten(-1, (width // head_dim, head_dim))  # type: ignore[no-untyped-call]
        return heads.transpose(1, 2)
    except RuntimeError as error:
        if not is_dtensor(projected):
            raise
        raise UnsupportedError(
            f"{name} gave a DTensor, shape {tuple(projected.shape)}, whose shards are no whole heads of head_dim = "
            f"{head_dim}: {error}\n{DIVIDES}"
        ) from error


def check_groups(query: Tensor, key: Tensor, value: Tensor, num_heads: int, num_kv_heads: int) -> None:
    """Check that each key head serves as many query heads as the module was built for."""
    heads, key_heads, value_heads = query.shape[1], key.shape[1], value.shape[1]
    if key_heads == value_heads and heads * num_kv_heads == key_heads * num_heads:
        return
    rows = {name: tuple(t.shape) for name, t in (("query", query), ("key", key), ("value", value))}
    raise ShapeError(
        f"the layers made {heads} query heads, {key_heads} key heads and {value_heads} value heads, and the module "
        f"has {num_heads} query heads to {num_kv_heads} key heads: each key head serves {num_heads // num_kv_heads}.\n"
        f"{columns(rows, -3)}\n{SHARE_OUT}"
    )


def check_output(name: str, layer: nn.Module, heads: int, value: Tensor) -> None:
    """Check that the last projection takes these heads side by side, each of the width of the value (B, Hk, L, E)."""
    weight = check_linear(name, layer)
    if weight is None:
        return
    width, taken = heads * value.shape[3], [weight.shape[1]]  # no set: torch.jit.trace has sizes without a hash
    if is_dtensor(weight):
        taken.append(weight.to_local().shape[1])  # type: ignore[attr-defined]
    if width not in taken:
        raise ShapeError(
            f"{name}.weight has shape {tuple(weight.shape)}, (out, in), and the heads side by side have width {width}: "
            f"{heads} heads of {value.shape[3]}.\n{SHARE_OUT}"
        )
    if weight.device != value.device or not have_one_dtype(weight, value):
        raise ClearheadError(
            f"{name}.weight is {weight.dtype} on {weight.device}, and the values are {value.dtype} on {value.device}: "
            f"the module was converted in part. Convert all of it: module.to({str(value.device)!r}, {value.dtype})."
        )


def project_output(name: str, layer: nn.Module, heads: Tensor) -> Tensor:
    """Apply the last projection to the heads side by side, (B, L, H·head_dim)."""
    try:
        output: Tensor = layer(heads)
    except RuntimeError as error:
        if isinstance(error, ClearheadError) or not is_dtensor(getattr(layer, "weight", None)):
            raise
        raise ShapeError(
            f"{name} is shared out over ranks and does not take the heads side by side, {tuple(heads.shape)}: {error}\n"
            + SHARE_OUT
        ) from error
    return output


def resolve_head_mask(mask: Any, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> Any:
    """Return a mask as `attention` takes it: (Lq, Lk), or (B or 1, H or 1, Lq or 1, Lk or 1)."""
    check_mask(mask)
    if mask is None or isinstance(mask, Mask) or not isinstance(mask, Tensor | np.ndarray):
        return mask  # attention() raises for anything else
    tensor = owned(mask, "mask")
    if not tensor.is_floating_point():
        check_keep(tensor, "mask", mask)
    elif tensor.dtype != dtype and is_autocasting(tensor.device):
        tensor = tensor.to(dtype)  # as autocast did with the projections
    four = tensor.unsqueeze(1) if tensor.ndim == 3 else tensor
    if 2 <= four.ndim <= 4 and broadcasts(four.shape, sizes):
        return four
    shape = tuple(tensor.shape)
    rows = {"scores": sizes, "mask": (shape[0], "", *shape[1:]) if len(shape) == 3 else shape}
    raise ShapeError(
        f"mask has shape {shape}, which does not fit the scores (B, H, Lq, Lk).\n{columns(rows)}\n"
        "A mask of two dimensions is (Lq, Lk), of three (B, Lq, Lk), of four (B, H, Lq, Lk); True: may attend."
        + _advice(shape, sizes, tensor.dtype == torch.bool)
    )


def _advice(shape: tuple[int, ...], sizes: tuple[int, int, int, int], is_bool: bool) -> str:
    batch, heads, _, keys = sizes
    turned = "~mask" if is_bool else "mask"
    if shape == (batch,) and not is_bool:
        return "\nIt seems to be lengths, (B,): pass valid_lens=mask.long()."
    if shape == (batch, keys):
        return (
            "\nIt seems to be padding, (B, Lk): pass Padding(mask), or, where it is a key_padding_mask of torch "
            "(True: may not), Padding(~mask)."
            if is_bool
            else "\nIt seems to be of padding, (B, Lk), added to the scores: pass mask[:, None]."
        )
    if len(shape) == 3 and shape[0] == heads:
        return "\nOne mask for each head is mask[None]."
    if len(shape) == 3 and shape[0] == batch * heads:
        return f"\nAn attn_mask of torch, (B·H, Lq, Lk), is {turned}.unflatten(0, ({batch}, {heads})) here."
    return "\nWith a cache, Lk counts the keys in it too. For the keys that are no padding pass Padding(keep)."


def check_part(mask: Any, bias: Any, sizes: Sizes, num_heads: int) -> None:
    """Raise for a mask or a bias that differs between heads where a rank computes an unknown part of the heads."""
    every = sizes._replace(heads=num_heads)
    for name, given in (("mask", mask), ("bias", bias)):
        if isinstance(given, Mask | Bias) and _by_head(given, every):
            raise UnsupportedError(
                f"{name} is not the same for all heads, and this module computes {sizes.heads} of its {num_heads} "
                f"heads.\nPass the part of this rank's heads as a tensor (B, {sizes.heads}, Lq, Lk)."
            )


def _by_head(given: Mask | Bias, every: Sizes) -> bool:
    """Whether a mask or a bias differs between heads, among all heads."""
    try:
        lowered: Any = given.lower(every)
    except ShapeError:
        return False  # it does not fit all heads; where it does not fit these heads either, attention() raises
    one = (slice(0, 1), slice(None), slice(0, 1), slice(0, 1))
    if isinstance(given, Mask):
        tensors, rule = lowered.edges(), lowered.residual
    else:
        tensors, rule = lowered.tensors, lowered.function
    return any(t.shape[1] > 1 for t in (*tensors, *([] if rule is None else [rule(*one)])))
