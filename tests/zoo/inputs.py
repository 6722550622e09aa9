"""Inputs for a model, by the names that its forward has."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zoo.small import SPECIAL, parts

BATCH, LENGTH = 2, 12


def inputs(model: Any, everything: bool) -> dict[str, Any]:
    """What forward needs: its main input and what has no default; `everything`: whatever else is known here too.

    Raises a LookupError for a needed input that is not known here.
    """
    given = inspect.signature(model.forward).parameters
    named = {n: p for n, p in given.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    needed = [name for name, one in named.items() if one.default is one.empty]
    main = model.main_input_name
    wanted = [*needed, main] if main in named else needed
    if getattr(model.config, "is_encoder_decoder", False):
        wanted += [name for name in ("decoder_input_ids",) if name in named]
    if not wanted:
        wanted = [name for name in named if name in MAKERS][:1]
    if everything:
        wanted += [name for name in named if name in MAKERS and name not in EITHER]
    unknown = [name for name in wanted if name not in MAKERS]
    if unknown:
        raise LookupError(f"its forward needs {', '.join(unknown)}")
    generator = torch.Generator().manual_seed(0)
    return {name: MAKERS[name](model.config, generator) for name in dict.fromkeys(wanted)}


def padded(model: Any, given: dict[str, Any]) -> dict[str, Any] | None:
    """The same with the last words of the second sequence as padding; None where the model takes no such mask."""
    if "input_ids" not in given or "attention_mask" not in inspect.signature(model.forward).parameters:
        return None
    mask = torch.ones(given["input_ids"].shape[:2], dtype=torch.long)
    mask[1, -4:] = 0
    return {**given, "attention_mask": mask}


def find(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these attributes that a configuration or a part of it has."""
    for part in parts(config):
        for name in names:
            value = getattr(part, name, None)
            if value is not None:
                return value
    return default


def _words(config: Any, generator: torch.Generator) -> Tensor:
    size = find(config, "vocab_size", default=SPECIAL)
    return torch.randint(3, max(min(size, SPECIAL), 4), (BATCH, LENGTH), generator=generator)


def _pair(size: Any) -> tuple[int, int]:
    return (int(size[-2]), int(size[-1])) if isinstance(size, list | tuple) else (int(size), int(size))


def _image(config: Any, generator: torch.Generator) -> Tensor:
    height, width = _pair(find(config, "image_size", "img_size", "pretrain_image_size", default=64))
    channels = find(config, "num_channels", "in_channels", "in_chans", default=3)
    return torch.randn(BATCH, channels, height, width, generator=generator)


def _video(config: Any, generator: torch.Generator) -> Tensor:
    height, width = _pair(find(config, "image_size", "crop_size", default=64))
    frames = find(config, "num_frames", "frames_per_clip", default=4)
    return torch.randn(BATCH, frames, find(config, "num_channels", "in_chans", default=3), height, width,
                       generator=generator)


def _sound(config: Any, generator: torch.Generator) -> Tensor:
    return torch.randn(BATCH, 16000, generator=generator)


def _mels(config: Any, generator: torch.Generator) -> Tensor:
    bins = find(config, "num_mel_bins", "n_mels", "feature_size", "input_feat_per_channel", default=80)
    positions = find(config, "max_source_positions")
    return torch.randn(BATCH, bins, 2 * positions if positions else 64, generator=generator)


def _states(config: Any, generator: torch.Generator) -> Tensor:
    return torch.randn(BATCH, LENGTH, find(config, "hidden_size", "d_model", "embed_dim"), generator=generator)


def _boxes(config: Any, generator: torch.Generator) -> Tensor:
    corners = torch.randint(0, 500, (BATCH, LENGTH, 2), generator=generator)
    return torch.cat([corners, corners + 100], -1)


MAKERS: dict[str, Callable[[Any, torch.Generator], Any]] = {
    "input_ids": _words,
    "decoder_input_ids": _words,
    "pixel_values": _image,
    "pixel_values_videos": _video,
    "input_values": _sound,
    "input_features": _mels,
    "inputs_embeds": _states,
    "hidden_states": _states,
    "bbox": _boxes,
}
EITHER = {"inputs_embeds", "pixel_values_videos", "hidden_states"}  # one of them and another is an error
