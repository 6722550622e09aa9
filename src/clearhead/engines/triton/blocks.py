"""How many queries and keys a tile has, by φ, pass and widths: chosen by what `make cuda-check` says of registers.

No device has measured these: they spill little, and leave room for as many warps as the table beside the kernels says.
"""

from __future__ import annotations

from typing import NamedTuple

WIDEST = 256  # a value, or a query of a dot product, that a program holds
FEW = 16  # queries up to which a tile has so many
SHARED = 64  # queries, those of a group together, up to which the keys are shared out among programs
SPLIT = 512  # keys to a program then, at least
PROGRAMS = 264  # two for each processor of an H200: more shares than that gain nothing


class Blocks(NamedTuple):
    """The tile of a kernel, and the warps of its programs."""

    queries: int
    keys: int
    warps: int = 4


def power(count: int, least: int = 16) -> int:
    """The power of two that holds `count`."""
    return max(least, 1 << (count - 1).bit_length())


def widest(phi: str, width: int, values: int) -> int:
    """The widest row that a program holds, a power of two: of queries and keys for a dot product, and of values."""
    return max(power(width) if phi == "mul" else 16, power(values or 1))


def blocks_for(phi: str, pass_: str, width: int, values: int, size: int, queries: int, plain: bool = True) -> Blocks:
    """The tile for widths of the operands, whose numbers have `size` bytes.

    `pass_`: forward, backward, "backward of statistics", summarise. `plain`: neither mask, bias, dropout nor sinks,
    which take registers beside the operands.
    """
    columns = widest(phi, width, values)
    row = columns * size  # bytes of the widest operand
    if pass_ == "backward of statistics":  # what they send back needs most registers
        return Blocks(16, 16, 8 if columns > 64 else 4)
    split = phi == "mul" and size == 4  # each number of a product is two in tf32: see `numbers.product`
    small = row > 256 or (phi == "mul" and pass_ != "forward" and (split or row > 128))
    found = Blocks(32, 16 if split and pass_ == "summarise" else 32, 8) if small else Blocks(64, 32, 8)
    if pass_ == "forward" and row <= 256 and plain and not split:
        found = Blocks(64, 64 if phi == "mul" else 32)
    return found._replace(queries=FEW, warps=4) if queries <= FEW and pass_ == "forward" else found
