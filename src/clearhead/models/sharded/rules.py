"""The rules by which transformers says who sees whom, as masks of the whole sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from clearhead.base.errors import UnsupportedError
from clearhead.base.positions import FAR
from clearhead.masks.base import Mask
from clearhead.masks.causal import Causal
from clearhead.masks.sliding_window import SlidingWindow

HOME = "transformers.masking_utils."


def rules(function: Callable[..., Any]) -> Iterator[Mask]:
    """The masks that a `mask_function` of transformers is the intersection of; none, where all may be seen.

    Its functions are of positions, and are given a rank's own; so they are read by their names, and by what they hold.
    """
    full = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"
    name = full.removeprefix(HOME) if full.startswith(HOME) else ""
    code = getattr(function, "__code__", None)
    names = code.co_freevars if code is not None else ()
    held = dict(zip(names, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))
    if name == "causal_mask_function":
        yield Causal()
    elif name == "and_masks.<locals>.and_mask":
        for part in held["mask_functions"]:
            yield from rules(part)
    elif name == "sliding_window_overlay.<locals>.inner_mask":
        yield SlidingWindow(before=held["sliding_window"] - 1, after=FAR)
    elif name == "sliding_window_bidirectional_overlay.<locals>.inner_mask":
        yield SlidingWindow(before=held["sliding_window"], after=held["sliding_window"])
    elif name != "bidirectional_mask_function":
        shown = (name or full).split(".<locals>")[0]
        raise UnsupportedError(
            f"the model's mask has the rule {shown!r}, which is not known for a sequence that is shared out over "
            "ranks: causal, bidirectional and sliding-window masks are, with padding and packed documents."
        )
