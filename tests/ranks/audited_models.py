"""Audits of a model that is spread over ranks, each of which has a batch of its own."""

from __future__ import annotations

from typing import Any

from audits.faults import IDS, IN_DOCUMENTS, PACKED
from audits.faulty_models import make_llama, register_backend
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import clearhead as ch


def audit_spread_models(rank: int) -> dict[str, list[dict[str, Any]]]:
    """The reports of a healthy and a faulty model, for DDP and for FSDP2."""
    batch = {**PACKED, "input_ids": (IDS + rank).clamp_max(199)}
    found = {}
    for kind, spread in (("ddp", DistributedDataParallel), ("fsdp2", _shard_layers)):
        models = make_llama(), make_llama(register_backend("causal alone"))
        found[kind] = [ch.audit(spread(model), batch, IN_DOCUMENTS, level="all").to_dict() for model in models]
    return found


def _shard_layers(model: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)
