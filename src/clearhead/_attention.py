"""attention(), the plan of a call, and masked_softmax()."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Never, Protocol, overload

import numpy as np
import torch
from torch import Tensor

from clearhead.base.arrays import Array, ArrayT, Integers, check_float, is_numpy, shape_of, to_tensor, to_tensor_float
from clearhead.base.errors import ClearheadError, ShapeError, columns, human_bytes
from clearhead.base.keyword_hints import raise_unknown_keywords
from clearhead.base.numbers import check_count
from clearhead.base.positions import check_align
from clearhead.base.shapes import AlignLike, broadcasts
from clearhead.base.torch_state.contexts import without_autocast
from clearhead.base.torch_state.mode import CURRENT, Mode, get_mode
from clearhead.biases.base import BiasLike
from clearhead.engines.base import Engine
from clearhead.engines.choose import as_written, choose, reasons
from clearhead.engines.operation import run
from clearhead.engines.tiled.tiles import softmax
from clearhead.masks.base import Mask, MaskLike
from clearhead.masks.dense import DenseMask
from clearhead.masks.lengths import Lengths
from clearhead.problem.layout import arrange, is_arranged
from clearhead.problem.lengths import apply_valid_lens
from clearhead.problem.problem import Problem, make_problem, with_given
from clearhead.scores.base import Score

Rows = Sequence[float] | Sequence[Sequence[float]] | Sequence[Sequence[Sequence[float]]]
LengthsLike = Mask | Integers | int | None
ScoreLike = Score | Callable[[Tensor, Tensor], Tensor] | None


def attention(
    query: ArrayT,
    key: ArrayT,
    value: ArrayT,
    *,
    score: ScoreLike = None,
    mask: MaskLike = None,
    valid_lens: Integers | None = None,
    bias: BiasLike = None,
    scale: float | None = None,
    sinks: Array | None = None,
    align: AlignLike = None,
    dropout_p: float = 0.0,
    layout: str = "BHLD",
    engine: str | Engine | None = None,
    **others: Never,
) -> ArrayT:
    """Attention, for any score and any mask, by the fastest engine that can compute it.

    >>> import torch, clearhead as ch
    >>> query, key, value = torch.rand(2, 8, 10, 64), torch.rand(2, 8, 20, 64), torch.rand(2, 8, 20, 32)
    >>> ch.attention(query, key, value, mask=ch.Lengths([15, 20])).shape
    torch.Size([2, 8, 10, 32])
    >>> ch.attention(query, key, value, valid_lens=[15, 20]).shape          # the same
    torch.Size([2, 8, 10, 32])
    >>> ch.attention(query, key, value, score=ch.Additive(64, 64, hidden_dim=16)).shape
    torch.Size([2, 8, 10, 32])

    Formula: output_i = Σ_j w_ij value_j, with w_i = softmax over the allowed keys j of score(query_i, key_j).
    A query that may see nothing gives 0.

    query (..., Lq, Eq), key (..., Lk, Ek), value (..., Lk, Ev), float32, bfloat16, float16 or float64, of two
    dimensions or more; leading dimensions broadcast. With four or more, dimension -3 is the heads, and key heads that
    divide the query heads are shared by groups of them.
    `score`: a `Score`, a function f(query_tile, key_tile), or None for `Dot()`.
    `mask`: a `Mask`, a bool tensor (True: may attend), a float tensor (added to the scores), or None.
    `valid_lens`: integers (B,) or (B, Lq), how many keys may be seen: a list, an array or a tensor; or None. Where a
    mask is given too, both hold.
    `bias`: a `Bias`, such as `ALiBi(num_heads)`, or a float tensor, added to the scores; or None.
    `scale`: a number that multiplies the scores; None is the score's own: 1/√E for `Dot()`, 1 for others. It is an
    error beside a score that was built with a scale.
    `sinks`: (H,), one logit a head, or None: one term more in the softmax's denominator, w_ij = exp(s_ij) /
    (exp(sink_h) + Σ_j exp(s_ij)), so that a query's weights sum to less than 1.
    `align`: where query 0 stands among the keys, for masks and biases that depend on positions; needed where Lq ≠ Lk:
    "upper_left" (at key 0), "lower_right" (the last query at the last key), a number, or a (B,) integer tensor.
    `dropout_p`: the probability with which a weight is set to 0; the other weights are divided by 1 − dropout_p. The
    seed is drawn from torch's generator, so `torch.manual_seed` makes the same dropout again, on every engine.
    `layout`: "BHLD", the heads before the length; "BLHD", (B, L, H, E), after it; "LHD", (L, H, E), packed sequences,
    with a mask such as `Documents.from_cu_seqlens`. The output has the same layout.
    Nested tensors (B, j, E) or (B, H, j, E), for sequences of unequal lengths j, are computed without padding: mask,
    bias, `valid_lens` and `align` are those of the padded batch, and the output is nested like the query.
    `engine`: "native", "flex", "sdpa", "triton", "tiled", "reference", an `Engine` of your own, or None for the first
    engine that takes the call: see `plan`.
    Returns the output alone, (..., Lq, Ev) of the value's dtype; NumPy arrays give a NumPy array. For the weights call
    `weights(query, key, …)`. Differentiable in all inputs.
    Raises `ClearheadError`, `ShapeError` or `UnsupportedError`; no argument is changed.
    Cost: the work of the allowed pairs; memory O(Lq + Lk), except on the engine "reference".
    Sources: Bahdanau et al. 2015; Vaswani et al. 2017, "Attention Is All You Need"; sinks: Xiao et al. 2024, "Efficient
    Streaming Language Models with Attention Sinks"; learnt sinks: OpenAI 2025, gpt-oss.
    """
    if others:
        raise_unknown_keywords("attention", attention, others)
    mask, bias = apply_valid_lens(mask, valid_lens, bias)
    back = None
    if not is_arranged(query, key, layout):
        query, key, value, mask, bias, align, back = arrange(query, key, value, mask, bias, align, layout)
    call = Arguments(query, key, value, score, mask, bias, scale, sinks, align, dropout_p, engine)
    output: ArrayT = attend_for(None, call).output
    return output if back is None else back(output)


class Arguments(NamedTuple):
    """The arguments of `attention`, or of `weights`, which has no value."""

    query: Any
    key: Any
    value: Any
    score: ScoreLike = None
    mask: Any = None
    bias: Any = None
    scale: float | None = None
    sinks: Any = None
    align: Any = None
    dropout_p: float = 0.0
    engine: str | Engine | None = None

    def problem(self, among: tuple[int, int] | None = None, by_tile: bool = False, mode: Mode = CURRENT) -> Problem:
        """The problem. For the options see `make_problem`; with `by_tile` it keeps the bias that was given."""
        query, key, value, score, mask, bias, scale, sinks, align, dropout_p, engine = self  # faster than *self[:-1]
        written = engine is not None and as_written(engine)
        problem = make_problem(
            query, key, value, score, mask, bias, scale, sinks, align, dropout_p,
            as_written=written, by_tile=by_tile, among=among, mode=mode,
        )  # fmt: skip
        return with_given(problem, bias, mask) if by_tile else problem


class Ran(Protocol):
    """The result of an edit of a call: the weights that ran are not those of the problem."""

    def later(self, numpy: bool) -> Callable[[], Any]:
        """A function that makes the weights that ran, without a graph. `numpy`: whether they give arrays."""

    def returned(self, weights: Tensor) -> Tensor:
        """A matrix of the problem's weights, (B, H, Lq, Lk) or its mean over heads, as they ran."""


class Attended(NamedTuple):
    """An output, the problem that was solved, and the result of an edit, or None. `padded`: whether the problem is that
    of the padded batch of nested sequences, whose output is packed."""

    output: Any
    problem: Problem
    ran: Ran | None = None
    padded: bool = False


def attend(call: Arguments) -> Attended:
    """Compute `attention`; give the output and the problem that it solved. `watch` replaces this function, so that code
    that has imported `attention` by name is recorded too."""
    query, key, value, engine = call.query, call.key, call.value, call.engine
    tensors = type(query) is type(key) is type(value) is Tensor
    numpy = not tensors and is_numpy(query=query, key=key, value=value)
    mode = get_mode()
    problem = call.problem(mode=mode)
    if mode.autocast:
        with without_autocast(problem.sizes.device):
            output = run(problem, choose(problem, engine), engine)
    else:  # the same without a context, at less cost
        output = run(problem, choose(problem, engine), engine)
    output = problem.sizes.restore(output)
    return Attended(output.detach().numpy() if numpy else output, problem)


def attend_for(module: Any, call: Arguments, cross: bool = False) -> Attended:
    """Compute `attend` for a module that calls it, or for None. `monitor` replaces this function to see compiled code.

    `cross`: whether the module was given another sequence for its keys than for its queries.
    """
    return attend(call)


@dataclass(frozen=True, eq=False)
class Plan:
    """The plan of a call of `attention`, made to be printed.

    `engine`: its name; `declined`: for each other engine, why it does not run; `notes`: remarks on this call.
    `pairs`: B · H · Lq · Lk; `computed`: the pairs that the engine computes, counted in its tiles; `operations` and
    `extra_bytes`: estimates for the forward pass, its work and its memory beyond inputs and output. `skipped`: the
    share of the pairs that it does not compute.
    """

    engine: str
    declined: dict[str, list[str]]
    notes: list[str]
    operations: int  # a pair: 2 a dimension of the score for a product, else 3; 2 a dimension of the value
    extra_bytes: int
    pairs: int  # B · H · Lq · Lk
    computed: int  # pairs the engine computes, counted in its tiles
    shapes: dict[str, tuple[int | str, ...]]  # "j" is the length that varies of a nested tensor

    @property
    def skipped(self) -> float:
        """The share of all pairs that is not computed."""
        return 1 - self.computed / self.pairs if self.pairs else 0.0

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {shape}" for name, shape in self.shapes.items()).replace("'", "")
        lines = [f"plan: {shapes}", f"  engine        {self.engine}"]
        for name, why in self.declined.items():
            lines += [f"  not {name.ljust(9)} {reason}" for reason in why]
        lines += [f"  note          {note}" for note in self.notes]
        lines.append(f"  operations    {self.operations:.3g}")
        lines.append(f"  extra memory  {human_bytes(self.extra_bytes)}, forward alone")
        lines.append(f"  skipped       {self.skipped:.1%} of {self.pairs:,} pairs")
        return "\n".join(lines)


def planned(call: Arguments, sides: tuple[Any, Any, Any]) -> Plan:
    """The plan of a call, with heads before the length. `sides`: query, key and value as they were given."""
    with torch.random.fork_rng(devices=[]):  # the call that follows draws the same dropout
        problem = call.problem()
    chosen = choose(problem, call.engine)
    cost = chosen.cost(problem)
    return Plan(
        engine=chosen.name,
        declined=reasons(problem, chosen, call.engine is not None),
        notes=[
            *chosen.notes(problem),
            *(call.mask._list_notes() if isinstance(call.mask, Mask) else []),
        ],
        operations=cost.pairs * _operations_a_pair(problem),
        extra_bytes=cost.bytes,
        pairs=math.prod(problem.sizes.shape),
        computed=cost.pairs,
        shapes={name: shape_of(side) for name, side in zip(("query", "key", "value"), sides, strict=True)},
    )


def _operations_a_pair(problem: Problem) -> int:
    lowered, width = problem.lowered, problem.key.shape[-1]
    a_dimension = 2 if lowered is not None and lowered.phi == "mul" else 3
    return a_dimension * width + 2 * (problem.value.shape[-1] if problem.value is not None else 0)


@overload
def masked_softmax(
    scores: Tensor, valid_lens: LengthsLike = None, *, dim: int = -1, align: AlignLike = None
) -> Tensor: ...
@overload
def masked_softmax(
    scores: np.ndarray | Rows, valid_lens: LengthsLike = None, *, dim: int = -1, align: AlignLike = None
) -> np.ndarray: ...
def masked_softmax(
    scores: Array | Rows, valid_lens: LengthsLike = None, *, dim: int = -1, align: AlignLike = None, **others: Never
) -> Array:
    """Softmax over the allowed entries; the others get exactly 0.

    >>> import torch, clearhead as ch
    >>> ch.masked_softmax(torch.zeros(2, 2, 4), [2, 3])
    tensor([[[0.5000, 0.5000, 0.0000, 0.0000],
             [0.5000, 0.5000, 0.0000, 0.0000]],
    <BLANKLINE>
            [[0.3333, 0.3333, 0.3333, 0.0000],
             [0.3333, 0.3333, 0.3333, 0.0000]]])

    Formula: w_ij = exp(s_ij) / Σ_j exp(s_ij) over the allowed j; a row with nothing allowed is all 0.

    `scores`: (..., Lq, Lk), or (Lk,), a tensor, an array or lists. `valid_lens`: one integer, integers (B,) or (B, Lq),
    or, for scores of two dimensions, (Lq,); a `Mask`, a bool tensor (True: allowed), or None for all. `dim`: the
    dimension of the keys; the lengths count along it. `align`: as for `attention`.
    Returns the scores' shape and dtype (integers give float64, in NumPy; lists are taken as NumPy).
    Raises `ClearheadError` for lengths that are no integers, negative or above Lk, and for keywords of other libraries
    (`others`), with what to pass instead. Cost: a few passes over the scores.
    """
    if others:
        raise_unknown_keywords("masked_softmax", masked_softmax, others)
    scores = listed_scores(scores)
    tensor = to_tensor_float(scores, "scores")
    check_float(tensor, "scores")
    check_count(dim, -tensor.ndim, "dim", most=tensor.ndim - 1)
    tile = tensor.movedim(dim, -1)
    align = check_align(align)
    if valid_lens is not None:
        rows = tile if tile.ndim > 1 else tile[None]
        mask = softmax_mask(valid_lens, tensor, rows, dim)
        # a mask reads only the shapes of query and key: these two have scores of this shape
        keep = mask.dense(rows[..., :1], rows.new_empty(*rows.shape[:-2], rows.shape[-1], 1), align)
        tile = tile.masked_fill(~keep.reshape(tile.shape), -torch.inf)
    weights = softmax(tile, may_be_empty=True) if tile.shape[-1] else tile
    weights = weights.movedim(-1, dim)
    return weights.detach().numpy() if isinstance(scores, np.ndarray) else weights


def listed_scores(scores: Any) -> Any:
    """Scores; lists of them are taken as NumPy."""
    if not isinstance(scores, list | tuple):
        return scores
    try:
        return np.asarray(scores)
    except (ValueError, TypeError, RuntimeError) as error:  # rows of unequal lengths; tensors with gradients
        raise ClearheadError(
            f"scores is no array: {error}. Pad its rows, and pass their valid_lens; of tensors pass "
            "torch.stack(scores)."
        ) from None


def softmax_mask(valid_lens: Any, scores: Tensor, rows: Tensor, dim: int) -> Mask:
    """`valid_lens` of `masked_softmax` as a mask for `rows`: the scores, `dim` last, of two dimensions or more."""
    if isinstance(valid_lens, Mask):
        return valid_lens
    if isinstance(valid_lens, Tensor | np.ndarray) and valid_lens.dtype in (torch.bool, np.bool_):
        keep = to_tensor(valid_lens, "valid_lens")
        if not broadcasts(keep.shape, scores.shape):
            raise ShapeError(
                f"valid_lens is a bool mask of shape {tuple(keep.shape)}, which does not broadcast to the scores, "
                f"{tuple(scores.shape)}.\n" + columns({"scores": scores.shape, "mask": keep.shape})
            )
        return DenseMask(keep.expand(scores.shape).movedim(dim, -1).reshape(rows.shape))
    lengths = Lengths(valid_lens)
    given = lengths.valid_lens
    if rows.ndim > 2 or given.ndim != 1 or len(given) == 1:
        return lengths
    return Lengths(given[None])
