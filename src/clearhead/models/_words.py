"""The words of a text beside the positions of calls, and the number of a sequence."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.models.attention_call import AttentionCall


def whole(sequence: Any) -> int:
    try:
        if isinstance(sequence, bool | np.bool_):
            raise TypeError
        return operator.index(sequence)
    except TypeError:
        raise ClearheadError(f"sequence is {sequence!r}; pass a whole number, which one of the batch.") from None


def words_of(call: AttentionCall, sequence: int) -> tuple[int, ...]:
    """How many queries and keys are no padding, where some are: one number or two."""
    batch = call.query.shape[0]
    if call.padding is None or not -batch <= sequence < batch:
        return ()
    sides = zip(call.padding, call.weights.shape[-2:], strict=True)
    return tuple(length if words is None else int(words[sequence].sum()) for words, length in sides)


def words(name: str, tokens: Any, sizes: set[int]) -> list[str]:
    """The caller's words, from any ordered iterable; none for None."""
    if tokens is None:
        return []
    ordered = not isinstance(tokens, str | bytes | set | frozenset | dict) and hasattr(tokens, "__iter__")
    words = list(tokens) if ordered else []
    if not ordered or not all(isinstance(word, str) for word in words):
        raise ClearheadError(
            f"{name} takes words, one for each position; got a {type(tokens).__name__}. "
            "For token ids pass tokenizer.convert_ids_to_tokens(ids)."
        )
    if len(words) not in sizes:
        raise ShapeError(
            f"{name} has {len(words)} words, and the calls have {sorted(sizes)} queries or keys; pass one "
            "word for each position of the sequence that the model was given."
        )
    return words
