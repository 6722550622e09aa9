"""Texts that a model reads beside the given text: its own answer, or a target."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError, require
from clearhead.models.loading import check_length, most_tokens

USUAL = 50  # the most tokens that a decoder generates without --generate


def generated(model: Any, inputs: dict[str, Tensor], most: int) -> Tensor:
    """The ids (1, L) of a greedy generation, with the other settings of the folder's generation_config.json."""
    given = {name: inputs[name] for name in ("input_ids", "attention_mask") if name in inputs}
    with torch.inference_mode():
        ids: Tensor = model.generate(**given, max_new_tokens=most, do_sample=False, num_beams=1, num_return_sequences=1)
    return ids


def check_causal(model: Any) -> None:
    """Raise an error for a model whose tokens see later tokens, such as BERT: it cannot generate sensible text."""
    transformers = require("transformers", "models", "--generate")
    config = model.config
    if type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        raise ClearheadError(
            f"--generate needs a model that generates text; {type(model.base_model).__name__} fills in masked words. "
            "Leave --generate out."
        )


def decoder_words(
    model: Any, tokenizer: Any, inputs: dict[str, Tensor], target: str | None, most: int | None
) -> tuple[Tensor, str | None]:
    """The ids (1, L) that an encoder-decoder's decoder reads, its start token first; and the answer, if it generated.

    The token that ends the text is left out, since no decoder reads it.
    """
    config, options = model.config, model.generation_config if model.can_generate() else None
    body, answer = model.base_model, None
    start = _first(options, config, "decoder_start_token_id")
    start = _first(options, config, "bos_token_id") if start is None else start
    if start is None:
        raise ClearheadError(
            f"the configuration of {type(model).__name__} names no decoder_start_token_id, with which the decoder's "
            "text begins. Set it in config.json."
        )
    if target is not None:
        words = tokenizer(text_target=target, return_tensors="pt", verbose=False)["input_ids"]
        ids = torch.cat([torch.tensor([[start]], device="cpu"), words.long()], 1)
    else:
        room = most_tokens(body, "decoder")
        limit = USUAL if room is None else min(USUAL, room - 1)
        if most is not None:
            check_length(body, 1, "the decoder's start", "decoder", most)
        ids = generated(model, inputs, limit if most is None else most)
        answer = tokenizer.decode(ids[0, 1:], skip_special_tokens=True)
    ends = _first(options, config, "eos_token_id")
    ends = [*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id]
    if ids.shape[1] > 1 and int(ids[0, -1]) in ends:
        ids = ids[:, :-1]
    check_length(body, ids.shape[1], "the target", "decoder")
    return ids, answer


def _first(options: Any, config: Any, name: str) -> Any:
    """A setting of the model's generation, or where it has none, of the model's configuration."""
    found = getattr(options, name, None)
    return getattr(config, name, None) if found is None else found
