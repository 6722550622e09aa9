"""Dates in many languages and formats, rewritten as ISO 8601 by an encoder and a decoder with additive attention.

    python examples/dates.py --seeds 3

trains three models, about 30 seconds each on one core. It prints how many held-out days each model gets right, and how
often the largest weight of a figure lies in the field that the figure comes from: the year, the month or the day.

>>> import torch
>>> from dates import Rewriter, encoded, rewritten, train
>>> from dates_data import sample, split
>>> days, held_out = split()
>>> _ = torch.manual_seed(0)
>>> model = Rewriter()
>>> losses = train(model, sample(days, 200, seed=0), steps=3)
>>> found = rewritten(model, sample(held_out, 5, seed=1))
>>> len(found.iso), found.weights.shape[:2]                     # a row of weights for each of the 10 characters
(5, torch.Size([5, 10]))

Source: Bahdanau et al. 2015, "Neural Machine Translation by Jointly Learning to Align and Translate". There the context
also enters the next state, one step after the other; here, as in Luong et al. 2015, "Effective Approaches to
Attention-based Neural Machine Translation", the states depend only on the written characters, and all queries are
asked at once.
"""

import argparse
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from dates_data import CHARACTERS, Item, sample, split
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from tqdm import tqdm

import clearhead as ch

ISO = "0123456789-^"  # the decoder's characters; ^ stands before the first one
FIELDS = "yyyy-mm-dd"  # the field of each character of the answer


class Encoded(NamedTuple):
    """Items as numbers: the text (N, L), padded with 0; how many characters each has; the answer (N, 11), from ^ on."""

    text: Tensor
    lengths: Tensor
    iso: Tensor


class Rewritten(NamedTuple):
    """The text that a model wrote, and the alignment (N, 10, L): a row has one character's weights, and sums to 1."""

    iso: list[str]
    weights: Tensor


class Encoder(nn.Module):
    """Each character with its surroundings: (N, L) to (N, L, 128), by a GRU that reads in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1 + len(CHARACTERS), 32, padding_idx=0)
        self.read = nn.GRU(32, 64, batch_first=True, bidirectional=True)

    def forward(self, text: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(text), lengths, batch_first=True, enforce_sorted=False)
        memory: Tensor = pad_packed_sequence(self.read(packed)[0], batch_first=True, total_length=text.shape[1])[0]
        return memory


class Decoder(nn.Module):
    """The next character's logits, (N, n, 12), after each of the n that are written.

    Everything that it knows of the text comes through its attention.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(ISO), 32)
        self.remember = nn.GRU(32, 128, batch_first=True)
        self.attend = ch.nn.AdditiveAttention(hidden_dim=64)
        self.choose = nn.Linear(128 + 128, len(ISO))

    def forward(self, written: Tensor, memory: Tensor, lengths: Tensor, mask: Tensor | None = None) -> Tensor:
        states = self.remember(self.embed(written))[0]
        context = self.attend(states, memory, memory, lengths, mask=mask)
        logits: Tensor = self.choose(torch.cat([states, context], -1))
        return logits


class Rewriter(nn.Module):
    """An encoder and a decoder. `decoder`: the class of the decoder; it is called as `Decoder` is."""

    def __init__(self, decoder: type[nn.Module] = Decoder) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(), decoder()

    def forward(self, text: Tensor, lengths: Tensor, written: Tensor) -> Tensor:
        logits: Tensor = self.decoder(written, self.encoder(text, lengths), lengths)
        return logits


def encoded(items: Sequence[Item]) -> Encoded:
    """Items as numbers."""
    numbers = {character: 1 + i for i, character in enumerate(CHARACTERS)}
    texts = [torch.tensor([numbers[c] for c in item.text]) for item in items]
    iso = torch.tensor([[ISO.index(c) for c in "^" + item.iso] for item in items])
    return Encoded(pad_sequence(texts, batch_first=True), torch.tensor([len(text) for text in texts]), iso)


def train(
    model: nn.Module, items: Sequence[Item], steps: int = 400, seed: int = 0, progress: bool = False
) -> list[float]:
    """Train on batches of 128 items; gives the loss of each step. `seed`: the seed of the batches."""
    text, lengths, iso = encoded(items)
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / 50, 1 - n / steps))
    losses = []
    for _ in tqdm(range(steps), f"seed {seed}", mininterval=1, disable=not progress):
        some = torch.randint(len(items), (128,), generator=draw)
        longest = int(lengths[some].max())
        logits = model(text[some, :longest], lengths[some], iso[some, :-1])  # each from the right characters before it
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), iso[some, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def rewritten(model: Rewriter, items: Sequence[Item], mask: Tensor | None = None) -> Rewritten:
    """The characters that the model writes, each the likeliest one after its own, and where it looked.

    `mask`: bool (N or 1, 10, L or 1): where each written character may look; None allows every place.
    """
    text, lengths, iso = encoded(items)
    memory, written = model.encoder(text, lengths), iso[:, :1]
    for i in range(len(FIELDS)):
        allowed = None if mask is None else mask[:, : i + 1]
        likeliest = model.decoder(written, memory, lengths, allowed)[:, -1:].argmax(-1)
        written = torch.cat([written, likeliest], 1)
    weights = model.decoder.attend.attention_weights[:]  # the last call asked for all ten characters
    return Rewritten(["".join(ISO[n] for n in row) for row in written[:, 1:].tolist()], weights)


def exact(found: Rewritten, items: Sequence[Item]) -> float:
    """The share of items that are right in every character."""
    return sum(iso == item.iso for iso, item in zip(found.iso, items, strict=True)) / len(items)


def in_field(weights: Tensor, items: Sequence[Item], near: int = 0) -> dict[str, float]:
    """How often a written figure's largest weight lies in the field that the figure comes from.

    `near`: this many characters on either side of the field count too.
    """
    places = weights.argmax(-1).tolist()
    hits: dict[str, list[bool]] = {"y": [], "m": [], "d": []}
    for item, row in zip(items, places, strict=True):
        for field, place in zip(FIELDS, row, strict=True):
            if field != "-":
                hits[field].append(field in item.fields[max(place - near, 0) : place + near + 1])
    return {field: sum(hit) / len(hit) for field, hit in hits.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=1, help="train this many models, with the seeds 0, 1, …")
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    days, held_out = split()
    test = sample(held_out, 2000, seed=10**6)
    print("seed   exact    year   month     day   or beside the field         CPU s")
    for seed in range(options.seeds):
        torch.manual_seed(seed)
        model, began = Rewriter(), time.process_time()
        train(model, sample(days, 20_000, seed), options.steps, seed, progress=True)
        seconds = time.process_time() - began
        found = rewritten(model, test)
        shares = [*in_field(found.weights, test).values(), *in_field(found.weights, test, near=1).values()]
        print(
            f"{seed:4}  {exact(found, test):.4f}  ", "   ".join(f"{share:.3f}" for share in shares), f"  {seconds:.0f}"
        )


if __name__ == "__main__":
    main()
