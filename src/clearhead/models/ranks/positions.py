"""Whether the position ids of all ranks are those of one sequence, as the model counts them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.distributed.layout import Layout


def check(positions: Tensor, words: Tensor | None, layout: Layout, model: Any, advice: str) -> None:
    """Raise for `positions` (rows, L) of the whole sequence that are not. `words` (B, L): what is no padding."""
    parts = [positions[:, layout.positions(positions.device, rank)] for rank in range(layout.ranks)]
    several = [part for part in parts if part.shape[1] > 1]
    alike = all(bool((p.diff(dim=1) == 1).all()) and torch.equal(p[:, 0], several[0][:, 0]) for p in several)
    if len(several) > 1 and alike:
        raise ClearheadError(
            f"position_ids begin at {int(several[0][0, 0])} on every rank, as if each held a sequence of its own; they "
            "are those of the whole sequence, layout.positions(), here such as "
            f"{layout.positions()[:3].tolist()}… {advice}"
        )
    start = _counts_from(model)
    if bool(((positions < start) & (True if words is None else words)).any()):
        raise ClearheadError(
            f"{type(model).__name__} counts positions from {start}, after its padding's, and position_ids has "
            f"{int(positions.min())}: give shard_batch position_ids of the whole sequences, as the model's embeddings "
            "make them (create_position_ids_from_input_ids)."
        )
    longest = [int(part.max()) + 1 for part in parts]
    for kind, limit in _limits(model):
        beyond = sum(length > limit for length in longest)
        # longrope has two sets of frequencies, and dynamic frequencies follow the length
        if beyond and (kind == "dynamic" or beyond < len(parts)):
            raise ClearheadError(
                f"the rotary frequencies of {type(model).__name__} ({kind}) depend on the longest position, "
                f"in calls of more than {limit}, and the ranks have up to {[n - 1 for n in longest]!r:.80}: they would "
                "compute with different ones. Give it shorter sequences, a layout in which all ranks reach as far "
                "(ZigZag), or other rope_parameters."
            )


def _counts_from(model: Any) -> int:
    """The first position id of a sequence, in models that count from after their padding's number; 0 in others."""
    for part in model.modules():
        if hasattr(part, "create_position_ids_from_inputs_embeds") and getattr(part, "padding_idx", None) is not None:
            return int(part.padding_idx) + 1
    return 0


def _limits(model: Any) -> Iterator[tuple[str, int]]:
    """The kinds of rotary frequencies that depend on the longest position, and beyond which length they do."""
    for part in model.modules():
        kinds = getattr(part, "rope_type", None)
        for layers, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if kind in ("dynamic", "longrope"):
                given = part.config.rope_parameters
                given = given if layers is None else given[layers]
                yield kind, given.get("original_max_position_embeddings") or part.config.max_position_embeddings
