"""Induction heads: a transformer of two attention layers learns to copy, and its heads are found and knocked out.

    python examples/induction.py --seeds 3

trains three models on sequences that repeat themselves, about 25 seconds each on one core. It prints how many of the
repeated words each model predicts, what its heads do, and how many hits are left when the first layer's head loses the
previous key, the key two back, or its whole output. Beside each model stands a control that learns from sequences of
one period alone. The control has as many hits and as high a score at this period, also without the previous key, and
has neither at another period.

>>> import torch
>>> from induction import AttentionOnly, hits, periodic, scores, train
>>> _ = torch.manual_seed(0)
>>> tokens, period = periodic(4, periods=(3, 3), length=9)
>>> bool((tokens[:, 3:] == tokens[:, :-3]).all())
True
>>> model = AttentionOnly(layers=2)
>>> history = train(model, steps=3)
>>> 0 <= hits(model, tokens, period) <= 1
True
>>> scores(model, tokens)["induction"].shape                    # (layers, heads)
torch.Size([2, 1])
>>> from transformers import GPT2Config, GPT2Model              # works for any model that takes tokens
>>> gpt2 = GPT2Model(GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4)).eval()
>>> scores(gpt2, tokens)["previous"].shape
torch.Size([3, 4])

Sources: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"; Olsson et al. 2022, "In-context
Learning and Induction Heads".
"""

import argparse
import time
from typing import NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

import clearhead as ch

WORDS, LENGTH, PERIODS = 64, 64, (4, 32)
FIXED, OTHER = 16, 20  # the control learns from sequences of one period alone, and is tested at another too


class Seen(NamedTuple):
    """A model at one step of its training: the loss on new words, the loss on words that come again, and scores."""

    step: int
    new: float
    again: float
    previous: Tensor
    induction: Tensor


class Layer(nn.Module):
    """Adds to each position the output of attention over the positions up to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attend = ch.nn.MultiHeadAttention(width, heads, rotary=ch.nn.RotaryEmbedding(width // heads))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        added: Tensor = self.attend(y, y, y, mask=ch.Causal())
        return x + added


class AttentionOnly(nn.Module):
    """Tokens (N, L) to the logits of the next tokens (N, L, words), by layers of attention alone."""

    def __init__(self, layers: int = 2, width: int = 64, heads: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.choose = nn.Linear(width, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.choose(self.norm(self.layers(self.embed(tokens))))
        return logits


def periodic(count: int, periods: tuple[int, int] = PERIODS, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Sequences (N, L) that repeat after a period of their own, (N, 1); no word comes twice within a period."""
    period = torch.randint(periods[0], periods[1] + 1, (count, 1))
    order = torch.rand(count, WORDS).argsort(-1)
    return order.gather(1, torch.arange(length) % period), period


def losses(model: nn.Module, tokens: Tensor) -> Tensor:
    """The cross entropy of each token but the first, (N, L − 1)."""
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")


def comes_again(tokens: Tensor, period: Tensor) -> Tensor:
    """Which tokens after the first can be predicted, (N, L − 1): the token before has occurred earlier."""
    return torch.arange(1, tokens.shape[1]) > period


@torch.no_grad()
def hits(model: nn.Module, tokens: Tensor, period: Tensor) -> float:
    """The share of the tokens that come again which the model finds likeliest."""
    right = model(tokens[:, :-1]).argmax(-1) == tokens[:, 1:]
    return right[comes_again(tokens, period)].float().mean().item()


@torch.no_grad()
def scores(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """(layers, heads) of two measures: the weight on the previous token, and on the token after an earlier equal token.

    It works for any model that `ch.watch` records and that takes tokens (N, L).
    """
    with ch.watch(model) as seen:
        model(tokens)
    rows = seen.table(tokens=tokens)
    return {
        name: torch.tensor([row[name] for row in rows]).view(len(seen.names), -1) for name in ("previous", "induction")
    }


def train(
    model: nn.Module,
    periods: tuple[int, int] = PERIODS,
    steps: int = 600,
    every: int = 20,
    progress: str | None = None,
) -> list[Seen]:
    """Train on new sequences in each step; gives the measures of the model, every `every` steps.

    `progress`: the name of a bar on stderr; None for no bar.
    """
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1, (n + 1) / 50))
    test, period = periodic(64, (periods[1], periods[1]))
    again, history = comes_again(test, period), []
    for step in tqdm(range(steps + 1), progress, mininterval=1, disable=progress is None):
        if step % every == 0:
            with torch.no_grad():
                each = losses(model, test)
            history.append(Seen(step, each[~again].mean().item(), each[again].mean().item(), **scores(model, test)))
        loss = losses(model, periodic(64, periods)[0]).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return history


def without_key(back: int) -> ch.extend.Mask:
    """A causal mask without one key: the key `back` places before the query."""
    return ch.Causal() & ch.MaskFunction(lambda b, h, q, k: q - k != back)


def without(model: nn.Module, tokens: Tensor, period: Tensor) -> dict[str, float]:
    """The hits that are left when one thing is taken from the first layer."""
    edits = {
        "previous key": ch.edits.ForceMask(without_key(1), layers=0),
        "two back": ch.edits.ForceMask(without_key(2), layers=0),
        "layer": ch.edits.ScaleHeads(layers=0, factor=0.0),
    }
    left = {}
    for name, one in edits.items():
        with ch.edit(model, one):
            left[name] = hits(model, tokens, period)
    return left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--seeds", type=int, default=1, help="train this many models of each kind, with the seeds 0, 1, …"
    )
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{f'at a period of {FIXED}, and with one thing taken away:':>72}{f'at {OTHER}:':>19}")
    columns = [
        "hits",
        "without previous",
        "two back",
        "layer",
        "induction",
        "hits",
        "induction",
        "from step",
        "seconds",
    ]
    print("seed  trained on" + "".join(f"{name:>{len(name) + 2}}" for name in columns))
    for seed in range(options.seeds):
        for periods in (PERIODS, (FIXED, FIXED)):
            torch.manual_seed(seed)
            model, began = AttentionOnly(), time.process_time()
            history = train(model, periods, options.steps, progress=f"seed {seed}, periods {periods}")
            seconds = time.process_time() - began
            torch.manual_seed(10**6)  # the same tests for all
            test, other = periodic(128, (FIXED, FIXED)), periodic(128, (OTHER, OTHER))
            first, second = (max(scores(model, tokens)["induction"][-1].tolist()) for tokens, _ in (test, other))
            step = next((at.step for at in history if at.induction[-1].max() > 0.8), None)
            shares = hits(model, *test), *without(model, *test).values(), first, hits(model, *other), second
            row = [f"{share:.3f}" for share in shares] + [str(step), f"{seconds:.0f}"]
            row = [f"{cell:>{len(name) + 2}}" for cell, name in zip(row, columns, strict=True)]
            print(f"{seed:4}  {periods[0]:2} to {periods[1]}  " + "".join(row))


if __name__ == "__main__":
    main()
