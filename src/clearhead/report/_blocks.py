"""Arrays as text inside an HTML page. Equal blocks are kept once, compressed, and in a temporary file."""

from __future__ import annotations

import base64
import hashlib
import tempfile
import weakref
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead.report.layer import Array

OCTAVES = 8  # a thumbnail reaches from uniform / 2^8 to uniform · 2^8
FINE = 128  # codes for an octave in the map of a long head
LEAST = -48  # the smallest weight of such a map is 2^-48
NO_NUMBER = 65535


def thumbnail_codes(times: Array) -> Array:
    """Multiples of uniform attention as bytes: 0 where no pair is allowed (below 0), 1 to 255 for 2^-8 to 2^8.

    times = 2^((code − 128) / 127 · 8). Multiples beyond an end have the code of this end; NaN has that of the upper
    end.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        octaves = np.log2(np.nan_to_num(times.astype(np.float64), nan=np.inf))
    codes = 128 + np.rint(127 * np.clip(np.nan_to_num(octaves, nan=0.0, neginf=-np.inf), -OCTAVES, OCTAVES) / OCTAVES)
    return np.where(times < 0, 0, codes).astype(np.uint8)


def map_codes(weights: Array, allowed: Array) -> Array:
    """Weights as 16 bits: 0 where no pair is allowed, 1 for 0, then weight = 2^((code − 2) / 128 − 48).

    Weights below 2^-48 have the code of 0, and NaN has the code 65535.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        fine = np.rint((np.log2(weights.astype(np.float64)) - LEAST) * FINE)
    codes = np.where(fine >= 0, 2 + np.nan_to_num(fine, nan=0.0, posinf=0.0, neginf=0.0), 1)
    codes = np.where(np.isnan(weights), NO_NUMBER, codes)
    return np.where(allowed, codes, 0).astype(np.uint16)


# Higher levels save hardly any room, since the arrays are mostly noise.
LEVEL = 6
PLACES = 8  # the largest number of arrays in a block
# The kinds of arrays, by their number: those of NumPy, whole multiples of steps, and 16 bits in two planes.
KINDS = ("uint8", "int32", "float32", "float64", "multiples", "planes")


def plain(array: NDArray[Any], dtype: str) -> bytes:
    """An array of a block: little-endian values in C order."""
    return _array(dtype, np.ascontiguousarray(array, dtype=np.dtype(dtype).newbyteorder("<")).tobytes())


def multiples(array: NDArray[Any], steps: NDArray[Any]) -> bytes:
    """The bytes of `array` (L, D), whose numbers are whole multiples of `steps` (D,), as these multiples.

    First as int32 the rows, the columns, the bytes of a multiple, and 0; then the steps as float64; then the lowest
    byte of all multiples, the second byte of all, …, each one feature after another. The sign is the lowest bit: the
    multiples 0, −1, 1, −2, … are written as 0, 1, 2, 3, ….
    """
    whole = np.rint(array.astype(np.float64) / steps).astype(np.int64)
    unsigned = ((whole << 1) ^ (whole >> 63)).T
    planes = max(1, (int(unsigned.max(initial=0)).bit_length() + 7) // 8)
    head = np.array([*array.shape, planes, 0], dtype="<i4").tobytes() + steps.astype("<f8").tobytes()
    return _array("multiples", head + b"".join((unsigned >> 8 * p).astype(np.uint8).tobytes() for p in range(planes)))


def planes(codes: NDArray[Any]) -> bytes:
    """Numbers of 16 bits: the low bytes of all, then the high ones."""
    flat = codes.astype(np.uint16).ravel()
    return _array("planes", (flat & 255).astype(np.uint8).tobytes() + (flat >> 8).astype(np.uint8).tobytes())


def _array(kind: str, values: bytes) -> bytes:
    """An array as bytes: its kind and its number of bytes as int32, then its bytes, filled up to a multiple of 8."""
    head = np.array([KINDS.index(kind), len(values)], dtype="<i4").tobytes()
    return head + values + b"\0" * (-len(values) % 8)


class Blocks:
    """Collects blocks of arrays, and says where each array stands; equal blocks are kept once.

    In the page, block n is `<script type="application/octet-stream" id="block-n">`, whose text is base64 of deflated
    arrays (zlib), one after another. Browsers do not run such an element, so it needs no hash in the page's policy.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self._ends = [0]
        self._numbers: dict[bytes, int] = {}
        self._early: set[int] = set()

    def add(self, *arrays: bytes, early: bool = False) -> list[int]:
        """Add arrays as one block, and return their places, 8 · block + place. `early`: before the program."""
        assert 0 < len(arrays) <= PLACES
        values = b"".join(arrays)
        content = hashlib.sha256(values).digest()
        number = self._numbers.setdefault(content, len(self))
        if number == len(self):
            self._file.write(zlib.compress(values, LEVEL))
            self._file.flush()
            self._ends.append(self._file.tell())
            if early:
                self._early.add(number)
        return [PLACES * number + place for place in range(len(arrays))]

    def one(self, array: bytes) -> int:
        """Add an array as a block of its own, and return its place."""
        return self.add(array)[0]

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: int) -> bytes:
        """The bytes of a block in the file, deflated."""
        start, stop = self._ends[number : number + 2]
        self._file.seek(start)
        return self._file.read(stop - start)

    def html(self, early: bool, first: Iterable[int]) -> Iterator[str]:
        """The elements of the blocks before the program, or after it; the blocks `first` come before the others."""
        for number in dict.fromkeys([*first, *range(len(self))]):
            if (number in self._early) is not early:
                continue
            yield f'<script type="application/octet-stream" id="block-{number}">'
            yield base64.b64encode(self[number]).decode("ascii")
            yield "</script>\n"
