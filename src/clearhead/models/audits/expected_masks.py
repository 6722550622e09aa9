"""The masks that are expected of attention calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from clearhead.base.arrays import to_tensor
from clearhead.base.errors import ClearheadError
from clearhead.base.output.text import said
from clearhead.masks.base import Mask
from clearhead.masks.dense import DenseMask
from clearhead.masks.first_keys import FirstKeys
from clearhead.models.recordings.attention_call import AttentionCall
from clearhead.models.recordings.calls import chosen_calls

EVERY_KEY = ~FirstKeys(0)
ExpectedMask = Mask | Tensor | np.ndarray | Callable[[AttentionCall], Any] | None
Expected = ExpectedMask | Mapping[str, ExpectedMask] | Mapping[int | str, ExpectedMask]


def describe_mask(expected: Expected) -> str:
    """An expected mask in a few words."""
    if expected is EVERY_KEY:
        return "every key"
    if isinstance(expected, Mask):
        return said(expected, expected.title)
    if isinstance(expected, Tensor | np.ndarray):
        return f"a mask of shape {tuple(expected.shape)}"
    return "every key" if expected is None else "a mask for each call" if callable(expected) else "masks by layer"


class ExpectedMasks:
    """The masks that are expected of the calls of one run; equal expectations give one object."""

    def __init__(self, expected: Expected) -> None:
        self._expected = expected
        self._made: dict[Any, tuple[Any, Mask]] = {}

    def pair(self, calls: Sequence[AttentionCall]) -> list[tuple[AttentionCall, Mask]]:
        """The calls that have an expected mask, each with its mask."""
        if not isinstance(self._expected, Mapping):
            return [(call, _make_mask(self._expected, call, self._made)) for call in calls]
        numbers = [(_find_calls(calls, which), mask) for which, mask in self._expected.items()]
        each = [[mask for some, mask in numbers if number in some] for number in range(len(calls))]
        return [
            (call, _make_mask(masks[0], call, self._made)) for call, masks in zip(calls, each, strict=True) if masks
        ]


def _find_calls(calls: Sequence[AttentionCall], which: Any) -> set[int]:
    """The numbers of the calls that "encoder", "decoder", "cross", or a layer names."""
    kinds = [call.layer.stack.split(".") if call.kind == "self" else [call.kind] for call in calls]
    found = {number for number, names in enumerate(kinds) if which in names}
    return found or set(chosen_calls(calls, which, "audit"))


def _make_mask(expected: Any, call: AttentionCall, made: dict[Any, tuple[Any, Mask]]) -> Mask:
    if not isinstance(expected, Mask | type) and callable(expected):
        expected = expected(call)
    if isinstance(expected, Mask):
        return expected
    sizes = call.problem.sizes
    if expected is None:
        return EVERY_KEY
    if not isinstance(expected, Tensor | np.ndarray):
        raise ClearheadError(
            f"audit: {expected!r:.60} is expected of {call.name}.\nPass a Mask, such as ch.Causal(), a bool tensor "
            "(True: may attend), None for every key, a function of the call that returns one, or a dict by layer."
        )
    queries, keys = sizes.queries, sizes.keys
    key = (id(expected), queries, keys)
    if key not in made:  # `expected` is kept, so that no other object can have its id
        keep = to_tensor(expected, "expected")
        if keep.ndim > 1 and keep.shape[-1] == keep.shape[-2] and keep.shape[-1] >= keys >= queries:  # a whole sequence
            keep = keep[..., keys - queries : keys, :keys]
        made[key] = expected, DenseMask(keep)
    return made[key][1]
