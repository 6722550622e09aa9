"""The mask that is expected of each call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.base.arrays import to_tensor
from clearhead.base.errors import ClearheadError
from clearhead.masks.base import Mask, Spans
from clearhead.masks.dense import DenseMask
from clearhead.models._choice import fits
from clearhead.models.attention_call import AttentionCall
from clearhead.models.calls import listed
from clearhead.problem._recorded import RecordedMask

One = Mask | Tensor | np.ndarray | Callable[[AttentionCall], Any] | None
Expected = One | Mapping[str, One]


def expected_of(calls: Sequence[AttentionCall], expected: Any) -> list[tuple[AttentionCall, Mask]]:
    """The calls of which something is expected, each with its mask: the same object where it is the same."""
    if not calls:
        raise ClearheadError("check: there is no call to look at.")
    made: dict[Any, tuple[Any, Mask]] = {}
    if not isinstance(expected, Mapping):
        return [(call, _mask(expected, call, made)) for call in calls]
    numbers = {name: i for i, name in enumerate(dict.fromkeys(call.name for call in calls))}
    without = [which for which in expected if not any(_names(which, *named) for named in numbers.items())]
    if without or not expected:
        raise ClearheadError(
            f"check: no call was made by a module {', '.join(map(repr, without)) or 'of an empty dict'}; calls were "
            f"made by {listed(numbers)}. Its keys are patterns of whole names, such as '*.layers.3.*'."
        )
    found = []
    for call in calls:
        fitting = [mask for which, mask in expected.items() if _names(which, call.name, numbers[call.name])]
        if fitting:
            found.append((call, _mask(fitting[0], call, made)))
    return found


def _names(which: Any, name: str, number: int) -> bool:
    return isinstance(which, str) and fits(which, name, number)


def _mask(expected: Any, call: AttentionCall, made: dict[Any, tuple[Any, Mask]]) -> Mask:
    if not isinstance(expected, Mask | type) and callable(expected):
        expected = expected(call)
    if isinstance(expected, Mask):
        return expected
    sizes = call.problem.sizes
    if expected is None:
        if sizes.shape not in made:
            whole = torch.zeros(1, 1, 1, dtype=torch.int64, device=sizes.device)
            made[sizes.shape] = None, RecordedMask(Spans(whole, whole + sizes.keys), sizes, "every key")
        return made[sizes.shape][1]
    if not isinstance(expected, Tensor | np.ndarray):
        raise ClearheadError(
            f"check: {expected!r:.60} is expected of {call.name}; pass a Mask, such as ch.Causal(), a bool tensor "
            "(True: may attend), None for every key, a function of the call that gives one of these, or a dict of them "
            "by the modules' names."
        )
    key = (id(expected), sizes.queries, sizes.keys)
    if key not in made:  # what it was made of is kept: another one could have its id
        made[key] = expected, DenseMask(_part(to_tensor(expected, "expected"), sizes.queries, sizes.keys))
    return made[key][1]


def _part(keep: Tensor, queries: int, keys: int) -> Tensor:
    """Of the matrix of a whole sequence, of which this call sees a part, the last rows up to its last key."""
    whole = keep.ndim > 1 and keep.shape[-1] == keep.shape[-2] and keep.shape[-1] >= keys >= queries
    return keep[..., keys - queries : keys, :keys] if whole else keep
