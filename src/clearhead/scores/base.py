"""The base class of scores, and scores that have no normal form."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, cast

import numpy as np
import torch
from torch import Tensor, nn

from clearhead.base.arrays import ArrayT, accumulated, check_float, check_memory, is_dense, shown, to_tensor_float
from clearhead.base.errors import ClearheadError, ShapeError, UnsupportedError, columns
from clearhead.base.kept import Memo
from clearhead.base.numbers import check_count, check_flag, check_positive
from clearhead.base.output.text import brief, said, with_outline
from clearhead.base.part_settings import PartSettings, validate_softcap
from clearhead.base.shapes import as_inputs
from clearhead.base.symbolic.steps import Step
from clearhead.base.torch_state.contexts import is_cast_together
from clearhead.base.torch_state.mode import get_mode
from clearhead.base.torch_state.modules import settled, with_parameters
from clearhead.base.user_functions.rules import as_part, check_tensors, indices_of
from clearhead.base.user_functions.single_pairs import call_rule, must_ask_again, reads_rows
from clearhead.scores._pairwise import Pairwise as Pairwise
from clearhead.scores._pairwise import check_pairwise as check_pairwise

ChangeOfPair = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
SCORES = ("B", "H", "Lq", "Lk")  # the axes of the scores, as a step names them


@with_outline
class ByTile(NamedTuple):
    """Scores that have no other form than their `tile`: s_ij = change(softcap(scale · tile_ij), b, h, i, j).

    `change` is the score's `changed_by`, where it has one. `places`: the sequences, heads, queries and keys of the
    whole that these are; None where they are the whole. `memo`: what engines have made of the change.
    """

    score: Score
    query: Tensor  # (B, H, Lq, Eq)
    key: Tensor  # (B, Hk, Lk, Ek)
    scale: float = 1.0
    softcap: float | None = None
    places: tuple[range, ...] | None = None
    memo: Memo | None = None


class Score(PartSettings, nn.Module, ABC):
    """The score of a query and a key. A score of your own is a subclass with `tile()`, which serves every use.

    >>> import torch, clearhead as ch
    >>> class Manhattan(ch.extend.Score):
    ...     def tile(self, query, key):
    ...         return -(query.unsqueeze(-2) - key.unsqueeze(-3)).abs().sum(-1)
    >>> ch.attention(torch.rand(3, 2), torch.rand(5, 2), torch.rand(5, 4), score=Manhattan()).shape
    torch.Size([3, 4])

    The score of a pair may depend on that query and that key alone: the engines compute any part of the matrix.
    Cost of `tile()` alone: PyTorch's operations, twice in a training step; a product trains in about three times the
    time that it takes with `lower()`.
    `lower()`, where a score has it, rewrites it in the normal form that the fused kernels take. It must preserve the
    scores themselves, not only their softmax. Both give scores before the call's scale and before the softcap: s_ij =
    softcap(scale · tile_ij) with softcap(s) = c · tanh(s / c). A score sets its softcap by
    `super().__init__(softcap=c)`, or as an attribute of its class. A function that also sees where a pair stands comes
    after these: see `then`.
    Source of the softcap: Gemma Team 2024, "Gemma 2".
    """

    _validators: ClassVar = {"softcap": validate_softcap, "product": check_flag}
    softcap: float | None = None
    product: ClassVar[bool] = False  # whether `tile` makes one number a pair, as a product of matrices does

    def __init__(self, *, softcap: float | None = None) -> None:
        super().__init__()
        if softcap is not None:  # else it is that of the class
            self.softcap = check_positive(softcap, "softcap")
        self.changed_by: ChangeOfPair | None = None
        self._reads: tuple[Tensor, ...] = ()  # the tensors that functions read and whose names do not show them
        self._by_rows: bool | None = False  # whether `changed_by` reads rows: see `reads_rows`

    def then(self, change: ChangeOfPair, reads: Sequence[Tensor] = ()) -> Self:
        """The same score, changed by a function that sees where each pair stands.

        >>> import torch, clearhead as ch
        >>> nearer = ch.Dot().then(lambda score, batch, head, i, j: score / (1 + (i - j).abs()))
        >>> nearer(torch.ones(3, 4), torch.ones(3, 4))
        tensor([[2.0000, 1.0000, 0.6667],
                [1.0000, 2.0000, 1.0000],
                [0.6667, 1.0000, 2.0000]])

        Formula: s_ij = change(softcap(scale · tile_ij), b, h, i, j) for query i of head h of sequence b and key j; a
        bias is added after it, and the mask comes last.
        `change(score, batch, head, query_index, key_index)` is the `score_mod` of FlexAttention. It is called on scores
        (B, H, Lq, Lk), float32 at least, and on int64 indices of shapes (B, 1, 1, 1), (1, H, 1, 1), (1, 1, Lq, 1) and
        (1, 1, 1, Lk), for any part of the matrix, and gives floating-point numbers that broadcast to the scores. The
        result for a pair may depend on that pair alone: a function that mixes heads ("talking heads") or keys is given
        parts of them. It is called again in the backward pass, and must give the same numbers then:
        `clearhead.testing.check_score(score)` finds a function that does not.
        It may be a module, whose parameters this score then lists, or read a parameter; both get gradients. `reads`:
        the tensors that it reads; most are found without it, as for `MaskFunction`. A tensor that requires grad and is
        not found is an error. A second `then` is applied to the result of the first.
        A function that reads a row of a table, `score + torch.dot(p[i], p[j])`, is mapped over the pairs by
        `torch.vmap`; to find out, the function is tried on a few pairs when it is given.
        Indices are counted from 0 for queries and keys alike: where Lq ≠ Lk, the function places the queries itself.
        Beside a `KeyValueCache` of a module, query_index counts the keys that the cache held before the call too.
        Beside `Documents.from_cu_seqlens` batch is the document, and both indices count inside it.
        Returns a score over the same parameters; this one is not changed. Raises a `ClearheadError` where the function
        does not take five arguments, and, when it is called, where it gives anything else.
        Cost: `clearhead.plan` says which engine takes it: "tiled" and "reference" do, and "flex" after a dot product,
        in its kernel, as it takes a `BiasFunction`. Memory O(Lq + Lk).
        Source: Dong et al. 2024, "Flex Attention".
        """
        if not fits_signature(change, 5):
            raise ClearheadError(
                "then takes a function f(score, batch, head, query_index, key_index), which gives the changed scores; "
                f"got {brief(change)}.\nA function of query and key is a score of its own, score=f; a function of the "
                "four indices is a bias, bias=BiasFunction(f)."
            )
        copied = with_parameters(self, lambda p: p, every=True)
        copied._reads = (*self._reads, *check_tensors(reads, "then"))
        copied.changed_by = change if self.changed_by is None else OneThenOther(self.changed_by, change)
        copied._by_rows = reads_rows(copied.changed_by, of_score=True)
        return copied

    @abstractmethod
    def tile(self, query: Tensor, key: Tensor) -> Tensor:
        """Scores of a part, before scale and softcap: (..., Lq, Eq) and (..., Lk, Ek) give (..., Lq, Lk)."""

    def _default_scale(self, width: int) -> float:
        """The scale where a call gives none, for queries of this width."""
        return 1.0

    def _scale_argument(self) -> str | None:
        """The argument that set this score's own scale, beside which a call gives no scale; None if none did."""
        return None

    def lower(self, query: Tensor, key: Tensor) -> Pairwise | None:
        """The normal form over query (B, H, Lq, Eq) and key (B, Hk, Lk, Ek), or None if there is none."""
        return None

    def steps(self, query: Step, key: Step) -> list[Step]:
        """How `tile` comes to its scores, for `clearhead.explain`; the last step is the `scores`, (B, H, Lq, Lk).

        The steps `query` (B, H, Lq, Eq) and `key` (B, H, Lk, Ek) are given; each further step is a line over earlier
        steps, `made("scores", "Why.", query @ key.mT)`. A score without steps of its own is shown as one step.
        """
        why = "One number for each query and key, computed by this score, which shows no steps of its own."
        tile = checked_tile(self, query.value, key.value)
        return [Step("scores", why, tile, SCORES, formula=f"scores = {type(self).__name__}(query, key)")]

    def _explain(self, query: Step, key: Step) -> list[Step]:
        """Its `steps`, or one step where they end in other numbers than `tile`, as steps of a parent class may."""
        steps, tile = self.steps(query, key), checked_tile(self, query.value, key.value)
        found = steps[-1].value
        if found.shape == tile.shape and torch.allclose(found.to(tile), tile, rtol=1e-4, atol=1e-5, equal_nan=True):
            return steps
        return Score.steps(self, query, key)

    def check(self, query: Tensor, key: Tensor) -> None:
        """Raise a `ClearheadError` for widths or dtypes this score cannot take."""
        for name, parameter in self.named_parameters():
            check_memory(parameter, f"the score's parameter {name}")
            one = parameter.dtype == query.dtype or is_cast_together(query.device, parameter.dtype, query.dtype)
            if not one or parameter.device != query.device:
                raise ClearheadError(
                    f"the score's parameter {name} is {parameter.dtype} on {parameter.device}, and the query is "
                    f"{query.dtype} on {query.device}.\nPass score.to({query.dtype}), or query and key like it."
                )

    @classmethod
    def example(cls) -> tuple[Score, int, int]:
        """A score to try this class with, and the widths (Eq, Ek) it takes."""
        return cls(), 4, 4

    def __repr__(self) -> str:
        return said(self, super().__repr__)

    def extra_repr(self) -> str:
        return self._format_options()

    def _format_options(self, *parts: str) -> str:
        """The text of this score in `repr`, its softcap and its change included."""
        more = () if self.softcap is None else (f"softcap={self.softcap}",)
        then = () if self.changed_by is None else (f"then={name_of(self.changed_by)}",)
        return ", ".join((*parts, *more, *then))

    def forward(self, query: ArrayT, key: ArrayT) -> ArrayT:
        """The scores (..., Lq, Lk), before any mask or bias, float32 at least; key heads are grouped.

        NumPy in, NumPy out. Makes the whole matrix: for long inputs see `clearhead.weights(...).scores(index)`.
        """
        queries, keys, _, sizes = as_inputs(to_tensor_float(query, "query"), to_tensor_float(key, "key"), None)
        self.check(queries, keys)
        keys = keys.repeat_interleave(sizes.heads // keys.shape[1], dim=1)
        problem = ByTile(settled(self), queries, keys, self._default_scale(queries.shape[-1]), self.softcap)
        scores: Any = sizes.restore(by_tile(problem))
        return cast(ArrayT, scores.detach().numpy() if isinstance(query, np.ndarray) else scores)

    if TYPE_CHECKING:  # torch declares a call of anything
        __call__ = forward


def capped(tile: Tensor, softcap: float | None) -> Tensor:
    """Scores bounded by the softcap, if there is one."""
    return tile if softcap is None else softcap * torch.tanh(tile / softcap)


def by_tile(scores: ByTile) -> Tensor:
    """The scores of every pair, by the score's own `tile`, over key heads that are repeated."""
    tile = checked_tile(scores.score, scores.query, scores.key)
    tile = capped(tile if scores.scale == 1.0 else tile * scores.scale, scores.softcap)
    return tile if scores.score.changed_by is None else changed(scores, tile)


def changed(scores: ByTile, tile: Tensor) -> Tensor:
    """Scores (B, H, Lq, Lk) after the score's `change`, whose result is checked: it is a user's function."""
    score, dtype = scores.score, tile.dtype
    if scores.query.dtype != dtype:
        score = with_parameters(score, lambda p: p.to(dtype))
    assert score.changed_by is not None
    places = scores.places
    extents = [(0, size, 1) for size in tile.shape] if places is None else [(p.start, p.stop, p.step) for p in places]
    indices = indices_of(extents, tile.device)
    title = f"{type(score).__name__}.then({name_of(score.changed_by)})"
    if must_ask_again(score._by_rows):
        score._by_rows = scores.score._by_rows = reads_rows(score.changed_by, True, tile.device)
    try:
        found = call_rule(score.changed_by, score._by_rows, tile, *indices)
    except UnsupportedError:  # it says what to write
        raise
    except Exception as error:
        raise ClearheadError(
            f"{title} failed on scores {tuple(tile.shape)}: {type(error).__name__}: {error}\n"
            f"It is called with scores and four index tensors, (batch, head, query_index, key_index), of shapes "
            f"{[tuple(index.shape) for index in indices]}, for any part of the matrix; it computes with them as they "
            "come: torch.where(condition, a, b) in place of if, and no mixing of heads or keys."
        ) from error
    return as_part(found, tile.shape, tile.device, title).to(dtype).expand(tile.shape)


class OneThenOther(nn.Module):
    """Two changes of scores, one after the other."""

    def __init__(self, one: ChangeOfPair, other: ChangeOfPair) -> None:
        super().__init__()
        self.one, self.other = one, other
        self.__name__ = f"{name_of(one)}, {name_of(other)}"

    def forward(self, score: Tensor, batch: Tensor, head: Tensor, query_index: Tensor, key_index: Tensor) -> Tensor:
        indices = batch, head, query_index, key_index
        return self.other(self.one(score, *indices), *indices)


def name_of(change: Callable[..., Any]) -> str:
    return str(getattr(change, "__name__", type(change).__name__))


def fits_signature(function: Any, count: int) -> bool:
    """Whether a function takes so many arguments, or its signature is not known."""
    if get_mode().compiled:  # compiled code cannot read signatures
        return True
    try:
        inspect.signature(function).bind(*[None] * count)
    except (TypeError, ValueError) as error:
        return isinstance(error, ValueError)  # a callable without a signature
    return True


def checked_tile(score: Score, query: Tensor, key: Tensor) -> Tensor:
    """`score.tile` in float32 at least, its result checked: a user's score may be wrong."""
    dtype = accumulated(query.dtype)
    if query.dtype == dtype:
        tile = score.tile(query, key)
    else:
        tile = with_parameters(score, lambda p: p.to(dtype)).tile(query.to(dtype), key.to(dtype))
    expected = (*query.shape[:-1], key.shape[-2])
    floats = is_dense(tile) and tile.is_floating_point()
    if not floats or tile.shape != expected or tile.device != query.device:
        raise ShapeError(
            f"{type(score).__name__}.tile gave {shown(tile)} for query {tuple(query.shape)} and key "
            f"{tuple(key.shape)}; expected floating-point numbers {expected} on {query.device}: one score for each "
            "query and key, over any leading dimensions."
        )
    return tile.to(dtype)


def check_width(score: Score, tensor: Tensor, width: int, name: str) -> None:
    if tensor.shape[-1] != width:
        raise ShapeError(
            f"{name} has width {tensor.shape[-1]}, shape {tuple(tensor.shape)}; {score} takes one of "
            f"width {width}.\nBuild the score with {name}_dim={tensor.shape[-1]}, or project the {name} first."
        )


def check_equal_width(score: Score, query: Tensor, key: Tensor) -> None:
    """Raise where a score that compares vectors is given two widths."""
    if query.shape[-1] != key.shape[-1]:
        widths = f"query_dim={query.shape[-1]}, key_dim={key.shape[-1]}"
        turned = ""
        if query.shape[-2] == key.shape[-1]:
            turned = "If each query is a column, pass query.mT. If the widths differ by intent:\n"
        # without the dimensions of size 1 that were added
        shown = [i for i in range(4) if i > 1 or query.shape[i] != 1 or key.shape[i] != 1]
        raise ShapeError(
            f"{type(score).__name__} needs query and key of one width E, and they differ.\n"
            + columns({name: [t.shape[i] for i in shown] for name, t in (("query", query), ("key", key))}, -1)
            + f"\n{turned}Pass score=Bilinear({widths}) or Additive({widths}, hidden_dim=...), which take two widths."
        )


def given_parameter(weight: Any, name: str, ndim: int) -> nn.Parameter:
    """A parameter from given weights: a Parameter is shared, other arrays are copied."""
    if isinstance(weight, nn.Parameter):
        parameter = weight
    else:
        tensor = to_tensor_float(weight, name).detach().clone()
        parameter = nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
    check_float(parameter, name)
    row = ndim == 1 and parameter.ndim == 2 and parameter.shape[0] == 1  # the weight of an nn.Linear of one output
    if parameter.ndim != ndim and not row:
        expected = {1: "one dimension", 2: "(out, in), as nn.Linear has it"}[ndim]
        raise ShapeError(f"{name} has shape {tuple(parameter.shape)}; expected {expected}.")
    return parameter


def linear_weight(out: int, width: int, device: Any, dtype: torch.dtype | None) -> nn.Parameter:
    """A fresh (out, in) weight, initialised as nn.Linear does."""
    out, width = check_count(out, 1, "a score's size"), check_count(width, 1, "a score's size")
    weight = nn.Parameter(torch.empty(out, width, device=device, dtype=dtype))
    draw_linear(weight)
    return weight


def draw_linear(weight: nn.Parameter | None) -> None:
    """Draw a weight (out, in), or (in,), as nn.Linear does."""
    if weight is not None:
        bound = weight.shape[-1] ** -0.5
        nn.init.uniform_(weight, -bound, bound)
