"""Sines and cosines of the position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from clearhead.base.arrays import Integers
from clearhead.base.dropout import check_dropout
from clearhead.base.numbers import check_count
from clearhead.base.output.pictures import Axes, Colormap, Style
from clearhead.nn._nested import encode_rows
from clearhead.nn._positions import LARGEST, Tabled, check_embedded, places_of, plot
from clearhead.problem.nested import is_nested


class SinusoidalPositionalEncoding(Tabled):
    """Adds to each vector sines and cosines of its position, from fast to slow.

    >>> import torch
    >>> from clearhead.nn import SinusoidalPositionalEncoding
    >>> encode = SinusoidalPositionalEncoding(embed_dim=4)
    >>> encode(torch.zeros(3, 4))
    tensor([[ 0.0000,  1.0000,  0.0000,  1.0000],
            [ 0.8415,  0.5403,  0.0100,  0.9999],
            [ 0.9093, -0.4161,  0.0200,  0.9998]])
    >>> encode(torch.zeros(2, 1, 4), offset=2).shape        # the third position, in decoding
    torch.Size([2, 1, 4])
    >>> encode(torch.zeros(2, 1, 4), offset=torch.tensor([5, 9])).shape     # each sequence at its own position
    torch.Size([2, 1, 4])
    >>> packed = encode(torch.zeros(5, 4), positions=[0, 1, 2, 0, 1])       # two documents, each from 0 on
    >>> torch.equal(packed[:2], packed[3:])
    True

    Formula: output_p = dropout(x_p + P_p), with P[p, 2i] = sin(p / 10000^(2i/E)), P[p, 2i+1] = cos(p / 10000^(2i/E)).

    `embed_dim`: E, odd or even. `dropout`: the probability with which an entry of the sum is dropped while training.
    x (B, ..., L, E), or (L, E). `offset`: the position of the first vector, a whole number, or integers (B,), one for
    each sequence. `positions`: in place of it the position of each vector, integers (L,) or (B, L), 0 or more, in any
    order. Returns x's shape and dtype. Any length; no parameters.
    Nested x (B, j, E), or (B, H, j, E), gives a nested result: each sequence begins anew, `offset` and `positions` are
    those of the padded batch.
    Raises a `ShapeError` for another width or batch, a `ClearheadError` for positions below 0.
    Cost: one addition an entry; a table of the longest sequence is kept.
    Source: Vaswani et al. 2017, "Attention Is All You Need".
    """

    def __init__(self, embed_dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed_dim = check_count(embed_dim, 1, "embed_dim")
        self.dropout = nn.Dropout(check_dropout(dropout, "dropout"))

    def forward(self, x: Tensor, offset: int | Tensor = 0, *, positions: Integers | None = None) -> Tensor:
        """x (..., L, E) with its positions added, from `offset` on, or those of `positions`: of x's shape."""
        who = "SinusoidalPositionalEncoding"
        if is_nested(x):
            return encode_rows(self.forward, x, offset, positions, who)
        check_embedded(x, self.embed_dim, who)
        output: Tensor = self.dropout(x + self._of(x, places_of(x, offset, positions, who), x.dtype, who))
        return output

    if TYPE_CHECKING:  # torch declares a call of anything
        __call__ = forward

    def _settings(self) -> tuple[Any, ...]:
        return (self.embed_dim,)

    def _rows(self, positions: Tensor) -> Tensor:
        steps = torch.arange(0, self.embed_dim, 2, dtype=positions.dtype, device=positions.device)
        angles = positions[:, None] * 10000.0 ** (-steps / self.embed_dim)
        both = torch.stack([angles.sin(), angles.cos()], -1)  # (N, E/2, 2)
        return both.flatten(-2)[:, : self.embed_dim]  # an odd width ends with a sine

    def plot(
        self, length: int = 64, *, title: str | None = None, cmap: str | Colormap = "RdBu_r", ax: Axes | None = None
    ) -> Axes:
        """Draw what is added at each position, (length, E), with matplotlib. Returns the axes.

        `length`: how many positions, from 0 on. `ax`: the axes to draw on; None makes new axes. Above 1,024 positions
        or entries a cell is the mean of several numbers.
        """
        rows = self._upto(check_count(length, 1, "length", LARGEST), torch.float32, torch.device("cpu"))[:length]
        return cast("Axes", plot({"": rows}, Style(title, cmap, "signed", ax)))

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}"
