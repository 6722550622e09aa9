"""What each head adds to a prediction: the parts of a logit, by head and by source token.

>>> import torch
>>> from transformers import GPT2Config, GPT2LMHeadModel
>>> from logit_attribution import strongest
>>> _ = torch.manual_seed(0)
>>> model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4)).eval()
>>> found = strongest(model, torch.arange(12)[None], answer=3, other=7, count=2)
>>> [sorted(one) for one in found]
[['attribution', 'head', 'layer', 'source'], ['attribution', 'head', 'layer', 'source']]
"""

from typing import Any

from torch import Tensor

import clearhead as ch


def strongest(model: Any, ids: Tensor, answer: int, other: int, count: int = 5) -> list[dict[str, Any]]:
    """The heads that add most to the difference of two logits, each with the token that it read this from."""
    parts = ch.models.logit_attribution(model, {"input_ids": ids}, token=answer, against=other)
    rows = []
    for call in parts:
        for head, added in enumerate(call.heads[0].tolist()):
            source = int(call.sources[0, head].argmax())
            rows.append({"layer": call.layer.column, "head": head, "attribution": added, "source": source})
    return sorted(rows, key=lambda row: -abs(row["attribution"]))[:count]
