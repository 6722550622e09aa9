"""φ = q · k, the dot product, with the same functions as tanh_add.py and sq_diff.py.

Both sides have the same role: `x` is the first side of a tile, `y` the second one; they are queries and keys, or keys
and queries. A weight has been multiplied into the query.
"""

import triton
import triton.language as tl

from clearhead.engines.triton.kernels.numbers import product
from clearhead.engines.triton.kernels.tile import matrix, sound


@triton.jit
def rows(given, x, b, h, places):
    """Load the rows of one side at these places, (X, D), once, before the blocks of the other side."""
    dims = tl.arange(0, given.shape.WIDTH)
    inside = sound(x, b, h, places[:, None]) & (dims[None, :] < given.width)
    return matrix(x.view, b, h, places[:, None], dims[None, :], inside)


@triton.jit
def scores(given, own, y, b, h_y, ys, X: tl.constexpr, Y: tl.constexpr):
    """Compute Σ_d x_d y_d, (X, Y) = (X, D) @ (D, Y)."""
    dims = tl.arange(0, given.shape.WIDTH)
    inside = sound(y, b, h_y, ys[None, :]) & (dims[:, None] < given.width)
    other = matrix(y.view, b, h_y, ys[None, :], dims[:, None], inside)
    return product(own, other, tl.zeros((X, Y), tl.float32), given.shape)


@triton.jit
def add(given, acc, y, b, h_y, ys, slopes):
    """Compute acc + Σ_y slope · y, (X, D) + (X, Y) @ (Y, D): the gradient of x without the scale."""
    return product(slopes, rows(given, y, b, h_y, ys), acc, given.shape)
