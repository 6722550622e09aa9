"""Texts in batches, which are the same for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import compress, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from clearhead.base.errors import ClearheadError
from clearhead.base.output.text import brief
from clearhead.base.torch_state.versions import compute_checksum
from clearhead.models.loading import reason

WINDOW = 1024  # how many texts are sorted together


class Batch(NamedTuple):
    """Texts that the model reads at once: `ids` int64 (B, L), `words` bool (B, L), False for padding.

    `number`: the number of the batch in the corpus. `truncated`: how many of its texts were cut. `digest`: a digest of
    the tokens.
    """

    number: int
    ids: Tensor
    words: Tensor
    truncated: int
    digest: str


def batches(texts: Any, tokenizer: Any, most: int, length: int | None) -> Iterator[Batch]:
    """Batches of at most `most` tokens, including padding; a longer text is a batch by itself.

    `length`: the length to which texts are cut. Texts are read in windows, and each window is sorted by the number of
    tokens, so memory is bounded for any iterable.
    """
    number, pad = 0, getattr(tokenizer, "pad_token_id", None) or 0
    for window in _windows(texts):
        rows, cut = _tokens(window, tokenizer, length)
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))  # stable: equal lengths keep their order
        while order:
            count = 1
            while count < len(order) and (count + 1) * len(rows[order[count]]) <= most:
                count += 1
            some, order = order[:count], order[count:]
            yield _batch(number, [rows[i] for i in some], sum(cut[i] for i in some), pad)
            number += 1
    if not number:
        raise ClearheadError("survey: there are no texts; pass an iterable of at least one.")


def _windows(texts: Any) -> Iterator[dict[int, str]]:
    """The texts with their numbers, one window at a time."""
    if isinstance(texts, str | bytes | Mapping | Tensor) or not isinstance(texts, Iterable):
        raise ClearheadError(f"survey: texts is a {type(texts).__name__}; expected a list of texts; of one, [text].")
    numbered = enumerate(texts)
    while window := {number: _text(number, given) for number, given in islice(numbered, WINDOW)}:
        yield window


def _text(number: int, given: Any) -> str:
    text = given.get("text") if isinstance(given, Mapping) else given
    if not isinstance(text, str):
        raise ClearheadError(f"survey: text {number} is {brief(given)}; pass strings: (row['body'] for row in rows).")
    if not text.strip():
        raise ClearheadError(f"survey: text {number} is empty; leave it out: [text for text in texts if text.strip()].")
    return text


def _tokens(window: dict[int, str], tokenizer: Any, length: int | None) -> tuple[list[list[int]], list[bool]]:
    """The tokens of each text, and whether it was cut to `length`."""
    texts = list(window.values())
    rows = _asked(tokenizer, texts)
    cut = [length is not None and len(row) > length for row in rows]
    if any(cut):
        long = list(compress(texts, cut))
        shorter = iter(_asked(tokenizer, long, truncation=True, max_length=length))
        rows = [next(shorter) if was else row for row, was in zip(rows, cut, strict=True)]
    for number, row in zip(window, rows, strict=True):
        if not row or (length is not None and len(row) > length):
            raise ClearheadError(
                f"survey: the tokenizer makes {len(row) or 'no'} tokens of text {number} with max_length={length}. "
                "Leave it out, or pass shorter texts."
            )
    return rows, cut


def _asked(tokenizer: Any, texts: list[str], **options: Any) -> list[list[int]]:
    quietly = {"verbose": False} if hasattr(tokenizer, "convert_ids_to_tokens") else {}
    try:
        rows = [[int(token) for token in row] for row in tokenizer(texts, **options, **quietly)["input_ids"]]
    except Exception as error:  # a tokenizer may raise any error
        raise ClearheadError(
            f"survey: tokenizer is a {type(tokenizer).__name__}, which cannot read the texts: {reason(error)}\n"
            "Expected a function of texts that gives {'input_ids': a list for each}, and takes truncation, max_length."
        ) from error
    if len(rows) != len(texts):
        raise ClearheadError(f"survey: the tokenizer made {len(rows)} rows of {len(texts)} texts; expected one each.")
    return rows


def _batch(number: int, rows: list[list[int]], truncated: int, pad: int) -> Batch:
    each = [torch.tensor(row, dtype=torch.int64, device="cpu") for row in rows]
    ids, words = pad_sequence(each, True, pad), pad_sequence([torch.ones_like(row) for row in each], True).bool()
    return Batch(number, ids, words, truncated, compute_checksum(repr(rows), {}))
