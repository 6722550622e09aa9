"""What one rank calls a model with: which it may, and what must be there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.distributed.batch import BY_POSITION
from clearhead.distributed.layout import Layout
from clearhead.problem.problem import refuse_distributed

WHY = {
    "labels": "labels are shifted before a sequence is shared out, and the loss is divided by the number of labels on "
    "all ranks: take part.loss(output.logits), of part = clearhead.distributed.shard_batch(batch, layout)",
    "past_key_values": "a cache of keys is not shared out over ranks, and so neither is generate()",
}


def check(model: str, named: Mapping[str, Any], layout: Layout, advice: str) -> tuple[Tensor, Tensor | None]:
    """This rank's position ids (rows, l) and attention mask (B, l) or None; raises for what cannot be shared out."""
    given = {name: value for name, value in named.items() if value is not None}
    refuse_distributed({name: value for name, value in given.items() if isinstance(value, Tensor)})
    if given.get("use_cache"):
        raise ClearheadError(
            f"{model} was called with use_cache=True, and runs on {layout}: {WHY['past_key_values']}. Call it with "
            "use_cache=False, or generate with a model set back by use_in_transformers(model)."
        )
    for name, value in given.items():
        if name in WHY or (isinstance(value, Tensor) and name not in BY_POSITION):
            packed = "; packed documents are told by position_ids that begin again" if "seq_len" in name else ""
            why = WHY.get(name, f"that is not shared out over ranks{packed}")
            raise ClearheadError(f"{model} was called with {name}, and runs on {layout}: {why}.")
    main = first(given)
    if not isinstance(main, Tensor):
        raise ClearheadError(f"{model} runs on {layout}, and was called without input_ids or inputs_embeds. {advice}")
    if "position_ids" not in given:
        raise ClearheadError(
            f"{model} runs on {layout}, and was called without position_ids: it would count each rank's positions from "
            f"0. {advice}"
        )
    for name in BY_POSITION:
        if name not in given:
            continue
        value = given[name]
        rows = {1, main.shape[0]} if name == "position_ids" else {main.shape[0]}
        right = isinstance(value, Tensor) and value.ndim == 2 + (name == "inputs_embeds")
        if not right or value.shape[0] not in rows or value.shape[1] != layout.count():
            shown = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ClearheadError(
                f"{name} is {shown}, and rank {layout.rank} holds {layout.count()} of {layout}: pass this rank's part, "
                f"({main.shape[0]}, {layout.count()}). {advice}"
            )
    return given["position_ids"], given.get("attention_mask")


def first(named: Mapping[str, Any]) -> Any:
    """The token ids, or what stands in their place."""
    ids = named.get("input_ids")
    return named.get("inputs_embeds") if ids is None else ids
