"""Rotary position embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from clearhead.base.arrays import Integers, accumulated, check_float, shown
from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.numbers import check_count, check_flag, check_positive
from clearhead.base.output.pictures import Colormap, Style
from clearhead.base.output.text import brief
from clearhead.base.torch_state.torch_private import has_hooks
from clearhead.nn._nested import encode_rows
from clearhead.nn._positions import LARGEST, Tabled, places_of, plot
from clearhead.nn.rotary_scaling import RotaryScaling
from clearhead.problem.nested import is_nested


class RotaryEmbedding(Tabled):
    """Turns pairs of entries of queries and keys by angles that grow with the position.

    >>> import torch
    >>> from clearhead.nn import RotaryEmbedding
    >>> rotary = RotaryEmbedding(dim=4)
    >>> query, key = torch.rand(4).expand(1, 6, 4), torch.rand(4).expand(1, 6, 4)
    >>> scores = rotary(query) @ rotary(key).mT             # the same vectors everywhere: only the distance counts
    >>> torch.allclose(scores[0, 2, 0], scores[0, 5, 3], atol=1e-6)
    True
    >>> rotary(torch.rand(2, 8, 1, 64), offset=torch.tensor([5, 9])).shape      # sequences at their own positions
    torch.Size([2, 8, 1, 64])
    >>> packed = rotary(torch.rand(4).expand(1, 5, 4), positions=[0, 1, 2, 0, 1])     # two documents, each from 0 on
    >>> torch.equal(packed[:, :2], packed[:, 3:])
    True

    Formula: (x_a, x_b) ← (x_a cos θ − x_b sin θ, x_b cos θ + x_a sin θ), with θ = p · base^(−2i/dim) for the position p
    and the pair i. The product of a query at p and a key at p' then depends on p − p' alone.

    `dim`: how many of the first entries turn, even; the entries after them stay as they are. `base`: above 0.
    `interleaved`: False pairs the entry i with i + dim/2, as Llama does; True pairs 2i with 2i + 1, as RoFormer and
    GPT-J do. `scaling`: a `RotaryScaling`, for sequences longer than those of the training; None is none.
    x (..., L, E) with E ≥ dim; `offset`: the position of the first vector, a whole number, or integers (B,), one for
    each sequence of x (B, ..., L, E). `positions`: in place of it the position of each vector, integers (L,) or (B, L),
    0 or more, in any order. Returns x's shape and dtype; the turn is computed in float32 at least.
    Nested x (B, j, E), or (B, H, j, E), gives a nested result: each sequence begins anew, `offset` and `positions` are
    those of the padded batch.
    The arguments are attributes, which may be set between calls: the next call turns by them.
    Raises a `ShapeError` for narrower x or another batch, a `ClearheadError` for positions below 0. Cost: three
    operations an entry; a table of the longest sequence is kept.
    Source: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding".
    """

    def __init__(
        self, dim: int, base: float = 10000.0, interleaved: bool = False, scaling: RotaryScaling | None = None
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved = _validate_settings(dim, base, interleaved, scaling)
        self.scaling = scaling

    def forward(self, x: Tensor, offset: int | Tensor = 0, *, positions: Integers | None = None) -> Tensor:
        """x (..., L, E) turned by its positions, from `offset` on, or those of `positions`: of x's shape."""
        who = "RotaryEmbedding"
        if is_nested(x):
            return encode_rows(self.forward, x, offset, positions, who)
        self._check(x)
        return self._rotate(x, self._of(x, places_of(x, offset, positions, who), accumulated(x.dtype), who))

    if TYPE_CHECKING:  # torch declares a call of anything
        __call__ = forward

    def _rotate(self, x: Tensor, rows: Tensor) -> Tensor:
        """x (..., L, E), turned by the rows of its positions."""
        cos, sin = rows.chunk(2, -1)  # each (L, dim), or (B, 1, ..., L, dim): cos, cos and −sin, sin
        turned = (x[..., : self.dim] if x.shape[-1] > self.dim else x).to(cos.dtype)
        if self.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            cos, _, _, sin = rows.chunk(4, -1)
            output = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        else:
            a, b = turned.chunk(2, -1)
            output = turned * cos + torch.cat([b, a], -1) * sin
        output = output.to(x.dtype)
        return torch.cat([output, x[..., self.dim :]], -1) if x.shape[-1] > self.dim else output

    def _find_rows(self, x: Tensor, offset: int | Tensor, end: int) -> Tensor | None:
        """The rows of the vectors of x (B, H, L, E), from `offset` on, a number or (B,); `end` is above all positions.

        None: the table does not have them yet, or something else must be checked, read on another device, or seen by a
        hook.
        """
        made_for, table = self._table or (None, None)
        if table is None or made_for != (self.dim, self.base, self.scaling) or type(self.interleaved) is not bool:
            return None
        is_other = table.dtype is not accumulated(x.dtype) or table.device != x.device or x.shape[-1] < self.dim
        if is_other or end > table.shape[0] or has_hooks(self):
            return None
        if not isinstance(offset, Tensor):
            return table[offset:end]
        if not offset.is_cpu:
            return None
        length = x.shape[-2]
        at = offset if length == 1 else (offset[:, None] + torch.arange(length, device="cpu")).flatten()
        return table.index_select(0, at.to(x.device)).view(offset.shape[0], 1, length, table.shape[1])

    def _settings(self) -> tuple[Any, ...] | None:
        by_length = self.scaling is not None and self.scaling.by_length
        return None if by_length else (self.dim, self.base, self.scaling)

    def _rows(self, positions: Tensor) -> Tensor:
        angles = positions[:, None] * self.speeds(positions)
        cos, sin = angles.cos(), angles.sin()
        rows = torch.cat([cos, cos, -sin, sin], -1)
        return rows if self.scaling is None else rows * self.scaling.magnitude

    def speeds(self, positions: Tensor) -> Tensor:
        """The angle of each pair at each step, (dim / 2,) in float64, in a call with these positions, (N,)."""
        steps = torch.arange(0, self.dim, 2, dtype=torch.float64, device=positions.device)
        plain = self.base ** (-steps / self.dim)
        if self.scaling is None:
            return plain
        length = positions.max() + 1 if positions.numel() else positions.new_ones(())
        return self.scaling.speeds(plain, self.base, length)

    def _check(self, x: Any) -> None:
        _validate_settings(self.dim, self.base, self.interleaved, self.scaling)  # they may have been set since
        if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[-1] < self.dim:
            raise ShapeError(
                f"RotaryEmbedding: x is {shown(x)}; pass a tensor (..., L, E) with E of dim = {self.dim} or more: the "
                "width of one head."
            )
        check_float(x, "RotaryEmbedding: x")

    def plot(self, length: int = 64, *, title: str | None = None, cmap: str | Colormap = "RdBu_r") -> np.ndarray:
        """Draw the cosines and the sines of the angles at each position, (length, dim / 2), with matplotlib.

        `length`: how many positions, from 0 on. Above 1,024 positions or pairs a cell is the mean of several numbers.
        Returns the two axes.
        """
        rows = self._upto(check_count(length, 1, "length", LARGEST), torch.float32, torch.device("cpu"))[:length]
        cos, _, _, sin = rows.chunk(4, -1)
        return cast(np.ndarray, plot({"cos θ": cos, "sin θ": sin}, Style(title, cmap, "signed")))

    def extra_repr(self) -> str:
        scaling = "" if self.scaling is None else f", scaling={self.scaling}"
        return f"dim={self.dim}, base={self.base:g}, interleaved={self.interleaved}{scaling}"


def _validate_settings(dim: Any, base: Any, interleaved: Any, scaling: Any) -> tuple[int, float, bool]:
    dim, base = check_count(dim, 2, "dim"), check_positive(base, "base")
    if dim % 2:
        raise ClearheadError(f"RotaryEmbedding: dim is {dim}; entries turn in pairs, so it must be even.")
    if scaling is not None and not isinstance(scaling, RotaryScaling):
        raise ClearheadError(
            f"RotaryEmbedding: scaling is {brief(scaling)}; expected a RotaryScaling, such as RotaryScaling.linear(4) "
            "or RotaryScaling.llama3(8, original_length=8192)."
        )
    if scaling is not None and (base <= 1 or (scaling.by_length and dim == 2)):
        raise ClearheadError(
            f"RotaryEmbedding: dim is {dim} and base {base:g}; {scaling} needs a base above 1"
            + (", and dim above 2." if scaling.by_length else ".")
        )
    return dim, base, check_flag(interleaved, "interleaved")
