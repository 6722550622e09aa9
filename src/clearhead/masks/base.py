"""The base class of masks, their normal form, and how masks combine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from clearhead.base.arrays import Array, mask_forms, refuse_additive
from clearhead.base.document_edges import DocumentEdges
from clearhead.base.errors import ClearheadError
from clearhead.base.fold import fold
from clearhead.base.numbers import check_flag
from clearhead.base.part_settings import PartSettings
from clearhead.base.pictures import Style
from clearhead.base.positions import check_align
from clearhead.base.rules import Joined
from clearhead.base.shapes import AlignLike, Sizes, array_sizes, moved
from clearhead.base.shapes import Sides as Sides
from clearhead.base.steps import PAIRS as PAIRS
from clearhead.base.steps import Step, made
from clearhead.base.text import said
from clearhead.base.thumbnails import short
from clearhead.masks._draw import html, plot, sizes_drawn, text
from clearhead.masks._read import KEPT
from clearhead.masks._spans import Edges as Edges
from clearhead.masks._spans import Residual as Residual
from clearhead.masks._spans import Spans as Spans
from clearhead.masks._spans import all_keys as all_keys
from clearhead.masks._spans import check_spans as check_spans
from clearhead.masks._spans import complement, union
from clearhead.masks._spans import intersection as intersection
from clearhead.masks._spans import of_intervals as of_intervals

if TYPE_CHECKING:
    from clearhead.base.pictures import Axes

TITLE = 2000  # the most characters of an expression
FEW_LEVELS = 3


class Mask(PartSettings, ABC):
    """Who may see whom: True means "may attend". Masks combine with `&`, `|` and `~`.

    >>> import clearhead as ch
    >>> ch.Causal() & ch.SlidingWindow(before=1)
    Causal() & SlidingWindow(before=1)
    ■ · · · · ·
    ■ ■ · · · ·
    · ■ ■ · · ·
    · · ■ ■ · ·
    · · · ■ ■ ·
    · · · · ■ ■

    A mask of your own is a subclass with `lower(sizes)`, which gives its `Spans`. They are kept for later calls if the
    class has `signature()` or `depends()`. In compiled code `&` and `|` work; write `~` outside of compiled code, since
    the compiler does not support this operator for classes.
    """

    __array_ufunc__ = None  # so that NumPy's arrays leave operators to the mask
    _validators: ClassVar = {"positional": check_flag}
    positional: bool = False  # whether it depends on where a query stands, and so on the call's alignment
    _document_edges: DocumentEdges | None = None  # of the documents in which the masks and biases beside it count

    @abstractmethod
    def lower(self, sizes: Sizes) -> Spans:
        """The normal form for a (B, H, Lq, Lk) matrix. Raises a `ClearheadError` where the mask does not fit it."""

    def signature(self) -> Hashable | None:
        """A small value that determines this mask, by which its spans can be cached; or None."""
        return None

    def depends(self) -> tuple[Tensor, ...] | None:
        """The tensors that decide, with the attributes, which pairs this mask allows; None where they are not known.

        The normal form is kept until one of them is written to, or an attribute changes.
        """
        return None if self.signature() is None else ()

    def _list_notes(self) -> list[str]:
        """The remarks on this mask that `clearhead.plan` shows."""
        return []

    def __getstate__(self) -> dict[str, Any]:  # copies and pickles keep no normal form
        return {name: value for name, value in vars(self).items() if not name.startswith(KEPT)}

    def drawn(self) -> Sizes:
        """The sizes at which `repr` draws this mask; 0 where any size will do; 1 where the mask repeats."""
        return Sizes(1, 1, 0, 0)

    def _count_drawn_keys(self) -> int:
        """The least number of keys at which a picture shows the pattern of this mask."""
        return 6

    @classmethod
    def example(cls, sizes: Sizes) -> Mask:
        """A mask to try this class with, that fits these sizes: `clearhead.testing.check_mask` calls it."""
        raise NotImplementedError(f"{cls.__name__} needs a classmethod example(sizes) -> Mask, to be checked with.")

    def _resolve(self, sizes: Sizes) -> Spans:
        """The spans of `lower`, after checks of their sizes."""
        return check_spans(self.lower(sizes), sizes, self)

    def _compute_matrix(self, sizes: Sizes) -> Tensor:
        """Every pair, bool, (B or 1, H or 1, Lq or 1, Lk), by the logic of the expression itself."""
        return self._compute_part(sizes, (slice(None),) * 4)

    def steps(self, sizes: Sizes, at: Sides, name: str = "mask") -> list[Step]:
        """How this mask says which pairs are allowed, for `clearhead.explain`; the last step is the mask, bool.

        `at`: four slices of (B, H, Lq, Lk), the part that is asked for; an axis along which the mask repeats has size
        1. `name`: the name of the last step. A mask that has no steps of its own is shown as it is.
        """
        why = f"{said(self, self.title)}: True where the query may see the key."
        return [Step(name, why, self._compute_part(sizes, at), PAIRS)]

    def _explain(self, sizes: Sizes, at: Sides, name: str = "mask") -> list[Step]:
        """Its `steps`, or the mask alone where they end in another mask, as steps of a parent class may."""
        steps = self.steps(sizes, at, name)
        differ = (steps[-1].value ^ self._compute_part(sizes, at)).any()
        return Mask.steps(self, sizes, at, name) if bool(differ) else steps

    def _compute_part(self, sizes: Sizes, at: Sides) -> Tensor:
        """The part that four slices name, bool; an axis along which the mask repeats may have size 1."""
        return check_spans(self.lower(sizes), sizes, self).keep(*at, sizes.keys)

    def spans(self, query: Array | int, key: Array | int, align: AlignLike = None) -> Spans:
        """The normal form for these inputs: `start` and `stop`, (B or 1, H or 1, Lq or 1), and the residual."""
        return self._resolve(_sizes_of(self, query, key)._replace(align=check_align(align)))

    def dense(self, query: Array | int, key: Array | int, align: AlignLike = None) -> Tensor:
        """The whole mask as a bool tensor (..., Lq, Lk), with the inputs' leading dimensions. O(Lq · Lk) memory.

        `query`, `key`: tensors or arrays of which the shapes are read, or the numbers Lq and Lk: then with as many
        leading dimensions as the mask itself has. `align`: as for `attention`.

        >>> import torch, clearhead as ch
        >>> ch.Causal().dense(2, 3, align="lower_right").int()
        tensor([[1, 1, 0],
                [1, 1, 1]], dtype=torch.int32)
        >>> ch.Lengths([2, 4]).dense(3, 5).shape
        torch.Size([2, 3, 5])
        """
        sizes = _sizes_of(self, query, key)._replace(align=check_align(align))
        return sizes.restore(dense(self._resolve(sizes), sizes))

    def __and__(self, other: Mask) -> Mask:
        return And(self, check_mask(other, "&"))

    def __or__(self, other: Mask) -> Mask:
        return Or(self, check_mask(other, "|"))

    def __invert__(self) -> Mask:
        return Not(self)

    def __rand__(self, other: Any) -> Mask:
        return And(check_mask(other, "&", "left"), self)

    def __ror__(self, other: Any) -> Mask:
        return Or(check_mask(other, "|", "left"), self)

    def __bool__(self) -> bool:
        raise ClearheadError("A mask has no truth value: combine masks with &, | and ~, not with and, or, not.")

    def title(self) -> str:
        """The expression that makes this mask."""
        return f"{type(self).__name__}()"

    def plot(
        self,
        query: Array | int | None = None,
        key: Array | int | None = None,
        align: AlignLike = None,
        *,
        query_labels: Sequence[str] | None = None,
        key_labels: Sequence[str] | None = None,
        title: str | None = None,
        ax: Axes | None = None,
    ) -> Axes | np.ndarray:
        """Draw the mask with matplotlib; pairs that may not attend are hatched. Returns the axes, or an array of them.

        `query`, `key`, `align`: as for `dense`; without them the mask is drawn at a size that shows its pattern.
        `query_labels`, `key_labels`: a word for each query, for each key. `ax`: the axes to draw one picture on; None
        makes new axes.
        There is a picture for each sequence and head in which the mask differs. Above 512 queries or keys a cell is the
        share of its pairs that may attend, found in O(Lq + Lk) memory. Up to 8 queries and keys each cell has 1 or 0.
        """
        if query is None and key is not None:
            raise ClearheadError("plot: key is given without query; pass both, tensors or lengths.")
        sizes = sizes_drawn(self) if query is None else _sizes_of(self, query, query if key is None else key)
        sizes = sizes._replace(align=check_align(align) if align is not None else sizes.align)
        return plot(self, sizes, (query_labels, key_labels), Style(title, ax=ax))

    def __repr__(self) -> str:
        title = said(self, self.title)
        return f"{title}\n{drawn}" if (drawn := text(self)) else title

    def _repr_html_(self) -> str:
        """The title and a picture, for notebooks."""
        return html(self)


MaskLike = Mask | Array | None


def _sizes_of(mask: Mask, query: Any, key: Any) -> Sizes:
    """The sizes of two arrays, or of two lengths: then for as many sequences and heads as the mask has."""
    sizes = array_sizes(query, key)
    if sizes.leading or isinstance(query, Tensor | np.ndarray):
        return sizes
    batch, heads = mask.drawn().shape[:2]
    leading = (batch, heads) if heads > 1 else (batch,) if batch > 1 else ()
    return sizes._replace(batch=batch, heads=heads, leading=leading)


def dense(spans: Spans, sizes: Sizes) -> Tensor:
    return spans.keep(*(slice(None),) * 4, sizes.keys).expand(sizes.shape)


def _no_mask(other: Any) -> str:
    """What was given where a mask was expected, and what may have been meant by it."""
    if isinstance(other, type):
        return f"the class {other.__name__}; a mask is an instance, {other.__name__}(...)"
    if other is None:
        return "None: leave it out, since no mask allows every pair"
    kind = f"a {type(other).__name__}"
    return f"{kind}: a rule of (batch, head, query_index, key_index) is MaskFunction(rule)" if callable(other) else kind


def check_mask(other: Any, operator: str, side: str = "right") -> Mask:
    if isinstance(other, Mask):
        return other
    if not isinstance(other, Tensor | np.ndarray):
        raise ClearheadError(f"{operator} joins two masks; the {side} one is {_no_mask(other)}.")
    refuse_additive(other, f"the {side} side of {operator}, tensor", "bias={}")
    raise ClearheadError(
        f"{operator} joins two masks; the {side} one is a {type(other).__name__}, {other.dtype}, {tuple(other.shape)}. "
        f"{mask_forms('tensor', other)} A tensor that is added to the scores is no mask: pass it as bias=tensor."
    )


class Combined(Mask):
    """Masks and an operator. Each mask is asked once, however often an expression uses it, and without recursion."""

    meaning: str  # one sentence
    ends: tuple[str, ...]  # the end of each inner mask's name in an explanation
    levels: int  # of operators, one inside another

    def __init__(self, *inner: Mask) -> None:
        self.positional = any(mask.positional for mask in inner)
        self._document_edges = next((mask._document_edges for mask in inner if mask._document_edges is not None), None)
        self.levels = 1 + max(mask.levels if isinstance(mask, Combined) else 0 for mask in inner)

    @property
    @abstractmethod
    def inner(self) -> tuple[Mask, ...]:
        """The masks that it joins."""

    @abstractmethod
    def join(self, *values: Any) -> Any:
        """The operator, on bool tensors or on steps of an explanation."""

    @abstractmethod
    def join_spans(self, sizes: Sizes, *spans: Spans) -> Spans:
        """The normal form, from those of the inner masks."""

    @abstractmethod
    def join_titles(self, *titles: str) -> str:
        """The title, from those of the inner masks."""

    @abstractmethod
    def join_drawn(self, *drawn: Sizes) -> Sizes:
        """The sizes of `drawn`, from those of the inner masks."""

    def signature(self) -> Hashable | None:
        if self.levels <= FEW_LEVELS:  # few masks: asked in each call of a model that generates
            own = [mask.signature() for mask in self.inner]
            return None if None in own else (type(self), *own)
        numbers: dict[Hashable, int] = {}  # of each mask by its own signature, or its operator and the numbers it joins

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
        def make(mask: Mask, *inner: Sizes) -> Sizes:
            return mask.join_drawn(*inner) if isinstance(mask, Combined) else mask.drawn()

        return fold(self, inner_masks, make)

    def _count_drawn_keys(self) -> int:
        return max(mask._count_drawn_keys() for mask in leaves(self))

    def title(self) -> str:
        def make(mask: Mask, *inner: str) -> str:
            return short(mask.join_titles(*inner), TITLE) if isinstance(mask, Combined) else said(mask, mask.title)

        return fold(self, inner_masks, make)

    def _compute_part(self, sizes: Sizes, at: Sides) -> Tensor:
        def make(mask: Mask, *inner: Tensor) -> Tensor:
            found: Tensor = mask.join(*inner) if isinstance(mask, Combined) else mask._compute_part(sizes, at)
            return found

        return fold(self, inner_masks, make)

    def steps(self, sizes: Sizes, at: Sides, name: str = "mask") -> list[Step]:
        order: list[Mask] = []
        fold(self, inner_masks, lambda mask, *inner: order.append(mask))
        names = {id(self): name}
        for mask in reversed(order):
            for end, one in zip(mask.ends if isinstance(mask, Combined) else (), inner_masks(mask), strict=True):
                names.setdefault(id(one), f"{names[id(mask)]}_{end}")
        found: list[Step] = []

        def make(mask: Mask, *inner: Step) -> Step:
            own = names[id(mask)]
            if isinstance(mask, Combined):
                found.append(made(own, mask.meaning, mask.join(*inner), PAIRS))
            else:
                found.extend(mask._explain(sizes, at, own))
            return found[-1]

        fold(self, inner_masks, make)
        return found

    def lower(self, sizes: Sizes) -> Spans:
        def make(mask: Mask, *inner: Spans) -> Spans:
            if isinstance(mask, Combined):
                return mask.join_spans(sizes, *inner)
            spans = check_spans(mask.lower(sizes), sizes, mask)
            # the complement of an interval before the first key, or behind the last one, is every key
            return spans._replace(start=spans.start.clamp(0, sizes.keys), stop=spans.stop.clamp(0, sizes.keys))

        return fold(self, inner_masks, make)


def inner_masks(mask: Mask) -> tuple[Mask, ...]:
    """The masks that an expression joins; none for any other mask."""
    return mask.inner if isinstance(mask, Combined) else ()


def leaves(mask: Mask) -> list[Mask]:
    """The masks of an expression that are no expressions, each once."""
    found: list[Mask] = []
    fold(mask, inner_masks, lambda part, *inner: None if inner else found.append(part))
    return found


def with_leaves(mask: Mask, change: Callable[[Mask], Mask]) -> Mask:
    """The expression with each of its leaves changed; itself where none is."""

    def make(part: Mask, *inner: Mask) -> Mask:
        if not inner:
            return change(part)
        same = all(new is old for new, old in zip(inner, inner_masks(part), strict=True))
        return part if same else type(part)(*inner)

    return fold(mask, inner_masks, make)


class MaskInDocuments(Mask):
    """A mask of the padded batch that has one sequence for each document, for the row of the documents."""

    _document_edges: DocumentEdges

    def __init__(self, mask: Mask, edges: DocumentEdges) -> None:
        self.mask, self._document_edges, self.positional = mask, edges, mask.positional

    @classmethod
    def example(cls, sizes: Sizes) -> Mask:
        return cls(Between(1, max(sizes.keys // 4, 1)), DocumentEdges.example(sizes))

    def signature(self) -> Hashable | None:
        signature = self.mask.signature()
        return None if signature is None else (type(self), signature, self._document_edges.numbers)

    def depends(self) -> tuple[Tensor, ...] | None:
        return self.mask.depends()

    def _list_notes(self) -> list[str]:
        return self.mask._list_notes()

    def title(self) -> str:
        return f"({self.mask.title()})" if isinstance(self.mask, Pair) else self.mask.title()

    def drawn(self) -> Sizes:
        return Sizes(1, 1, self._document_edges.queries.total, self._document_edges.keys.total)

    def _pad_sizes(self, sizes: Sizes) -> Sizes:
        return self._document_edges.pad_sizes(sizes, self.mask.title if self.positional else None)

    def _compute_part(self, sizes: Sizes, at: Sides) -> Tensor:
        padded = self._pad_sizes(sizes)
        return self._document_edges.to_row(lambda *own: self.mask._compute_part(padded, own), sizes)(*at)

    def lower(self, sizes: Sizes) -> Spans:
        edges = self._document_edges
        padded = self._pad_sizes(sizes)
        document, index = edges.queries.locate(sizes.device)
        sums = moved(edges.keys.sums, sizes.device)
        first, stop = sums[document], sums[document + 1]
        if not sizes.queries or not sizes.keys:
            return Spans(first.view(1, 1, -1), stop.view(1, 1, -1))
        spans = check_spans(self.mask.lower(padded), padded, self.mask)

        def to_row(edge: Tensor) -> Tensor:
            batch, _, length, *_ = edge.shape
            own = edge[document if batch > 1 else document * 0, :, index if length > 1 else index * 0]  # (T, H or 1, …)
            low, high = (bound.view(-1, *(1,) * (own.ndim - 1)) for bound in (first, stop))
            return torch.minimum(low + own.clamp(min=0), high).transpose(0, 1)[None]

        gaps = None if spans.gaps is None else (to_row(spans.gaps[0]), to_row(spans.gaps[1]))
        residual = None if spans.residual is None else edges.to_row(spans.rest, sizes)
        return Spans(to_row(spans.start), to_row(spans.stop), residual, spans.reads, gaps)


def _count_in_documents(mask: Mask, edges: DocumentEdges) -> Mask:
    """A side of `&` or `|` beside documents with these edges."""
    if mask._document_edges is None:
        return MaskInDocuments(mask, edges)
    if mask._document_edges.numbers == edges.numbers:
        return mask
    raise ClearheadError(
        f"{short(mask.title(), 200)} has other documents than the mask beside it, and masks count positions in one set "
        "of documents. Pass the edges of their common parts to one Documents.from_cu_seqlens(cu_q, cu_k)."
    )


class Pair(Combined):
    """Two masks and an operator."""

    operator: str
    ends = ("left", "right")

    def __init__(self, left: Mask, right: Mask) -> None:
        super().__init__(left, right)
        edges = self._document_edges
        if edges is not None:
            left, right = (_count_in_documents(mask, edges) for mask in (left, right))
        self.left, self.right = left, right

    @property
    def inner(self) -> tuple[Mask, ...]:
        return self.left, self.right

    def join_titles(self, *titles: str) -> str:
        sides = (f"({text})" if isinstance(mask, Pair) else text for text, mask in zip(titles, self.inner, strict=True))
        return f" {self.operator} ".join(sides)

    def join_drawn(self, *drawn: Sizes) -> Sizes:
        left, right = drawn
        batch, heads, queries, keys = map(max, zip(left.shape, right.shape, strict=True))
        # a side that is the same for all queries, or keys, is drawn at the sizes of the other
        queries = 0 if queries == 1 and 0 in (left.queries, right.queries) else queries
        return Sizes(batch, heads, queries, 0 if keys == 1 and 0 in (left.keys, right.keys) else keys)


class And(Pair):
    """Allowed where both allow: the intersection of their intervals."""

    operator = "&"
    meaning = "&, and: True where both are True. An axis of size 1 is repeated."

    @classmethod
    def example(cls, sizes: Sizes) -> Mask:
        return cls(Between(0, max(sizes.keys - 1, 0)), Between(min(1, sizes.keys), sizes.keys))

    def join(self, *values: Any) -> Any:
        return values[0] & values[1]

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
    """Allowed where either allows: the union of their intervals, with a residual where one has a residual."""

    operator = "|"
    meaning = "|, or: True where at least one is True. An axis of size 1 is repeated."

    @classmethod
    def example(cls, sizes: Sizes) -> Mask:
        return cls(Between(0, min(1, sizes.keys)), Between(max(sizes.keys - 1, 0), sizes.keys))

    def join(self, *values: Any) -> Any:
        return values[0] | values[1]

    def join_spans(self, sizes: Sizes, *spans: Spans) -> Spans:
        a, b = spans
        joined = union(a.intervals(), b.intervals())
        either = of_intervals(*joined, sizes.keys)
        reads = _all_of(a.reads, b.reads)
        if a.residual is None and b.residual is None and either is not None:
            return either
        if either is None:  # the hull
            start, stop = joined
            last = stop.amax(-1)
            either = Spans(torch.where(stop > start, start, sizes.keys).amin(-1).clamp(max=last), last)
            reads = _all_of(reads, a.edges(), b.edges())
        return either._replace(residual=_either(a, b, sizes, self.join), reads=reads)


def _either(a: Spans, b: Spans, sizes: Sizes, join: Callable[..., Tensor]) -> Residual:
    """Two masks joined pair by pair."""
    return Joined(join, a.pairs(sizes.keys), b.pairs(sizes.keys))


def _all_of(*several: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Some tensors and others, each once."""
    found: dict[int, Tensor] = {id(tensor): tensor for tensors in several for tensor in tensors}
    return tuple(found.values())


class Not(Combined):
    """Allowed where the other mask does not allow: the complement of its intervals, or a residual."""

    meaning = "~, not: True where the other is False."
    ends = ("inner",)

    def __init__(self, mask: Mask) -> None:
        super().__init__(mask)
        self.mask = mask

    @property
    def inner(self) -> tuple[Mask, ...]:
        return (self.mask,)

    @classmethod
    def example(cls, sizes: Sizes) -> Mask:
        return cls(Between(min(1, sizes.keys), max(sizes.keys - 1, 0)))

    def join(self, *values: Any) -> Any:
        return ~values[0]

    def join_titles(self, *titles: str) -> str:
        return f"~({titles[0]})" if isinstance(self.mask, Pair) else f"~{titles[0]}"

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


class Between(Mask):
    """Every query may see the keys start ≤ j < stop. It serves the examples of `And`, `Or` and `Not`."""

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop

    @classmethod
    def example(cls, sizes: Sizes) -> Mask:
        return cls(sizes.keys // 3, sizes.keys)

    def signature(self) -> Hashable | None:
        return (type(self), self.start, self.stop)

    def title(self) -> str:
        return f"Between({self.start}, {self.stop})"

    def lower(self, sizes: Sizes) -> Spans:
        edges = torch.tensor([self.start, self.stop], device=sizes.device).clamp(0, sizes.keys)
        return Spans(edges[0].view(1, 1, 1), edges[1].view(1, 1, 1))
