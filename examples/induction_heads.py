"""Induction heads and previous-token heads, by their scores on a random sequence that is repeated once.

>>> import torch
>>> from transformers import GPT2Config, GPT2Model
>>> from induction_heads import scores
>>> _ = torch.manual_seed(0)
>>> model = GPT2Model(GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4)).eval()
>>> found = scores(model, length=20)
>>> found["induction"].shape, found["previous token"].shape     # layers, heads
(torch.Size([2, 4]), torch.Size([2, 4]))

Source: Olsson et al. 2022, "In-context Learning and Induction Heads".
"""

from typing import Any

import torch
from torch import Tensor

import clearhead as ch


@torch.no_grad()
def scores(model: Any, length: int = 50) -> dict[str, Tensor]:
    """(layers, heads): the mean weight on the token after the last same one, and on the token before."""
    half = torch.randint(model.config.vocab_size, (1, length))
    with ch.watch(model) as seen:
        model(torch.cat([half, half], 1))
    second, all_but_first = torch.arange(length, 2 * length), torch.arange(1, 2 * length)
    weights = [call.weights.dense()[0] for call in seen.calls]
    return {
        "induction": torch.stack([w[:, second, second - length + 1].mean(-1) for w in weights]),
        "previous token": torch.stack([w[:, all_but_first, all_but_first - 1].mean(-1) for w in weights]),
    }
