"""Which weights dropout keeps: a hash of (seed, batch, head, query, key).

A pair is kept or dropped alike in any block, on any engine, forward and backward. So nothing has to be stored, and
the size of a tile never changes a result. Words have 32 bits and wrap around, and ⊕ is exclusive or:

    mix(x)       x ⊕= x ≫ 16;  x ·= 0x7feb352d;  x ⊕= x ≫ 15;  x ·= 0x846ca68b;  x ⊕= x ≫ 16
    row(b, h, i) = mix(mix(mix(mix(mix(low half of the seed) + high half) + b) + h) + i)
    column(j)    = mix(j + 0x9e3779b9)
    x            = row(b, h, i) + column(j);  x ⊕= x ≫ 16;  x ·= 0x7feb352d;  x ⊕= x ≫ 15;  x ·= 0x846ca68b
    kept         if x, as a signed number, is at least round(p · 2³²) − 2³¹

`mix` is Wellons' "lowbias32" (2018, "Prospecting for Hash Functions"). A stronger generator costs several times the
work of the tile itself. This much mixing, of words that are mixed already, costs about half of that work.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError, UnsupportedError
from clearhead.base.output.text import brief
from clearhead.base.shapes import Sizes
from clearhead.base.torch_state.mode import count_loss_batches, get_mode

_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - 2**32  # as signed numbers, for PyTorch's int32
_COLUMNS = 0x9E3779B9 - 2**32


def check_dropout(p: Any, name: str) -> float:
    """A probability below 1."""
    # its steps are of 2⁻³²
    if isinstance(p, bool) or not isinstance(p, int | float | np.number) or not 0.0 <= float(p) <= 1 - 2.0**-32:
        raise ClearheadError(f"{name} is {brief(p)}; expected a probability: 0 ≤ {name} < 1.")
    return float(p)


def draw_seed(device: torch.device) -> Tensor:
    """A seed from torch's generator: `torch.manual_seed` makes dropout repeat."""
    if get_mode().vectorized or count_loss_batches():
        raise UnsupportedError(
            "dropout inside torch.func.vmap, or a transform with vectorize=True, would be the same for every sample: "
            "pass dropout_p=0, or give the inputs a batch dimension of their own, and call attention() on the whole "
            "batch."
        )
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)


def factors(seed: Tensor, p: float, sizes: Sizes, origin: tuple[range, ...] | None, dtype: torch.dtype) -> Tensor:
    """The factors by which dropout multiplies weights (B, H, Lq, Lk): 0 with probability p, else 1 / (1 − p). `origin`:
    where these weights are a part of a larger matrix, their four ranges in it."""
    places = [(0, size, 1) for size in sizes.shape] if origin is None else [(r.start, r.stop, r.step) for r in origin]
    b, h, i, j = (torch.arange(*ends, dtype=torch.int32, device=seed.device) for ends in places)
    low, high = (seed.bitwise_and(2**32 - 1) - 2**31).int() ^ -(2**31), (seed >> 32).int()
    sequence = _mix(_mix(_mix(low) + high) + b)  # (b,)
    row = _mix(_mix(sequence[:, None] + h)[..., None] + i)  # (b, h, q)
    x = row[..., None] + _mix(j + _COLUMNS)  # (b, h, q, k)
    spare = torch.empty_like(x)  # new memory for each step would cost more than the step
    _shift(x, 16, spare).mul_(_FIRST)
    _shift(x, 15, spare).mul_(_SECOND)
    kept = torch.empty(x.shape, dtype=dtype, device=x.device)
    return torch.ge(x, round(p * 2**32) - 2**31, out=kept).mul_(1 / (1 - p))


def _mix(x: Tensor) -> Tensor:
    x = x.clone()
    spare = torch.empty_like(x)
    _shift(x, 16, spare).mul_(_FIRST)
    _shift(x, 15, spare).mul_(_SECOND)
    return _shift(x, 16, spare)


def _shift(x: Tensor, bits: int, spare: Tensor) -> Tensor:
    """x ⊕= x ≫ bits, where the shift fills with zeros. PyTorch's shift fills with the sign."""
    torch.bitwise_right_shift(x, bits, out=spare).bitwise_and_(2 ** (32 - bits) - 1)
    return x.bitwise_xor_(spare)
