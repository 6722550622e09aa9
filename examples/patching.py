"""Path patching: through which side of its attention does layer 1 read what layer 0 wrote?

    python examples/patching.py

trains the model of `induction.py` (about half a minute), takes the query, the key or the value of layer 1 from a run
without layer 0, and prints the loss. The keys carry it: the previous-token head and the induction head compose by K.

>>> import torch
>>> from induction import AttentionOnly, periodic
>>> from patching import paths
>>> _ = torch.manual_seed(0)
>>> sorted(paths(AttentionOnly().eval(), periodic(4)[0]))
['key', 'query', 'value', 'whole']
"""

import torch
from induction import AttentionOnly, hits, losses, periodic, train
from torch import Tensor, nn

import clearhead as ch


@torch.no_grad()
def paths(model: nn.Module, tokens: Tensor) -> dict[str, float]:
    """The loss of the last token where one side of layer 1 is that of a run without layer 0."""
    with ch.watch(model, values=True) as without, ch.edit(model, ch.edits.Ablate(layers=0)):
        losses(model, tokens)
    found = {"whole": losses(model, tokens)[:, -1].mean().item()}
    for part in ("query", "key", "value"):
        with ch.edit(model, ch.edits.Patch(without, layers=1, part=part)):
            found[part] = losses(model, tokens)[:, -1].mean().item()
    return found


def main() -> None:
    torch.manual_seed(0)
    model = AttentionOnly()
    train(model, progress="training")
    model.eval()
    tokens, period = periodic(64, periods=(16, 16))
    print(f"hits {hits(model, tokens, period):.3f}")
    for name, loss in paths(model, tokens).items():
        print(f"{name:>6}: loss {loss:.3f}")


if __name__ == "__main__":
    main()
