"""The base class of biases, their normal form, and the sum of two."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from clearhead.base.arrays import Array, is_dense, shown
from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.numbers import check_flag
from clearhead.base.output.text import said, with_outline
from clearhead.base.part_settings import PartSettings
from clearhead.base.positions import check_align
from clearhead.base.shapes import AlignLike, Sides, Sizes, array_sizes, broadcasts, extent, no_heads, part
from clearhead.base.symbolic.steps import PAIRS, Step, made
from clearhead.base.torch_state.mode import get_mode
from clearhead.base.torch_state.modules import after_hooks, settled
from clearhead.base.user_functions.rules import Joined, as_part

Part = Callable[[slice, slice, slice, slice], Tensor]


@with_outline
class Added(NamedTuple):
    """The normal form of a bias: the numbers that are added to the scores of pairs, after the softcap.

    >>> import torch, clearhead as ch
    >>> class Later(ch.extend.Bias):
    ...     def lower(self, sizes):
    ...         return ch.extend.Added(dense=torch.arange(float(sizes.keys), device=sizes.device).view(1, 1, 1, -1))
    >>> Later()(torch.zeros(1, 4), torch.zeros(3, 4))
    tensor([[0., 1., 2.]])

    `dense`: (B or 1, H or 1, Lq or 1, Lk or 1), one number a pair. `relative`: (B or 1, H or 1, Lq + Lk − 1), one
    number a distance: its entry j − i + Lq − 1 is added to the pair (i, j). It takes O(L) memory, and serves a bias
    that depends on the distance alone. `function(batch, heads, queries, keys)`, four slices, gives that part of the
    bias, a floating-point tensor of four dimensions that broadcasts to it; `reads` are the caller's tensors that it
    reads. Where several are given, all are added. `given`: the bias that has this normal form, where an explanation may
    ask for its steps.
    """

    dense: Tensor | None = None
    relative: Tensor | None = None
    function: Part | None = None
    reads: tuple[Tensor, ...] = ()
    given: Bias | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for t in (self.dense, self.relative) if t is not None)

    def plus(self, other: Added) -> Added:
        """The normal form of the sum, in float32 at least."""
        dense, relative = (_sum(a, b) for a, b in zip(self[:2], other[:2], strict=True))
        functions = [added.function for added in (self, other) if added.function is not None]
        one = functions[0] if functions else None
        function = Joined(lambda a, b: wide(a) + wide(b), *functions) if len(functions) > 1 else one
        return Added(dense, relative, function, (*self.reads, *other.reads))

    def tile(self, batch: slice, heads: slice, queries: slice, keys: slice, sizes: Sizes) -> Tensor:
        """The part of the bias that these slices name; it broadcasts to that part of the scores."""
        dense = None if self.dense is None else part(self.dense, batch, heads, queries, keys)
        if self.function is not None:
            dense = _sum(self.function(batch, heads, queries, keys), dense)
        if self.relative is None:
            assert dense is not None
            return dense
        along = part(self.relative, batch, heads)
        top, bottom, row_step = extent(queries, sizes.queries)
        left, right, column_step = extent(keys, sizes.keys)
        if bottom <= top or right <= left:
            count = [len(range(*ends)) for ends in ((top, bottom, row_step), (left, right, column_step))]
            spread = along.new_zeros(*along.shape[:2], *count)
        else:
            # row i is a window of the distances, and the window of the row after it begins one distance earlier
            every = along[..., sizes.queries - bottom + left : sizes.queries - top + right - 1]
            spread = every.unfold(-1, right - left, 1).flip(-2)[..., ::row_step, ::column_step]
        return spread if dense is None else wide(spread) + wide(dense)


def check_added(added: Any, sizes: Sizes, who: str) -> Added:
    """The normal form that `who` gave, such as a bias's `lower`, its sizes checked, since engines rely on them. Its
    function's results are checked at each call."""
    if not isinstance(added, Added) or not (added.tensors or added.function is not None):
        raise ClearheadError(
            f"{who} gave a {type(added).__name__}; expected Added(dense=...), one number a pair, "
            "Added(relative=...), one a distance, or Added(function=...)."
        )
    distances = max(sizes.queries + sizes.keys - 1, 0)
    for name, expected in (("dense", sizes.shape), ("relative", (sizes.batch, sizes.heads, distances))):
        tensor = getattr(added, name)
        if tensor is None:
            continue
        fits = is_dense(tensor) and tensor.ndim == len(expected) and broadcasts(tensor.shape, expected)
        fits = fits and (name == "dense" or tensor.shape[-1] == distances)
        if not fits or not tensor.is_floating_point() or tensor.device != sizes.device:
            legend = "(B, H, Lq, Lk)" if name == "dense" else "(B, H, Lq + Lk − 1)"
            raise ShapeError(
                f"{who} gave {name} {shown(tensor)}; expected floating-point numbers on {sizes.device} that broadcast "
                f"to {legend} = {expected}."
            )
    if added.function is None or get_mode().compiled or getattr(added.function, "func", None) is _checked_part:
        return added
    return added._replace(function=partial(_checked_part, added.function, sizes, who))


def _checked_part(function: Part, sizes: Sizes, who: str, *sides: slice) -> Tensor:
    """A part of a bias's function, checked: floating-point numbers of four dimensions that broadcast to it."""
    asked = [len(range(size)[side]) for size, side in zip(sizes.shape, sides, strict=True)]
    return as_part(function(*sides), asked, sizes.device, f"{who}: its function")


class Bias(PartSettings, nn.Module, ABC):
    """A bias is added to the scores, after scale and softcap. Biases combine with `+`.

    >>> import torch, clearhead as ch
    >>> x = torch.rand(1, 8, 10, 16)
    >>> ch.attention(x, x, x, bias=ch.ALiBi(8) + ch.DenseBias(torch.zeros(10, 10))).shape
    torch.Size([1, 8, 10, 16])

    A bias of your own is a subclass with `lower(sizes)`, which gives its normal form, `Added`. Called as
    `bias(query, key)` it gives the whole of it, (..., Lq, Lk).
    """

    __array_ufunc__ = None  # so that NumPy's arrays leave + to the bias
    _validators: ClassVar = {"positional": check_flag}
    positional: bool = False  # whether it depends on where a query stands, and so on the call's alignment

    @abstractmethod
    def lower(self, sizes: Sizes) -> Added:
        """The normal form for a (B, H, Lq, Lk) matrix. Raises a `ClearheadError` where the bias does not fit it."""

    def steps(self, sizes: Sizes, at: Sides, name: str = "bias") -> list[Step]:
        """How this bias comes to its numbers, for `clearhead.explain`; the last step is the bias.

        `at`: four slices of (B, H, Lq, Lk), the part that is asked for; an axis along which the bias repeats has size
        1. `name`: the name of the last step. A bias that has no steps of its own is shown as it is.
        """
        return numbers_alone(name, wide(self._compute_part(sizes, at)))

    def _explain(self, sizes: Sizes, at: Sides, name: str = "bias") -> list[Step]:
        """Its `steps`, or its numbers alone where they end in other numbers, as steps of a parent class may."""
        steps, numbers = self.steps(sizes, at, name), self._compute_part(sizes, at)
        return steps if ends_in(steps, numbers) else numbers_alone(name, wide(numbers))

    def _compute_part(self, sizes: Sizes, at: Sides) -> Tensor:
        """The numbers of the part that four slices name; an axis along which the bias repeats may have size 1."""
        tile = _checked(settled(self), sizes).tile(*at, sizes)
        return tile.reshape((1,) * (4 - tile.ndim) + tuple(tile.shape))

    @classmethod
    def example(cls, sizes: Sizes) -> Bias:
        """A bias to try this class with, that fits these sizes: `clearhead.testing.check_bias` calls it."""
        raise NotImplementedError(f"{cls.__name__} needs a classmethod example(sizes) -> Bias, to be checked with.")

    def forward(self, query: Array | int, key: Array | int, align: AlignLike = None) -> Tensor:
        """The bias of every pair, (..., Lq, Lk), with the inputs' leading dimensions. O(Lq · Lk) memory.

        >>> import torch, clearhead as ch
        >>> (ch.ALiBi(1)(torch.zeros(3, 4), torch.zeros(3, 4)) * 256).int()
        tensor([[ 0, -1, -2],
                [-1,  0, -1],
                [-2, -1,  0]], dtype=torch.int32)
        """
        sizes = array_sizes(query, key)._replace(align=check_align(align))
        return sizes.restore(self._compute_part(sizes, (slice(None),) * 4).expand(sizes.shape))

    if TYPE_CHECKING:  # torch declares a call of anything
        __call__ = forward

    def __repr__(self) -> str:
        return said(self, super().__repr__)

    def __add__(self, other: Bias) -> Bias:
        return Sum(self, _check_bias(other, "right"))

    def __radd__(self, other: Any) -> Bias:
        if isinstance(other, int) and other == 0:  # sum() begins with 0
            return self
        return Sum(_check_bias(other, "left"), self)


BiasLike = Bias | Array | None


def check_heads(bias: Bias, heads: int, sizes: Sizes) -> None:
    """Raise where a bias of so many heads is added to the scores of another number."""
    if sizes.heads != heads:
        name, shape = type(bias).__name__, (*sizes.shown, sizes.queries, sizes.keys)
        raise ShapeError(
            f"{name} has {heads} heads and the scores have {sizes.heads}, {shape}; pass {name}({sizes.heads})."
            + no_heads(sizes)
        )


def lowered(bias: Bias, sizes: Sizes) -> Added:
    """A bias's normal form, checked. Its forward pre-hooks are run first, with the sizes as their input."""
    return _checked(after_hooks(bias, sizes), sizes)


def _checked(bias: Bias, sizes: Sizes) -> Added:
    return check_added(bias.lower(sizes), sizes, f"{type(bias).__name__}.lower")


def _check_bias(other: Any, side: str) -> Bias:
    if isinstance(other, Bias):
        return other
    raise ClearheadError(
        f"+ joins two biases; the {side} one is a {type(other).__name__}. Wrap a tensor in DenseBias(tensor)."
    )


class Sum(Bias):
    """Two biases, both added."""

    def __init__(self, left: Bias, right: Bias) -> None:
        super().__init__()
        self.left, self.right = left, right
        self.positional = left.positional or right.positional

    @classmethod
    def example(cls, sizes: Sizes) -> Bias:
        return cls(Far(0.3), Far(0.1))

    def steps(self, sizes: Sizes, at: Sides, name: str = "bias") -> list[Step]:
        left = self.left._explain(sizes, at, f"{name}_left")
        right = self.right._explain(sizes, at, f"{name}_right")
        both = made(name, "Both are added. An axis of size 1 is repeated.", left[-1] + right[-1], PAIRS)
        return [*left, *right, both]

    def lower(self, sizes: Sizes) -> Added:
        return lowered(self.left, sizes).plus(lowered(self.right, sizes))


class Far(Bias):
    """The index of the diagonal, times a learnable number. It serves the example of `Sum`."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(slope))

    @classmethod
    def example(cls, sizes: Sizes) -> Bias:
        return cls(0.2)

    def lower(self, sizes: Sizes) -> Added:
        far = torch.arange(max(sizes.queries + sizes.keys - 1, 0), device=sizes.device) - sizes.keys
        return Added(relative=(self.slope * far.to(self.slope.dtype)).view(1, 1, -1))


def distances(sizes: Sizes, offset: int | Tensor) -> Tensor:
    """Key position less query position at each place of `Added.relative`: int64 (B or 1, Lq + Lk − 1). `offset` is the
    position of query 0, as `query_offset` gives it."""
    count = max(sizes.queries + sizes.keys - 1, 0)
    apart = torch.arange(count, device=sizes.device)[None] - (sizes.queries - 1)
    return apart - (offset.view(-1, 1) if isinstance(offset, Tensor) else offset)


def ends_in(steps: list[Step], numbers: Tensor) -> bool:
    """Whether the last step has these numbers, but for rounding; an axis along which it repeats may have size 1."""
    found = steps[-1].value.detach().to(numbers.dtype)
    fits = found.ndim == 4 and broadcasts(found.shape, numbers.shape)
    return fits and torch.allclose(found.expand_as(numbers), numbers, rtol=1e-5, atol=1e-6, equal_nan=True)


def numbers_alone(name: str, numbers: Tensor) -> list[Step]:
    """A bias as it is, without steps."""
    why = "One number for each pair, which does not depend on the vectors."
    return [Step(name, why, numbers.reshape((1,) * (4 - numbers.ndim) + tuple(numbers.shape)), PAIRS)]


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else wide(one) + wide(other)


def wide(learnt: Tensor) -> Tensor:
    """The numbers in float32 at least, so that a sum, or a gradient over many distances, is rounded once."""
    return learnt if learnt.dtype == torch.float64 else learnt.float()
