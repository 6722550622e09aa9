"""A picture whose patches are the tokens of a recording."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.report.layer import Array

MOST = 448  # pixels of a side that a page holds
EXTRA = 16  # the most tokens before the patches


class Patches(NamedTuple):
    """A picture, uint8 (height, width, 3), in `rows` × `columns` patches, and how many tokens stand before these."""

    pixels: Array
    rows: int
    columns: int
    extra: int

    @property
    def words(self) -> list[str]:
        """The names of the tokens: special ones, then row and column of each patch."""
        special = ["[CLS]", *(f"[{number}]" for number in range(1, self.extra))][: self.extra]
        return special + [f"{row},{column}" for row in range(self.rows) for column in range(self.columns)]


class Picture(Protocol):
    """A picture of PIL."""

    def convert(self, mode: str) -> Self: ...


def patches_of(image: Any, lengths: set[int]) -> Patches:
    """The patches of a picture for calls with so many positions: see `Recording.view`."""
    pixels = _pixels(image)
    height, width = pixels.shape[:2]
    for extra in range(EXTRA + 1):
        for length in sorted(lengths, reverse=True):
            for rows in range(1, length - extra + 1):
                columns = (length - extra) // rows
                # patches are square: the sides of the grid are in the ratio of those of the picture
                if rows * columns == length - extra and abs(rows * width - columns * height) < 0.02 * rows * width:
                    return Patches(_smaller(pixels), rows, columns, extra)
    raise ClearheadError(
        f"image has {height} × {width} pixels, and the calls {sorted(lengths)} positions, no grid of square patches: "
        "pass the picture as the processor has resized and cropped it."
    )


def _pixels(image: Any) -> Array:
    """The picture as uint8 (height, width, 3)."""
    if hasattr(image, "convert"):  # a picture of PIL
        image = image.convert("RGB")
    array = image.detach().cpu().numpy() if isinstance(image, Tensor) else np.asarray(image)
    if array.ndim == 3 and array.shape[0] in (1, 3) and array.shape[2] not in (1, 3):
        array = array.transpose(1, 2, 0)
    if array.ndim == 2:
        array = array[..., None]
    numeric = array.dtype.kind in "uif"
    if array.ndim != 3 or array.shape[2] not in (1, 3) or not numeric or not array.size:
        raise ClearheadError(
            f"image is a {type(image).__name__} of shape {getattr(array, 'shape', ())}; expected (height, width, 3) or "
            "(3, height, width), whole numbers to 255 or floats to 1, or a picture of PIL."
        )
    if array.dtype.kind == "f":
        array = np.nan_to_num(array.astype(np.float64)) * 255
    found: Array = np.broadcast_to(np.clip(np.rint(array), 0, 255).astype(np.uint8), (*array.shape[:2], 3))
    return found


def _smaller(pixels: Array) -> Array:
    """The picture with at most MOST pixels on a side: every so-manieth one."""
    size = max(pixels.shape[:2])
    height, width = (min(side, max(1, side * MOST // size)) for side in pixels.shape[:2])
    rows, columns = (np.arange(n) * side // n for n, side in zip((height, width), pixels.shape[:2], strict=True))
    return np.ascontiguousarray(pixels[rows][:, columns])
