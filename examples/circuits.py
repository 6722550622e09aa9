"""Circuits of the induction model: which heads compose, and whether the induction head copies, by the weights alone.

    python examples/circuits.py

trains the model of `induction.py` with two heads in each layer (about a minute). The largest K-composition is that of
the head that attends to the previous token with an induction head.

>>> import torch
>>> from circuits import copying, strongest_pair
>>> from induction import AttentionOnly, periodic
>>> _ = torch.manual_seed(0)
>>> model, tokens = AttentionOnly(heads=2).eval(), periodic(4)[0]
>>> sorted(strongest_pair(model, tokens))
['composition', 'head', 'layer', 'with head', 'with layer']
>>> 0 <= copying(model, tokens, layer=1, head=0) <= 1
True
"""

from typing import Any

import torch
from induction import AttentionOnly, periodic, scores, train
from torch import Tensor

import clearhead as ch


def strongest_pair(model: Any, tokens: Tensor) -> dict[str, Any]:
    """The pair of heads of which the later one's keys read most of what the earlier one writes."""
    return ch.models.circuits(model, tokens).composition("key")[0]


@torch.no_grad()
def copying(model: Any, tokens: Tensor, layer: int, head: int) -> float:
    """The share of the words that a head makes likelier than the mean of all words where it attends to them."""
    ov = ch.models.circuits(model, tokens).ov(layer, head)
    made = model.choose.weight @ (ov @ model.embed.weight.T)  # (words made likelier, words attended to)
    return made.diagonal().gt(made.mean(0)).double().mean().item()


def main() -> None:
    torch.manual_seed(0)
    model = AttentionOnly(heads=2)
    train(model, progress="training")
    model.eval()
    tokens, _ = periodic(64, periods=(16, 16))
    print(scores(model, tokens))
    print(strongest_pair(model, tokens))
    for head in range(2):
        print(f"layer 1, head {head} copies {copying(model, tokens, 1, head):.0%} of the words")


if __name__ == "__main__":
    main()
