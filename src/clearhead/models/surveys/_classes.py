"""Classes of tokens: special ones, punctuation, numbers, words, and the parts that go on with a word."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.base.errors import ClearheadError

CLASSES = ("special", "punctuation", "number", "word", "part")
SPECIAL, PUNCTUATION, NUMBER, WORD, PART = range(5)
_UNMARKED = 5  # letters that begin a word, or go on with one: by what stands before
_MARKS = ("##", "Ġ", "▁")  # of what goes on with a word; of what begins one, in two kinds of vocabularies
_BYTE = re.compile("<0x[0-9A-F]{2}>")


class WordClasses:
    """The class of each token of a batch, by a tokenizer's vocabulary.

    Special tokens are the tokenizer's own; punctuation has neither letters nor digits; a number has digits alone; of
    what has letters, a part goes on with a word, and a word begins one. WordPiece marks parts by ##; other vocabularies
    mark beginnings (▁, Ġ), and there what has no mark is a part if the token before it has letters or digits. Without
    marks all are words.
    """

    def __init__(self, tokenizer: Any) -> None:
        try:
            self._tokenizer, self._special = tokenizer, set(tokenizer.all_special_ids)
            found = Counter(mark for token in tokenizer.get_vocab() for mark in _MARKS if token.startswith(mark))
            tokenizer.convert_tokens_to_string(tokenizer.convert_ids_to_tokens([0]))
        except Exception as error:  # whatever is no tokenizer raises
            raise ClearheadError(
                f"survey: 'word classes' reads the vocabulary of a tokenizer of transformers, and tokenizer is a "
                f"{type(tokenizer).__name__}. Leave it out of keep."
            ) from error
        self._mark = found.most_common(1)[0][0] if found else None
        self._known: dict[int, int] = {}

    def of(self, ids: Tensor) -> Tensor:
        """int64 (B, L), places in CLASSES."""
        every, places = torch.unique(ids, return_inverse=True)
        table = torch.tensor([self._class(token) for token in every.tolist()], dtype=torch.int64, device=ids.device)
        found = table[places]
        # at the start of a text, and after what has neither letters nor digits, a word begins
        goes_on = F.pad(found[:, :-1] >= NUMBER, (1, 0), value=False)
        unmarked = found == _UNMARKED
        return torch.where(unmarked, torch.where(goes_on, PART, WORD), found)

    def _class(self, token: int) -> int:
        if token not in self._known:
            self._known[token] = self._found(token)
        return self._known[token]

    def _found(self, token: int) -> int:
        if token in self._special:
            return SPECIAL
        written = str(self._tokenizer.convert_ids_to_tokens([token])[0])
        marked = self._mark is not None and written.startswith(self._mark)
        if _BYTE.fullmatch(written):
            text = "\ufffd"
        else:
            text = self._tokenizer.convert_tokens_to_string([written])
            text = text.removeprefix("##") if self._mark == "##" and len(text) > 2 else text
        letters = any(c.isalpha() or c == "\ufffd" for c in text)  # "\ufffd": some bytes of a character
        if not letters:
            return NUMBER if any(c.isnumeric() for c in text) else PUNCTUATION
        if self._mark == "##":
            return PART if marked else WORD
        return WORD if marked or self._mark is None else _UNMARKED
