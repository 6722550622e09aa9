"""The tokens of texts: as numbers, and which tokens of two texts correspond."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.managers import caller
from clearhead.base.output.words import TokensLike, rows_of
from clearhead.models.recordings.attention_call import AttentionCall

Pair = tuple[Tensor | None, Tensor]


def words_read(call: AttentionCall, count: int) -> int | None:
    """How many of the `count` words of a generated text a step of the generation has read; None for another call.

    A model does not read the last token that it generates: the text may have one more than the last step has read.
    """
    chain, link = call.cached_key.chain, call.cached_key.link
    generated = chain.appended or len(call.begins) > 1  # in steps, which may be joined
    if call.kind == "cross" or not generated or not 0 <= count - chain.links[-1].filled <= 1:
        return None
    return link.filled


def not_joined(calls: Iterable[AttentionCall]) -> str:
    """What to do about words that fit no call where these are steps of a generation; "" elsewhere."""
    if all(len(call.cached_key.chain.links) == 1 for call in calls):
        return ""
    return (
        " These calls are steps of a generation: the words of the whole text are those of the recording that "
        "seen.joined() gives; with beams it is seen.joined(sequences), of the ids that generate returned."
    )


def told_unread(calls: Iterable[AttentionCall], words: Any, name: str) -> Any:
    """The words without the last one, and a warning that says so, where it was generated and no call has read it."""
    count = len(words) if hasattr(words, "__len__") else 0
    if all(words_read(call, count) is None or call.cached_key.chain.links[-1].filled == count for call in calls):
        return words
    caller().warn(
        f"{name} has {count} tokens, and the model has read {count - 1}: the last one was generated and never read. It "
        "is left out."
    )
    return words[:-1]


def place_of(word: Any, tokens: Sequence[str] | None, length: int, name: str) -> Any:
    """The place of a word among the `length` queries or keys of a call; a number is given back as it is.

    A call that continues a text has the text's last words. `tokens`: the text's words, None where they are not known.
    """
    if not isinstance(word, str):
        return word
    if tokens is None:
        raise ClearheadError(f"{name} is the word {word!r:.60}, and the words of the text are not known: pass tokens=.")
    given = tokens[max(len(tokens) - length, 0) :]
    place = place_among(word, given, name)
    if place is None:
        there = " ".join(map(str, given[:40]))
        raise ClearheadError(f"{name} is {word!r:.60}, which is no token of the text: {there}.")
    return place


def place_among(word: str, tokens: Sequence[str], name: str) -> int | None:
    """The place of a word among tokens, or None; an error where there are several. `name`: of the argument.

    Tokens are compared as they are, then without the marks of pieces, then in small letters too.
    """
    plain = [token.removeprefix("##").strip("Ġ▁ ") for token in tokens]
    for known in (list(tokens), plain, [token.lower() for token in plain]):
        for wanted in (word, word.lower()):
            places = [place for place, token in enumerate(known) if token == wanted]
            if len(places) > 1:
                some = ", ".join(map(str, places[:8])) + ", …" * (len(places) > 8)
                raise ClearheadError(
                    f"{name} is {word!r:.60}, which stands at the places {some} of the text: pass one of these."
                )
            if places:
                return places[0]
    return None


class Tokens:
    """The tokens of a model's text, and of its encoder's text where the model reads two."""

    def __init__(self, tokens: TokensLike | None, source_tokens: TokensLike | None) -> None:
        numbers: dict[str, int] = {}
        self.own = None if tokens is None else _rows("tokens", tokens, numbers)
        self.source = None if source_tokens is None else _rows("source_tokens", source_tokens, numbers)
        self.words = {number: word for word, number in numbers.items()}

    def of(self, call: AttentionCall, sequence: int | None = None) -> Pair | None:
        """The tokens of a call's queries, (B or 1, Lq), and keys, (B or 1, Lk), int64; None where they do not fit.

        In self attention the queries are some of the keys, and their entry is None. `sequence`: of this sequence alone.
        """
        own, source = self._placed(call, sequence)
        device = call.problem.sizes.device
        if call.kind == "cross":
            return None if own is None or source is None else (own.to(device), source.to(device))
        held = source if own is None else own  # the text of an encoder is the source
        return None if held is None else (None, held.to(device))

    def _placed(self, call: AttentionCall, sequence: int | None = None) -> tuple[Tensor | None, Tensor | None]:
        """The tokens of the model's text and of its encoder's, at the positions of a call; None where they do not
        fit."""
        batch, _, queries, keys = call.problem.sizes.shape
        queried, words = call.padding or (None, None)
        if sequence is not None:
            batch = 1
            queried, words = (None if t is None else t[sequence : sequence + 1] for t in (queried, words))
        source = _placed(self.source, batch, keys, words)
        if call.kind == "cross":
            return _placed(self.own, batch, queries, queried), source
        mine = self.own and [row[: words_read(call, len(row))] for row in self.own]  # a step has read a part
        return _placed(mine, batch, keys, words), source

    def word(self, call: AttentionCall, sequence: int, key: int) -> str | None:
        """The word at a key; None where no words were given."""
        pair = self.of(call)
        held = None if pair is None else pair[1]
        return None if held is None else self.words.get(int(held[sequence % len(held), key]))

    def check(self, calls: Sequence[AttentionCall]) -> None:
        """Raise where tokens were given and fit no call, or are one text's and the calls read several. Leave out a
        last token that no call has read."""
        shared = any(call.problem.sizes.batch == 1 and self._placed(call)[1] is not None for call in calls)
        for call in calls:
            self._check_texts(call, shared)
        if self.own is not None and len({len(row) for row in self.own}) == 1:
            shorter = told_unread(calls, self.own[0], "tokens")
            self.own = [row[: len(shorter)] for row in self.own]
        if (self.own is None and self.source is None) or not calls or any(self.of(call) for call in calls):
            return
        sizes = sorted({(call.problem.sizes.batch, call.problem.sizes.keys) for call in calls})
        given = {len(row) for rows in (self.own, self.source) if rows is not None for row in rows}
        raise ShapeError(
            f"tokens has {sorted(given)} tokens a sequence, and the calls have (sequences, keys) {sizes}; pass a list "
            "of words for each sequence, or the ids (B, L). Cross attention needs source_tokens too."
            + not_joined(calls)
        )

    def _check_texts(self, call: AttentionCall, shared: bool) -> None:
        """Raise where the words of one text would be those of several sequences of a call.

        `shared`: whether an encoder has read the source alone, so that all sequences of cross attention, such as beams,
        have the same source.
        """
        batch = call.problem.sizes.batch
        own, source = (text is not None for text in self._placed(call))
        used = own, source and not own
        if call.kind == "cross":
            used = own and source, own and source and not shared
        for name, rows, counts in zip(("tokens", "source_tokens"), (self.own, self.source), used, strict=True):
            if counts and rows is not None and len(rows) == 1 < batch:
                raise ShapeError(
                    f"{name} has the words of one sequence, and the weights of {call.name} are of {batch}. Pass one "
                    f"list of words for each, or the ids (B, L); where all are one text, {name}=[words] * {batch}."
                )


def _rows(name: str, tokens: Any, numbers: dict[str, int]) -> list[Tensor]:
    """The numbers of each sequence's tokens: ids as they are, words numbered by the dictionary `numbers`."""
    rows = rows_of(name, tokens)
    if isinstance(rows, Tensor):
        return list(rows.cpu().long())
    return [
        torch.tensor([numbers.setdefault(token, len(numbers)) for token in row], dtype=torch.int64, device="cpu")
        for row in rows
    ]


def _placed(rows: list[Tensor] | None, batch: int, length: int, words: Tensor | None) -> Tensor | None:
    """Each sequence's numbers at its positions, (B or 1, length), −1 at padding; None where they do not fit."""
    if rows is None or len(rows) not in (1, batch):
        return None
    if all(len(row) == length for row in rows):
        return torch.stack(rows)
    if words is None:
        return None
    placed = torch.full((batch, length), -1, dtype=torch.int64, device="cpu")
    for sequence, real in enumerate(words.cpu()):
        row = rows[sequence % len(rows)]
        if len(row) == length:
            placed[sequence] = row
        elif len(row) == int(real.sum()):
            placed[sequence, real] = row
        else:
            return None
    return placed


def match_tokens(
    tokens: Iterable[str], other_tokens: Iterable[str], *, replaced: bool = False
) -> tuple[list[int], list[int]]:
    """The positions of the tokens that two texts have in common, in the same order in both.

    >>> import torch, clearhead as ch
    >>> block, short, long = ch.nn.DotProductAttention(), "the cat sat".split(), "the old cat sat".split()
    >>> x, y = torch.ones(1, 1, 3, 4), torch.ones(1, 1, 4, 4)
    >>> with ch.watch(block) as before:
    ...     output = block(x, x, x)
    >>> with ch.watch(block) as after:
    ...     output = block(y, y, y)
    >>> ch.models.match_tokens(short, long)
    ([0, 1, 2], [0, 2, 3])
    >>> before.compare(after, matched=ch.models.match_tokens(short, long))[0].divergence
    tensor([0.0956], dtype=torch.float64)

    `tokens`, `other_tokens`: words, or numbers of tokens. The longest stretch that is equal in both texts is matched
    first, then the longest stretches before and after it, and so on. Gives two ascending lists of equal length, of
    positions in the first text and in the second. A token that was replaced by another is in neither list, unless
    `replaced`: then a stretch between two matches that is as long in both texts is matched token by token.
    Matched tokens may stand at different positions. `compare` and `Patch` take them, but for a `Patch` of queries or
    keys in a model with rotary embeddings, which were turned by their positions.
    Raises a `ClearheadError` for an argument that is no list of tokens, and where the texts have no token in common.
    Cost: O(L²) time for most texts, O(L) memory. Source: Ratcliff and Metzener 1988, "Pattern Matching: The Gestalt
    Approach", as in Python's `difflib`.
    """
    one, other = _listed("tokens", tokens), _listed("other_tokens", other_tokens)
    mine: list[int] = []
    theirs: list[int] = []
    behind = other_behind = 0  # the ends of the last match
    blocks = SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks()  # the last is empty, at the ends
    for start, other_start, size in blocks if len(blocks) > 1 else ():
        if replaced and start - behind == other_start - other_behind:
            mine += range(behind, start)
            theirs += range(other_behind, other_start)
        mine += range(start, start + size)
        theirs += range(other_start, other_start + size)
        behind, other_behind = start + size, other_start + size
    if not mine:
        raise ClearheadError(f"match_tokens: {one[:4]!r:.60} and {other[:4]!r:.60} have no token in common.")
    return mine, theirs


def _listed(name: str, tokens: Any) -> list[Any]:
    other = isinstance(tokens, str | bytes | set | frozenset | dict) or hasattr(tokens, "ndim")
    found = list(tokens) if isinstance(tokens, Iterable) and not other else []
    if not found or not all(isinstance(token, str | int) and not isinstance(token, bool) for token in found):
        raise ClearheadError(
            f"match_tokens: {name} is {tokens!r:.60}; expected a list of words, or of numbers of tokens, ids.tolist()."
        )
    return found
