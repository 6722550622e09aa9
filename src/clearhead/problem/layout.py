"""The layouts of a call's arguments: where the heads stand, and sequences of unequal lengths in nested tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError, ShapeError, UnsupportedError, columns
from clearhead.base.positions import check_align
from clearhead.base.ragged import Sequences
from clearhead.base.tracing import compiling, transformed, unwrapped
from clearhead.biases.base import Bias
from clearhead.biases.dense import DenseBias
from clearhead.biases.ragged import RaggedBias
from clearhead.masks.base import Mask
from clearhead.masks.dense import DenseMask
from clearhead.masks.ragged import RaggedMask

LAYOUTS = ("BHLD", "BLHD", "LHD")
ARRANGED = ("query", "key", "value", "mask", "bias", "align")


class Arranged(NamedTuple):
    """The arguments of a call with the heads before the length, in one memory; `back` gives its output their layout."""

    query: Any
    key: Any
    value: Any
    mask: Any
    bias: Any
    align: Any
    back: Callable[[Any], Any]


def is_arranged(query: Any, key: Any, layout: Any) -> bool:
    """Whether query and key are (..., H, L, D) tensors or arrays already."""
    return not (_nested(query) or _nested(key)) and type(layout) is str and layout == "BHLD"


def _nested(given: Any) -> bool:
    """Whether this is a nested tensor, or `torch.func` wraps one."""
    wrapped = isinstance(given, Tensor) and transformed()
    return bool(getattr(unwrapped(given) if wrapped else given, "is_nested", False))


def arrange(query: Any, key: Any, value: Any, mask: Any, bias: Any, align: Any, layout: Any) -> Arranged:
    """The arguments of a call in any layout, for engines. `value`: None where only the weights are wanted."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ClearheadError(
            f"layout is {layout!r:.60}; expected 'BHLD' (heads before the length), 'BLHD' (after it) or 'LHD' (packed: "
            "after it, without a batch)."
        )
    named = {"query": query, "key": key} | ({} if value is None else {"value": value})
    if layout != "BHLD":
        named = {name: _heads_first(name, given, layout) for name, given in named.items()}

    def back(output: Any) -> Any:
        if layout == "BHLD":
            return output
        return _turned(output[0] if layout == "LHD" else output)

    if not any(map(_nested, named.values())):
        return Arranged(named["query"], named["key"], named.get("value"), mask, bias, align, back)
    rows = _rows(named)
    queries, keys = rows["query"], rows["key"]
    if mask is not None and not isinstance(mask, Mask):
        mask = _as_mask(mask)
    if isinstance(bias, Tensor | np.ndarray):
        bias = DenseBias(bias)
    sequences = Sequences(queries.edges, keys.edges, check_align(align))
    sequences.check_align(mask, bias)
    return Arranged(
        queries.packed,
        keys.packed,
        rows["value"].packed if "value" in rows else None,
        RaggedMask(mask, sequences),
        RaggedBias(bias, sequences) if isinstance(bias, Bias) else bias,
        None,
        lambda output: back(queries.nested(output)),
    )


def _turned(array: Any) -> Any:
    return array.transpose(-3, -2) if isinstance(array, Tensor) else array.swapaxes(-3, -2)


def _heads_first(name: str, array: Any, layout: str) -> Any:
    dims = getattr(array, "ndim", None)
    if dims is None or not (dims == 3 if layout == "LHD" else dims >= 4):
        expected = "three dimensions, (L, H, D)" if layout == "LHD" else "four dimensions, (B, L, H, D), or more"
        got = f"shape {tuple(array.shape)}" if dims is not None else f"type {type(array).__name__}"
        raise ShapeError(f"{name} has {got}; with layout={layout!r} it has {expected}.")
    return _turned(array)[None] if layout == "LHD" else _turned(array)


class Rows(NamedTuple):
    """A nested tensor: its sequences one after the other, (1, H, T, D) or (1, T, D), and where they begin and end."""

    packed: Tensor
    edges: Tensor  # (B + 1,)
    like: Tensor  # what was given

    def nested(self, output: Tensor) -> Tensor:
        """An output of these queries as a tensor nested like them."""
        output = output[0]
        if self.like.layout is torch.strided:
            return torch.nested.as_nested_tensor(list(torch.split(output, self.edges.diff().tolist(), -2)))
        given: Tensor = torch.nested.nested_tensor_from_jagged(output.movedim(-2, 0), self.edges)
        return given.transpose(1, 2) if given.dim() == 4 else given


def _rows(named: dict[str, Any]) -> dict[str, Rows]:
    if compiling():
        raise UnsupportedError(
            "Nested tensors are read on the host, so compiled code cannot use them. Call attention outside of the "
            "compiled function, or pass padded tensors and mask=Lengths(valid_lens)."
        )
    if transformed():
        raise UnsupportedError(
            "torch.func does not follow nested tensors. Pass padded tensors and mask=Lengths(valid_lens), or take the "
            "gradients by torch.autograd.grad."
        )
    if not all(isinstance(given, Tensor) and given.is_nested for given in named.values()):
        kinds = {name: "nested" if getattr(given, "is_nested", False) else "not" for name, given in named.items()}
        raise ClearheadError(
            f"{', '.join(f'{name} is {kind}' for name, kind in kinds.items())}: pass nested tensors for all of them, "
            "or to_padded_tensor(0.0) of the nested ones and mask=Lengths(valid_lens)."
        )
    found = {name: _row(name, given) for name, given in named.items()}
    query, key = found["query"], found["key"]
    if len(query.edges) != len(key.edges):
        raise ShapeError(f"query has {len(query.edges) - 1} sequences and key has {len(key.edges) - 1}.")
    if "value" in found and not torch.equal(found["value"].edges, key.edges):
        lengths = {name: tuple(found[name].edges.diff().tolist()[:8]) for name in ("key", "value")}
        raise ShapeError("key and value disagree in the lengths of their sequences.\n" + columns(lengths))
    return found


def _row(name: str, given: Any) -> Rows:
    if given.layout is torch.strided:
        parts = given.unbind()
        if any(part.ndim not in (2, 3) for part in parts) or len({part.ndim for part in parts}) > 1:
            raise ShapeError(f"{name} is nested; expected sequences (L, D) or (H, L, D), all of one kind.")
        if not parts:
            raise ShapeError(f"{name} is nested and holds no sequence, so neither its heads nor its width are known.")
        lengths = torch.tensor([0, *(part.shape[-2] for part in parts)], device=given.device)
        return Rows(torch.cat(parts, -2)[None], lengths.cumsum(0), given)
    ragged = [dim for dim, size in enumerate(given.shape) if not isinstance(size, int)]
    if given.dim() not in (3, 4) or ragged != [given.dim() - 2]:
        raise ShapeError(
            f"{name} is a nested tensor of shape {tuple(given.shape)}; expected (B, j, D) or (B, H, j, D), where j is "
            "the length that varies. For (B, j, H, D) pass layout='BLHD'."
        )
    flat = given.transpose(1, 2) if given.dim() == 4 else given
    values, edges, lengths = flat.values(), flat.offsets(), flat.lengths()
    if lengths is not None:  # there is room between the sequences; contiguous() would have a gradient of another shape
        starts, edges = edges[:-1], torch.cat((edges[:1] * 0, lengths.cumsum(0)))
        moves = (starts - edges[:-1]).repeat_interleave(lengths)
        values = values[moves + torch.arange(len(moves), device=values.device)]
    return Rows(values[None] if values.ndim == 2 else values.transpose(0, 1)[None], edges, given)


def _as_mask(mask: Any) -> Mask:
    if isinstance(mask, Tensor | np.ndarray) and str(mask.dtype).rpartition(".")[2] in ("bool", "bool_"):
        return DenseMask(mask)
    raise ClearheadError(
        f"mask is a {type(mask).__name__}; beside nested tensors it is a Mask, such as Causal(), or a bool tensor for "
        "the padded sequences, (B, Lq, Lk) or (B, H, Lq, Lk). Pass numbers that are added to the scores as bias=."
    )
