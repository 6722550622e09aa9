"""What a survey's numbers depend on beside its texts, in a form that two runs can compare."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import nn

import clearhead
from clearhead.models.surveys._batches import WINDOW
from clearhead.models.surveys._looks import Kept

_ELSEWHERE = ("_name_or_path", "name_or_path", "transformers_version")  # where a model came from


def settings_of(model: nn.Module, kept: Kept, batch: int, max_length: int | None) -> dict[str, str]:
    """By name, what must be the same in all runs whose states are added up."""
    parameters = list(model.parameters())
    types = sorted({str(t.dtype) for t in parameters})
    config: Any = getattr(model, "config", None)
    said = config.to_dict() if hasattr(config, "to_dict") else {}
    said = {name: value for name, value in said.items() if name not in _ELSEWHERE}
    named = [column for column in kept.columns[1:] if not column.endswith(" uniform")]
    backend = getattr(config, "_attn_implementation", None)
    return {
        "model": type(model).__name__,
        "configuration": _digest(json.dumps(said, sort_keys=True, default=str).encode()),
        "weights": _weights(model),
        "dtype": ", ".join(types),
        "device": ", ".join(sorted({t.device.type for t in parameters})) or "cpu",
        "backend": str(backend),
        "threads": str(torch.get_num_threads()),  # a sum that is shared out otherwise has other last digits
        "keep": ", ".join([*named, *map(_said, kept.reductions)]),
        "batch": str(batch),
        "max_length": str(max_length),
        "window": str(WINDOW),
        "clearhead": clearhead.__version__,
        "torch": torch.__version__,
    }


def _said(reduction: Any) -> str:
    """A reduction with its settings: without the place in memory that Python shows of most objects."""
    said = repr(reduction)
    return said if " at 0x" not in said else f"{type(reduction).__qualname__}({vars(reduction)})"


@torch.no_grad()
def _weights(model: nn.Module) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if isinstance(tensor, torch.Tensor):
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
