"""φ = (q − k)², the Gaussian score, never as q² − 2qk + k², which loses its digits for inputs with an offset.

Both sides have the layout by dimension in float32, (B · heads, D, length): a tile's numbers of a dimension are
adjacent.
"""

import triton
import triton.language as tl

from clearhead.engines.triton.kernels.numbers import zeros


@triton.jit
def scores(given, x, y, x_at, y_at, xs, ys, X: tl.constexpr, Y: tl.constexpr):
    """Compute Σ_d w_d (x_d − y_d)², (X, Y); `x_at` and `y_at` are the addresses of a sequence and a head."""
    acc = zeros(X, Y, given.shape.BACKEND)
    for d in range(0, given.width):
        own, other = tl.load(x_at + d * x.padded + xs), tl.load(y_at + d * y.padded + ys)
        apart = own[:, None] - other[None, :]
        acc += tl.load(given.weight + d) * (apart * apart)
    return acc


@triton.jit
def add(given, x, y, x_at, y_at, xs, ys, slopes, to, to_weight):
    """Add Σ_y slope (x_d − y_d) to the gradient of x, without 2 w scale, and Σ_y slope (x_d − y_d)² to that of w."""
    for d in range(0, given.width):
        own, other = tl.load(x_at + d * x.padded + xs), tl.load(y_at + d * y.padded + ys)
        apart = own[:, None] - other[None, :]
        pull = slopes * apart
        at = to + d * x.padded + xs
        tl.store(at, tl.load(at) + tl.sum(pull, 1))
        if to_weight is not None:
            at = to_weight + d * x.padded + xs
            tl.store(at, tl.load(at) + tl.sum(pull * apart, 1))
