"""φ = tanh(q + k), the additive score, without a tanh (docs/maths/additive.md).

    Σ_d w_d tanh(x_d + y_d) = Σ_d w_d − 2 Σ_d w_d / t_d,    t_d = 1 + A_d B_d,    A = e^2x,    B = e^2y

A and B have the layout by dimension in float32, (B · heads, D, length), where D is a multiple of four, and the last
dimensions have a weight of 0; four dimensions share a reciprocal. A pair of blocks has one of three forms, by the
largest |x| and |y| in it:

    0  QUICK   as above, t at most 2³¹; |x| and |y| are below 43
    1  NEAR    tanh by its series, if all |x| + |y| are below 0.625: 1 − 2 / t would have no digits left
    2  EXACT   tanh itself of x and y: for any numbers, and if scale · Σ |w| is large
"""

import triton
import triton.language as tl

from clearhead.engines.triton.kernels.numbers import BITS, LIMIT, LIMIT_LOG2, NEAR, reciprocal, tanh, tanh_near, zeros
from clearhead.engines.triton.kernels.tile import along, sound

REACH = tl.constexpr(43.0)  # e^(2 · 43) < 2^126
HEAVY = tl.constexpr(32.0)  # scale · Σ |w| above this is large: its rounding error is 4e-6


@triton.jit
def form(given, x, y, x_head, y_head, x_block, y_block):
    """Return the form for a block of either side; `x_head`, `y_head`: the head among all heads of its side."""
    x_reach = tl.load(x.reach + x_head * x.blocks + x_block)
    y_reach = tl.load(y.reach + y_head * y.blocks + y_block)
    heavy = tl.abs(given.scale) * tl.load(given.sums + 1) > HEAVY
    quick = (x_reach < REACH) & (y_reach < REACH) & (heavy == 0)
    return tl.where(x_reach + y_reach < NEAR, 1, tl.where(quick, 0, 2))


@triton.jit
def _column(x, b, h, places, inside, d):
    return along(x.view, b, h, places, inside, 0.0, d).to(tl.float32)


@triton.jit
def _quick(given, x, y, x_at, y_at, xs, ys, X: tl.constexpr, Y: tl.constexpr):
    acc = zeros(X, Y, given.shape.BACKEND)
    for d in range(0, given.width, 4):
        a, b, w = x_at + d * x.padded + xs, y_at + d * y.padded + ys, given.weight + d
        w0, w1, w2, w3 = tl.load(w), tl.load(w + 1), tl.load(w + 2), tl.load(w + 3)
        t0 = tl.minimum(tl.load(a)[:, None] * tl.load(b)[None, :] + 1.0, LIMIT)
        t1 = tl.minimum(tl.load(a + x.padded)[:, None] * tl.load(b + y.padded)[None, :] + 1.0, LIMIT)
        t2 = tl.minimum(tl.load(a + 2 * x.padded)[:, None] * tl.load(b + 2 * y.padded)[None, :] + 1.0, LIMIT)
        t3 = tl.minimum(tl.load(a + 3 * x.padded)[:, None] * tl.load(b + 3 * y.padded)[None, :] + 1.0, LIMIT)
        left, right = t0 * t1, t2 * t3
        upper = (w0 * t1 + w1 * t0) * right + (w2 * t3 + w3 * t2) * left
        acc += upper * reciprocal(left * right, given.shape.BACKEND)
    return tl.load(given.sums) - 2.0 * acc


@triton.jit
def _direct(given, x, y, b, x_h, y_h, xs, ys, near, X: tl.constexpr, Y: tl.constexpr):
    acc = zeros(X, Y, given.shape.BACKEND)
    x_inside, y_inside = sound(x, b, x_h, xs), sound(y, b, y_h, ys)
    for d in range(0, given.width):
        both = _column(x, b, x_h, xs, x_inside, d)[:, None] + _column(y, b, y_h, ys, y_inside, d)[None, :]
        if near:
            acc += tl.load(given.weight + d) * tanh_near(both)
        else:
            acc += tl.load(given.weight + d) * tanh(both, given.shape.BACKEND)
    return acc


@triton.jit
def scores(given, x, y, b, x_h, y_h, x_at, y_at, xs, ys, which, X: tl.constexpr, Y: tl.constexpr):
    """Compute Σ_d w_d tanh(x_d + y_d), (X, Y), in the form `which`."""
    if which == 0:
        s = _quick(given, x, y, x_at, y_at, xs, ys, X, Y)
    else:
        s = _direct(given, x, y, b, x_h, y_h, xs, ys, which == 1, X, Y)
    return s


@triton.jit
def add(given, x, y, b, x_h, y_h, x_at, y_at, xs, ys, which, slopes, to, to_weight):
    """Add Σ_y slope tanh'(x_d + y_d) / 4 to the gradient of x, without w scale, and Σ_y slope tanh to that of w.

    tanh' = 4 (t − 1) / t², from A B itself: 1 / t − 1 / t² loses its digits where x + y is far below 0.
    """
    if which == 0:
        for d in range(0, given.width):
            own, other = tl.load(x_at + d * x.padded + xs), tl.load(y_at + d * y.padded + ys)
            power = tl.minimum(own[:, None] * other[None, :], LIMIT)
            r = reciprocal(power + 1.0, given.shape.BACKEND)
            at = to + d * x.padded + xs
            tl.store(at, tl.load(at) + tl.sum(slopes * (power * r * r), 1))
            if to_weight is not None:
                at = to_weight + d * x.padded + xs
                tl.store(at, tl.load(at) + tl.sum(slopes * (1.0 - 2.0 * r), 1))
    else:
        x_inside, y_inside = sound(x, b, x_h, xs), sound(y, b, y_h, ys)
        for d in range(0, given.width):
            both = _column(x, b, x_h, xs, x_inside, d)[:, None] + _column(y, b, y_h, ys, y_inside, d)[None, :]
            bits = both * BITS
            power = tl.exp2(tl.where(bits > LIMIT_LOG2, LIMIT_LOG2, bits))
            r = reciprocal(power + 1.0, given.shape.BACKEND)
            at = to + d * x.padded + xs
            tl.store(at, tl.load(at) + tl.sum(slopes * (power * r * r), 1))
            if to_weight is not None:
                at = to_weight + d * x.padded + xs
                tl.store(at, tl.load(at) + tl.sum(slopes * tanh(both, given.shape.BACKEND), 1))
