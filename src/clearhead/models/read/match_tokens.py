"""Which tokens of two texts correspond."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import Any

from clearhead.base.errors import ClearheadError


def match_tokens(tokens: Iterable[str], other_tokens: Iterable[str]) -> tuple[list[int], list[int]]:
    """The positions of the tokens that two texts have in common, in the same order in both.

    >>> import torch, torch.nn.functional as F, clearhead as ch
    >>> class Block(torch.nn.Module):
    ...     def forward(self, x):
    ...         return F.scaled_dot_product_attention(x, x, x)
    >>> block, short, long = Block(), "the cat sat".split(), "the old cat sat".split()
    >>> with ch.watch(block) as before:
    ...     output = block(torch.ones(1, 1, 3, 4))
    >>> with ch.watch(block) as after:
    ...     output = block(torch.ones(1, 1, 4, 4))
    >>> ch.models.match_tokens(short, long)
    ([0, 1, 2], [0, 2, 3])
    >>> before.compare(after, matched=ch.models.match_tokens(short, long))[0].divergence
    tensor([0.0956], dtype=torch.float64)

    `tokens`, `other_tokens`: words, or numbers of tokens. The longest stretch that is equal in both comes first, then
    the longest ones before and after it, and so on. Gives two ascending lists of equal length: positions of the one,
    and of the other. A token that has another in its place is in neither.
    Raises a `ClearheadError` for what is no list of tokens, and where the texts have no token in common.
    Cost: O(L²) time for most texts, O(L) memory. Source: Ratcliff and Metzener 1988, "Pattern Matching: The Gestalt
    Approach", as in Python's `difflib`.
    """
    one, other = _listed("tokens", tokens), _listed("other_tokens", other_tokens)
    mine: list[int] = []
    theirs: list[int] = []
    for start, other_start, size in SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks():
        mine += range(start, start + size)
        theirs += range(other_start, other_start + size)
    if not mine:
        raise ClearheadError(
            f"match_tokens: {_few(one)} and {_few(other)} have no token in common, so that no positions correspond. "
            "Pass the tokens of two versions of one text."
        )
    return mine, theirs


def _listed(name: str, tokens: Any) -> list[Any]:
    other = isinstance(tokens, str | bytes | set | frozenset | dict) or hasattr(tokens, "ndim")
    found = list(tokens) if isinstance(tokens, Iterable) and not other else []
    if not found or not all(isinstance(token, str | int) and not isinstance(token, bool) for token in found):
        raise ClearheadError(
            f"match_tokens: {name} is {tokens!r:.60}; pass a list of words, one for each position of the text, or "
            "of the numbers of tokens, ids.tolist()."
        )
    return found


def _few(tokens: list[Any]) -> str:
    return f"{tokens[:4]!r:.80}"
