"""Arrays as text inside an HTML page, each content once."""

from __future__ import annotations

import base64
import hashlib
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Deflate gains little on the noise of float mantissas: the fastest level is hardly larger.
LEVEL = 1


class Blocks:
    """Collects arrays and hands out their numbers; equal arrays share a number.

    In the page, block n is `<script type="application/octet-stream" id="block-n">`, whose text is
    base64 of zlib-deflated little-endian values in C order. Browsers do not run such an element,
    so that it needs no hash in the page's policy.
    """

    def __init__(self) -> None:
        self.types: list[str] = []
        self._elements: list[str] = []
        self._numbers: dict[bytes, int] = {}

    def add(self, array: NDArray[Any], dtype: str) -> int:
        """The number of a block that holds `array` as `dtype` (a NumPy name)."""
        values = np.ascontiguousarray(array, dtype=np.dtype(dtype).newbyteorder("<")).tobytes()
        content = hashlib.sha256(dtype.encode() + b"\0" + values).digest()
        if content not in self._numbers:
            number = len(self._elements)
            text = base64.b64encode(zlib.compress(values, LEVEL)).decode("ascii")
            self._elements.append(f'<script type="application/octet-stream" id="block-{number}">{text}</script>')
            self.types.append(dtype)
            self._numbers[content] = number
        return self._numbers[content]

    def __len__(self) -> int:
        return len(self._elements)

    def html(self, first: int, last: int) -> str:
        """The elements of blocks `first` up to and without `last`."""
        return "\n".join(self._elements[first:last])
