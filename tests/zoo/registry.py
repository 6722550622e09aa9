"""The architectures that the installed version of transformers names, and the class of each one's model."""

from __future__ import annotations

import importlib
import inspect
from typing import Any


def names() -> list[str]:
    """Every model type that transformers has a configuration for."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return sorted(CONFIG_MAPPING_NAMES)


def config_class(name: str) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[name]


def model_class(name: str) -> Any:
    """The base model; else the first that a registry of models with heads names; else the one of this configuration.

    Raises a LookupError where there is none: some configurations are of parts that are no model of their own.
    """
    from transformers.models.auto import modeling_auto

    config = config_class(name)
    found = _mapped(modeling_auto.MODEL_MAPPING, config)
    for registry in sorted(r for r in vars(modeling_auto) if r.startswith("MODEL_FOR_") and r.endswith("_MAPPING")):
        found = found or _mapped(getattr(modeling_auto, registry), config)
    found = found or _beside(config)
    if found is None:
        raise LookupError("no model of transformers takes this configuration alone")
    return found


def _mapped(mapping: Any, config: Any) -> Any:
    found = mapping.get(config, None)
    return found[0] if isinstance(found, tuple | list) else found


def _beside(config: Any) -> Any:
    """A model whose `config_class` this is, in the modelling files of the configuration's folder."""
    from transformers import PreTrainedModel

    folder, _, file = config.__module__.rpartition(".")
    try:
        module = importlib.import_module(f"{folder}.{file.replace('configuration_', 'modeling_')}")
    except ImportError:
        return None
    fitting = [
        cls
        for _, cls in inspect.getmembers(module, inspect.isclass)
        if issubclass(cls, PreTrainedModel) and cls.__module__ == module.__name__ and cls.config_class is config
    ]
    runs = [cls for cls in fitting if cls.forward is not PreTrainedModel.forward and "forward" in dir(cls)]
    own = [cls for cls in runs if "PreTrained" not in cls.__name__]
    own.sort(key=lambda cls: (cls.__name__ != config.__name__.replace("Config", "Model"), len(cls.__name__)))
    return own[0] if own else None
