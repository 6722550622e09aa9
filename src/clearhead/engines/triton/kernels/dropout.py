"""The hash of base/dropout.py, to the bit: 32-bit words that wrap around."""

import triton
import triton.language as tl


@triton.jit
def mix(x):
    """Wellons' lowbias32."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def kept(given, b, h, i, j):
    """Which pairs of a tile dropout keeps: i and j are the places of its queries and keys, and broadcast to it."""
    seed = tl.load(given.dropout.seed)
    sequence = mix(mix(mix(seed.to(tl.uint32)) + (seed >> 32).to(tl.uint32)) + (b + given.dropout.batch).to(tl.uint32))
    row = mix(mix(sequence + (h + given.dropout.head).to(tl.uint32)) + (i + given.dropout.query).to(tl.uint32))
    x = row + mix((j + given.dropout.key).to(tl.uint32) + 0x9E3779B9)
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x.to(tl.int32, bitcast=True) >= given.dropout.limit
