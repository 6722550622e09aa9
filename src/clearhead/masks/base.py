"""The base class of masks, and their normal form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from clearhead.base.arrays import Array, mask_forms, refuse_additive
from clearhead.base.document_edges import DocumentEdges
from clearhead.base.errors import ClearheadError
from clearhead.base.numbers import check_flag
from clearhead.base.output.pictures import Axes, Style
from clearhead.base.output.text import brief, said
from clearhead.base.part_settings import PartSettings
from clearhead.base.positions import check_align
from clearhead.base.shapes import AlignLike, Sizes, array_sizes
from clearhead.base.shapes import Sides as Sides
from clearhead.base.symbolic.steps import PAIRS as PAIRS
from clearhead.base.symbolic.steps import Step
from clearhead.masks._draw import html, plot, sizes_drawn, text
from clearhead.masks._read import KEPT
from clearhead.masks._spans import Residual as Residual
from clearhead.masks._spans import Spans as Spans
from clearhead.masks._spans import all_keys as all_keys
from clearhead.masks._spans import check_spans as check_spans
from clearhead.masks._spans import map_edges as map_edges

OPERATORS: dict[str, Callable[..., Mask]] = {}  # the classes of `&`, `|` and `~`, which `combined.py` enters


class Mask(PartSettings, ABC):
    """Base class of masks: which pairs of a query and a key are allowed.

    >>> import clearhead as ch
    >>> ch.Causal() & ch.SlidingWindow(before=1)
    Causal() & SlidingWindow(before=1)
    ■ · · · · ·
    ■ ■ · · · ·
    · ■ ■ · · ·
    · · ■ ■ · ·
    · · · ■ ■ ·
    · · · · ■ ■

    A mask is True where a query may attend to a key. Masks combine with `&`, `|` and `~`. In compiled code `&` and `|`
    work; write `~` outside of compiled code, since the compiler does not support this operator for classes.

    A user-defined mask is a subclass with `lower(sizes)`, which returns its `Spans`. The spans are cached for later
    calls if the class has `signature()` or `depends()`.

    Attributes:
        positional: Whether the mask depends on the positions of the queries, and so on the `align=` of the call; False
            by default.
    """

    __array_ufunc__ = None  # makes NumPy call the mask's operators for `array & mask`
    _validators: ClassVar = {"positional": check_flag}
    positional: bool = False
    _is_pair: ClassVar[bool] = False  # whether the title needs parentheses beside an operator
    _document_edges: DocumentEdges | None = None  # the documents inside of which masks and biases beside it count

    @abstractmethod
    def lower(self, sizes: Sizes) -> Spans:
        """Return the normal form of this mask for a (B, H, Lq, Lk) matrix.

        Args:
            sizes: The sizes of the score matrix, its device, and the alignment of the call.

        Returns:
            The `Spans` of the mask, on the device of `sizes`.

        Raises:
            ClearheadError: If the mask does not fit the sizes.
        """

    def signature(self) -> Hashable | None:
        """Return a small hashable value that determines this mask, as the key of cached spans.

        Returns:
            The value; None if the mask has no such value.
        """
        return None

    def depends(self) -> tuple[Tensor, ...] | None:
        """Return the tensors that determine, together with the attributes, which pairs this mask allows.

        The spans of the mask are cached until one of these tensors is written to, or an attribute changes.

        Returns:
            The tensors; None if they are unknown, and the spans are not cached.

        Raises:
            ClearheadError: If the memory of one of the tensors was freed.
        """
        return None if self.signature() is None else ()

    def _list_notes(self) -> list[str]:
        """Return the remarks on this mask that `clearhead.plan` shows."""
        return []

    def __getstate__(self) -> dict[str, Any]:  # copies and pickles hold no caches
        return {name: value for name, value in vars(self).items() if not name.startswith(KEPT)}

    def drawn(self) -> Sizes:
        """Return the sizes at which `repr` draws this mask.

        Returns:
            The sizes. 0 queries or keys: any number shows the pattern. 1: the mask is the same along this axis.
        """
        return Sizes(1, 1, 0, 0)

    def _count_drawn_keys(self) -> int:
        """Return the least number of keys at which a picture shows the pattern of this mask."""
        return 6

    @classmethod
    def example(cls, sizes: Sizes) -> Mask:
        """Return a mask of this class that fits the sizes, for `clearhead.testing.check_mask`.

        Args:
            sizes: The sizes of the score matrix, its device, and the alignment of the call.

        Returns:
            A mask of this class.

        Raises:
            NotImplementedError: If the class does not define the method.
        """
        raise NotImplementedError(f"{cls.__name__} has no classmethod example(sizes) -> Mask; check_mask needs it.")

    def _resolve(self, sizes: Sizes) -> Spans:
        """Return the spans of `lower`, after checks of their sizes."""
        return check_spans(self.lower(sizes), sizes, f"{type(self).__name__}.lower")

    def _compute_matrix(self, sizes: Sizes) -> Tensor:
        """Compute every pair, bool, (B or 1, H or 1, Lq or 1, Lk), by the logic of the expression itself."""
        return self._compute_part(sizes, (slice(None),) * 4)

    def steps(self, sizes: Sizes, at: Sides, name: str = "mask") -> list[Step]:
        """Return the steps that compute this mask, for `clearhead.explain`.

        A class without steps of its own is shown as one step, the mask itself.

        Args:
            sizes: The sizes of the whole score matrix.
            at: Four slices of (B, H, Lq, Lk): the part to compute. An axis along which the mask repeats has size 1.
            name: The name of the last step.

        Returns:
            The steps in order; the value of the last one is the mask, bool.
        """
        why = f"{said(self, self.title)}: True where the query may attend to the key."
        return [Step(name, why, self._compute_part(sizes, at), PAIRS)]

    def _explain(self, sizes: Sizes, at: Sides, name: str = "mask") -> list[Step]:
        """Return the `steps`, or the mask alone if they end in another mask, as inherited steps may."""
        steps = self.steps(sizes, at, name)
        differ = (steps[-1].value ^ self._compute_part(sizes, at)).any()
        return Mask.steps(self, sizes, at, name) if bool(differ) else steps

    def _compute_part(self, sizes: Sizes, at: Sides) -> Tensor:
        """Compute the part at four slices, bool; an axis along which the mask repeats may have size 1."""
        return self._resolve(sizes).keep(*at, sizes.keys)

    def spans(self, query: Array | int, key: Array | int, align: AlignLike = None) -> Spans:
        """Return the normal form of this mask for a query and a key.

        Args:
            query: A tensor or array (..., Lq, Eq), of which only the shape is read, or the number Lq.
            key: A tensor or array (..., Lk, Ek), of which only the shape is read, or the number Lk.
            align: The key index of query 0, as for `attention`: "upper_left", "lower_right", an integer,
                or integers (B,).

        Returns:
            The `Spans`: `start` and `stop`, (B or 1, H or 1, Lq or 1), and the residual.

        Raises:
            ClearheadError: If the mask does not fit the sizes, or needs `align`.
        """
        return self._resolve(_sizes_of(self, query, key)._replace(align=check_align(align)))

    def dense(self, query: Array | int, key: Array | int, align: AlignLike = None) -> Tensor:
        """Return the whole mask as a bool tensor (..., Lq, Lk).

        >>> import torch, clearhead as ch
        >>> ch.Causal().dense(2, 3, align="lower_right").int()
        tensor([[1, 1, 0],
                [1, 1, 1]], dtype=torch.int32)
        >>> ch.Lengths([2, 4]).dense(3, 5).shape
        torch.Size([2, 3, 5])

        Args:
            query: A tensor or array (..., Lq, Eq), of which only the shape is read, or the number Lq. For a number the
                result has as many leading dimensions as the mask itself.
            key: A tensor or array (..., Lk, Ek), of which only the shape is read, or the number Lk.
            align: The key index of query 0, as for `attention`: "upper_left", "lower_right", an integer,
                or integers (B,).

        Returns:
            The mask, bool, True = may attend, with the leading dimensions of the inputs.

        Raises:
            ClearheadError: If the mask does not fit the sizes, or needs `align`.

        Cost:
            O(Lq · Lk) memory.
        """
        sizes = _sizes_of(self, query, key)._replace(align=check_align(align))
        return sizes.restore(dense(self._resolve(sizes), sizes))

    def __and__(self, other: Mask) -> Mask:
        return OPERATORS["&"](self, check_mask(other, "&"))

    def __or__(self, other: Mask) -> Mask:
        return OPERATORS["|"](self, check_mask(other, "|"))

    def __invert__(self) -> Mask:
        return OPERATORS["~"](self)

    def __rand__(self, other: Any) -> Mask:
        return OPERATORS["&"](check_mask(other, "&", "left"), self)

    def __ror__(self, other: Any) -> Mask:
        return OPERATORS["|"](check_mask(other, "|", "left"), self)

    def __bool__(self) -> bool:
        raise ClearheadError("A mask has no truth value; combine masks with &, | and ~ in place of and, or, not.")

    def title(self) -> str:
        """Return the expression that makes this mask.

        Returns:
            The expression as text, such as "Causal() & FirstKeys(2)".
        """
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
        """Draw the mask with matplotlib; masked pairs are hatched.

        There is one picture for each sequence and head in which the mask differs. Up to 8 queries and keys each cell
        shows 1 or 0. Above 512 queries or keys a cell is the share of its pairs that are allowed.

        Args:
            query: A tensor or array (..., Lq, Eq), or the number Lq; by default a size that shows the pattern of the
                mask.
            key: A tensor or array (..., Lk, Ek), or the number Lk; by default that of `query`.
            align: The key index of query 0, as for `attention`.
            query_labels: One label for each query, such as its token.
            key_labels: One label for each key.
            title: The title of the picture; by default the expression of the mask.
            ax: The matplotlib axes to draw one picture on; by default new axes.

        Returns:
            The axes, or an array of axes for several pictures.

        Raises:
            ClearheadError: If the mask does not fit the sizes, or `key` is given without `query`.

        Cost:
            O(Lq + Lk) memory.
        """
        if query is None and key is not None:
            raise ClearheadError("plot: key is given without query; pass both.")
        sizes = sizes_drawn(self) if query is None else _sizes_of(self, query, query if key is None else key)
        sizes = sizes._replace(align=check_align(align) if align is not None else sizes.align)
        return plot(self, sizes, (query_labels, key_labels), Style(title, ax=ax))

    def __repr__(self) -> str:
        title = said(self, self.title)
        return f"{title}\n{drawn}" if (drawn := text(self)) else title

    def _repr_html_(self) -> str:
        """Return the title and a picture, for notebooks."""
        return html(self)


MaskLike = Mask | Array | None


def _sizes_of(mask: Mask, query: Any, key: Any) -> Sizes:
    """Return the sizes of two arrays, or of two lengths with as many sequences and heads as the mask has."""
    sizes = array_sizes(query, key)
    if sizes.leading or isinstance(query, Tensor | np.ndarray):
        return sizes
    batch, heads = mask.drawn().shape[:2]
    leading = (batch, heads) if heads > 1 else (batch,) if batch > 1 else ()
    return sizes._replace(batch=batch, heads=heads, leading=leading)


def dense(spans: Spans, sizes: Sizes) -> Tensor:
    """Compute the bool matrix (B, H, Lq, Lk) of spans."""
    return spans.keep(*(slice(None),) * 4, sizes.keys).expand(sizes.shape)


def check_mask(other: Any, operator: str, side: str = "right") -> Mask:
    """Return one side of `&` or `|`; raise unless it is a mask."""
    if isinstance(other, Mask):
        return other
    if not isinstance(other, Tensor | np.ndarray):
        raise ClearheadError(
            f"The {side} side of {operator} is {brief(other)}; expected an instance of a Mask, such as Causal().\n"
            "A function of (batch, head, query_index, key_index) becomes a mask by MaskFunction(rule)."
        )
    refuse_additive(other, f"the {side} side of {operator}, tensor", "bias={}")
    raise ClearheadError(
        f"The {side} side of {operator} is a {type(other).__name__}, {other.dtype}, {tuple(other.shape)}; expected a "
        f"Mask.\n{mask_forms('tensor', other)}\nIf it is added to the scores, pass it as bias=tensor."
    )
