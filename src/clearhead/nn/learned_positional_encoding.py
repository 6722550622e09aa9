"""A learnt vector for each position."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.base.arrays import Integers
from clearhead.base.dropout import check_dropout
from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.numbers import check_count
from clearhead.base.output.pictures import Axes, Colormap, Style
from clearhead.base.shapes import placed
from clearhead.nn._nested import encode_rows
from clearhead.nn._positions import check_embedded, count_of, places_of, plot, spread
from clearhead.problem.nested import is_nested


class LearnedPositionalEncoding(nn.Module):
    """Adds to each vector a learnt vector for its position.

    >>> import torch
    >>> from clearhead.nn import LearnedPositionalEncoding
    >>> encode = LearnedPositionalEncoding(max_len=512, embed_dim=4)
    >>> encode(torch.rand(2, 10, 4)).shape
    torch.Size([2, 10, 4])
    >>> encode(torch.rand(2, 1, 4), offset=511).shape
    torch.Size([2, 1, 4])
    >>> encode(torch.rand(2, 1, 4), offset=torch.tensor([5, 9])).shape      # each sequence at its own position
    torch.Size([2, 1, 4])
    >>> encode(torch.rand(1, 5, 4), positions=[0, 1, 2, 0, 1]).shape        # two documents, each from 0 on
    torch.Size([1, 5, 4])

    Formula: output_p = dropout(x_p + P_p), with P (max_len, E) a parameter.

    `max_len`: how many positions there are. `embed_dim`: E.
    `dropout`: the probability with which an entry of the sum is dropped while training.
    `device`, `dtype`: those of P; None is the default of PyTorch.
    x (B, ..., L, E), or (L, E). `offset`: the position of the first vector, a whole number, or integers (B,), one for
    each sequence. `positions`: in place of it the position of each vector, integers (L,) or (B, L), in any order.
    Nested x (B, j, E), or (B, H, j, E), gives a nested result: each sequence begins anew, `offset` and `positions` are
    those of the padded batch.
    Returns x's shape, of the dtype of x + P.
    Raises a `ShapeError` for another width or batch, and for positions from max_len on; a `ClearheadError` for
    positions below 0. Cost: one addition an entry.
    Source: Gehring et al. 2017, "Convolutional Sequence to Sequence Learning"; Devlin et al. 2019, "BERT", for
    the initial standard deviation of 0.02.
    """

    def __init__(
        self,
        max_len: int,
        embed_dim: int,
        dropout: float = 0.0,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.max_len = check_count(max_len, 1, "max_len")
        self.embed_dim = check_count(embed_dim, 1, "embed_dim")
        self.P = nn.Parameter(torch.empty(self.max_len, self.embed_dim, device=device, dtype=dtype))
        self.dropout = nn.Dropout(check_dropout(dropout, "dropout"))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the vectors anew: normal, of standard deviation 0.02."""
        nn.init.normal_(self.P, std=0.02)

    def forward(self, x: Tensor, offset: int | Tensor = 0, *, positions: Integers | None = None) -> Tensor:
        """x (..., L, E) with its positions added, from `offset` on, or those of `positions`: of x's shape."""
        who = "LearnedPositionalEncoding"
        if is_nested(x):
            return encode_rows(self.forward, x, offset, positions, who)
        max_len, width = self.P.shape  # read from the table, which may have been replaced
        check_embedded(x, width, who)
        places = places_of(x, offset, positions, who)
        stop = places + x.shape[-2] if not isinstance(places, Tensor) else count_of(places, who, max_len)
        if stop is not None and stop > max_len:
            raise ShapeError(
                f"{who}: x has shape {tuple(x.shape)} and stands up to position {stop - 1}, which needs {stop} "
                f"positions; max_len is {max_len}.\nCut the sequence, or build it with max_len={stop}."
            )
        if x.device != self.P.device:
            raise ClearheadError(f"{who}: x is on {x.device}, and its table on {self.P.device}.")
        if isinstance(places, Tensor):
            rows = spread(F.embedding(placed(places, x.device, who), self.P), x)
        else:
            rows = self.P[places:stop]
        output: Tensor = self.dropout(x + rows)
        return output

    if TYPE_CHECKING:  # torch declares a call of anything
        __call__ = forward

    def plot(
        self,
        length: int | None = None,
        *,
        title: str | None = None,
        cmap: str | Colormap = "RdBu_r",
        ax: Axes | None = None,
    ) -> Axes:
        """Draw what is added at each position, (length, E), with matplotlib. Returns the axes.

        `length`: how many positions, from 0 on; None is all. `ax`: the axes to draw on; None makes new axes. Above
        1,024 positions or entries a cell is the mean of several numbers.
        """
        count = len(self.P) if length is None else check_count(length, 1, "length", len(self.P))
        return cast("Axes", plot({"": self.P[:count]}, Style(title, cmap, "signed", ax)))

    def extra_repr(self) -> str:
        return f"max_len={self.max_len}, embed_dim={self.embed_dim}"
