"""Where query 0 stands among the keys, for whatever depends on a query's position."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from clearhead.base.arrays import to_tensor
from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.shapes import Sizes, placed
from clearhead.base.tracing import ensure, readable

FAR = 2**40  # further than any sequence is long; sums of such numbers do not overflow

Align = Literal["upper_left", "lower_right"] | Tensor | None

_ADVICE = (
    'Pass align="upper_left" (query 0 stands at key 0), align="lower_right" (the last query stands at the last key: '
    "a key/value cache), or a (B,) integer tensor of the positions of query 0."
)


def check_align(align: Any, who: str) -> Any:
    """The alignment as given, an array as a tensor; raise for anything that is none."""
    if align is None or (isinstance(align, str) and align in ("upper_left", "lower_right")):
        return align
    if isinstance(align, str) or not hasattr(align, "shape"):
        raise ClearheadError(f"{who}: align is {align!r}. {_ADVICE}")
    positions = to_tensor(align, "align")
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool or positions.ndim > 1:
        raise ClearheadError(
            f"{who}: align has dtype {positions.dtype}, shape {tuple(positions.shape)}; expected integers (B,). "
            + _ADVICE
        )
    return positions.detach().long().clamp(-FAR, FAR)


def say_align(align: str | Tensor) -> str:
    """An alignment as it was given."""
    if isinstance(align, str):
        return repr(align)
    return repr(align.tolist()) if readable(align) else f"<{align.numel()} positions>"


def query_offset(align: Any, sizes: Sizes, who: str) -> int | Tensor:
    """The position of query 0 among the keys: a number, or a tensor (B, 1, 1)."""
    if isinstance(align, Tensor):
        if align.numel() not in (1, sizes.batch):
            raise ShapeError(
                f"{who}: align has shape {tuple(align.shape)} and the batch is {sizes.batch}; expected "
                f"({sizes.batch},): the position of query 0 of each sequence."
            )
        return placed(align, sizes.device, f"{who}: align").reshape(-1, 1, 1)
    if align == "lower_right":
        return sizes.keys - sizes.queries
    if align is None and sizes.queries != sizes.keys:
        left, right = _causal_picture(0), _causal_picture(2)
        pictures = "\n".join(f"    {a}      {b}" for a, b in zip(left, right, strict=True))
        raise ClearheadError(
            f"{who}: {sizes.queries} queries and {sizes.keys} keys, and no alignment. A causal mask of 3 queries "
            f'and 5 keys would be\n    "upper_left"   "lower_right"\n{pictures}\n{_ADVICE}'
        )
    return 0


def _causal_picture(offset: int) -> list[str]:
    return [" ".join("■" if j <= i + offset else "·" for j in range(5)).ljust(9) for i in range(3)]


def check_one_alignment(offsets: list[tuple[str, int | Tensor]]) -> None:
    """Raise where two parts of one call place query 0 differently."""
    for (first, a), (second, b) in pairwise(offsets):
        same: Any = a == b

        def differ(
            who: str = f"{first} and {second} place query 0 differently", a: Any = a, b: Any = b
        ) -> ClearheadError:
            return ClearheadError(
                f"{who}, at {_say(a)} and at {_say(b)}.\nGive both the same align: one call has one alignment."
            )

        if isinstance(same, Tensor):
            ensure(same, differ, f"{first} and {second} place query 0 differently")
        elif not same:
            raise differ()


def _say(offset: int | Tensor) -> str:
    return f"key {offset}" if isinstance(offset, int) else f"keys {offset.flatten().tolist()}"
