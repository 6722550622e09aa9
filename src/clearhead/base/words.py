"""The words, or the ids, of the tokens that a caller names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.base.arrays import Array, to_tensor
from clearhead.base.errors import ClearheadError, ShapeError

TokensLike = Iterable[str] | Iterable[Sequence[str]] | Array  # words of one sequence, or of each; or ids


def word_list(name: str, words: Any, sequence: Any = 0) -> list[str] | None:
    """The caller's words, one for each position, from any ordered iterable; None for None.

    Ids, integers (L,) or (B, L), are words by their numbers. Where there are words of several sequences, those of this
    `sequence`.
    """
    if words is None:
        return None
    ordered, ids = not isinstance(words, str | bytes | set | frozenset | dict), ids_of(words)
    try:
        found: list[Any] = list(words) if ordered and ids is None else []
    except TypeError:  # it has no words
        ordered, found = False, []
    if ids is not None:
        found = [list(map(str, row)) for row in ids.tolist()]
    if found and all(isinstance(row, list | tuple) for row in found):
        try:
            found = list(found[sequence if len(found) > 1 else 0])
        except (IndexError, TypeError):
            raise ShapeError(f"{name} has words of {len(found)} sequences, and sequence is {sequence!r:.60}.") from None
    if not ordered or not all(isinstance(word, str) for word in found):
        raise ClearheadError(
            f"{name} takes words, one for each position, or a tensor of token ids, which are shown as numbers; got a "
            f"{type(words).__name__}. For the words of ids pass tokenizer.convert_ids_to_tokens(ids)."
        )
    return found


def ids_of(words: Any) -> Tensor | None:
    """The ids of tokens, (B, L), of integers (L,) or (B, L); None for what is no tensor of ids."""
    if not isinstance(words, Tensor | np.ndarray) or words.ndim not in (1, 2):
        return None
    if isinstance(words, np.ndarray) and words.dtype.kind not in "iu":
        return None
    ids = to_tensor(words, "tokens").detach()
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        return None
    return ids.reshape(-1, ids.shape[-1])
