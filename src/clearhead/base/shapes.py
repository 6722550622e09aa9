"""The shape legend, and the only shape checks.

    B    batch: all leading dimensions but the heads, folded into one
    H    query heads;  Hk  key and value heads, which divide H (grouped queries)
    Lq   queries;      Lk  keys (and values)
    Eq, Ek  width of a query, of a key;  Ev  width of a value

Inside clearhead every tensor has four dimensions: query (B, H, Lq, Eq), key (B, Hk, Lk, Ek), value (B, Hk, Lk, Ev).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clearhead.base.arrays import FLOATS, check_float, check_memory, shown
from clearhead.base.errors import ClearheadError, ShapeError, columns
from clearhead.base.numbers import check_count
from clearhead.base.torch_state.mode import any_thread_compiles, get_mode
from clearhead.base.torch_state.tensor_kind import has_no_values, to_fake

Align = Literal["upper_left", "lower_right"] | int | Tensor | None
AlignLike = Align | np.ndarray
Sides = tuple[slice, slice, slice, slice]  # a part of the matrix: batch, heads, queries, keys


class Sizes(NamedTuple):
    """The score matrix a mask or a bias is lowered for: (B, H, Lq, Lk), its device, the caller's dimensions."""

    batch: int
    heads: int
    queries: int
    keys: int
    device: torch.device = torch.device("cpu")
    leading: tuple[int, ...] | None = None  # the caller's leading dimensions; None: (B, H)
    align: Align = None  # where query 0 stands: see `positions.query_offset`
    heads_last: bool | None = None  # whether the last leading dimension is the heads; None: where there are two or more

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self[:4]

    @property
    def shown(self) -> tuple[int, ...]:
        """The leading dimensions as the caller has them: (), (B,), (B, H), or more."""
        return (self.batch, self.heads) if self.leading is None else self.leading

    @property
    def has_heads(self) -> bool:
        """Whether the last of the caller's leading dimensions is the heads."""
        if self.leading is None:
            return True
        return len(self.leading) >= 2 if self.heads_last is None else self.heads_last

    def restore(self, tensor: Tensor) -> Tensor:
        """A (B, H, ...) tensor with the caller's leading dimensions."""
        if self.leading is None or (self.has_heads and len(self.leading) == 2):
            return tensor
        return tensor.reshape(*self.shown, *tensor.shape[2:])


def unflatten(tensor: Tensor, dim: int, *sizes: int) -> Tensor:
    """One dimension as several."""
    result: Tensor = tensor.unflatten(dim, sizes)  # type: ignore[no-untyped-call]
    return result


def one_or(n: int, size: int) -> bool:
    """Whether a dimension is 1 or this size. The compiler's `in` does not compare its symbols with numbers."""
    return n == 1 or n == size


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether sizes, aligned on the last dimension, are 1 or those of `to`; further dimensions are not compared."""
    return all(one_or(n, size) for n, size in zip(shape[::-1], to[::-1], strict=False))


def no_heads(sizes: Sizes) -> str:
    """The hint where a number of heads does not fit inputs that have no heads."""
    if len(sizes.shown) > 1:
        return ""
    return "\nInputs of fewer than four dimensions have no heads: if their first is the heads, pass query[None], …"


def heads_second(sizes: Sizes, keys: int) -> str:
    """The hint where a mask has more keys than the inputs, but no more than their heads: the length may come second."""
    if len(sizes.shown) < 2 or not sizes.keys < keys <= sizes.heads:
        return ""
    return (
        f"\nWith four dimensions, dimension -3 is the heads, of which there are {sizes.heads}: if it is the length "
        "here, (B, L, H, E), pass tensor.transpose(1, 2)."
    )


def as_inputs(query: Tensor, key: Tensor, value: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, Sizes]:
    """Query, key and value as (B, H, L, E), views of the caller's memory where possible, and their sizes."""
    sizes = plain_sizes(query, key, value)
    if sizes is not None:
        return query, key, value, sizes
    named = {"query": query, "key": key} | ({} if value is None else {"value": value})
    for name, tensor in named.items():
        check_float(tensor, name)
        if tensor.ndim < 2:
            raise ShapeError(
                f"{name} has shape {tuple(tensor.shape)}; expected at least two dimensions, (..., length, width).\n"
                f"For one vector pass {name}[None]; for vectors of one number each {name}[:, None]."
            )
    if any(t.dtype != query.dtype or t.device != query.device for t in named.values()):
        _refuse_mixture(named)
    refuse_fakes(named)
    if value is not None and value.shape[-2] != key.shape[-2]:
        raise ShapeError(
            "key and value disagree in their length Lk: each key needs its value.\n"
            + columns({n: tuple(t.shape) for n, t in named.items()}, -2)
            + "\nIf the heads come after the length, (B, L, H, E), pass tensor.transpose(1, 2)."
        )
    depth = max(t.ndim for t in named.values())
    if depth <= 3:  # no heads
        leading = _broadcast({n: tuple(t.shape[:-2]) for n, t in named.items()}, named)
        batch = leading[0] if leading else 1
        four = [t.reshape(t.shape[0] if t.ndim == 3 else 1, 1, *t.shape[-2:]) for t in named.values()]
        four = [t if t.shape[0] == batch else t.expand(batch, -1, -1, -1) for t in four]
        heads = 1
    else:
        flat = [n for n, t in named.items() if t.ndim == 3 and t.shape[0] > 1]
        if flat:
            raise ShapeError(
                f"{flat[0]} has 3 dimensions and another input {depth}: its first could be the batch or the heads.\n"
                + columns({n: tuple(t.shape) for n, t in named.items()})
                + f"\nPass {flat[0]}[:, None] for (B, 1, L, E), or {flat[0]}[None] for (1, H, L, E)."
            )
        padded = {n: (1,) * (depth - t.ndim) + tuple(t.shape) for n, t in named.items()}
        outer = _broadcast({n: s[:-3] for n, s in padded.items()}, named)
        heads, key_heads = _heads({n: s[-3] for n, s in padded.items()}, named)
        leading = (*outer, heads)
        batch = math.prod(outer)
        four = [_fold(t.reshape(padded[n]), outer, heads if n == "query" else key_heads) for n, t in named.items()]
    sizes = Sizes(batch, heads, query.shape[-2], key.shape[-2], query.device, leading)
    return four[0], four[1], four[2] if len(four) > 2 else None, sizes


def plain_sizes(query: Any, key: Any, value: Any) -> Sizes | None:
    """The sizes in the common case, at little cost: tensors of four dimensions, which need no broadcast or error."""
    if not type(query) is type(key) is type(value) is Tensor:
        return None
    try:
        q, k, v = query.shape, key.shape, value.shape
    except RuntimeError:  # a nested tensor has none
        return None
    if not len(q) == len(k) == len(v) == 4 or not query.layout is key.layout is value.layout is torch.strided:
        return None
    (batch, heads, queries, _), (key_batch, key_heads, keys, _) = q, k
    if (k != v and k[:3] != v[:3]) or batch != key_batch or not key_heads or heads % key_heads:
        return None
    dtype, device = query.dtype, query.device
    if not key.dtype is value.dtype is dtype or dtype not in FLOATS:
        return None
    if not (query.is_cpu and key.is_cpu and value.is_cpu) and not device == key.device == value.device:
        return None
    return Sizes(batch, heads, queries, keys, device)


def _broadcast(shapes: dict[str, tuple[int, ...]], named: Mapping[str, Tensor]) -> tuple[int, ...]:
    depth = max(map(len, shapes.values()))
    outer = []
    for i in range(-depth, 0):
        found = [shape[i] for shape in shapes.values() if len(shape) >= -i and shape[i] != 1]
        if any(size != found[0] for size in found):
            rows = {n: tuple(t.shape) for n, t in named.items()}
            inner = max(map(len, rows.values())) - depth
            raise ShapeError(
                f"{', '.join(named)} disagree in a leading dimension: sizes must be equal or 1.\n"
                + columns(rows, i - inner)
            )
        outer.append(found[0] if found else 1)
    return tuple(outer)


def _heads(heads: dict[str, int], named: Mapping[str, Tensor]) -> tuple[int, int]:
    """The numbers of query heads and of key heads. A size of 1 broadcasts, else key heads must divide query heads."""
    total = max(heads.values())
    key_heads = max(heads[n] for n in heads if n != "query")
    rows = {n: tuple(t.shape) for n, t in named.items()}
    if any(not one_or(heads[n], key_heads) for n in heads if n != "query"):
        raise ShapeError(
            "key and value disagree in their heads: the counts must be equal, or one of them 1.\n" + columns(rows, -3)
        )
    if not one_or(heads["query"], total) or (total % key_heads if key_heads else total):
        raise ShapeError(
            f"{heads['query']} query heads cannot share {key_heads} key heads: the key heads must divide the "
            f"query heads (grouped queries), or be as many, or 1.\n{columns(rows, -3)}\n"
            "With 4 dimensions or more, dimension -3 is the heads. If it is the length here, (B, L, H, E), "
            "pass tensor.transpose(1, 2)."
        )
    return total, key_heads


def _fold(tensor: Tensor, outer: tuple[int, ...], heads: int) -> Tensor:
    wanted = (*outer, heads, *tensor.shape[-2:])
    if tensor.shape != wanted:
        tensor = tensor.expand(wanted)
    return tensor if tensor.ndim == 4 else tensor.reshape(math.prod(outer), *wanted[-3:])


def refuse_fakes(named: Mapping[str, Tensor]) -> None:
    """Raise where some tensors have values, and others a shape alone."""
    fakes = {name: not get_mode().compiled and has_no_values(tensor) for name, tensor in named.items()}
    if len(set(fakes.values())) > 1:
        listed = " and ".join(name for name, fake in fakes.items() if fake)
        raise ClearheadError(f"{listed} has a shape alone (a fake tensor) and the others have values; pass one kind.")


def _refuse_mixture(named: Mapping[str, Tensor]) -> None:
    dtypes = {n: str(t.dtype).removeprefix("torch.") for n, t in named.items()}
    devices = {n: str(t.device) for n, t in named.items()}
    what, values = ("dtypes", dtypes) if len(set(dtypes.values())) > 1 else ("devices", devices)
    listed = ", ".join(f"{n} {v} {tuple(named[n].shape)}" for n, v in values.items())
    raise ClearheadError(
        f"{', '.join(named)} have different {what}: {listed}.\n"
        "Convert them to one, for example with key.to(query), or key.astype(query.dtype) in NumPy."
    )


def array_sizes(query: Any, key: Any) -> Sizes:
    """The sizes of the score matrix of two arrays, of which only the shapes are read, or of two lengths."""
    if isinstance(query, int | np.integer) and isinstance(key, int | np.integer):
        return Sizes(1, 1, check_count(query, 0, "query"), check_count(key, 0, "key"), leading=())
    for name, array in (("query", query), ("key", key)):
        if not isinstance(array, Tensor | np.ndarray) or getattr(array, "is_nested", False):
            raise ClearheadError(f"{name} is {shown(array)}; pass a tensor or an array of its shape, or both lengths.")
    like = [torch.empty(tuple(array.shape), dtype=torch.float32, device="meta") for array in (query, key)]
    *_, sizes = as_inputs(like[0], like[1], None)
    device = query.device if isinstance(query, Tensor) else torch.device("cpu")
    return Sizes(*sizes.shape, device, sizes.leading)


def placed(tensor: Tensor, device: torch.device, who: str) -> Tensor:
    """A tensor of a mask or a bias on the inputs' device."""
    if tensor.is_meta and device.type != "meta":
        raise ClearheadError(
            f"{who} is on the meta device, shape {tuple(tensor.shape)}, which holds no values, and the inputs are on "
            f"{device}. Make it outside of `torch.device('meta')`."
        )
    return moved(to_fake(check_memory(tensor, f"a tensor of {who}")), device)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device. To CUDA from memory that is not pinned the host does not wait: the driver has its copy
    before the call returns. Pinned memory is read later, when its owner may have written to it."""
    if device.type != "cuda" or get_mode().compiled or not tensor.is_cpu or tensor.is_pinned():
        return tensor.to(device)
    return tensor.to(device, non_blocking=True)


def copy_shared_rows(*tensors: Tensor) -> list[Tensor]:
    """Copy the tensors whose rows share memory, as rows of `unfold` do. PyTorch's products of such rows are wrong, or
    fail, in low precision; its fused kernel is wrong in every precision."""
    found = list(tensors)
    for place, tensor in enumerate(tensors):
        if tensor.is_contiguous():
            continue
        if any_thread_compiles() and get_mode().compiled:
            return found
        reach = 0  # the span in memory of the dimensions so far, from the innermost
        for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
            if stride and size > 1:
                if stride <= reach:
                    found[place] = tensor.contiguous()
                    break
                reach += stride * (size - 1)
    return found


def extent(side: slice, size: int) -> tuple[int, int, int]:
    """The begin, the end and the step of a slice of a dimension. In compiled code slices lie inside, so they are not
    clamped to the size: the code then serves other sizes too."""
    if get_mode().compiled:
        return side.start or 0, size if side.stop is None else side.stop, side.step or 1
    found = range(size)[side]
    return found.start, max(found.stop, found.start), found.step


def part(tensor: Tensor, *slices: slice) -> Tensor:
    """Slice the first dimensions. A dimension of size 1 is left whole, because it broadcasts."""
    return tensor[tuple(slice(None) if tensor.shape[i] == 1 else s for i, s in enumerate(slices))]


def as_scores(tensor: Tensor, depth: int) -> Tensor:
    """A raw mask as (B, H, Lq, Lk), for inputs of this many dimensions."""
    if tensor.ndim < 2:
        tensor = tensor.reshape((1,) * (2 - tensor.ndim) + tuple(tensor.shape))
    if tensor.ndim == 3 and depth == 3:
        return tensor.unsqueeze(1)
    return tensor.reshape((1,) * (4 - tensor.ndim) + tuple(tensor.shape)) if tensor.ndim < 4 else tensor


def _one_row(tensor: Tensor, leading: int, name: str) -> str:
    if tensor.ndim != 2 or not leading:
        return ""
    if tensor.dtype == torch.bool:
        return f"\nOne row a sequence, (B, Lk), pass as Padding({name}); lengths as Lengths(valid_lens)."
    return f"\nOne row a sequence, (B, Lk), pass as {name}[:{', None' * leading}]."


def fit(tensor: Tensor, sizes: Sizes, name: str) -> Tensor:
    """A raw (..., Lq, Lk) tensor as (B or 1, H or 1, Lq or 1, Lk or 1), or an error that shows what disagrees."""
    check_memory(tensor, name)
    shown = (*sizes.shown, sizes.queries, sizes.keys)
    rows = {"scores": shown, name: tuple(tensor.shape)}
    if tensor.ndim == 3 and len(shown) >= 4:
        raise ShapeError(
            f"{name} has 3 dimensions and the inputs have heads: its first could be the batch or the heads.\n"
            f"{columns(rows)}\nPass {name}[:, None] for (B, 1, Lq, Lk), or {name}[None] for (1, H, Lq, Lk)."
        )
    wrong = [-i for i in range(1, tensor.ndim + 1) if i > len(shown) or not one_or(tensor.shape[-i], shown[-i])]
    if wrong:
        raise ShapeError(
            f"{name} has shape {tuple(tensor.shape)}, which does not broadcast to the scores (..., Lq, Lk).\n"
            + columns(rows, wrong[0])
            + _one_row(tensor, len(sizes.shown), name)
        )
    if len(shown) > 4:
        tensor = tensor.expand(shown).reshape(sizes.shape)
    return as_scores(tensor, len(shown))
