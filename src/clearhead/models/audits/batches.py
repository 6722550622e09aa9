"""The batch of a model: the names of the inputs that are changed, and one batch for all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from clearhead.base.errors import ClearheadError
from clearhead.base.torch_state.tensor_kind import is_dtensor
from clearhead.base.torch_state.torch_private import tree_map_only

INPUTS = ("input_ids", "inputs_embeds", "input_features", "input_values", "pixel_values", "hidden_states", "x", "src")
DECODER_INPUTS = ("decoder_input_ids", "decoder_inputs_embeds", "tgt")


def find_inputs(batch: Any, named: str | None = None) -> list[str]:
    """The names of the inputs to change: of an encoder, of a decoder, or of both. A batch without names gives [""].

    `named`: the input that the caller named, where none of the names is known.
    """
    if not isinstance(batch, Mapping):
        return [""]
    given = {name for name, value in batch.items() if isinstance(value, Tensor)}
    found = [name for names in (INPUTS, DECODER_INPUTS) for name in [one for one in names if one in given][:1]]
    if not found and named is None:
        raise ClearheadError(f'audit: none of the inputs {", ".join(map(str, batch))} is known. Name it: inputs="...".')
    return found or [str(named)]


def share_batch(model: Any, batch: Any) -> Any:
    """The batch of rank 0, where a model is spread over several ranks, which must run the same forward passes."""
    if not isinstance(model, nn.Module) or not (dist.is_available() and dist.is_initialized()):
        return batch
    sharded = next((parameter for parameter in model.parameters() if is_dtensor(parameter)), None)
    if not isinstance(model, DistributedDataParallel) and sharded is None:
        return batch
    group: Any = model.process_group if sharded is None else sharded.device_mesh.get_group(0)  # type: ignore[attr-defined]
    shared = [tree_map_only(Tensor, Tensor.cpu, batch)]
    dist.broadcast_object_list(shared, group=group, group_src=0)
    device = next(model.parameters()).device
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), shared[0])
