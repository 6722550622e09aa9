"""Inputs for a model, by the names that its forward has."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zoo.small import SPECIAL, parts

BATCH, LENGTH = 2, 12
GRIDS = [[1, 4, 4], [1, 4, 8]]  # two images, in patches


VARIANTS = ["needed", "all", "needed, other layout", "all, other layout"]


def inputs(model: Any, variant: str) -> dict[str, Any]:
    """What forward needs: its main input and what has no default; "all": whatever else is known here too.

    "other layout": sounds with their axes exchanged, words with a dimension for codebooks, several images, no cache.
    Raises a LookupError for a needed input that is not known here.
    """
    given = inspect.signature(model.forward).parameters
    named = {n: p for n, p in given.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    wanted = [name for name, one in named.items() if one.default is one.empty]
    if model.main_input_name in named:
        wanted.append(model.main_input_name)
    if getattr(model.config, "is_encoder_decoder", False):
        wanted += [name for name in ("decoder_input_ids",) if name in named]
    if not wanted:
        wanted = [name for name in named if name in MAKERS][:1]
    if variant.startswith("all"):
        alone = EITHER - {"encoder_hidden_states"} if "query_embeds" in wanted else EITHER
        wanted += [name for name in named if name in MAKERS and name not in alone]
    wanted = list(dict.fromkeys(wanted))
    if placed := PLACED & set(named):
        made = _placed_patches(model.config, torch.Generator().manual_seed(0))
        return {name: made[name] for name in (*placed, *wanted) if name in made}
    unknown = [name for name in wanted if name not in MAKERS and name != "grid_thw"]
    if unknown:
        raise LookupError(f"its forward needs {', '.join(unknown)}")
    generator = torch.Generator().manual_seed(0)
    if "grid_thw" in wanted:
        made = {name: _patches(model.config, generator) for name in wanted if name != "grid_thw"}
        return {**made, "grid_thw": torch.tensor(GRIDS)}
    made = {name: MAKERS[name](model.config, generator) for name in wanted}
    if variant.endswith("other layout"):
        made = {name: _other(model.config, name, value) for name, value in made.items()}
        if "use_cache" in named:
            made["use_cache"] = False
    return made


def _other(config: Any, name: str, value: Any) -> Any:
    if name == "input_features":
        return value.mT.contiguous()
    if name == "input_values":
        return value[:, None] if value.ndim == 2 else value.mT.contiguous()
    if name == "pixel_values" and value.ndim == 4:  # the images of a video, or a pair
        return value[:, None].repeat(1, find(config, "num_frames", default=2), 1, 1, 1)
    books = find(config, "num_codebooks", "num_channels", "n_codebooks", "num_quantizers")
    if name.endswith("input_ids") and type(books) is int:
        return value[..., None].expand(-1, -1, books).contiguous()
    return value


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
    height, width = _pair(find(config, "image_size", "img_size", "pretrain_image_size", default=256))
    channels = find(config, "num_channels", "in_channels", "in_chans", default=3)
    channels = channels if type(channels) is int else 3
    return torch.randn(BATCH, channels, height, width, generator=generator)


def _video(config: Any, generator: torch.Generator) -> Tensor:
    height, width = _pair(find(config, "image_size", "crop_size", default=64))
    frames = find(config, "num_frames", "frames_per_clip", default=4)
    return torch.randn(
        BATCH, frames, find(config, "num_channels", "in_chans", default=3), height, width, generator=generator
    )


def _patches(config: Any, generator: torch.Generator) -> Tensor:
    """The patches of all images, one after the other, each one flat."""
    height, width = _pair(find(config, "patch_size", default=14))
    frames = _pair(find(config, "temporal_patch_size", default=1))[0]
    channels = find(config, "in_channels", "in_chans", "num_channels", default=3)
    number = sum(t * h * w for t, h, w in GRIDS)
    return torch.randn(number, channels * frames * height * width, generator=generator)


# names that say that an image is given as patches, each with its place
PLACED = {"pixel_position_ids", "spatial_shapes", "flattened_patches"}


def _placed_patches(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """Six by six patches of each image, and where each stands, in the forms that models know."""
    width = find(config, "num_channels", default=3) * find(config, "patch_size", default=16) ** 2
    patches = torch.rand(BATCH, 36, width, generator=generator)
    places = torch.cartesian_prod(torch.arange(6), torch.arange(6)).expand(BATCH, -1, -1)
    return {
        "pixel_values": patches,
        "pixel_position_ids": places,
        "spatial_shapes": torch.full((BATCH, 2), 6),
        "pixel_attention_mask": torch.ones(BATCH, 36, dtype=torch.long),
        "flattened_patches": torch.cat([places + 1.0, patches], -1),
        "input_ids": _words(config, generator),
        "decoder_input_ids": _words(config, generator),
    }


def _sound(config: Any, generator: torch.Generator) -> Tensor:
    frames, bins = getattr(config, "max_length", None), getattr(config, "num_mel_bins", None)
    if type(frames) is int and type(bins) is int and frames > 100:
        return torch.randn(BATCH, frames, bins, generator=generator)
    return torch.randn(BATCH, 16000, generator=generator)


def _mels(config: Any, generator: torch.Generator) -> Tensor:
    if find(config, "spec_size") is not None:  # CLAP takes a picture of the sound
        return torch.randn(BATCH, 1, 1024, find(config, "num_mel_bins"), generator=generator)
    bins = find(
        config, "num_mel_bins", "n_mels", "feature_size", "input_feat_per_channel", "input_feat_size", default=128
    )
    positions = find(config, "max_source_positions")
    return torch.randn(BATCH, bins, 2 * positions if positions else 64, generator=generator)


def _states(config: Any, generator: torch.Generator) -> Tensor:
    width = find(config, "input_dim", "hidden_size", "d_model", "embed_dim")
    return torch.randn(BATCH, LENGTH, width, generator=generator)


def _others(config: Any, generator: torch.Generator) -> Tensor:
    """What another part of the model would hand over."""
    width = find(config, "encoder_hidden_size", "cross_hidden_size", "hidden_size", "d_model")
    return torch.randn(BATCH, LENGTH + 3, width, generator=generator)


def _series(config: Any, generator: torch.Generator) -> Tensor:
    channels, length = find(config, "num_input_channels"), find(config, "context_length", default=64)
    if channels is None:  # one series, and as much of it before as is looked back at
        return torch.randn(BATCH, length + max(find(config, "lags_sequence", default=[0])), generator=generator)
    return torch.randn(BATCH, length, channels, generator=generator)


def _times(config: Any, generator: torch.Generator) -> Tensor:
    return torch.randn(*_series(config, generator).shape[:2], find(config, "num_time_features"), generator=generator)


def _later(config: Any, generator: torch.Generator) -> Tensor:
    return torch.randn(BATCH, find(config, "prediction_length"), generator=generator)


def _steps(width: str) -> Callable[[Any, torch.Generator], Tensor]:
    """Of an agent: (B, L, width)."""
    return lambda config, generator: torch.randn(BATCH, LENGTH, find(config, width, default=1), generator=generator)


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
    "query_embeds": _states,
    "encoder_hidden_states": _others,
    "past_values": _series,
    "past_time_features": _times,
    "past_observed_mask": lambda config, generator: torch.ones_like(_series(config, generator)),
    "future_values": _later,
    "future_time_features": lambda config, generator: _later(config, generator)[..., None].expand(
        -1, -1, find(config, "num_time_features")
    ),
    "states": _steps("state_dim"),
    "actions": _steps("act_dim"),
    "rewards": _steps(""),
    "returns_to_go": _steps(""),
    "timesteps": lambda config, generator: torch.arange(LENGTH).expand(BATCH, -1),
    "input_features_mask": lambda config, generator: torch.ones(_mels(config, generator).shape[::2], dtype=torch.long),
    "audio_mel": lambda config, generator: _mels(config, generator).mT.contiguous(),
    "audio_mel_mask": lambda config, generator: torch.zeros(_mels(config, generator).shape[::2], dtype=torch.bool),
    "is_longer": lambda config, generator: torch.zeros(BATCH, 1, dtype=torch.bool),
    "image": _image,
    "bbox": _boxes,
}
# given where they are needed alone: beside another they are an error, or turn a model into a decoder
EITHER = {"inputs_embeds", "pixel_values_videos", "hidden_states", "query_embeds", "encoder_hidden_states"}
