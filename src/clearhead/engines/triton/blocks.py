"""The numbers of queries and keys of a tile, by φ, pass and widths, chosen by the register counts of `make cuda-check`.

No device has measured these: they spill little, and leave room for as many warps as the table beside the kernels lists.
"""

from __future__ import annotations

from typing import NamedTuple

WIDEST = 256  # the widest value, or query of a dot product, that a program holds
FEW = 16  # up to this many queries a tile has this many rows
SHARED = 64  # up to this many queries, those of a group together, several programs share the keys
SPLIT = 512  # the least keys of such a program
PROGRAMS = 264  # two for each processor of an H200: more programs gain nothing


class Blocks(NamedTuple):
    """The tile of a kernel, and the warps of its programs."""

    queries: int
    keys: int
    warps: int = 4


def power(count: int, least: int = 16) -> int:
    """Return the least power of two that holds `count`."""
    return max(least, 1 << (count - 1).bit_length())


def widest(phi: str, width: int, values: int) -> int:
    """Return the widest row that a program holds, a power of two: queries and keys of a dot product, and values."""
    return max(power(width) if phi == "mul" else 16, power(values or 1))


def blocks_for(phi: str, pass_: str, width: int, values: int, size: int, queries: int, plain: bool = True) -> Blocks:
    """Return the tile for operands of these widths.

    Args:
        phi: The φ of the score.
        pass_: "forward", "backward", "backward of statistics" or "summarise".
        width: The width of queries and keys.
        values: The width of the value.
        size: The bytes of a number of the operands.
        queries: Lq.
        plain: Whether there are neither mask, bias, dropout nor sinks, which take registers beside the operands.
    """
    columns = widest(phi, width, values)
    row = columns * size  # the bytes of a row of the widest operand
    if pass_ == "backward of statistics":  # the gradients of statistics need the most registers
        return Blocks(16, 16, 8 if columns > 64 else 4)
    split = phi == "mul" and size == 4  # a product holds two tf32 numbers for each float32: see `numbers.product`
    small = row > 256 or (phi == "mul" and pass_ != "forward" and (split or row > 128))
    found = Blocks(32, 16 if split and pass_ == "summarise" else 32, 8) if small else Blocks(64, 32, 8)
    if pass_ == "forward" and row <= 256 and plain and not split:
        found = Blocks(64, 64 if phi == "mul" else 32)
    return found._replace(queries=FEW, warps=4) if queries <= FEW and pass_ == "forward" else found
