"""The keywords that transformers' models pass to an attention backend, and the masks that they describe.

These masks are FlashAttention's, those of packed sequences, and the keys that an indexer chose.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.base.errors import UnsupportedError
from clearhead.base.output.text import listed
from clearhead.base.torch_state.mode import assume_constant
from clearhead.masks.causal import Causal
from clearhead.masks.documents import Documents
from clearhead.masks.sliding_window import SlidingWindow
from clearhead.models.interception.masks import MaskStore, Recorded, Shape
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
        "indices",  # the keys that an indexer chose, see `selected`
        "block_indices",
        "cu_seq_lens_q",  # packed sequences, see `documents`
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
    passed = [word for word, value in keywords.items() if value is not None]
    given = [word for word in passed if word not in READ and word not in NOT_READ]
    if given:  # else it takes time to ask for the words of losses
        losses = loss_words()
        given = [word for word in given if word not in losses]
    if not given:
        return ""
    return (
        f"{name} called the attention backend {backend!r} with {listed(given)}, which clearhead does not read: that "
        "may change the weights, and leaving it out could make them wrong.\n"
        "Run the model without it: without continuous batching, on attn_implementation='sdpa' or 'eager', and with no "
        "keyword in its call that its forward does not name."
    )


VARLEN = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")  # they are read where all are given


def read_flash_masks(
    store: MaskStore, shape: Shape, mask: Tensor | None, is_causal: bool, kwargs: dict[str, Any]
) -> Recorded:
    """The masks of a FlashAttention backend, where the last query stands at the last key.

    `shape`: (B, H, Lq, Lk). `mask` (B, Lk): 1 where there is a token.
    """
    batch, _, queries, keys = shape
    found = Recorded()
    if mask is not None:  # then FlashAttention ignores packed sequences
        tokens = mask.bool()
        keep = tokens[:, None, None, :]
        if queries > 1:  # the queries are the last tokens; FlashAttention computes nothing for padding
            keep = keep & tokens[:, None, -queries:, None]
        found = store.convert(keep)
    elif all(kwargs.get(name) is not None for name in VARLEN):
        found = Recorded(documents(kwargs, batch, queries, keys))
    elif batch == 1 and kwargs.get("position_ids") is not None:
        found = Recorded(restarting(kwargs["position_ids"], queries, keys))
    if is_causal and queries > 1:
        found = found.plus(Recorded(Causal(), align="lower_right"))
    window = kwargs.get("sliding_window")
    if window is not None and keys > window:
        after = 0 if is_causal else window - 1
        found = found.plus(Recorded(SlidingWindow(before=window - 1, after=after), align="lower_right"))
    return found


def documents(keywords: Mapping[str, Any], batch: int, queries: int, keys: int) -> Documents | None:
    """The mask of `cu_seq_lens_q`, (documents + 1,): where each document begins, and where the last one ends.

    The places count through the whole batch. None where the keyword is not given.
    """
    starts, of_keys = keywords.get("cu_seq_lens_q"), keywords.get("cu_seq_lens_k")
    if starts is None:
        return None
    starts = starts.detach().long()
    one = of_keys is None or of_keys is keywords["cu_seq_lens_q"] or torch.equal(of_keys.long(), starts)
    rows = range(0, batch * queries + 1, max(queries, 1))
    if not one or queries != keys or not set(rows) <= set(starts.tolist()):
        raise UnsupportedError(
            f"a backend was given cu_seq_lens_q {starts.tolist()} for {batch} × {queries} queries and {keys} keys; "
            "expected documents that fill the whole sequence, none of them in two, the same for queries and keys.\n"
            "Pass all documents as one sequence, (1, L), without a cache; or a padded batch and an attention mask."
        )
    return _of(torch.searchsorted(starts, torch.arange(batch * queries, device=starts.device), right=True), batch)


def restarting(positions: Tensor, queries: int, keys: int) -> Documents | None:
    """The documents of one sequence whose position ids begin again from 0; None where the ids never do."""
    positions = positions.reshape(-1)
    if positions.numel() != queries or queries < 2 or bool((positions.diff() == 1).all()):
        return None
    if queries != keys or int(positions[0]) != 0:
        raise UnsupportedError(
            "a FlashAttention backend was given several sequences packed into one, with a cache: "
            f"{queries} queries, {keys} keys. Run the packed sequence at once, with use_cache=False."
        )
    return _of((positions == 0).cumsum(0), 1)


def _of(ids: Tensor, batch: int) -> Documents:
    ids = ids.view(batch, -1)
    return Documents(ids[0] if batch == 1 else ids)


def check_unmasked(module: nn.Module, backend: str, shape: Shape, keywords: Mapping[str, Any]) -> None:
    """Raise where a function that is not known is given no mask, and keywords that it may make one of.

    Transformers makes masks for the backends that have a mask function. Without one the window and the documents of a
    model are said by keywords alone, and whether the function reads them is not known. `shape`: (B, H, Lq, Lk).
    """
    batch, _, queries, keys = shape
    window, positions = keywords.get("sliding_window"), keywords.get("position_ids")
    given = f"sliding_window={window}" if window is not None and keys > window else ""
    if isinstance(positions, Tensor) and batch == 1 and positions.numel() == queries == keys:
        # cu_seq_lens_q would tell of the documents: see `documents`
        packed = keywords.get("cu_seq_lens_q") is None and bool((positions.reshape(-1).diff() < 0).any())
        given = given or ("position_ids that begin again" if packed else "")
    if given:
        raise UnsupportedError(
            f"{type(module).__name__} called the attention backend {backend!r} with {given} and no mask: whether it "
            "hides keys by it is not known. Give it a mask function, and add the attention_mask to the scores: "
            f"transformers.AttentionMaskInterface.register({backend!r}, transformers.masking_utils.eager_mask)"
        )


def selected(module: Any, keywords: Mapping[str, Any], shape: Shape, masked: bool) -> Tensor | None:
    """The keys that an indexer chose, bool (B, H or 1, Lq, Lk); None where there is no choice.

    The keyword `indices` (B, Lq, n) names keys, as in DeepSeek 3.2; `block_indices` (B, groups of heads, Lq, n) names
    blocks of keys, −1 for none, as in MiniMax M3. On "eager" and "sdpa" these models put the choice into the mask.
    `shape`: (B, H, Lq, Lk). `masked`: whether there is a mask too; without it, MiniMax is causal by its position ids.
    """
    _, heads, queries, keys = shape
    indices, blocks = keywords.get("indices"), keywords.get("block_indices")
    keep: Tensor | None = None
    if indices is not None:
        keep = _scattered(indices, keys).unsqueeze(1)
    if blocks is not None:
        size = module.indexer.block_size
        count = -(-keys // size)
        chosen = _scattered(blocks.masked_fill(blocks < 0, count), count + 1)[..., :count]  # the last is dropped
        chosen = chosen.repeat_interleave(size, -1)[..., :keys].repeat_interleave(heads // blocks.shape[1], 1)
        if not masked:
            own = keywords.get("position_ids")
            own = torch.arange(keys - queries, keys, device=chosen.device) if own is None else own
            chosen = chosen & (torch.arange(keys, device=chosen.device) <= own.view(-1, 1, queries, 1))
        keep = chosen if keep is None else keep & chosen
    return keep


def _scattered(indices: Tensor, size: int) -> Tensor:
    none = torch.zeros(*indices.shape[:-1], size, dtype=torch.bool, device=indices.device)
    return none.scatter(-1, indices.long(), True)
