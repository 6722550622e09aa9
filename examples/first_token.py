"""How much attention each head gives to the first token, over a corpus. No tensor of a text is kept.

>>> from first_token import share_of_first
>>> from clearhead.models import bundled, load
>>> model, tokenizer = load(bundled())
>>> shares = share_of_first(model, tokenizer, ["The pump in Broad Street was closed.", "It was."])
>>> shares.shape                                                # 6 layers of 12 heads
torch.Size([6, 12])
>>> bool((0 < shares).all() and (shares < 1).all())
True
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import clearhead as ch
from clearhead.models import bundled, load


@torch.no_grad()
def share_of_first(model: Any, tokenizer: Any, texts: Iterable[str]) -> Tensor:
    """(layers, heads): the mean over all tokens of all texts of their weight on the first token."""
    means = ch.models.Means()
    for text in texts:
        inputs = tokenizer(text, return_tensors="pt", truncation=True)
        others = (torch.arange(inputs["input_ids"].shape[1]) > 0).long()  # group 0: the first token
        with ch.models.statistics(model, [ch.reductions.Mass(others)], merge=means):
            model(**inputs)
    return torch.stack([means[name][0][:, 0] for name in means])


if __name__ == "__main__":
    text = (Path(__file__).parent / "paragraph.txt").read_text()
    for layer, shares in enumerate(share_of_first(*load(bundled()), text.split(". "))):
        print(f"layer {layer}:", " ".join(f"{share:.2f}" for share in shares))
