"""The checks of chapters 7 to 10: induction, a Transformer, a trained model, long texts."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import clearhead as ch
from checks.compared import answered, called, case, drawn, numbers, same, two


def ranks(x: Tensor) -> Tensor:
    return x.flatten().argsort().argsort().double()


def correlation(x: Tensor, y: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([x.flatten().double(), y.flatten().double()]))[0, 1])


# Chapter 7


def one_layer(single: Any, alone: Any, tokens: Tensor, period: Tensor) -> None:
    from induction import WORDS, hits, losses

    answered("the model of one layer, and its hits", single, alone)
    layers = sum(isinstance(module, ch.nn.MultiHeadAttention) for module in single.modules())
    if layers != 1:
        raise AssertionError(f"the model: it has {layers} layers of attention, and one was asked for.")
    with torch.no_grad():
        loss = losses(single, tokens).mean().item()
    guessing = torch.tensor(float(WORDS)).log().item()
    if loss > guessing:
        raise AssertionError(f"the model: its loss is {loss:.2f}; a guess among {WORDS} has {guessing:.2f}. Train it.")
    found = hits(single, tokens, period)
    but = {"this is the share of words that it misses": 1 - found, "this is a percentage, not a share": 100 * found}
    same(alone, found, "the hits", 1e-4, but)
    print("right: the hits of one layer")


def induction_score(by_hand: Any, model: nn.Module, tokens: Tensor, p: int) -> None:
    """Of the head of the last layer, for sequences of the period `p`."""
    with ch.watch(model) as seen, torch.no_grad():
        model(tokens)
    weights = seen[-1].weights[:, 0].dense()
    length = weights.shape[-1]

    def mean(shift: int, least: int = 1, first: int = p) -> Tensor:
        rows = [sum(weights[:, i, j] for j in range(i - p + shift, least - 1, -p)) for i in range(first, length)]
        return torch.stack([torch.as_tensor(row).expand(len(weights)) for row in rows]).mean()

    each = torch.stack([weights[:, i, j] for i in range(p, length) for j in range(i - p + 1, 0, -p)]).mean()
    nearest = torch.stack([weights[:, i, i - p + 1] for i in range(p, length)]).mean()
    but = {
        "each row's weights were averaged, and not added up": each,
        "only the nearest of the keys was counted": nearest,
        "these are the keys with the query's own word, not the ones after them": mean(0, least=0),
        "these are the keys before the query's own word, not the ones after them": mean(-1, least=0),
        "the queries of the first period are counted too": mean(1) * (length - p) / length,
        "these are the scores of another sequence or another layer": seen[0].weights[:, 0][:, p:].mean(),
        "this is the sum over the queries, not their mean": mean(1) * (length - p),
    }
    same(by_hand, mean(1), "the score", 1e-4, but)
    print("right: the score")


def cut_keys(
    hidden: Any, control: Any, tried: Callable[..., Any], model: nn.Module, test: tuple[Tensor, Tensor]
) -> None:
    answered("the hits without these keys, and those of the control", hidden, control)
    hidden, control = (given[0] if isinstance(given, tuple) else given for given in (hidden, control))  # all of `tried`

    def left(hides: Callable[[Tensor], Tensor], causal: bool = True) -> float:
        mask = ch.MaskFunction(lambda b, h, q, k: ~hides(q - k))
        hits: float = tried(model, *test, ch.edits.ForceMask(ch.Causal() & mask if causal else mask, layers=1))[0]
        return hits

    def whole_periods(back: int, given: Any, causal: bool = True) -> float:
        """Of the two ways to hide these keys the one that gives more nearly what was given.

        One hides the key 63 back too, which is key 0 and follows no word; the other hides the three before it.
        """
        forms = (lambda x: x % 16 == back), (lambda x: (x == back) | (x == back + 16) | (x == back + 32))
        values = [left(form, causal) for form in forms]
        return min(values, key=lambda value: abs(value - float(numbers(given, "the hits").mean())))

    for back, given, what in ((15, hidden, "the hits without these keys"), (14, control, "the hits of the control")):
        expected = whole_periods(back, given)
        but = {
            "only the key 15 back was hidden; the same word stands whole periods before it too": left(
                lambda x: x == 15
            ),
            "layer 1 still has the keys that it needs: layer 0 was cut, or this is the control": whole_periods(
                14, given
            ),
            "the keys 16 back and whole periods more were hidden: those are the query's own word": left(
                lambda x: x % 16 == 0
            ),
            "later keys are seen: the mask takes the place of the causal one, so join it with `Causal()`": (
                whole_periods(back, given, causal=False)
            ),
            "this is a percentage, not a share": 100 * whole_periods(back, numbers(given, what) / 100),
        }
        same(given, expected, what, 1e-3, but if back == 15 else {})
    print("right: these keys, and not those beside them")


# Chapter 8


def stream_of_a_block(stream: Callable[..., Any], block: Any) -> None:
    x, mask = drawn(2, 6, block.norms[0].normalized_shape[0]), ch.Lengths([4, 6])
    block.eval()

    def attended(y: Tensor, mask: Any = mask) -> Tensor:
        result: Tensor = block.attend(y, y, y, mask=mask)
        return result

    with torch.no_grad():
        y = block.norms[0](x)
        first = attended(y)
        second = block.feed(block.norms[2](x + first))
        found = two(called(stream, block, x, mask, what="stream"), "stream, with the two vectors that are added")
        of_first = {
            "this is the stream after attention, and not what attention adds": x + first,
            "attention read the stream without its norm": attended(x),
            "the mask is missing: padding was read": attended(y, None),
            "attention read the stream behind the wrong norm": attended(block.norms[2](x)),
            "this is what the feed-forward layer adds: the order is exchanged": second,
        }
        of_second = {
            "this is the stream after the block, and not what the feed-forward layer adds": x + first + second,
            "the feed-forward layer read the stream from before attention": block.feed(block.norms[2](x)),
            "the feed-forward layer read what attention added, without the stream": block.feed(block.norms[2](first)),
            "the feed-forward layer read the stream without its norm": block.feed(x + first),
        }
        same(found[0], first, "what attention adds", but=of_first)
        same(found[1], second, "what the feed-forward layer adds", but=of_second)
        same(x + first + second, block(x, mask), "the output of the block", 1e-4)
    print("right: the two vectors")


def a_look_ahead(
    cheating: Any,
    cheat: Any,
    sorted_share: Any,
    loss_of: Callable[..., Tensor],
    generate: Callable[..., Tensor],
    test: tuple[Tensor, Tensor, Tensor],
) -> None:
    """`test`: numbers that are given, (N, L), their lengths, and the answers, (N, L), filled up with 1."""
    answered("the model, its loss, and the share of sorted sequences", cheating, cheat, sorted_share)
    given, lengths, answer = test
    before = torch.nn.functional.pad(answer[:, :-1], (1, 0))
    changed = before.clone()
    changed[:, 1] = 2 + (changed[:, 1] - 1) % 28  # another number
    with torch.no_grad():
        moved = (cheating(given, lengths, before) - cheating(given, lengths, changed))[:, 0].abs().max()
        loss = float(loss_of(cheating, *test))
        written = generate(cheating, given, lengths)
    if float(moved) < 1e-6:
        raise AssertionError("the model: place 0 sees nothing that comes later. Its decoder still has a causal mask.")
    if loss > 1:
        raise AssertionError(f"the model: its loss with the teacher's answer is {loss:.2f}. Train it for 200 steps.")
    real = answer != 1
    whole = ((written == answer) | ~real).all(1).double().mean()
    each = (written == answer)[real].double().mean()
    same(cheat, loss, "the loss", 0.05, {"this is the probability of a right number, not the loss": np.exp(-loss)})
    but = {
        "this is the share of numbers that are right, and not of whole sequences": each,
        "padding was compared too": (written == answer).all(1).double().mean(),
        "this is the share of sequences that are not sorted": 1 - whole,
    }
    same(sorted_share, whole, "the share of sorted sequences", 0.02, but)
    print("right: the loss is small, and the model cannot sort")


# Chapter 9


def head_of_itself(
    layer: Any, head: Any, value: Any, when_shuffled: Any, table: Sequence[Any], shuffled: Sequence[Any]
) -> None:
    """`table` and `shuffled`: the rows of all heads, 12 for each layer."""
    answered("the head", layer, head, value, when_shuffled)
    of_all = [row["itself"] for row in table]
    best = max(range(len(of_all)), key=of_all.__getitem__)
    if not 0 <= head < 12:
        raise AssertionError(f"the head: {head} is no number of a head: each layer has 12, from 0 to 11.")
    if (layer, head) != divmod(best, 12):
        number, largest = 12 * int(layer) + int(head), [row["itself"] for row in shuffled]
        if number == max(range(len(largest)), key=largest.__getitem__):
            raise AssertionError("the head: not right. It seems that this is the head of the shuffled text.")
        if 0 <= number < len(of_all):
            raise AssertionError(
                f"the head: L{layer}H{head} has {of_all[number]:.4f} on `TEXT`, and another head has more."
            )
        raise AssertionError(f"the head: there is no layer {layer}.")
    same(value, of_all[best], "the value", 1e-4, {"this is the value on the shuffled text": shuffled[best]["itself"]})
    strongest = max(row["itself"] for row in shuffled)
    but = {"this is the value on `TEXT`": of_all[best], "this is the largest value of any head there": strongest}
    same(when_shuffled, shuffled[best]["itself"], "the value on the shuffled text", 1e-4, but)
    print("right: the head, and its values")


def rank_correlation(relation: Any, weight: Tensor, effect: Tensor) -> None:
    inner = weight[1:5], effect[1:5]
    but = {
        "this is the correlation of the numbers, not of their ranks": correlation(*inner),
        "all six layers are in it, not layers 1 to 4 alone": correlation(ranks(weight), ranks(effect)),
        "the first layers are in it: layer 1 is `[1]`": correlation(ranks(weight[:4]), ranks(effect[:4])),
        "the order of one is turned around": -correlation(*map(ranks, inner)),
        "the layers were averaged first": correlation(ranks(inner[0].mean(1)), ranks(inner[1].mean(1))),
    }
    same(relation, correlation(*map(ranks, inner)), "the rank correlation", 1e-3, but)
    print("right: the rank correlation")


def arrived_by_rollout(arrived: Any, agreement: Any, rollout: Tensor, matters: Tensor) -> None:
    answered("what has arrived, and how it agrees", arrived, agreement)
    right = rollout[0].mean(0)
    but = {
        "this is the mean of each row, which sums to 1: the mean over the rows is along the first axis": rollout[
            0
        ].mean(1),
        "this is the sum over the rows, not their mean": rollout[0].sum(0),
        "this is the row of [CLS] alone": rollout[0, 0],
        "these are only the tokens' own shares": rollout[0].diagonal(),
    }
    same(arrived, right, "what has arrived", but=but)
    inner = right[1:-1]
    but = {"this is the correlation of the numbers, not of their ranks": correlation(inner, matters)}
    same(agreement, correlation(ranks(inner), ranks(matters)), "the agreement", 1e-3, but)
    print("right: what has arrived, and how it agrees")


# Chapter 10


def merge_by_hand(merge: Callable[..., Any]) -> None:
    right: list[str] = []
    for name, shift in (("scores near 0", 0.0), ("scores near 1000", 1000.0), ("scores near −1000", -1000.0)):
        o1, o2, l1, l2 = drawn(2, 5, 3), drawn(2, 5, 3, seed=1), drawn(2, 5) + shift, drawn(2, 5, seed=1) + shift
        share = (l1 - l2).sigmoid()[..., None]
        but = {
            "both parts count the same": (o1 + o2) / 2,
            "the shares are exchanged": (1 - share) * o1 + share * o2,
            "the parts were added, and not averaged": o1 + o2,
            "the log-sum-exps were used as they are, without the exponential": (
                (l1[..., None] * o1 + l2[..., None] * o2) / (l1 + l2)[..., None]
            ),
        }
        expected = share * o1 + (1 - share) * o2
        with case(name, right):
            found = numbers(called(merge, o1, l1, o2, l2, what="the output"), "the output")
            if not found.isfinite().all():
                raise AssertionError(
                    "the output: it is not finite: e to the power of a log-sum-exp overflowed, or is 0."
                )
            same(found, expected, "the output", 1e-3, but)
    print("right: the merged output")


def without_the_largest(at_10: Any, at_30: Any, query: Tensor, key: Tensor, value: Tensor) -> None:
    answered("the shares that are not finite", at_10, at_30)

    def share(factor: float, divided: bool = True) -> float:
        grown = (factor * query @ key.mT / (query.shape[-1] ** 0.5 if divided else 1)).exp()
        lost = ~(grown @ value / grown.sum(-1, keepdim=True)).isfinite()
        return lost.float().mean().item()

    for factor, given in ((30, at_30), (10, at_10)):  # at 10 two mistakes give 1
        found = share(factor)
        count = found * query[..., 0].numel() * value.shape[-1]
        but = {
            "the scores were not divided by √E": share(factor, divided=False),
            "this is the share that is finite": 1 - found,
            "this is a count, not a share": count,
            "this is a percentage, not a share": 100 * found,
        }
        grown = (factor * query @ key.mT / query.shape[-1] ** 0.5).exp()
        but["these are the exponentials that are not finite, and not the outputs"] = (~grown.isfinite()).double().mean()
        same(given, found, f"the share at {factor}", 1e-4, but)
    print("right: it works until it overflows")


def causal_blocks(walk: Callable[..., Any]) -> None:
    for length, block in ((300, 100), (128, 16)):
        query, key, value = (drawn(1, 2, length, 8, seed=seed) for seed in range(3))
        result = called(walk, query, key, value, block, what="walk")
        output, computed = two(result, "walk, with the output and the number of pairs of blocks")
        blocks = torch.arange(length) // block
        masks = {
            "nothing is masked": None,
            "in the blocks on the diagonal later keys are still seen": blocks[:, None] >= blocks,
            "the blocks on the diagonal are missing": blocks[:, None] > blocks,
            "no query sees its own key": torch.ones(length, length).tril(-1).bool(),
        }
        but = {reason: ch.attention(query, key, value, mask=mask) for reason, mask in masks.items()}
        same(output, ch.attention(query, key, value, mask=ch.Causal()), "the output", 1e-4, but)
        n = length // block
        but = {
            "every pair of blocks was computed, also those that no query may see": n * n,
            "the blocks on the diagonal were not counted": n * (n - 1) // 2,
            "the blocks of keys were counted, and not the pairs": n,
            "pairs of a query and a key were counted, and not pairs of blocks": length * (length + 1) // 2,
        }
        same(computed, n * (n + 1) // 2, f"the pairs of blocks, for {n} blocks", 0, but)
    print("right: the output, and the pairs of blocks")
