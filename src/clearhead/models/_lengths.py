"""How many tokens a model takes."""

from __future__ import annotations

from typing import Any

from torch import nn

from clearhead.base.errors import ClearheadError

# How models of transformers call a table with a vector for each position. Others compute positions, at any length.
TABLES = ("position_embeddings", "position_embedding", "embed_positions", "positions_embed", "wpe")


def most_tokens(body: Any, side: str = "") -> int | None:
    """The most positions that a model, or its encoder or decoder (`side`), has vectors for; None for any number."""
    found = []
    for name, module in body.named_modules():
        *path, last = name.split(".")
        if last in TABLES and isinstance(module, nn.Embedding) and (not side or side in path):
            kept = getattr(module, "offset", 0) if module.padding_idx is None else module.padding_idx + 1
            found.append(module.num_embeddings - kept)  # the first rows are those of padding
    return min(found, default=None)


def check_length(body: Any, tokens: int, what: str, side: str = "", more: int = 0) -> None:
    """Raise where these tokens, and so many more to come, are more than the model takes."""
    most = most_tokens(body, side)
    if most is not None and tokens + more > most:
        asked = f" and --generate asks for {more} more" if more else ""
        raise ClearheadError(
            f"{what} has {tokens} tokens{asked}, and {type(body).__name__} takes at most {most}: it has no vectors for "
            "positions beyond. Shorten it, or take a model of longer texts."
        )
