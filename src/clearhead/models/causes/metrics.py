"""Measures of a model's output, for `sweep`: each takes the output, and gives one number for each sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.base.arrays import Integers, is_whole
from clearhead.base.errors import ClearheadError
from clearhead.base.output.text import brief
from clearhead.models.interception.padding import Told, given

Metric = Callable[..., Tensor]
Each = int | Sequence[int] | Tensor  # one for all sequences, or one for each


@dataclass(frozen=True)
class Named:
    """A metric with the name and the unit of its numbers. `refuse`: raises where the metric reads padding of these
    words, bool (B, L)."""

    name: str
    unit: str
    of: Metric
    refuse: Callable[[Tensor], None]

    def __call__(self, output: Any) -> Tensor:
        return self.of(output)


def refuse_padding(metric: Any, model: nn.Module, inputs: Any, output: Any) -> None:
    """Raise where a metric of clearhead's own reads what a model computed at padding, by the inputs' attention mask."""
    logits = getattr(output, "logits", output)
    if not isinstance(metric, Named) or not isinstance(inputs, Mapping) or not isinstance(logits, Tensor):
        return
    words = given(model.forward, inputs, Told()).own
    if words is not None and logits.ndim == 3 and words.shape == logits.shape[:2]:
        metric.refuse(words)


def _refuse_at(position: Any) -> Callable[[Tensor], None]:
    def refuse(words: Tensor) -> None:
        batch, length = words.shape
        places = numbers_for(position, batch, range(-length, length), "position", words.device)
        real = words[torch.arange(batch, device=words.device), places]
        if bool(real.all()):
            return
        at = int((~real).nonzero()[0])
        last = "-1" if bool(words[at, -1]) else "attention_mask.sum(1) - 1"
        raise ClearheadError(
            f"position {int(places[at])} of sequence {at} is padding by the attention mask, so its logits are those of "
            f"no token. The last word of each sequence is at position={last}."
        )

    return refuse


def logits_of(output: Any) -> Tensor:
    """The logits of a model's output, (B, L, V) or (B, V)."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.ndim not in (2, 3):
        raise ClearheadError(
            f"the model gave a {type(output).__name__} without logits, (B, L, V) or (B, V); pass it with its head."
        )
    return logits


def numbers_for(given: Any, batch: int, allowed: range, name: str, device: torch.device) -> Tensor:
    """A whole number for each sequence, (B,), from one for all or one for each. `allowed`: those that there are."""
    try:
        numbers = torch.as_tensor(given, device=device)
    except (TypeError, ValueError, RuntimeError):
        numbers = torch.empty(0, dtype=torch.float64, device=device)
    fits = is_whole(numbers) and numbers.shape in ((), (batch,))
    if not fits or any(n not in allowed for n in numbers.flatten().tolist()):
        raise ClearheadError(
            f"{name} is {brief(given)}; expected a whole number from {allowed.start} to {allowed.stop - 1}, or one for "
            f"each of the {batch} sequences, ({batch},)."
        )
    return numbers.long().clone().expand(batch)  # a copy: autograd keeps no tensor of inference mode


def at_position(logits: Tensor, position: Any) -> Tensor:
    """The logits (B, V) of one position of each sequence; logits (B, V) have one alone."""
    if logits.ndim == 2:
        return logits
    batch, length, _ = logits.shape
    places = numbers_for(position, batch, range(-length, length), "position", logits.device)
    return logits[torch.arange(batch, device=logits.device), places]


def logit_difference(token: Each, against: Each | None = None, position: Each = -1) -> Metric:
    """The logit of a token, less that of another one.

    >>> import torch, clearhead as ch
    >>> ch.models.logit_difference(2, 0)(torch.tensor([[1.0, 2.0, 4.0]]))
    tensor([3.])

    `token`, `against`: numbers of the vocabulary, one for all sequences or one for each; without `against`, the logit
    itself. `position`: which of the L outputs, one for all sequences or one for each; −1 is the last one, which is a
    word where texts are padded on the left. Of texts that are padded on the right the last words are at
    `attention_mask.sum(1) - 1`. Gives a function of the model's output, (B,), which raises a `ClearheadError` for a
    number outside of the vocabulary, and where both are one token. `sweep` and `attribution_patching`, which know the
    inputs, raise one for a position that is padding by their attention mask.
    """

    def metric(output: Any) -> Tensor:
        logits = at_position(logits_of(output), position)
        every = range(logits.shape[1])
        wanted = numbers_for(token, len(logits), every, "token", logits.device)
        found = logits.gather(1, wanted[:, None])
        if against is not None:
            other = numbers_for(against, len(logits), every, "against", logits.device)
            if bool((same := wanted == other).any()):
                at = int(same.nonzero()[0])
                raise ClearheadError(
                    f"token and against are both {int(wanted[at])} in sequence {at}: the difference is 0 in any model."
                )
            found = found - logits.gather(1, other[:, None])
        return found.squeeze(1)

    return Named("logit" if against is None else "logit difference", "", metric, _refuse_at(position))


def kl(reference: object, position: Each = -1) -> Metric:
    """The Kullback–Leibler divergence of the model's next token from that of a reference, in nats.

    >>> import torch, clearhead as ch
    >>> before = torch.tensor([[1.0, 2.0, 4.0]])
    >>> ch.models.kl(before)(before)
    tensor([0.])

    Formula: Σ p log(p / q), p = softmax(reference), q = softmax(logits). `reference`: another output of the model, or
    its logits. `position`: which of the L outputs, as for `logit_difference`. Gives a function of the model's output,
    (B,).
    """
    wanted = at_position(logits_of(reference), position).detach().log_softmax(-1)

    def metric(output: Any) -> Tensor:
        found = at_position(logits_of(output), position).log_softmax(-1)
        chances = wanted.exp()
        divergence: Tensor = (chances * (wanted - found)).masked_fill(chances == 0, 0.0).sum(-1)
        return divergence

    return Named("KL divergence", "nats", metric, _refuse_at(position))


def next_token_loss(ids: Integers) -> Metric:
    """The mean cross entropy of each next token, in nats.

    >>> import torch, clearhead as ch
    >>> metric = ch.models.next_token_loss(torch.tensor([[0, 2]]))
    >>> metric(torch.tensor([[[1.0, 2.0, 4.0], [0.0, 0.0, 0.0]]]))
    tensor([0.1698])

    `ids`: the tokens (B, L) that the model was given; those that are negative, such as −100 for padding, are left out.
    Gives a function of the model's output, (B,). `sweep` and `attribution_patching` raise a `ClearheadError` where
    padding, by the attention mask of the inputs, is not left out.
    """
    tokens = torch.as_tensor(ids)

    def metric(output: Any) -> Tensor:
        logits = logits_of(output)
        fits = is_whole(tokens) and tokens.shape == logits.shape[:-1]
        if not fits or bool((tokens >= logits.shape[-1]).any()):
            raise ClearheadError(
                f"next_token_loss: ids are {tokens.dtype}, {tuple(tokens.shape)}; expected whole numbers below "
                f"{logits.shape[-1]}, {tuple(logits.shape[:-1])}, for the logits {tuple(logits.shape)}."
            )
        wanted = tokens[:, 1:].to(logits.device)
        counts = wanted >= 0
        each = -logits[:, :-1].log_softmax(-1).gather(2, wanted.clamp_min(0)[..., None]).squeeze(2)
        mean: Tensor = each.masked_fill(~counts, 0.0).sum(1) / counts.sum(1)
        return mean

    def refuse(words: Tensor) -> None:
        pairs = words[:, 1:] & words[:, :-1]  # a token after padding is predicted by padding
        if tokens.shape == words.shape and bool((tokens[:, 1:].to(words.device)[~pairs] >= 0).any()):
            raise ClearheadError(
                "next_token_loss: some of ids are padding, or follow padding, by the attention mask. Leave them out: "
                "next_token_loss(ids.masked_fill(attention_mask * attention_mask.roll(1, 1) == 0, -100))."
            )

    return Named("loss of the next token", "nats", metric, refuse)
