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
from clearhead.base.errors import ClearheadError, ShapeError, UnsupportedError, columns
from clearhead.base.numbers import check_count
from clearhead.base.shapes import Sizes, broadcasts
from clearhead.base.torch_state.contexts import is_autocasting, is_cast_together
from clearhead.base.torch_state.mode import get_mode
from clearhead.base.torch_state.tensor_kind import holds_all_bytes, is_dtensor
from clearhead.base.torch_state.torch_private import has_hooks, read_linear
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


def reset_modules(*modules: nn.Module) -> None:
    """Call `reset_parameters` of these modules and of those inside, where they have it."""
    for module in modules:
        for part in module.modules():
            drawn = getattr(part, "reset_parameters", None)
            if callable(drawn):
                drawn()


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
        name = f"{name}.weight"
        if type(layer) not in LINEAR:
            return cls(name, getattr(layer, "in_features", 0) or None, None)  # a lazy layer has 0
        weight: Any = layer.weight
        if is_dtensor(weight) and not get_mode().compiled:  # the compiler traces no device mesh
            check_shared_out(name, weight, head_dim)
        return cls(name, weight.shape[-1], weight)


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
    first, last, widths = inputs[0], object(), []  # no input is `object()`, and None is no tensor
    for tensor, (layer, _) in zip(inputs, layers, strict=False):
        if type(layer) not in LINEAR:
            return False
        if tensor is not last:  # one tensor is all three in self-attention
            if type(tensor) is not Tensor or tensor.is_nested or tensor.layout is not torch.strided:
                return False
            fits = tensor.dtype is first.dtype and tensor.dtype in FLOATS and tensor.device == first.device
            if not fits or not holds_all_bytes(tensor):
                return False
            last = tensor
        widths.append(tensor.shape[-1] if tensor.ndim in (2, 3) else -1)
    query, key, value = inputs
    if query.shape[:-2] != key.shape[:-2] or key.shape[:-1] != value.shape[:-1] or type(layers[-1][0]) not in LINEAR:
        return False
    parameters, dtype, device = read_linear(*layers), first.dtype, first.device
    for (weight, bias), (_, width), taken in zip(parameters, layers, (*widths, layers[0][1]), strict=False):
        for parameter, shape in ((weight, (width, taken)), (bias, (width,))):
            if parameter is not None and not (
                parameter.shape == shape and parameter.dtype is dtype and parameter.device == device
            ):
                return False
    return bool(parameters)


def check_inputs(inputs: dict[str, Any], projections: tuple[Projection, ...], batch_first: bool = True) -> None:
    """Check inputs (B, L, E), or (L, B, E), or each without B: a value for each key, and one batch size, or 1."""
    order, at = ("B, L", -3) if batch_first else ("L, B", -2)
    shapes = {name: tuple(getattr(tensor, "shape", ())) for name, tensor in inputs.items()}
    ndim = len(next(iter(shapes.values())))
    for (name, tensor), (weight_name, width, weight) in zip(inputs.items(), projections, strict=True):
        if not isinstance(tensor, Tensor):
            raise ClearheadError(f"{name} is a {type(tensor).__name__}; expected a tensor: torch.as_tensor({name}).")
        check_kind(tensor, name)
        if ndim not in (2, 3) or tensor.ndim != ndim or (width is not None and tensor.shape[-1] != width):
            raise ShapeError(
                f"{name} has shape {shapes[name]}; expected ({order}, {width or 'E'}), or (L, {width or 'E'}) as all "
                f"three, of the width that the module was built for; it makes the heads by itself.\n{columns(shapes)}"
            )
        if weight is not None:
            check_dtype(name, tensor, weight, weight_name)
    check_memories(inputs.items())
    if "key" in inputs and shapes["key"][:-1] != shapes["value"][:-1]:
        raise ShapeError(f"key and value disagree in batch or length: each key needs its value.\n{columns(shapes)}")
    if len(inputs) == 3 and ndim == 3 and not has_one_batch(shapes["query"][at], shapes["key"][at]):
        other = "(L, B, E) pass tensor.transpose(0, 1)" if batch_first else "(B, L, E) build it with batch_first=True"
        raise ShapeError(
            f"query and key disagree in the batch; the module takes ({order}, E).\n{columns(shapes, at)}\nFor {other}."
        )


def has_one_batch(queries: int, keys: int) -> bool:
    """Whether the sizes are the same, or one of them is 1; without a set: sizes of compiled code have no hash."""
    return queries == keys or queries == 1 or keys == 1


def split_heads(projected: Tensor, name: str, head_dim: int) -> Tensor:
    """Split (B, L, H·head_dim) into (B, H, L, head_dim), with as many heads as fit the width."""
    try:
        heads: Tensor = projected.unflatten(-1, (projected.shape[-1] // head_dim, head_dim))  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ShapeError(
            f"{name} gave shape {tuple(projected.shape)}, which is no whole heads of head_dim = {head_dim}: {error}\n"
            f"{DIVIDES}"
        ) from error
    return heads.transpose(1, 2)


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


def project_output(name: str, layer: nn.Module, heads: Tensor) -> Tensor:
    """Apply the last projection to the heads side by side, (B, L, H·head_dim)."""
    try:
        output: Tensor = layer(heads)
    except RuntimeError as error:
        weight = getattr(layer, "weight", None)
        fits = not isinstance(weight, Tensor) or weight.shape[-1:] == heads.shape[-1:]
        if isinstance(error, ClearheadError) or (fits and not is_dtensor(weight)):
            raise
        raise ShapeError(
            f"{name} does not take the heads side by side, {tuple(heads.shape)}: {error}\n{SHARE_OUT}"
        ) from error
    return output


def resolve_head_mask(mask: Any, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> Any:
    """Return a mask as `attention` takes it: (Lq, Lk), or (B or 1, H or 1, Lq or 1, Lk or 1)."""
    check_mask(mask)
    if not isinstance(mask, Tensor | np.ndarray):
        return mask  # attention() raises for what is no Mask
    tensor = owned(mask, "mask")
    if not tensor.is_floating_point():
        check_keep(tensor, "mask", mask)
    elif tensor.dtype != dtype and is_autocasting(tensor.device):
        tensor = tensor.to(dtype)  # as autocast did with the projections
    four = tensor.unsqueeze(1) if tensor.ndim == 3 else tensor
    if 2 <= four.ndim <= 4 and broadcasts(four.shape, sizes):
        return four
    shape = tuple(tensor.shape)
    raise ShapeError(
        f"mask has shape {shape}, which does not fit the scores (B, H, Lq, Lk) = {tuple(sizes)}; expected (Lq, Lk), "
        f"(B, Lq, Lk) or (B, H, Lq, Lk).\n{_advise(shape, sizes, tensor.dtype == torch.bool)}"
    )


def _advise(shape: tuple[int, ...], sizes: tuple[int, int, int, int], is_bool: bool) -> str:
    batch, heads, _, keys = sizes
    if shape == (batch, keys):
        padding = "Padding(mask), or Padding(~mask) where True is padding, as in torch" if is_bool else "mask[:, None]"
        return f"Of padding, (B, Lk), pass {padding}."
    if len(shape) == 3 and shape[0] == batch * heads:
        turned = "~mask" if is_bool else "mask"
        return f"An attn_mask of torch, (B·H, Lq, Lk), is {turned}.unflatten(0, ({batch}, {heads})) here."
    return "With a cache, Lk counts the keys in it too. For padding pass Padding(keep), for lengths valid_lens."


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
