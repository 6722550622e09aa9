"""The text that a command is given, and the model that reads it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from clearhead.base.errors import ClearheadError
from clearhead.models.loading import bundled, load, reason
from clearhead.models.recording import Recording
from clearhead.models.watch import watch


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="a folder with a model and its tokenizer, both saved with save_pretrained() (default: a small BERT)",
    )


def model_of(options: argparse.Namespace) -> tuple[Any, Any, Path]:
    """The model, its tokenizer, and the folder that they are from."""
    folder = bundled() if options.model is None else Path(options.model)
    return *load(folder), folder


def checked(text: str) -> str:
    """A text that a model can be given."""
    if any("\ud800" <= c <= "\udfff" for c in text):  # bytes of the command line that are no character
        raise ClearheadError("the text is not UTF-8: pass it in a file, and convert that (iconv -t UTF-8).")
    if not text.strip():
        raise ClearheadError("the text is empty.")
    return text


def watched(model: Any, tokenizer: Any, text: str, **watching: Any) -> tuple[Recording, list[str], int]:
    """The recording of the model, the tokens that it read, and how many were left out; `watching`: as for `watch`."""
    try:
        return _read(model, tokenizer, text, watching)
    except ClearheadError:
        raise
    except Exception as error:  # any error of a tokenizer and a model that do not match
        raise ClearheadError(
            f"{type(model).__name__} cannot read the text: {reason(error)}\nThe folder needs a model of texts, and the "
            "tokenizer that it was trained with."
        ) from error


def _read(model: Any, tokenizer: Any, text: str, watching: dict[str, Any]) -> tuple[Recording, list[str], int]:
    every = tokenizer(text, return_tensors="pt", verbose=False)
    limit = min(tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", None) or sys.maxsize)
    total = every["input_ids"].shape[1]
    inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=limit) if total > limit else every
    ids = inputs["input_ids"]
    if model.config.is_encoder_decoder:  # the decoder reads the same text
        inputs["decoder_input_ids"] = ids
    with torch.inference_mode(), watch(model, **watching) as recording:
        model(**inputs)
    numbers = ids[0].tolist()
    words = [str(n) if w is None else w for n, w in zip(numbers, tokenizer.convert_ids_to_tokens(numbers), strict=True)]
    return recording, words, max(total - limit, 0)
