"""Which part of a call is explained."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.output.words import TokensLike, word_list
from clearhead.base.shapes import Sizes
from clearhead.base.symbolic.steps import Step
from clearhead.inspection.index import parse
from clearhead.problem.region import Region

BLOCKS = 8  # the most sequences times heads that are explained where `at` does not name them
ASKED = 64  # the most heads that are explained of those that it names
QUERIES = 8  # the most queries that are explained
KEYS = 64  # the most keys that any view of an explanation holds; of more keys, those with the largest weights
FEW = 5  # as many keys fit in the narrowest view, text
SAID = 3  # rows of the first table whose largest weights are said in words


class Asked(NamedTuple):
    """What a caller asked for: the part to explain, an index of the weights, and a word for each query and each key."""

    at: Any = None
    tokens: TokensLike | None = None
    source_tokens: TokensLike | None = None

    def words(
        self, queries: int, keys: int, batches: tuple[int, ...]
    ) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
        """The words of so many queries, and of so many keys, of these sequences."""
        own = self._checked("tokens", self.tokens, queries, "queries", batches)
        source = self._checked("source_tokens", self.source_tokens, keys, "keys", batches)
        return own, own if source is None and queries == keys else source

    @staticmethod
    def _checked(name: str, given: Any, count: int, what: str, batches: tuple[int, ...]) -> tuple[str, ...] | None:
        words = word_list(name, given, *batches)
        if words is not None and len(words) != count:
            raise ShapeError(f"{name} has {len(words)} words, and there are {count} {what}: one word belongs to each.")
        return None if words is None else tuple(words)


@dataclass(frozen=True)
class Shown:
    """The places in the whole call that are explained, and the pair whose numbers are written out.

    Each step holds these sequences, heads and queries, and all keys of the call; `keys` are the keys that are shown.
    """

    sizes: Sizes
    batches: tuple[int, ...]
    heads: tuple[int, ...]
    queries: tuple[int, ...]
    keys: tuple[int, ...]  # ascending
    pair: tuple[int, int, int, int]  # indices into `batches`, `heads` and `queries`, and the number of the key
    absent: tuple[str, ...] = ()  # the axes, among "B" and "H", that the caller's arrays do not have
    left_out: tuple[str, ...] = ()
    strongest: tuple[int, ...] = ()  # the same keys, the largest weights first
    query_words: tuple[str, ...] | None = None  # a word for each query of the call
    key_words: tuple[str, ...] | None = None  # a word for each key of the call

    @property
    def region(self) -> Region:
        batch, heads, queries = (_slice(places) for places in (self.batches, self.heads, self.queries))
        return Region(batch, heads, queries)

    def squeezed(self, step: Step) -> Tensor:
        """A step's result without the axes in `absent`."""
        drop = tuple(i for i, axis in enumerate(step.axes[:2]) if axis in self.absent)
        return step.value.squeeze(drop) if drop else step.value

    def name(self, axis: str, place: int) -> str:
        """The name of a row or a column: its place and word, or its kind and place."""
        words = {"Lq": self.query_words, "L": self.query_words, "Lk": self.key_words}.get(axis)
        kinds = {"Lq": "query", "Lk": "key", "L": "position", "B": "sequence", "H": "head"}
        if words is not None:
            return f"{place} {words[place]}"
        return f"{kinds[axis]} {place}" if axis in kinds else str(place)

    @property
    def chosen(self) -> str:
        """The names of the sequence, head and query, each where it is the only one shown of several."""
        every = zip(("B", "H", "Lq"), (self.batches, self.heads, self.queries), self.sizes.shape, strict=False)
        word = "query " * (self.query_words is not None)
        names = {axis: self.name(axis, places[0]) for axis, places, size in every if len(places) == 1 < size}
        return ", ".join(word + name if axis == "Lq" else name for axis, name in names.items())

    def places(self, axis: str, size: int) -> tuple[int, ...]:
        """The place in the whole call of each entry of a step's axis."""
        chosen = {"B": self.batches, "H": self.heads, "Lq": self.queries, "L": self.queries}.get(axis, ())
        return chosen if len(chosen) == size else tuple(range(size))


def _slice(places: tuple[int, ...]) -> slice:
    step = places[1] - places[0] if len(places) > 1 else 1
    return slice(places[0], places[-1] + 1, step) if places else slice(0, 0)


def choose(at: Any, sizes: Sizes) -> Shown:
    """The part that an index of the weights names, or an `Asked`, which may have words. None names the whole call; of a
    large part, the first is taken.

    `settle` chooses the keys and the pair, when the weights are known.
    """
    at, *_ = asked = at if isinstance(at, Asked) else Asked(at)
    shape = torch.Size((*sizes.shown, sizes.queries, sizes.keys))
    if 0 in shape:
        raise ClearheadError(f"there is nothing to explain: the weights are {tuple(shape)}, without a pair.")
    if at is None:
        batches, heads, queries, keys = (tuple(range(n)) for n in sizes.shape)
    else:
        batches, heads, queries, keys = _named(at, shape, sizes)
    left_out = []
    if len(batches) * len(heads) > BLOCKS and len(batches) > 1:
        left_out.append(f"{len(batches)} sequences: the first is shown")
        batches = batches[:1]
    names_heads = isinstance(at, tuple) and len(shape) > 3 and len(at) > len(shape) - 3 and Ellipsis not in at
    most = ASKED if names_heads or len(heads) < sizes.heads else BLOCKS
    if len(heads) > most:
        first = f"first {ASKED} are" if most == ASKED else "first is"
        left_out.append(f"{len(heads)} heads: the {first} shown")
        heads = heads[: ASKED if most == ASKED else 1]
    if len(queries) > QUERIES:
        left_out.append(f"{len(queries)} queries: the first {QUERIES} are shown")
        queries = queries[:QUERIES]
    absent = ("B", "H")[min(len(sizes.shown), 2) :]
    whole = len(keys) in (1, sizes.keys)  # beside one named key, the keys with the largest weights are shown
    pair = (0, 0, 0, -1 if len(keys) == sizes.keys else keys[0])
    keys = () if whole else keys
    words = asked.words(sizes.queries, sizes.keys, batches)
    return Shown(sizes, batches, heads, queries, keys, pair, absent, tuple(left_out), (), *words)


def _named(at: Any, shape: torch.Size, sizes: Sizes) -> tuple[tuple[int, ...], ...]:
    """The sequences, heads, queries and keys that an index names."""
    part = parse(at, shape, sizes)
    sides = (part.heads, part.queries, part.keys)
    heads, queries, keys = (tuple(range(n)[side]) for n, side in zip(sizes.shape[1:], sides, strict=True))
    batches = tuple(b for side in part.batches for b in range(sizes.batch)[side])
    for name, places in (("sequence", batches), ("head", heads), ("query", queries), ("key", keys)):
        if not places:
            raise ClearheadError(f"at={at!r} names no {name} of weights of shape {tuple(shape)}.")
    if len({b - a for a, b in itertools.pairwise(batches)}) > 1:
        raise ClearheadError(f"at={at!r} names sequences that are not evenly spaced; name one, or all.")
    return batches, heads, queries, keys


def settle(shown: Shown, weights: Tensor, keep: Tensor | None) -> Shown:
    """The keys that are shown, and the pair: the chosen key, or the first one that the first query may see.

    Where not all keys are shown, these come first: the key of the pair, then the key with the largest weight of each
    row that is said in words, then the keys with the largest weight of any row. Of equal ones the first comes first.
    """
    b, h, i, j = shown.pair
    if j < 0:
        allowed = None if keep is None else keep.expand(weights.shape)[b, h, i].nonzero()
        j = 0 if allowed is None or not len(allowed) else int(allowed[0])
    keys, left_out = shown.keys or tuple(range(shown.sizes.keys)), shown.left_out
    of_keys = weights.detach().nan_to_num()[..., list(keys)]
    of_rows = of_keys[0, 0, :SAID].argmax(-1).tolist() if of_keys.numel() else []
    ranked = of_keys.amax((0, 1, 2)).argsort(descending=True, stable=True).tolist()
    if len(keys) > KEYS:
        left_out = (*left_out, few_keys(len(keys), KEYS))
    strongest = tuple(dict.fromkeys([j, *(keys[n] for n in (*of_rows, *ranked))]))[:KEYS]
    return replace(shown, keys=tuple(sorted(strongest)), strongest=strongest, pair=(b, h, i, j), left_out=left_out)


def few_keys(keys: int, most: int) -> str:
    """Which of the keys are shown, in words."""
    return f"{keys:,} keys {most} are shown: the key of the written-out lines, and the keys with the largest weights"


def narrowed(shown: Shown, keys: int) -> Shown:
    """The same part with at most this many keys: the key of the pair, then the keys with the largest weights."""
    return replace(shown, keys=tuple(sorted(shown.strongest[:keys])))
