"""What a head had in another run: a recording, one of its calls, or a tensor."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from clearhead.base.arrays import Array, check_float, check_memory, to_tensor
from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.output.text import listed
from clearhead.base.torch_state.tensor_kind import has_no_values
from clearhead.models.edits.spot import Spot
from clearhead.models.interception.layers import Site
from clearhead.models.recordings.attention_call import AttentionCall
from clearhead.models.recordings.calls import Calls

Part = Literal["query", "key", "value", "output"]

Source = Calls[AttentionCall] | AttentionCall | Array


class FromRun:
    """The source of an edit. `who`: the edit's name, for messages.

    A recording gives each layer the call of the same layer; a call, or a tensor of all heads, is for every layer that
    the edit changes.
    """

    def __init__(self, source: Source, who: str) -> None:
        self.source, self.who = source, who
        if isinstance(source, np.ndarray | Tensor):
            self.source = to_tensor(source, f"{who}: source").detach()
            check_float(self.source, f"{who}: source")
            if has_no_values(self.source):
                raise ClearheadError(f"{who}: source has a shape alone (meta or fake); expected a tensor with values.")
            if self.source.ndim != 4:
                shape = tuple(self.source.shape)
                raise ShapeError(f"{who}: source has shape {shape}; expected (B, H, L, E), or (B, H, Lq, Lk).")
            return
        calls = source.calls if isinstance(source, Calls) else [source]
        if not all(isinstance(call, AttentionCall) for call in calls):
            raise ClearheadError(f"{who}: source is a {type(source).__name__}; expected a recording, call, or tensor.")

    def __repr__(self) -> str:
        if isinstance(self.source, Tensor):
            return f"<{'×'.join(map(str, self.source.shape))}>"
        return repr(self.source)

    @property
    def call_of(self) -> bool:
        """Whether the source is a recording or a call, which has masks and weights."""
        return not isinstance(self.source, Tensor)

    def call(self, site: Site | None) -> AttentionCall:
        """The source's call of a layer. Raises a `ClearheadError` where it has none, or several."""
        if isinstance(self.source, AttentionCall):
            return self.source
        assert isinstance(self.source, Calls) and site is not None
        found = [call for call in self.source.calls if call.layer == site.layer]
        if len(found) > 1:  # several modules may attend in one layer
            found = [call for call in found if call.name == site.name] or found
        if len(found) != 1:
            there = listed(dict.fromkeys(str(call.layer) for call in self.source.calls))
            several = f"{len(found)} calls of {site.layer}: pass one run of the model, such as recording.runs[0]"
            missing = f"no call of {site.layer} ({site.name}); it has {there}"
            raise ClearheadError(f"{self.who}: the source has {several if found else missing}.")
        call: AttentionCall = found[0]
        return call

    def length(self, part: Part, site: Site | None) -> int:
        """How many positions a part of a layer has, without the part itself, which may have to be computed."""
        if isinstance(self.source, Tensor):
            return self.source.shape[2]
        return self._whole(part, site).shape[2 if part in ("query", "output") else 3]

    def _whole(self, part: Part, site: Site | None) -> AttentionCall:
        """The source's call of a layer, which has all positions of its text."""
        call = self.call(site)
        if part in ("query", "output") and call.kind == "self" and call.shape[2] != call.shape[3]:
            step = f"the source's call of {call.layer} is a step of a generation"
            raise ClearheadError(f"{self.who}: {step}. Pass a run on the whole text.")
        return call

    def tensor(self, part: Part, site: Site | None) -> Tensor:
        """The query, key, value or output of a layer, (B, H or Hk, L, E)."""
        if isinstance(self.source, Tensor):
            return self.source
        call = self._whole(part, site)
        if part == "output":
            return call.output
        if part == "value":
            return call.values()[0]
        return call.problem.query if part == "query" else call.problem.key

    def taken(self, part: Part, spot: Spot, like: Tensor, places: list[int]) -> Tensor:
        """The source's vectors for these heads at these positions of its sequence, (B or 1, h, len(places), E).

        `like`: this run's tensor (B, h, L, E) of the spot's heads, with which shape, dtype and device are compared.
        """
        source = check_memory(self.tensor(part, spot.site), f"{self.who}: the source's {part}")
        batch, heads, length, width = source.shape
        where = f"{self.who}: the source's {part} has shape {tuple(source.shape)}"
        fits = batch in (1, like.shape[0]) and width == like.shape[-1] and heads and not spot.all_heads % heads
        if not fits or (part in ("query", "output") and heads != spot.all_heads):
            raise ShapeError(
                f"{where}, and this run has {like.shape[0]} sequences, {spot.all_heads} query heads and width "
                f"{like.shape[-1]}. Pass a run of as many sequences, or of one for all, of the same model."
            )
        if places and max(places) >= length:
            raise ShapeError(f"{where}: it has no position {max(places)}. Positions are those of its own sequence.")
        if source.dtype != like.dtype or source.device != like.device:
            raise ClearheadError(
                f"{where}, {source.dtype} on {source.device}, and this run's is {like.dtype} on {like.device}. Pass "
                f"a source of the same kind: source.to({str(like.device)!r}, {like.dtype})."
            )
        each = [n * heads // spot.all_heads for n in spot.heads]
        numbers = torch.tensor([*each, *places], device=source.device, dtype=torch.long)  # one copy to the device
        return source.index_select(1, numbers[: len(each)]).index_select(2, numbers[len(each) :])
