"""Arrays as text inside an HTML page, each content once."""

from __future__ import annotations

import base64
import hashlib
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

# The higher levels are hardly smaller: what is left is noise.
LEVEL = 6
MULTIPLES = "multiples"  # the type of a block of whole multiples


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
        return self._put(np.ascontiguousarray(array, dtype=np.dtype(dtype).newbyteorder("<")).tobytes(), dtype)

    def add_multiples(self, array: NDArray[Any], steps: NDArray[Any]) -> int:
        """The number of a block that holds `array` (L, D), whole multiples of `steps` (D,), as those.

        Rows, columns and bytes a multiple as int32; the steps as float64; then the first byte of all multiples, the
        second, …: of one feature after another, the lowest first, signs at the end (0, -1, 1, -2, … are 0, 1, 2, 3, …).
        """
        multiples = np.rint(array.astype(np.float64) / steps).astype(np.int64)
        unsigned = ((multiples << 1) ^ (multiples >> 63)).T
        planes = max(1, (int(unsigned.max(initial=0)).bit_length() + 7) // 8)
        head = np.array([*array.shape, planes, 0], dtype="<i4").tobytes() + steps.astype("<f8").tobytes()
        return self._put(
            head + b"".join((unsigned >> 8 * p).astype(np.uint8).tobytes() for p in range(planes)), MULTIPLES
        )

    def add_rounded(self, array: NDArray[Any]) -> int:
        """The number of a block of numbers (L,), to 16 bits of the largest; as float32 where one is not finite."""
        if not np.isfinite(array).all():
            return self.add(array, "float32")
        step = np.array([float(np.abs(array).max(initial=0.0)) / (2**15 - 1) or 1.0])
        return self.add_multiples(array[:, None], step)

    def _put(self, values: bytes, dtype: str) -> int:
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
