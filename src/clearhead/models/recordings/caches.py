"""The new keys of a call are found by comparing all its keys with those of the call before."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from clearhead.base.torch_state.versions import bits
from clearhead.models.interception.modules import Kind
from clearhead.models.interception.patch import replaced
from clearhead.models.recordings.cached import Cached, Chain, Link
from clearhead.models.recordings.equal_keys import comparable, find_continued_rows, is_own, nearly_equal
from clearhead.nn.key_value_cache import KeyValueCache
from clearhead.problem.record import copied


class CallFacts(NamedTuple):
    """The facts by which a call may continue another. `filled`: how many of its keys are in use.

    `joins`: whether the call may continue another: False where the record has a projection of the key in place of the
    key. `tokens`: how many tokens the cache has counted, with those of this call; None: unknown. `cache`: the object in
    which the model keeps keys, by which several generations at once are told apart; None: unknown.
    """

    kind: Kind
    run: int
    queries: int
    filled: int
    joins: bool = True
    tokens: int | None = None
    cache: object = None

    def left(self, length: int) -> int | None:
        """How many keys a window has dropped before the first of `length` keys; None: unknown."""
        return None if self.tokens is None else max(self.tokens - length, 0)


Which = tuple[str, int, str]  # a module, which of its calls in a run, and "key" or "value"
_Chains = dict[Which, "_Newest"]


class _Now(threading.local):
    """The facts of the run that a thread is in: threads may take turns between the layers of a model.

    `turns`: of each module its newest run, and how many calls it had made in it before the newest. `beside`: a run, and
    its newest self attention. `rows`: a run, and which rows may continue which, see `Link`.
    """

    def __init__(self) -> None:
        self.turns: dict[str, tuple[int, int]] = {}
        self.beside: tuple[int, _Newest | None] = -1, None
        self.rows: tuple[int, Tensor | None] = -1, None


class Caches:
    """The newest chain of each module, and its newest tensor in full, with which the next one is compared.

    Where a call's cache has been met before, its newest chain is that of the same cache: several generations may take
    turns. Else it is the newest of all, since a model may hand its keys on in another object, or the newest of another
    cache, of which this one may be a copy: then each of the two goes on with a branch of its own.
    """

    def __init__(self, every: int) -> None:
        self._every = every  # of how many runs of the model one is recorded
        self._newest: _Chains = {}
        self._of_cache = WeakKeyDictionary[Any, _Chains]()
        self._began = -1  # the newest run in which a sequence began
        self._now = _Now()
        self._lock = threading.Lock()

    def add(
        self, name: str, call: CallFacts, key: Tensor, value: Tensor | None, fresh: bool = False
    ) -> tuple[Cached, Cached | None]:
        """A call's key and value (B, Hk, Lk, E), of which the new entries are copied.

        `fresh`: whether the key is a copy already.
        """
        with self._lock, torch.inference_mode(False):  # kept tensors are written to outside of inference mode too
            run, turn = self._now.turns.get(name, (-1, 0))
            turn = turn + 1 if run == call.run else 0  # a module may call attention several times
            self._now.turns[name] = call.run, turn
            which: Which = (name, turn, "key")
            own = self._own(call)
            among = [own] if which in own else [self._newest, *self._of_cache.values()]
            keys, among = self._add(which, call, key.detach(), fresh, own, among)
            if call.kind == "self":
                self._now.beside = call.run, self._newest[which]
                self._began = call.run if keys.number == 0 else self._began
            which = (name, turn, "value")
            return keys, None if value is None else self._add(which, call, value.detach(), False, own, among)[0]

    def _add(
        self, which: Which, call: CallFacts, tensor: Tensor, fresh: bool, own: _Chains, among: list[_Chains]
    ) -> tuple[Cached, list[_Chains]]:
        """The link of a call's tensor, and those of `among` with the chain that it continues: one or none.

        `own`: the newest chains of the call's cache. `among`: where the chain that it may continue is looked for.
        """
        found: list[tuple[int, Link, _Newest, list[_Chains]]] = []
        for chains in among:
            newest = chains.get(which)
            if newest is not None and self._may_continue(newest, call, tensor):
                link = newest.link(call, tensor, self._among(call), chains is own)
                if link is not None:
                    found.append((abs(link.base - newest.last.base), link, newest, [chains]))
        if found:  # a window that has not moved shows more of its keys than one that has
            _, link, newest, among = min(found, key=lambda one: one[0])
            if which not in own and any(newest is other.get(which) for other in self._of_cache.values()):
                newest = newest.branch()
            link = link._replace(query=self._place(call, link.filled), rows=self._together(call, link.rows))
            newest.follow(link, call, tensor)
        else:
            newest, among = _Newest(first(call, tensor, fresh, self._place(call, 0)), call, tensor), []
        own[which] = self._newest[which] = newest
        return newest.cached, among

    @contextmanager
    def noting_crops(self) -> Iterator[None]:
        """Inside the `with`, a crop of a cache is noted in the links that it drops keys of: a generation's last step
        has no later one, which would show the tokens that were rejected."""

        def wrap(crop: Callable[..., Any]) -> Callable[..., Any]:
            def cropping(*args: Any, **kwargs: Any) -> Any:
                with self._lock:
                    before = [(cache, chains, tokens_in(cache)) for cache, chains in self._of_cache.items()]
                result = crop(*args, **kwargs)
                with self._lock:
                    for cache, chains, tokens in before:
                        for newest in set(chains.values()):
                            newest.reject(tokens - tokens_in(cache))
                return result

            return cropping

        library = sys.modules.get("transformers.cache_utils")
        with ExitStack() as stack:
            for kind in (KeyValueCache, *([] if library is None else [library.Cache])):
                stack.enter_context(replaced(kind, "crop", wrap))
            yield

    def _own(self, call: CallFacts) -> _Chains:
        """The newest chains of the call's cache; an empty dict that is not kept where the cache is unknown."""
        if type(call.cache).__weakrefoffset__ and type(call.cache).__hash__ is object.__hash__:
            return self._of_cache.setdefault(call.cache, {})
        return {}

    def _place(self, call: CallFacts, filled: int) -> int | None:
        """The place of a call's first query. `filled`: where its keys end."""
        if call.kind == "self":
            return max(filled or call.filled, call.queries) - call.queries
        return None if (beside := self._beside(call)) is None else beside.last.query

    def _beside(self, call: CallFacts) -> _Newest | None:
        """The self attention that came before a cross attention in the same run."""
        run, newest = self._now.beside
        return newest if call.kind == "cross" and run == call.run else None

    def _among(self, call: CallFacts) -> Tensor | None:
        """Which rows may continue which, by the earlier calls of the same run; None: unknown."""
        run, rows = self._now.rows
        return rows if run == call.run else None

    def _together(self, call: CallFacts, found: Tensor | None) -> Tensor | None:
        """Which rows may continue which, by this call and the earlier ones of the run, whose links share the result."""
        if found is None or found.numel() == 1:
            return None
        known, own = self._among(call), is_own(found)
        if known is None or known.shape != found.shape or not bool((known & found).any(1).all()):
            known = found  # the earlier ones have another cache
        known &= found  # in place: the other layers have the same tensor
        self._now.rows = call.run, known
        return None if own else known

    def _may_continue(self, newest: _Newest, call: CallFacts, tensor: Tensor) -> bool:
        if not call.joins or not comparable(tensor) or not newest.alike(tensor):
            return False
        if call.kind == "self":
            return call.filled > call.queries  # else its first query is at its first key, and it begins a sequence
        # the steps of another sequence may read the same source
        beside = self._beside(call)
        if self._own(call) and beside is not None:
            return len(beside.chain.links) > 1
        return self._began < call.run <= newest.chain.run + self._every


def tokens_in(cache: Any) -> int:
    """How many tokens a cache holds; 0 where it does not say."""
    try:
        return len(cache) if isinstance(cache, KeyValueCache) else int(cache.get_seq_length())
    except (AttributeError, ValueError, IndexError):  # a cache of the caller's own, or of layers that count no tokens
        return 0


def first(call: CallFacts, tensor: Tensor, fresh: bool, query: int | None) -> Cached:
    """The first link of a chain; the empty slots of a static cache are not kept."""
    length, filled = tensor.shape[2], call.filled
    if call.joins and filled < length and comparable(tensor) and not bool(bits(tensor[:, :, filled:]).any()):
        new = copied(tensor[:, :, :filled])
    else:
        new = tensor if fresh else copied(tensor)
    dropped = call.left(length) if call.kind == "self" else None
    return Cached(Chain([Link(0, length, 0, new, filled, query=query)], first=dropped or 0), 0)


class _Newest:
    """The newest link of a chain, and a copy of the whole tensor of its call, with room for the keys of later ones.

    The model may write to its own tensor, and a write through `.data` or NumPy is not counted: so a copy is compared.
    """

    def __init__(self, cached: Cached, call: CallFacts, tensor: Tensor) -> None:
        self.chain = cached.chain
        self.chain.run, self._left, self._queries = call.run, call.left(tensor.shape[2]), call.queries
        self._room: Tensor | None = None  # the newest tensor from `_at` on, and room for more; None until it is read
        self._at = 0

    @property
    def last(self) -> Link:
        return self.chain.links[-1]

    @property
    def cached(self) -> Cached:
        return Cached(self.chain, len(self.chain.links) - 1)

    def reject(self, tokens: int) -> None:
        """Note that the cache has dropped the last tokens. Where none of the newest call's is left, the cache goes back
        to an earlier step, so that another text may follow: then the call's tokens were no drafts."""
        rejected = self.last.rejected + tokens
        if rejected < self._queries:
            self.chain.links[-1] = self.last._replace(rejected=rejected)

    def branch(self) -> _Newest:
        """The same link, as the newest one of another chain that begins with the same links."""
        other = copy.copy(self)
        other.chain = replace(self.chain, links=list(self.chain.links))
        other._room, other._at = None, 0
        return other

    def alike(self, tensor: Tensor) -> bool:
        """Whether a tensor differs from the newest in rows and length alone."""
        mine = self.last.new
        shapes = [(t.shape[1::2], t.dtype, t.device) for t in (mine, tensor)]
        return type(mine) is Tensor and shapes[0] == shapes[1]

    def _mine(self) -> Tensor:
        """The whole tensor of the newest call."""
        if self._room is None:
            self._room = self.cached.tensor()
        return self._room[:, :, self._at : self._at + self.last.length]

    def link(self, call: CallFacts, tensor: Tensor, among: Tensor | None, same_cache: bool = False) -> Link | None:
        """The link of a tensor that continues the newest one; None where it does not. `among`: see `Caches._among`.

        `same_cache`: the keys are of the cache of the newest call. Where the cache counts tokens, its keys may differ
        by rounding: models with latent attention keep a compressed key, and expand all keys again in each step.
        """
        last, length, newest = self.last, tensor.shape[2], self._mine()
        among = among if call.kind == "cross" else None
        matches = [None, nearly_equal] if same_cache and call.tokens is not None else [None]
        for moved, filled in self._places(call, newest.shape[2], length):
            base, mine, offset = last.base + moved, newest, moved
            old = min(filled - call.queries if call.kind == "self" else length, last.filled - base)
            if old <= 0 or base < 0:
                continue
            if moved < 0:  # the cache was cropped: the window has moved back, over keys that the newest had dropped
                mine, offset = self.cached.between(base, last.base + newest.shape[2]), 0
            pairs = [(0, old, offset)] + [(filled, length, 0)] * (filled < length)
            # where all earlier keys are there, equal keys mean the same sequence. In a window they need not; nor in
            # cross attention of beams, which read one source
            whole = base == 0 and among is None
            for match in matches:
                rows = find_continued_rows(mine, tensor, pairs, among, whole, match)
                if rows is not None:
                    new = copied(tensor[:, :, old:filled])
                    return Link(base, length, base + old, new, base + filled, rows)
        return None

    def _places(self, call: CallFacts, before: int, length: int) -> Iterator[tuple[int, int]]:
        """Places of the newest `before` keys where the first of `length` may stand, and how many slots are in use."""
        if call.kind == "cross":
            if before == length:
                yield 0, length
            return
        left = call.left(length)
        if left is not None and self._left is not None:  # else the keys alone show the place
            yield left - self._left, min(call.tokens or length, length)
        if before == length and (call.filled < length or self.last.filled - self.last.base < length):
            yield 0, call.filled  # a static cache: a slot in the middle is filled, or the last ones
        old = length - call.queries
        for offset in sorted({max(before - old, 0), 0}, reverse=True):
            yield offset, length  # the cache grew, and a window dropped its first keys; or its last ones were rejected

    def follow(self, link: Link, call: CallFacts, tensor: Tensor) -> None:
        """Add a link, and keep the whole tensor of its call."""
        last = self.last
        self.chain.run, self._left, self._queries = call.run, call.left(link.length), call.queries
        self.chain.links.append(link)
        if link.base < last.base:
            self._room, self._at = None, 0  # the copy has no key before the newest ones
        if self._room is None:
            return
        at = self._at + link.base - last.base
        first, parents = link.start - link.base, link.parents
        stop = first + link.new.shape[2]
        full = self._room is self.chain.links[0].new or at + link.length > self._room.shape[2]
        if parents is not None or (full and first < stop):
            old = self._room[:, :, at : self._at + last.length][:, :, : link.length]
            old = old if parents is None else old[parents]
            batch, heads, had, width = old.shape
            room = old.new_empty(batch, heads, link.length + link.length // 4 + 16, width)
            room[:, :, :had] = old
            self._room, at = room, 0
        self._room[:, :, at + first : at + stop] = link.new
        self._at = at
