"""A side laid by dimension, for the φ that are no matrix product."""

import triton
import triton.language as tl

from clearhead.engines.triton.kernels.numbers import BITS
from clearhead.engines.triton.kernels.tile import matrix


@triton.jit
def lay_kernel(x, width, wide, RAISE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """(B, heads, length, D) to (B · heads, wide, padded) in float32; with RAISE e^2x, and each block's largest |x|.

    A program writes one block of rows. What is beyond the length and the width is 0, or e⁰.
    """
    program = tl.program_id(0)
    block, head = program % x.blocks, program // x.blocks
    b, h = head // x.heads, head % x.heads
    rows = block * BLOCK + tl.arange(0, BLOCK)
    reach = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, wide, WIDTH):
        dims = first + tl.arange(0, WIDTH)
        inside = (rows[:, None] < x.length) & (dims[None, :] < width)
        values = matrix(x.view, b, h, rows[:, None], dims[None, :], inside).to(tl.float32)
        if RAISE:
            size = tl.where(values == values, tl.abs(values), float("inf"))  # NaN is beyond any reach
            reach = tl.maximum(reach, tl.max(size, 1))
            values = tl.exp2(tl.minimum(values, 44.0) * BITS)
        at = x.laid + (head.to(tl.int64) * wide + dims[:, None]) * x.padded + rows[None, :]
        tl.store(at, tl.trans(values), mask=dims[:, None] < wide)
    if RAISE:
        tl.store(x.reach + program, tl.max(reach, 0))
