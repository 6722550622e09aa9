"""What is expected of a model: the mask of each attention call, and the inputs that may influence each output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.base.shapes import Sizes
from clearhead.masks.base import Mask
from clearhead.masks.dense import DenseMask
from clearhead.masks.padding import Padding
from clearhead.models.audits.calls import ExpectedCall
from clearhead.models.audits.expected_masks import EVERY_KEY, Expected, describe_mask
from clearhead.models.audits.reachability import AllowedPairs, CrossReachability, Reachability


class Expectation:
    """The masks that are expected of a model's attention, for one batch.

    `tokens`: the outputs that count, bool (B, L), False for padding. `encoder_tokens`: the same of the encoder's
    inputs, where the outputs are a decoder's. `calls`: the attention calls; empty where they cannot be recorded.
    """

    def __init__(
        self, expected: Expected, tokens: Tensor, encoder_tokens: Tensor | None, calls: Sequence[ExpectedCall]
    ) -> None:
        self._expected, self.tokens, self.encoder_tokens = expected, tokens, encoder_tokens
        self.calls = calls
        self._pairs: dict[Any, AllowedPairs] = {}  # by the id of a mask, which `calls` or `expected` keeps alive

    @property
    def text(self) -> str:
        """The expected mask in words."""
        return describe_mask(self._expected)

    def find_reach(self) -> Reachability | None:
        """The inputs that may influence each output, through all layers of self attention.

        Where the number of layers is not known, through any number of them. None where a mask is expected by call, and
        no call has the length of the outputs.
        """
        masks = [c.mask for c in self.calls if self._is_whole(c, self.tokens) and not self._is_in_encoder(c)]
        if masks:
            return Reachability([self._make_pairs(mask, self.tokens, self.tokens) for mask in masks])
        if self.calls and self._is_expected_by_call():
            return None
        return Reachability([self._make_pairs(self._single_mask(), self.tokens, self.tokens)], unlimited=True)

    def find_encoder_reach(self) -> CrossReachability | None:
        """The inputs of the encoder that may influence each output of the decoder; None without all calls."""
        encoder = self.encoder_tokens
        assert encoder is not None
        inside = [c.mask for c in self.calls if self._is_in_encoder(c) and self._is_whole(c, encoder)]
        own = [c.mask for c in self.calls if not self._is_in_encoder(c) and self._is_whole(c, self.tokens)]
        cross = [c.mask for c in self.calls if c.kind == "cross" and c.shape[3] == encoder.shape[1]]
        if not cross or len(cross) != len(own):
            return None
        layers = [
            (self._make_pairs(one, self.tokens, self.tokens), self._make_pairs(other, self.tokens, encoder))
            for one, other in zip(own, cross, strict=True)
        ]
        reach = Reachability([self._make_pairs(mask, encoder, encoder) for mask in inside])
        return CrossReachability(reach, layers, (encoder.shape[1], self.tokens.shape[1]))

    def find_reach_of_block(self, name: str, shape: torch.Size) -> tuple[Reachability, Tensor] | None:
        """The reach inside one block of the model, by its name, and its tokens; None where no mask is expected of it.

        `shape`: (B, L) of the hidden states.
        """
        both = [tokens for tokens in (self.tokens, self.encoder_tokens) if tokens is not None and tokens.shape == shape]
        if len(both) == 2:  # an encoder's block and a decoder's block have one shape
            both = both[1:] if any(map(self._is_in_encoder, self._find_calls(name))) else both[:1]
        if not both:
            return None
        (tokens,) = both
        inside = [call.mask for call in self._find_calls(name) if self._is_whole(call, tokens)]
        if inside:
            return Reachability([self._make_pairs(mask, tokens, tokens) for mask in inside]), tokens
        if self._is_expected_by_call():
            return None
        return Reachability([self._make_pairs(self._single_mask(), tokens, tokens)]), tokens

    def _is_expected_by_call(self) -> bool:
        """Whether each call has an expected mask of its own."""
        return not isinstance(self._expected, Mask) and (
            callable(self._expected) or isinstance(self._expected, Mapping)
        )

    def _find_calls(self, name: str) -> list[ExpectedCall]:
        """The calls inside a block."""
        return [call for call in self.calls if call.name.startswith(f"{name}.")]

    def _is_in_encoder(self, call: ExpectedCall) -> bool:
        """Whether a call is in the encoder of an encoder-decoder."""
        parts = call.layer.stack.split(".")  # such as "text_encoder", or "encoder.text_model"
        return self.encoder_tokens is not None and any(part.endswith("encoder") for part in parts)

    def _is_whole(self, call: ExpectedCall, tokens: Tensor) -> bool:
        """Whether a call is self attention of the whole sequence."""
        batch, length = tokens.shape
        return call.kind == "self" and call.shape[0] == batch and call.shape[2:] == (length, length)

    def _single_mask(self) -> Mask:
        """The mask that is expected of every layer."""
        expected = self._expected
        if isinstance(expected, Mask):
            return expected
        if isinstance(expected, Tensor | np.ndarray):
            pairs = torch.as_tensor(expected)
            return DenseMask(pairs.any(1, keepdim=True) if pairs.ndim == 4 else pairs)  # of any head
        if expected is None:
            return EVERY_KEY
        raise ClearheadError(
            f"audit: the mask is a {type(expected).__name__} by call, and no call of the model is recorded.\n"
            "Pass one Mask, such as ch.Causal()."
        )

    def _make_pairs(self, mask: Mask, queries: Tensor, keys: Tensor) -> AllowedPairs:
        """The allowed pairs of a mask for tokens (B, Lq) and (B, Lk); padding is no key."""
        which = id(mask), id(queries), id(keys)
        if which not in self._pairs:
            heads = max((call.shape[1] for call in self.calls), default=1)
            sizes = Sizes(len(queries), heads, queries.shape[1], keys.shape[1], align="lower_right")
            padded = mask if bool(keys.all()) else mask & Padding(keys)
            self._pairs[which] = AllowedPairs.from_mask(padded, sizes)
        return self._pairs[which]
