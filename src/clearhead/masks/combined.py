"""The masks that `&`, `|` and `~` return."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable
from operator import and_, invert, or_
from typing import Any, TypeVar

import torch
from torch import Tensor

from clearhead.base.output.text import said, short
from clearhead.base.shapes import Sizes
from clearhead.base.symbolic.fold import fold
from clearhead.base.symbolic.steps import PAIRS, Step, made
from clearhead.base.user_functions.rules import Joined
from clearhead.masks._spans import Residual, Spans, all_keys, complement, intersection, of_intervals, union
from clearhead.masks.base import OPERATORS, Mask, Sides
from clearhead.masks.first_keys import FirstKeys
from clearhead.masks.mask_in_documents import count_in_documents

T = TypeVar("T")
TITLE = 2000  # the most characters of a title
FEW_LEVELS = 3


class Combined(Mask):
    """Masks joined by an operator.

    Evaluation computes each mask once, however often an expression uses it, and is not recursive.
    """

    meaning: str  # one sentence for explanations
    ends: tuple[str, ...]  # the suffix of each inner mask's name in an explanation
    join: Callable[..., Any]  # the operator, on bool tensors or on steps of an explanation
    levels: int  # the depth of nested operators

    def __init__(self, *inner: Mask) -> None:
        self.positional = any(mask.positional for mask in inner)
        self.levels = 1 + max(mask.levels if isinstance(mask, Combined) else 0 for mask in inner)
        edges = next((mask._document_edges for mask in inner if mask._document_edges is not None), None)
        self._document_edges = edges
        self.inner = inner if edges is None else tuple(count_in_documents(mask, edges) for mask in inner)

    @abstractmethod
    def join_spans(self, sizes: Sizes, *spans: Spans) -> Spans:
        """Return the normal form of the expression from the normal forms of the inner masks."""

    @abstractmethod
    def join_titles(self, *titles: str) -> str:
        """Return the title of the expression from the titles of the inner masks."""

    @abstractmethod
    def join_drawn(self, *drawn: Sizes) -> Sizes:
        """Return the sizes of `drawn` from the sizes of the inner masks."""

    def signature(self) -> Hashable | None:
        if self.levels <= FEW_LEVELS:  # faster for few masks: decoding calls it for each token and layer
            own = [mask.signature() for mask in self.inner]
            return None if None in own else (type(self), *own)
        numbers: dict[Hashable, int] = {}  # a number for each leaf's signature, and for each operator on such numbers

        def make(mask: Mask, *inner: int | None) -> int | None:
            own = (type(mask), *inner) if inner else mask.signature()
            return None if own is None or None in inner else numbers.setdefault(own, len(numbers))

        return None if fold(self, inner_masks, make) is None else (Combined, *numbers)

    def depends(self) -> tuple[Tensor, ...] | None:
        found = [mask.depends() for mask in leaves(self)]
        known = [tensors for tensors in found if tensors is not None]
        return tuple(tensor for tensors in known for tensor in tensors) if len(known) == len(found) else None

    def _list_notes(self) -> list[str]:
        return [note for mask in leaves(self) for note in mask._list_notes()]

    def drawn(self) -> Sizes:
        found: Sizes = self._fold(lambda mask, *inner: mask.join_drawn(*inner), lambda leaf: leaf.drawn())
        return found

    def _count_drawn_keys(self) -> int:
        return max(mask._count_drawn_keys() for mask in leaves(self))

    def title(self) -> str:
        def join(mask: Combined, *inner: str) -> str:
            return short(mask.join_titles(*inner), TITLE)

        return self._fold(join, lambda leaf: said(leaf, leaf.title))

    def _compute_part(self, sizes: Sizes, at: Sides) -> Tensor:
        found: Tensor = self._fold(lambda mask, *inner: mask.join(*inner), lambda leaf: leaf._compute_part(sizes, at))
        return found

    def steps(self, sizes: Sizes, at: Sides, name: str = "mask") -> list[Step]:
        order: list[Mask] = []
        fold(self, inner_masks, lambda mask, *inner: order.append(mask))
        names = {id(self): name}
        for mask in reversed(order):
            for end, one in zip(mask.ends if isinstance(mask, Combined) else (), inner_masks(mask), strict=True):
                names.setdefault(id(one), f"{names[id(mask)]}_{end}")
        found: list[Step] = []

        def join(mask: Combined, *inner: Step) -> Step:
            found.append(made(names[id(mask)], mask.meaning, mask.join(*inner), PAIRS))
            return found[-1]

        def explain(leaf: Mask) -> Step:
            found.extend(leaf._explain(sizes, at, names[id(leaf)]))
            return found[-1]

        self._fold(join, explain)
        return found

    def lower(self, sizes: Sizes) -> Spans:
        def lower(leaf: Mask) -> Spans:
            spans = leaf._resolve(sizes)
            # clamp: ~ of an interval before the first or after the last key must be every key
            return spans._replace(start=spans.start.clamp(0, sizes.keys), stop=spans.stop.clamp(0, sizes.keys))

        found: Spans = self._fold(lambda mask, *inner: mask.join_spans(sizes, *inner), lower)
        return found

    def _fold(self, join: Callable[..., T], ask: Callable[[Mask], T]) -> T:
        """Fold the expression: `ask` gives the result of a leaf, and `join` combines the results at an operator."""
        return fold(self, inner_masks, lambda mask, *inner: join(mask, *inner) if inner else ask(mask))


def inner_masks(mask: Mask) -> tuple[Mask, ...]:
    """Return the masks that an expression joins; none for any other mask."""
    return mask.inner if isinstance(mask, Combined) else ()


def leaves(mask: Mask) -> list[Mask]:
    """Return the masks of an expression that are no expressions themselves, each once."""
    found: list[Mask] = []
    fold(mask, inner_masks, lambda part, *inner: None if inner else found.append(part))
    return found


def with_leaves(mask: Mask, change: Callable[[Mask], Mask]) -> Mask:
    """Return the expression with each of its leaves changed; the same object if no leaf changes."""

    def make(part: Mask, *inner: Mask) -> Mask:
        if not inner:
            return change(part)
        same = all(new is old for new, old in zip(inner, inner_masks(part), strict=True))
        return part if same else type(part)(*inner)

    return fold(mask, inner_masks, make)


class Pair(Combined):
    """Two masks joined by an operator."""

    operator: str
    ends = ("left", "right")
    _is_pair = True

    def join_titles(self, *titles: str) -> str:
        sides = (f"({text})" if mask._is_pair else text for text, mask in zip(titles, self.inner, strict=True))
        return f" {self.operator} ".join(sides)

    def join_drawn(self, *drawn: Sizes) -> Sizes:
        left, right = drawn
        batch, heads, queries, keys = map(max, zip(left.shape, right.shape, strict=True))
        # draw a side that is the same for all queries or keys at the sizes of the other side
        queries = 0 if queries == 1 and 0 in (left.queries, right.queries) else queries
        return Sizes(batch, heads, queries, 0 if keys == 1 and 0 in (left.keys, right.keys) else keys)


class And(Pair):
    """Pairs that both masks allow: the intersection of their intervals."""

    operator = "&"
    join = staticmethod(and_)
    meaning = "&, and: True where both are True. An axis of size 1 is repeated."

    @classmethod
    def example(cls, sizes: Sizes) -> Mask:
        return cls(FirstKeys(max(sizes.keys - 1, 0)), ~FirstKeys(1))

    def join_spans(self, sizes: Sizes, *spans: Spans) -> Spans:
        a, b = spans
        residual = a.residual or b.residual
        if a.residual is not None and b.residual is not None:
            residual = Joined(self.join, a.residual, b.residual)
        reads = _all_of(a.reads, b.reads)
        if a.gaps is None and b.gaps is None:
            return Spans(torch.maximum(a.start, b.start), torch.minimum(a.stop, b.stop), residual, reads)
        both = of_intervals(*intersection(a.intervals(), b.intervals(), sizes.keys), sizes.keys)
        if both is not None:
            return both._replace(residual=residual, reads=reads)
        hull = Spans(torch.maximum(a.start, b.start), torch.minimum(a.stop, b.stop))
        return hull._replace(residual=_either(a, b, sizes, self.join), reads=_all_of(reads, a.edges(), b.edges()))


class Or(Pair):
    """Pairs that either mask allows: the union of their intervals, with a residual if either mask has a residual."""

    operator = "|"
    join = staticmethod(or_)
    meaning = "|, or: True where at least one is True. An axis of size 1 is repeated."

    @classmethod
    def example(cls, sizes: Sizes) -> Mask:
        return cls(FirstKeys(1), ~FirstKeys(max(sizes.keys - 1, 0)))

    def join_spans(self, sizes: Sizes, *spans: Spans) -> Spans:
        a, b = spans
        joined = union(a.intervals(), b.intervals())
        either = of_intervals(*joined, sizes.keys)
        reads = _all_of(a.reads, b.reads)
        if a.residual is None and b.residual is None and either is not None:
            return either
        if either is None:  # too many intervals: take the hull, and leave the rest to the residual
            start, stop = joined
            last = stop.amax(-1)
            either = Spans(torch.where(stop > start, start, sizes.keys).amin(-1).clamp(max=last), last)
            reads = _all_of(reads, a.edges(), b.edges())
        return either._replace(residual=_either(a, b, sizes, self.join), reads=reads)


class Not(Combined):
    """Pairs that the inner mask does not allow: the complement of its intervals, or a residual."""

    meaning = "~, not: True where the other is False."
    ends = ("inner",)
    join = staticmethod(invert)

    @classmethod
    def example(cls, sizes: Sizes) -> Mask:
        return cls(FirstKeys(max(sizes.keys - 1, 0)) & ~FirstKeys(1))

    def join_titles(self, *titles: str) -> str:
        return f"~({titles[0]})" if self.inner[0]._is_pair else f"~{titles[0]}"

    def join_drawn(self, *drawn: Sizes) -> Sizes:
        return drawn[0]

    def join_spans(self, sizes: Sizes, *spans: Spans) -> Spans:
        (other,) = spans
        if other.residual is None:
            rest = of_intervals(*complement(*other.intervals(), sizes.keys), sizes.keys)
            if rest is not None:
                return rest
        residual = Joined(self.join, other.pairs(sizes.keys))
        return all_keys(sizes, residual, _all_of(other.reads, other.edges()))


def _either(a: Spans, b: Spans, sizes: Sizes, join: Callable[..., Tensor]) -> Residual:
    """Return the residual of two masks that are joined pair by pair."""
    return Joined(join, a.pairs(sizes.keys), b.pairs(sizes.keys))


def _all_of(*several: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the tensors of all tuples, each once."""
    found: dict[int, Tensor] = {id(tensor): tensor for tensors in several for tensor in tensors}
    return tuple(found.values())


OPERATORS.update({"&": And, "|": Or, "~": Not})
