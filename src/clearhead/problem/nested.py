"""Nested tensors: their sequences as packed rows, and what mask, bias and score of a padded batch say about these."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError, ShapeError, UnsupportedError, columns
from clearhead.base.ragged import Sequences, places_in
from clearhead.base.shapes import Align
from clearhead.base.torch_state import interpreter
from clearhead.base.tracing import compiling, transformed, unwrapped
from clearhead.biases.base import Bias
from clearhead.biases.dense import DenseBias
from clearhead.biases.ragged import RaggedBias
from clearhead.masks.base import Mask
from clearhead.masks.dense import DenseMask
from clearhead.masks.ragged import RaggedMask


def is_nested(array: Any) -> bool:
    """Whether this is a nested tensor, or `torch.func` wraps one."""
    if not isinstance(array, Tensor):
        return False
    return bool(array.is_nested if interpreter() is None or compiling() else unwrapped(array).is_nested)


class Rows(NamedTuple):
    """A nested tensor: its sequences one after the other, (1, H, T, D) or (1, T, D), and where they begin and end."""

    packed: Tensor
    edges: Tensor  # (B + 1,)
    like: Tensor  # what was given

    def placed(self, numbers: Tensor | None = None) -> Tensor:
        """The numbers of the vectors, (T,), of those of the padded batch, (L,) or (B, L); None: their places."""
        device = self.edges.device if numbers is None else numbers.device
        number, place = places_in(self.edges.to(device), torch.arange(self.packed.shape[-2], device=device))
        if numbers is None:
            return place
        return numbers[place] if numbers.ndim == 1 else numbers[number, place]

    def nested(self, output: Tensor) -> Tensor:
        """An output of these queries, (1, T, D) or (1, H, T, D), as a tensor nested like them."""
        output = output[0]
        if self.like.layout is torch.strided:
            return torch.nested.as_nested_tensor(list(torch.split(output, self.edges.diff().tolist(), -2)))
        given: Tensor = torch.nested.nested_tensor_from_jagged(output.movedim(-2, 0), self.edges)
        return given.transpose(1, 2) if given.dim() == 4 else given


class Packed(NamedTuple):
    """The nested tensors of a call as packed rows, and their sequences."""

    rows: dict[str, Rows]
    sequences: Sequences

    def ragged(self, mask: Any, bias: Any) -> tuple[RaggedMask, Any]:
        """Mask and bias of the padded batch, for the packed row."""
        of = self.sequences
        if mask is not None and not isinstance(mask, Mask):
            mask = _as_mask(mask)
        if isinstance(bias, Tensor | np.ndarray):
            bias = DenseBias(bias)
        of.check_align(mask, bias)
        return RaggedMask(mask, of), RaggedBias(bias, of) if isinstance(bias, Bias) else bias


def packed(named: dict[str, Any], align: Align, hint: str) -> Packed:
    """The packed rows of query and key, and of a value where there is one. `hint`: the last words where there are
    dimensions too many."""
    if compiling():
        raise UnsupportedError(
            "Nested tensors are read on the host, so compiled code cannot use them. Call attention, or the module, "
            "outside of the compiled function, or pass padded tensors and mask=Lengths(valid_lens)."
        )
    if transformed():
        raise UnsupportedError(
            "torch.func does not follow nested tensors. Pass padded tensors and mask=Lengths(valid_lens), or take the "
            "gradients by torch.autograd.grad."
        )
    if not all(map(is_nested, named.values())):
        kinds = {name: "nested" if is_nested(given) else "not" for name, given in named.items()}
        raise ClearheadError(
            f"{', '.join(f'{name} is {kind}' for name, kind in kinds.items())}: pass nested tensors for all of them, "
            "or to_padded_tensor(0.0) of the nested ones and mask=Lengths(valid_lens)."
        )
    found: dict[str, Rows] = {}
    for name, given in named.items():
        again = next((rows for rows in found.values() if rows.like is given), None)
        found[name] = row(name, given, hint) if again is None else again
    key = found["key"]
    query = found.get("query", key)
    if len(query.edges) != len(key.edges):
        raise ShapeError(f"query has {len(query.edges) - 1} sequences and key has {len(key.edges) - 1}.")
    if "value" in found and not torch.equal(found["value"].edges, key.edges):
        lengths = {name: tuple(found[name].edges.diff().tolist()[:8]) for name in ("key", "value")}
        raise ShapeError("key and value disagree in the lengths of their sequences.\n" + columns(lengths))
    return Packed(found, Sequences(query.edges, key.edges, align))


def row(name: str, given: Any, hint: str) -> Rows:
    """The sequences of a nested tensor, one after the other."""
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
            f"the length that varies. {hint}"
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
