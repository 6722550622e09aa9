"""The checks of chapters 0 to 3: words as vectors, averages, dot products, masks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import clearhead as ch
from checks.compared import AXES, answered, called, case, drawn, numbers, pairs, same, told, two

# Chapter 0


def nearest_words(nearest: Callable[..., Any], table: Tensor, tokenizer: Any) -> None:
    """`table`: the vector of each token, (V, E)."""
    unit = table / table.norm(dim=-1, keepdim=True)
    for word, count in (("street", 2), ("king", 5), ("water", 3)):
        own = tokenizer.convert_tokens_to_ids(word)
        rows = (unit @ unit[own], table @ unit[own], -(table - table[own]).norm(dim=-1))
        by_cosine, by_product, by_distance = (
            tokenizer.convert_ids_to_tokens(row.topk(count + 2).indices.tolist()) for row in rows
        )

        def others(words: list[str], most: int = count) -> list[str]:
            return [other for other in words if other != word][:most]  # noqa: B023

        found = called(nearest, word, count, what="the words")
        but = {
            "the word itself is among them": by_cosine[:count],
            "these are the words with the largest dot product, and long vectors are among them": others(by_product),
            "these are the words at the smallest distance, and not at the smallest angle": others(by_distance),
            "there is one word too many": others(by_cosine, count + 1),
            "these are the numbers of the tokens, and not the tokens": tokenizer.convert_tokens_to_ids(
                others(by_cosine)
            ),
        }
        told(found, others(by_cosine), f"the {count} words nearest to {word}", but)
    print("right: the nearest words")


def first_by_product(first: Any, table: Tensor, tokenizer: Any) -> None:
    answered("the first token", first)
    own = table[tokenizer.convert_tokens_to_ids("water")]
    products = table @ own
    best = int(products.argmax())
    but = {
        "this is the number of the token, and not the token": best,
        "this is the second": tokenizer.convert_ids_to_tokens([int(products.topk(2).indices[1])])[0],
        "this is the last: its dot product is the smallest": tokenizer.convert_ids_to_tokens([int(products.argmin())])[
            0
        ],
        "this is the longest vector": tokenizer.convert_ids_to_tokens([int(table.norm(dim=-1).argmax())])[0],
    }
    told(first, tokenizer.convert_ids_to_tokens([best])[0], "the first token", but)
    print("right: the first token")


# Chapter 1


def leave_one_out(without_itself: Callable[..., Any]) -> None:
    for count in (50, 12):
        key = np.random.default_rng(count).uniform(0, 2, (count, 1))
        W = ch.weights(key, key, score=ch.Gaussian(0.3))[:]
        off = W * (1 - np.eye(count))
        but = {
            "the weights on the diagonal are not 0": W,
            "the diagonal is 0, and the rows were not divided by their new sums": off,
            "the columns were made to sum to 1, not the rows": off / off.sum(0),
            "each column was divided by the sum of a row; `keepdims=True` keeps the axis": off / off.sum(1),
            "all was divided by one number, the sum of the whole matrix": off / off.sum(),
            "the rows were divided by the sums of the others, and the diagonal stayed": W / off.sum(1, keepdims=True),
        }
        others = ~ch.DenseMask(np.eye(count, dtype=bool))
        expected = ch.weights(key, key, score=ch.Gaussian(0.3), mask=others)[:]
        same(called(without_itself, W, what="the weights"), expected, "the weights", but=but)
    print("right: the weights")


def two_ends(wide: Any, narrow: Any, some: Any, x: Any, y: Any) -> None:
    wide, narrow = numbers(wide, "the wide guess"), numbers(narrow, "the narrow guess")
    nearest = np.abs(some[:, None] - x[None, :]).argmin(1)
    ends = np.full(len(some), y.mean()), y[nearest]
    exchanged = "the two guesses are exchanged"
    middle = {"this is the median, not the average": np.full(len(some), np.median(y)), exchanged: ends[1]}
    same(wide.expand(len(some)) if wide.dim() == 0 else wide, ends[0], "the wide guess", 1e-4, middle)
    near = {
        exchanged: ends[0],
        "these are the moments of the nearest measurements, not their values": x[nearest],
        "these are the places of the nearest measurements, not their values": nearest,
        "these are the next measurements after the moments, not the nearest": y[
            np.searchsorted(x, some).clip(max=len(x) - 1)
        ],
        "this interpolates between two neighbours, where one measurement counts alone": np.interp(some, x, y),
    }
    same(narrow, ends[1], "the narrow guess", but=near)
    print("right: the two guesses")


def box_kernel(box: Any, t: Any, x: Any, y: Any) -> None:
    apart = np.abs(t[:, None] - x[None, :])

    def average(weights: Any) -> Any:
        with np.errstate(invalid="ignore", divide="ignore"):
            return (weights @ y / weights.sum(1))[:, None]

    but = {
        "the mask is turned around: these are averages of the far ones": average((apart >= 0.5) * 1.0),
        "nothing is masked": average(np.ones_like(apart)),
        "the mask ends at another distance": average((apart < 0.25) * 1.0),
        "the measurements are those up to a distance of 1": average((apart < 1) * 1.0),
        "the sum of the values was taken, not their average": ((apart < 0.5) @ y)[:, None],
    }
    for width in (0.1, 0.25, 0.3, 0.5, 1.0, 2.0):
        uneven = f"nearer measurements still count for more, as with a bandwidth of {width}"
        but[uneven] = average((apart < 0.5) * np.exp(-(apart**2) / (2 * width**2)))
    same(box, average((apart < 0.5) * 1.0), "the guesses", but=but)
    print("right: the guesses")


# Chapter 2


def dot_product_attention(attention: Callable[..., Any]) -> None:
    right: list[str] = []
    for name, axes in AXES.items():
        query, key, value = drawn(*axes, 5, 3), drawn(*axes, 7, 3), drawn(*axes, 7, 2)
        scores = query @ key.mT
        but = {
            "these are scores, and the softmax is missing": scores / 3**0.5,
            "the scores were not divided by √E": scores.softmax(-1),
            "the scores were divided by E, not by its root": (scores / 3).softmax(-1),
            "the scores were multiplied by √E": (scores * 3**0.5).softmax(-1),
            "the scores were divided by the root of the number of keys": (scores / 7**0.5).softmax(-1),
            "the softmax runs over the queries: the columns sum to 1, not the rows": (scores / 3**0.5).softmax(-2),
            "the output and the weights are exchanged: the output comes first": (scores / 3**0.5).softmax(-1) @ value,
        }
        with case(name, right):
            result = called(attention, query, key, value, what="attention")
            output, weights = two(result, "attention, with the output and the weights")
            expected = (scores / 3**0.5).softmax(-1)
            same(weights, expected, "the weights", but=but)
            same(output, expected @ value, "the output")
    print("right: attention")


def moved(keys_moved_changes: Any, queries_moved_changes: Any) -> None:
    answered("for moved keys, and for moved queries", keys_moved_changes, queries_moved_changes)
    if bool(keys_moved_changes):
        raise AssertionError(
            "for moved keys: no. q · (k + δ) is q · k + q · δ. For which keys is q · δ another number?"
        )
    if not bool(queries_moved_changes):
        raise AssertionError("for moved queries: no. (q + δ) · k is q · k + δ · k. Is δ · k one number for all keys?")
    print("right: for moved keys, and for moved queries")


def scale_of(scale: Any) -> None:
    deviation, d = 3 * 0.5, 64
    expected = 1 / (deviation * d**0.5)
    but = {
        "this is 1 / √E, for entries whose standard deviation is 1": d**-0.5,
        "a sum of E products was taken to have E times the standard deviation of one": 1 / (deviation * d),
        "the standard deviations were added, where those of a product multiply": 1 / (3.5 * d**0.5),
        "this is the standard deviation of the scores; they are multiplied by the scale": 1 / expected,
        "this is 1 / the variance of the scores": expected**2,
        "the root of E is missing: this is 1 / the standard deviation of one product": 1 / deviation,
        "the sign is wrong: the largest score becomes the smallest": -expected,
    }
    relative = {reason: value / expected for reason, value in but.items()}
    same(numbers(scale, "the scale") / expected, 1.0, "the scale, as a share of the right one", 0.03, relative)
    print("right: the scale")


def length_of_keys(of_cosine: Any, of_dot: Any, query: Tensor, key: Tensor) -> None:
    def change(score: Any, scores: bool = False) -> Tensor:
        short, long = (ch.weights(query, k, score=score) for k in (key, 10 * key))
        if scores:
            return (query @ key.mT) * 9 / query.shape[-1] ** 0.5
        return long[:] - short[:]

    same(of_cosine, change(ch.Cosine()).abs().max(), "the largest change with Cosine()")
    found = change(ch.Dot())
    but = {
        "this is the mean change, not the largest": found.abs().mean(),
        "this is the largest growth: a weight may also fall": found.max(),
        "this is the change of the scores, not of the weights": change(ch.Dot(), scores=True).abs().max(),
        "this is the sum of all changes": found.abs().sum(),
    }
    same(of_dot, found.abs().max(), "the largest change with Dot()", but=but)
    print("right: both changes")


# Chapter 3


def masked_softmax(function: Callable[..., Any]) -> None:
    scores, keep = drawn(3, 4), torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 1]]).bool()
    large, some = torch.tensor([[0.0, 1.0, 0.5, 200.0]]), torch.tensor([[1, 1, 1, 0]]).bool()
    cases = {
        "rows that see something": (scores[[0, 2]], keep[[0, 2]]),
        "a query that sees nothing": (scores, keep),
        "a large score that is masked": (large, some),
        "three axes": (drawn(2, 3, 4), keep.expand(2, 3, 4)),
    }
    right: list[str] = []
    for name, (s, k) in cases.items():
        after = s.softmax(-1) * k
        divided = (after / after.sum(-1, True)).nan_to_num(0.0)
        but = {
            "nothing is masked": s.softmax(-1),
            "the mask is turned around: True means that the query may see the key": s.masked_fill(
                k, -torch.inf
            ).softmax(-1),
            "the scores were multiplied: a masked score of 0 still counts, since exp(0) is 1": (s * k).softmax(-1),
            "a query that sees nothing has 0 / 0": s.masked_fill(~k, -torch.inf).softmax(-1),
            "such a query got equal weights, as with −1e9": s.masked_fill(~k, -1e9).softmax(-1),
            "the large score took all weight before it was masked: mask before the softmax": divided,
            "the weights were set to 0 after the softmax: the rows sum to less than 1": after,
            "a small number is too little: the large score still counts": s.masked_fill(~k, 1e-9).softmax(-1),
        }
        with case(name, right):
            expected = ch.masked_softmax(s, k)
            same(called(function, s, k, what="the weights"), expected, "the weights", but=but)
    print("right: the weights")


def of_a_masked_key(of_masked: Any) -> None:
    e2 = float(np.exp(2))
    but = {
        "a masked key was taken to get nothing: its score is 0, and exp(0) is not 0": 0.0,
        "all four were taken to be alike: only the masked scores are multiplied by 0": 0.25,
        "this is the weight of a key that may be seen": e2 / (2 * e2 + 2),
        "one key of each kind was counted, and there are two": 1 / (e2 + 1),
        "this is the weight of both masked keys together": 2 / (2 * e2 + 2),
        "the exponentials were left out: these are shares of scores": 0.5,
        "the masked keys were left out of the sum": 1 / (2 * e2),
    }
    same(of_masked, 1 / (2 * e2 + 2), "the weight of a masked key", 1e-4, but)
    print("right: the weight of a masked key")


def a_rule_of_your_own(mine: Any) -> None:
    answered("the mask", mine)
    if not isinstance(mine, ch.extend.Mask):
        raise AssertionError("the mask: this is no mask. Combine named masks with `&`, `|` and `~`.")
    for name in ("DenseMask", "MaskFunction"):
        if name in mine.title():
            raise AssertionError(f"the mask: {name} writes the pairs down. Build it from masks that name their rule.")
    i, j = torch.arange(8)[:, None], torch.arange(8)[None, :]
    pairs(mine.dense(8, 8), (j == 0) | (j == i) | (j == i - 2), "the mask")
    print("right: the mask of 8 queries and 8 keys")


def loss_with_padding(loss: Any, outputs: Tensor, targets: Tensor, lengths: Tensor) -> None:
    real = torch.arange(outputs.shape[1]) < lengths[:, None]
    off = outputs - targets
    squares = off.square()
    but = {
        "padding counts too": squares.mean(),
        "the errors of padding are 0, and it is still counted: divide by the number of words": (squares * real).mean(),
        "each sentence counts the same, so a word of the short one counts for more": (
            (squares * real).sum(1) / lengths
        ).mean(),
        "this is the sum, not the mean": squares[real].sum(),
        "this is the root of the mean": squares[real].mean().sqrt(),
        "the errors were not squared": off[real].abs().mean(),
        "the mask is turned around: this is the loss of padding": squares[~real].mean(),
        "the average was taken before the square": off[real].mean().square(),
    }
    same(loss, squares[real].mean(), "the loss", but=but)
    print("right: the loss")
