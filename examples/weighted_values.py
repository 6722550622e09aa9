"""Weights beside the lengths of what they move, and a figure for a paper.

>>> from weighted_values import figure, shares
>>> from clearhead.models import bundled, load
>>> model, tokenizer = load(bundled())
>>> weights, values, written = shares(model, tokenizer, "The pump in Broad Street was closed.", layer=3)
>>> weights.shape == values.shape == written.shape              # each key's share, (heads, keys)
True
>>> axes = figure(model, tokenizer, "The pump in Broad Street was closed.", layer=3, head=5)

Source: Kobayashi et al. 2020, "Attention is Not Only a Weight: Analyzing Transformers with Vector Norms".
"""

from typing import Any

import torch
from torch import Tensor

import clearhead as ch


@torch.no_grad()
def shares(model: Any, tokenizer: Any, text: str, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """(heads, keys): the part of all weight that a key receives, its part of Σ w ‖v‖, and its part of Σ w ‖v W_O‖.

    The last is the norm of the paper: of what the head writes for the key, behind the layer that writes the heads.
    """
    with ch.watch(model, layers=layer, values=True) as seen:
        model(**tokenizer(text, return_tensors="pt"))
    received = seen[0].weights.received()[0]
    values, written = received * seen[0].value_norms[0], received * seen[0].transformed_norms[0]
    first, second, third = (every / every.sum(-1, keepdim=True) for every in (received, values, written))
    return first, second, third


@torch.no_grad()
def figure(model: Any, tokenizer: Any, text: str, layer: int, head: int) -> Any:
    """One head, with its words, drawn by matplotlib: `axes.figure.savefig("head.pdf")`."""
    inputs = tokenizer(text, return_tensors="pt")
    words = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
    with ch.watch(model, layers=layer) as seen:
        model(**inputs)
    return seen[0].weights.plot(0, head, query_labels=words, key_labels=words)
