"""The private names of transformers' that clearhead uses: a table of the use of each, and of the way without it.

They are attributes of models and configurations. Each is looked up where it is used: transformers is not imported here.
"""

from __future__ import annotations

import sys
from typing import Any

from clearhead.base.errors import UnsupportedError
from clearhead.base.private import ABSENT, RAISES, Part, missing

PARTS = {
    "PreTrainedConfig._attn_implementation": Part("to see and set back the backend that a model runs on", RAISES),
    "PreTrainedModel._can_set_attn_implementation": Part("to see whether a model lets a backend attend", RAISES),
    "PreTrainedModel._supports_sdpa": Part(
        "to choose the masks that a model is given on clearhead", "it is given masks as whole matrices"
    ),
    "utils.output_capturing._active_collector": Part(
        "to see whether a model was asked for its attentions", "lazy weights are made in each call, asked for or not"
    ),
    "PreTrainedConfig._name_or_path": Part(
        "to leave out the path of a model, where the states of surveys are added up", "nothing is left out"
    ),
}
ORIGIN = "_name_or_path"


def _missing(name: str) -> UnsupportedError:
    return missing(f"transformers.{name}", PARTS[name].serves, "transformers")


def has_backend(config: Any) -> bool:
    """Whether a configuration says which backend its model runs on."""
    return getattr(config, "_attn_implementation", ABSENT) is not ABSENT


def backend_of(config: Any) -> Any:
    """The name of the backend that a model with this configuration runs on."""
    found = getattr(config, "_attn_implementation", ABSENT)
    if found is ABSENT:
        raise _missing("PreTrainedConfig._attn_implementation")
    return found


def named_backend(config: Any) -> Any:
    """The name of that backend; None where it is not known, or where there is no configuration."""
    return getattr(config, "_attn_implementation", None)


def set_backend(config: Any, name: Any) -> None:
    """Write into a configuration that its model runs on this backend."""
    backend_of(config)
    config._attn_implementation = name


def takes_backends(model: Any) -> bool:
    """Whether the model attends through transformers' interface, where it can be given a backend."""
    found = getattr(model, "_can_set_attn_implementation", None)
    if found is None:
        raise _missing("PreTrainedModel._can_set_attn_implementation")
    return bool(found())


def takes_sdpa(model: Any) -> bool:
    """Whether the model can run on the masks of transformers' "sdpa"."""
    return bool(getattr(model, "_supports_sdpa", False))


def collected() -> Any:
    """The outputs that transformers is collecting from the layers of a model, by their names; None: not known."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    return None if collector is None else collector.get()
