"""The words, or the ids, of the tokens that a caller names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from clearhead.base.arrays import Array, is_whole, to_tensor
from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.output.text import brief

TokensLike = Iterable[str] | Iterable[Sequence[str]] | Array  # words of one sequence, or of each; or ids


def rows_of(name: str, words: Any) -> Tensor | list[list[str]]:
    """The ids of tokens, (B, L); or lists of words, of each sequence or of one, from any ordered iterable."""
    ids = ids_of(words)
    if ids is not None:
        return ids
    given = words.tolist() if isinstance(words, np.ndarray) else words
    ordered = not isinstance(given, Tensor | str | bytes | set | frozenset | dict)
    try:
        found: list[Any] = list(given) if ordered else []
    except TypeError:  # it has no words
        ordered, found = False, []
    nested = bool(found) and all(isinstance(row, Sequence) and not isinstance(row, str | bytes) for row in found)
    rows = [list(row) for row in found] if nested else [found]
    places = ((f"[{i}]" * nested + f"[{n}]", word) for i, row in enumerate(rows) for n, word in enumerate(row))
    at, wrong = next(((at, word) for at, word in places if not isinstance(word, str)), ("", ""))
    if not ordered or wrong != "":
        there = f", with {brief(wrong)} at {name}{at}" if at else ""
        raise ClearheadError(
            f"{name} takes words, one for each position, a list of such lists, one for each sequence, or a tensor of "
            f"token ids, integers (L,) or (B, L), which are shown as numbers; got {brief(words)}{there}.\nFor the "
            "words of ids pass tokenizer.convert_ids_to_tokens(ids)."
        )
    return rows


def word_list(name: str, words: Any, *sequences: Any) -> list[str] | None:
    """The caller's words, one for each position; None for None. Ids are words by their numbers.

    Where there are words of several sequences, those of these `sequences`, which must have the same words. One list is
    the words of the sequences that are asked for.
    """
    if words is None:
        return None
    rows = rows_of(name, words)
    lists = [list(map(str, row)) for row in rows.tolist()] if isinstance(rows, Tensor) else rows
    try:
        found = [lists[one if len(lists) > 1 else 0] for one in sequences or (0,)]
    except (IndexError, TypeError):
        asked = ", ".join(f"{one!r:.60}" for one in sequences or (0,))
        raise ShapeError(f"{name} has words of {len(lists)} sequences, and sequence is {asked}.") from None
    if any(other != found[0] for other in found):
        raise ShapeError(
            f"{name} has other words for each of {len(lists)} sequences, and {len(found)} are explained beside each "
            "other, with one word a position. Name one sequence by at=, such as at=(0,), or pass one list of words."
        )
    return found[0]


def ids_of(words: Any) -> Tensor | None:
    """The ids of tokens, (B, L), of integers (L,) or (B, L); None for what is no tensor of ids."""
    if not isinstance(words, Tensor | np.ndarray) or words.ndim not in (1, 2) or not is_whole(words):
        return None
    ids = to_tensor(words, "tokens").detach()
    return ids if ids.ndim == 2 else ids[None]
