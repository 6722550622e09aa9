"""The layout of a side by dimension, and the weights of its dimensions, for a φ that is no matrix product."""

import triton
import triton.language as tl

from clearhead.engines.triton.kernels.numbers import BITS
from clearhead.engines.triton.kernels.tile import block_of, matrix, sound


@triton.jit
def weigh_kernel(to, sums, weight, width, wide, WIDTH: tl.constexpr):
    """Write the weights in float32, ones without weights, and zeros beyond the width; and Σ w and Σ |w|.

    One program, in steps of WIDTH, sums in float64. `sums` may be None.
    """
    total, size = tl.zeros((WIDTH,), tl.float64), tl.zeros((WIDTH,), tl.float64)
    for first in range(0, wide, WIDTH):
        dims = first + tl.arange(0, WIDTH)
        w = tl.where(dims < width, 1.0, 0.0)
        if weight is not None:
            w = tl.load(weight + dims, mask=dims < width, other=0.0).to(tl.float32)
        tl.store(to + dims, w, mask=dims < wide)
        total += w.to(tl.float64)
        size += tl.abs(w).to(tl.float64)
    if sums is not None:
        tl.store(sums, tl.sum(total, 0).to(tl.float32))
        tl.store(sums + 1, tl.sum(size, 0).to(tl.float32))


@triton.jit
def lay_kernel(x, width, wide, RAISE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Transpose (B, heads, length, D) to (B · heads, wide, padded) in float32; with RAISE write e^2x and max |x|.

    Each program writes one block of rows, and its largest |x|. Entries beyond the length and the width are 0, or e⁰.
    """
    program = tl.program_id(0)
    _, rows, b, h, head = block_of(program, x.length, x.heads, BLOCK)
    real = sound(x, b, h, rows)
    reach = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, wide, WIDTH):
        dims = first + tl.arange(0, WIDTH)
        inside = real[:, None] & (dims[None, :] < width)
        values = matrix(x.view, b, h, rows[:, None], dims[None, :], inside).to(tl.float32)
        if RAISE:
            size = tl.where(values == values, tl.abs(values), float("inf"))  # NaN counts as infinite
            reach = tl.maximum(reach, tl.max(size, 1))
            values = tl.exp2(tl.minimum(values, 44.0) * BITS)
        at = x.laid + (head.to(tl.int64) * wide + dims[:, None]) * x.padded + rows[None, :]
        tl.store(at, tl.trans(values), mask=dims[:, None] < wide)
    if RAISE:
        tl.store(x.reach + program, tl.max(reach, 0))
