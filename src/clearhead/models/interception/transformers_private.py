"""The private names of transformers that clearhead uses, with their purposes.

They are attributes of models and configurations. Each is looked up where it is used: transformers is not imported here.
"""

from __future__ import annotations

import sys
from typing import Any

from clearhead.base.torch_state.private import ABSENT, missing_name

PURPOSES = {
    "PreTrainedConfig._attn_implementation": "to see the backend that a model runs on",
    "PreTrainedModel._can_set_attn_implementation": "to see whether a model lets a backend attend",
    "PreTrainedModel._supports_sdpa": "to choose the masks that a model is given on clearhead",
    "utils.output_capturing._active_collector": "to see whether a model was asked for its attentions",
}
ORIGIN = "_name_or_path"  # the key of a configuration with the path of its model


def _read(owner: Any, name: str) -> Any:
    """Read the attribute that a row of the table names."""
    found = getattr(owner, name.rpartition(".")[2], ABSENT)
    if found is ABSENT:
        raise missing_name(f"transformers.{name}", PURPOSES[name], "transformers")
    return found


def backend_of(config: Any) -> Any:
    """The name of the backend that a model with this configuration runs on."""
    return _read(config, "PreTrainedConfig._attn_implementation")


def named_backend(config: Any) -> Any:
    """The name of that backend; None where it is not known, or where there is no configuration."""
    return getattr(config, "_attn_implementation", None)


def takes_backends(model: Any) -> bool:
    """Whether the model attends through transformers' interface, where it can be given a backend."""
    return bool(_read(model, "PreTrainedModel._can_set_attn_implementation")())


def takes_sdpa(model: Any) -> bool:
    """Whether the model can run on the masks of transformers' "sdpa"."""
    return bool(_read(model, "PreTrainedModel._supports_sdpa"))


def collected() -> Any:
    """The outputs that transformers is collecting from the layers of a model, by their names, or None."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    return None if capturing is None else _read(capturing, "utils.output_capturing._active_collector").get()
