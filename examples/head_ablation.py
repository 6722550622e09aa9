"""Which heads does a prediction need? Each head is scaled to 0 in turn; gradients estimate all effects at once.

>>> import torch
>>> from transformers import GPT2Config, GPT2LMHeadModel
>>> from head_ablation import ablated, importance
>>> _ = torch.manual_seed(0)
>>> model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.0)).eval()
>>> ids = torch.arange(12)[None]
>>> ablated(model, ids, answer=3, other=7).shape                # layers, heads: the change of the logit difference
torch.Size([2, 4])
>>> importance(model, ids, answer=3, other=7).shape             # to first order, from one backward pass
torch.Size([2, 4])
"""

from typing import Any

import torch
from torch import Tensor

import clearhead as ch


def logit_difference(model: Any, ids: Tensor, answer: int, other: int) -> Tensor:
    """The logit of one next token, less the logit of another."""
    logits: Tensor = model(ids).logits[0, -1]
    return logits[answer] - logits[other]


@torch.no_grad()
def ablated(model: Any, ids: Tensor, answer: int, other: int) -> Tensor:
    """(layers, heads): the logit difference without a head, less the logit difference of the whole model."""
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    change = torch.zeros(layers, heads) - logit_difference(model, ids, answer, other)
    for layer in range(layers):
        for head in range(heads):
            with ch.edit(model, ch.edits.ScaleHeads(layer, head, 0.0)):
                change[layer, head] += logit_difference(model, ids, answer, other)
    return change


def importance(model: Any, ids: Tensor, answer: int, other: int) -> Tensor:
    """(layers, heads): Σ A ∘ ∂L/∂A, to first order the loss of logit difference without a head."""
    with ch.watch(model, gradients=True) as seen:
        difference = logit_difference(model, ids, answer, other)
    difference.backward()
    return torch.stack([call.head_importance[0] for call in seen.calls])
