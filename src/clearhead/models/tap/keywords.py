"""The keywords that transformers' models pass to an attention backend, as far as clearhead knows them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

from clearhead.base.errors import UnsupportedError
from clearhead.base.mode import assume_constant
from clearhead.scores.dot import Dot

# The names under which clearhead registers its own backends. MASKED is for models that transformers does not run on
# SDPA: their modules need not set `is_causal`, since eager attention gets every causal mask, and their own code adds
# the mask to scores. So the mask is eager's, and a call without one is not causal. RANKS shares out sequences.
NAME, MASKED, RANKS = "clearhead", "clearhead_masked", "clearhead_ranks"


_dots: dict[tuple[float | None, float | None], Dot] = {}  # PyTorch's compiler warns of functools.cache


def dot(scale: float | None, softcap: float | None) -> Dot:
    """The score of dot products: one object for each scale and softcap, because each call of a model asks for it."""
    found = _dots.get((scale, softcap))
    if found is None:
        found = _dots[scale, softcap] = Dot(scale, softcap)
    return found


# The keywords that clearhead reads.
READ = frozenset(
    {
        "scaling",
        "softcap",
        "s_aux",
        "position_bias",
        "dropout",
        "is_causal",
        "sliding_window",  # FlashAttention reads it; for other backends the window is in the mask, see `check_unmasked`
        "indices",  # the keys that an indexer chose, see `selected` in told.py
        "block_indices",
        "cu_seq_lens_q",  # packed sequences, see `documents` in told.py
        "cu_seq_lens_k",
        "position_ids",  # where FlashAttention finds packed sequences; queries and keys are rotated before the call
    }
)

# The keywords that change no weight, and why.
_MODEL = "for the model around the attention, which passes on its own keywords"
_DECODER = "the decoder's, passed on by an encoder alone"
_DONE = "used before the backend is called: query and key hold it already"
NOT_READ = {
    **dict.fromkeys(("use_cache", "return_dict", "training", "labels", "num_items_in_batch"), _MODEL),
    **dict.fromkeys(("logits_to_keep", "input_ids", "inputs_embeds"), _MODEL),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "output_router_logits"), _MODEL),
    **dict.fromkeys(("decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask"), _DECODER),
    **dict.fromkeys(("decoder_position_ids", "encoder_outputs"), _DECODER),
    **dict.fromkeys(("position_embeddings", "past_key_values", "past_key_value", "cache_position"), _DONE),
    **dict.fromkeys(("max_length_q", "max_length_k"), "the longest of the packed sequences, which cu_seq_lens_q tells"),
    "seq_idx": "the packed sequences, for layers that are no attention",
    "deterministic": "the order in which FlashAttention's backward pass adds",
    "kernel_options": "how FlexAttention is tiled",
    "cache_params": "the state of layers that are no attention",
    "token_type_ids": "made by a tokenizer, and not read by a model without such embeddings",
    "special_tokens_mask": "made by a tokenizer, and not read by models",
    "grid_thw": "the sizes of images, whose patches are embedded already",
}

# The keywords that change the weights, and cannot be read yet.
REFUSED = {
    **dict.fromkeys(("cache", "block_table", "k_cache", "v_cache"), "the keys of continuous batching"),
    "sinks": "one logit a query in the softmax's denominator",
}


@assume_constant
def loss_words() -> tuple[str, ...]:
    """The parameters of the losses of transformers, which causal models give the keywords of their call too.

    No attention function of transformers has a parameter of such a name.
    """
    losses = sys.modules.get("transformers.loss.loss_utils")
    functions = () if losses is None else losses.LOSS_MAPPING.values()
    return tuple({word: None for one in functions for word in inspect.signature(one).parameters})


def check_keywords(name: str, backend: str, keywords: Mapping[str, Any]) -> None:
    """Raise where a backend is given a keyword that may change the weights and is not read."""
    message = unread_keywords(name, backend, keywords)
    if message:
        raise UnsupportedError(message)


def unread_keywords(name: str, backend: str, keywords: Mapping[str, Any]) -> str:
    """Of keywords that may change the weights and are not read; "" where a backend is given none of these."""
    given = [
        word for word, value in keywords.items() if value is not None and word not in READ and word not in NOT_READ
    ]
    if given:  # else it takes time to ask for the words of losses
        losses = loss_words()
        given = [word for word in given if word not in losses or word in REFUSED]
    if not given:
        return ""
    shown = [f"{word!r} ({REFUSED.get(word, 'which clearhead does not know')})" for word in given]
    return (
        f"{name} called the attention backend {backend!r} with {' and '.join(shown)}: that may change the weights, and "
        "leaving it out could make them wrong.\nRun the model without it: without continuous batching, on "
        "attn_implementation='sdpa' or 'eager', and with no keyword in its call that its forward does not name."
    )
