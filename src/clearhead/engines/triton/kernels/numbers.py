"""Arithmetic in float32: products in several precisions, a reciprocal, tanh, and zeros in the layout of a product.

`BACKEND` is the target of the kernel: 0 the interpreter, 1 NVIDIA, 2 AMD.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
BITS = tl.constexpr(2.8853900817779268)  # log2(e^2)
LIMIT = tl.constexpr(2147483648.0)  # 2^31: beyond it 1 / t is 0 within the digits of float32
LIMIT_LOG2 = tl.constexpr(31.0)
NEAR = tl.constexpr(0.625)
HIGHEST = tl.constexpr(3.401162134214653e38)  # (2 − 2^−10) 2^127: the largest number of 11 bits


@triton.jit
def reciprocal(x, BACKEND: tl.constexpr):
    """Compute 1 / x to a unit in the last place, by one instruction: `/` takes four on NVIDIA, with its scaling."""
    if BACKEND == 1:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    elif BACKEND == 2:
        return tl.inline_asm_elementwise("v_rcp_f32 $0, $1", "=v,v", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return 1.0 / x


@triton.jit
def tanh_near(x):
    """Compute tanh for |x| < NEAR by its series, with all its digits, however small x is."""
    square = x * x
    p = square * -5.70498872745e-3 + 2.06390887954e-2
    p = p * square - 5.37397155531e-2
    p = p * square + 1.33314422036e-1
    p = p * square - 3.33332819422e-1
    return x + x * (square * p)


@triton.jit
def tanh(x, BACKEND: tl.constexpr):
    """Compute tanh of any number: its series near 0, elsewhere 1 − 2 / (1 + e^2|x|). NaN stays NaN."""
    size = tl.abs(x)
    power = tl.exp2(tl.where(size > 12.0, 12.0, size) * BITS)
    far = 1.0 - 2.0 * reciprocal(1.0 + power, BACKEND)
    return tl.where(size < NEAR, tanh_near(x), tl.where(x < 0, -far, far))


@triton.jit
def zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr, BACKEND: tl.constexpr):
    """Return zeros (ROWS, COLUMNS) in the layout of a matrix product, which results computed from them keep.

    In another layout the compiler would convert the weights, with all that they are computed from, before the product
    with the values: that spilled thousands of bytes for each thread (Triton 3.6, 3.7).
    """
    if BACKEND == 0:
        return tl.zeros((ROWS, COLUMNS), tl.float32)
    else:
        return tl.dot(tl.zeros((ROWS, 16), tl.bfloat16), tl.zeros((16, COLUMNS), tl.bfloat16))


@triton.jit
def high(x):
    """Round a float32 to 11 bits, which a tensor core reads of it in tf32; never to infinity.

    The rest, x − high(x), is at most 2^−11 |x|. Truncation would leave up to 2^−10 |x| with the sign of x: then the
    product of two rests, which `product` drops, is up to 2^−20 of a term and has the term's sign, so that the errors of
    a sum add up.
    """
    nearest = ((x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)
    return tl.clamp(nearest, -HIGHEST, HIGHEST)


@triton.jit
def product(x, y, acc, shape):
    """Compute acc + x @ y, (X, Y) + (X, N) @ (N, Y), summed in float32; x is converted to y's dtype.

    A float32 product takes `shape.PRODUCTS` tf32 products: 3 read 22 bits of each number, 1 reads 11 bits. They are
    written out, since Triton's "tf32x3" splits numbers in a layout that spills.
    """
    # the interpreter multiplies the bits of bfloat16 as integers
    if y.dtype == tl.bfloat16 and shape.BACKEND == 0:
        return tl.dot(x.to(tl.bfloat16).to(tl.float32), y.to(tl.float32), acc, input_precision="ieee")
    elif y.dtype != tl.float32:
        return tl.dot(x.to(y.dtype), y, acc)
    elif shape.PRODUCTS == 3:
        x_high, y_high = high(x), high(y)
        acc = tl.dot(x - x_high, y_high, acc, input_precision="tf32")
        acc = tl.dot(x_high, y - y_high, acc, input_precision="tf32")
        return tl.dot(x_high, y_high, acc, input_precision="tf32")
    else:
        return tl.dot(x, y, acc, input_precision="tf32")
