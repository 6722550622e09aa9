"""What is expected of a model: the mask of each attention call, and the inputs that may influence each output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.base.output.text import said
from clearhead.base.shapes import Sizes
from clearhead.masks.base import Mask, Spans
from clearhead.masks.dense import DenseMask
from clearhead.masks.padding import Padding
from clearhead.models.audits.audit import Expected, expected_of
from clearhead.models.audits.reachability import AllowedPairs, Reachability
from clearhead.models.recordings.attention_call import AttentionCall
from clearhead.problem._recorded import RecordedMask


class Expectation:
    """The masks that are expected of a model's attention, for a batch whose outputs are (B, L, ...).

    `tokens`: bool (B, L), False for padding. `calls`: the recorded attention calls, each with its expected mask; empty
    where the calls of the model cannot be recorded.
    """

    def __init__(self, expected: Expected, tokens: Tensor, calls: Sequence[AttentionCall]) -> None:
        self._expected, self.tokens = expected, tokens
        self.calls = expected_of(calls, expected) if calls else []
        self._pairs: dict[int, AllowedPairs] = {}  # by the id of a mask, which `calls` or `expected` keeps alive

    @property
    def text(self) -> str:
        """The expected mask in words."""
        expected = self._expected
        if isinstance(expected, Mask):
            return said(expected, expected.title)
        return "every position" if expected is None else f"a mask by {type(expected).__name__}"

    def find_reach(self) -> Reachability:
        """The inputs that may influence each output, through all layers.

        Where the number of layers is not known, through any number of them.
        """
        masks = [mask for call, mask in self.calls if self._is_whole(call)]
        if masks:
            return Reachability([self._make_pairs(mask) for mask in masks])
        return Reachability([self._make_pairs(self._single_mask())], unlimited=True)

    def find_reach_of_block(self, name: str) -> Reachability | None:
        """The same for one block of the model, by its name; None where no mask is expected of it."""
        inside = [mask for call, mask in self.calls if call.name.startswith(f"{name}.") and self._is_whole(call)]
        if inside:
            return Reachability([self._make_pairs(mask) for mask in inside])
        if isinstance(self._expected, Mapping) or callable(self._expected) and not isinstance(self._expected, Mask):
            return None
        return Reachability([self._make_pairs(self._single_mask())])

    def _is_whole(self, call: AttentionCall) -> bool:
        """Whether a call is self attention of the whole sequence."""
        batch, length = self.tokens.shape
        return call.kind == "self" and call.shape[0] == batch and call.shape[2:] == (length, length)

    def _single_mask(self) -> Mask:
        """The mask that is expected of every layer."""
        expected = self._expected
        if isinstance(expected, Mask):
            return expected
        if isinstance(expected, Tensor | np.ndarray):
            return DenseMask(torch.as_tensor(expected))
        if expected is None:
            return _EVERY
        raise ClearheadError(
            f"audit: the mask is a {type(expected).__name__} by attention call, and no call of the model is recorded.\n"
            "Pass one Mask, such as ch.Causal()."
        )

    def _make_pairs(self, mask: Mask) -> AllowedPairs:
        if id(mask) not in self._pairs:
            batch, length = self.tokens.shape
            heads = max((call.shape[1] for call, _ in self.calls), default=1)
            sizes = Sizes(batch, heads, length, length, align="lower_right")
            padded = mask if bool(self.tokens.all()) else mask & Padding(self.tokens)
            self._pairs[id(mask)] = AllowedPairs.from_mask(padded, sizes)
        return self._pairs[id(mask)]


class _EveryKey(Mask):
    """Every query may attend to every key."""

    def lower(self, sizes: Sizes) -> Spans:
        start = torch.zeros(1, 1, 1, dtype=torch.int64, device=sizes.device)
        return Spans(start, start + sizes.keys)

    def signature(self) -> str:
        return "every key"


_EVERY = _EveryKey()
