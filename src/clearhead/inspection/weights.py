"""The lazy matrix of the weights, and weights(), which makes it of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Never, TypeVar, cast, overload

import numpy as np
import torch
from torch import Tensor

from clearhead._attention import Arguments, ScoreLike
from clearhead.base.arrays import Array, ArrayT, Integers, accumulated, check_float, is_numpy, to_tensor_float
from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.keyword_hints import raise_unknown_keywords
from clearhead.base.output.pictures import Axes, Colormap, Side, Style, check_style, draw
from clearhead.base.shapes import AlignLike, Sizes, refuse_fakes
from clearhead.base.torch_state.contexts import without_autocast
from clearhead.biases.base import BiasLike
from clearhead.engines.base import Engine
from clearhead.engines.choose import choose
from clearhead.engines.operation import run
from clearhead.engines.summarised import summarised
from clearhead.engines.tiled import tiles
from clearhead.engines.tiled.look import Look
from clearhead.engines.tiled.statistics import looks
from clearhead.inspection import plot
from clearhead.inspection.gradients import WeightGradients
from clearhead.inspection.index import Heads, parse
from clearhead.inspection.matrix import Index, LazyMatrix
from clearhead.inspection.reductions.base import Reduction
from clearhead.inspection.reductions.by_query import Entropy, Output, TopK
from clearhead.inspection.reductions.over_queries import Pool, Received
from clearhead.inspection.source import DerivedSource, FromCall, Source, shown
from clearhead.inspection.stream import stream
from clearhead.masks.base import MaskLike
from clearhead.problem.checked import checked_from
from clearhead.problem.guard import guard, zero_unseen
from clearhead.problem.layout import arrange, is_arranged
from clearhead.problem.lengths import apply_valid_lens
from clearhead.problem.packing import operands, with_operands
from clearhead.problem.partial import log_sum_exp, rows_of
from clearhead.problem.problem import Problem
from clearhead.problem.region import Region
from clearhead.problem.regions import cut
from clearhead.problem.summary import Summary
from clearhead.problem.visible import finite_unseen

R1 = TypeVar("R1")
R2 = TypeVar("R2")
R3 = TypeVar("R3")
R4 = TypeVar("R4")


class Weights(LazyMatrix[ArrayT]):
    """The attention weights as a matrix that is computed where it is looked at. `clearhead.weights` makes it.

    >>> import torch, clearhead as ch
    >>> w = ch.weights(torch.rand(2, 8, 50, 16), torch.rand(2, 8, 50, 16), mask=ch.Causal())
    >>> w.shape
    torch.Size([2, 8, 50, 50])
    >>> w[0, 3, 17].shape                        # one exact row
    torch.Size([50])
    >>> w[0, 3].entropy().shape, w[0, 3].dense().shape             # one head, lazy too
    (torch.Size([50]), torch.Size([50, 50]))
    >>> w.entropy().shape, w.received().shape, w.pool(10).shape
    (torch.Size([2, 8, 50]), torch.Size([2, 8, 50]), torch.Size([2, 8, 10, 10]))
    >>> (w @ torch.rand(2, 8, 50, 4)).shape
    torch.Size([2, 8, 50, 4])

    `w[index]` is a part as a tensor, and `w[:]` the whole, up to 256 MiB. Numbers for leading dimensions alone, such as
    `w[0]`, `w[0, 3]` and `w[:, 3]`, give a lazy matrix of these heads, with all that is here; `w[0, 3].dense()` is its
    tensor. `sum`, `mean`, `max`, `min`, `amax`, `amin`, `argmax` and `argmin` are those of `w[:]` in O(Lq + Lk) memory.
    Any other operator or function of PyTorch or NumPy, such as `w * 2` or `torch.stack([w, w])`, is given `w[:]`; other
    methods of tensors are written `w[:].sort(-1)`.

    Weights are float32, or float64 for float64 inputs; NumPy where the inputs were NumPy. `w[index]`, `scores`,
    `w @ value` and the reductions are differentiable (but for maxima of cells, and the keys of `topk`). It takes
    O(Lq + Lk) memory beside the result. A reduction takes the time of the allowed pairs, an index the time of its rows.
    """

    _instead = "Index the part you need (w[..., -1, :]), use pool(), topk() or entropy()"

    def __init__(self, source: Source, engine: str | Engine | None = None) -> None:
        self._source, self._asked = source, engine
        self._known: dict[str, Any] = {}  # results that have been computed for the source's problem
        problem = self.problem
        self._sizes, self._dtype = problem.sizes, accumulated(problem.query.dtype)
        if engine is not None:
            choose(problem, engine)  # raises where it refuses; without a name, one engine always can

    @property
    def problem(self) -> Problem:
        """The normal form: projected query and key, spans and bias, from which the weights are computed.

        It is the source's problem as it is now; results for an earlier problem are forgotten.
        """
        given = self._source.problem()
        if self._known.get("given") is not given:
            self._known = {"given": given, "problem": checked_from(self._source, given, "problem")}
        return cast(Problem, self._known["problem"])

    def _with_value(self, value: Any) -> Problem:
        return checked_from(self._source, self._source.with_value(value), "with_value")

    def _engine(self, problem: Problem) -> Engine:
        """The engine for this use, which may be another one inside a transform."""
        return choose(problem if problem.value is None else problem._replace(value=None), self._asked)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def _head(self) -> str:
        problem, options = self.problem, self._source.said()
        said = "".join(f", {name}={shown(value)}" for name, value in options.items() if value is not None)
        return f"Weights({tuple(self.shape)}, {self.dtype}, engine={self._engine(problem).name!r}{said})"

    def __getstate__(self) -> dict[str, Any]:  # copies and pickles compute anew
        return self.__dict__ | {"_known": {}}

    @property
    def _guarded(self) -> Problem:
        problem = self.problem
        if "guarded" not in self._known:
            self._known["guarded"] = guard(problem)
        return cast(Problem, self._known["guarded"])

    @property
    def _finite_unseen(self) -> Problem:
        """The problem with finite numbers where no query sees a key, for raw scores."""
        problem = self.problem
        if "finite unseen" not in self._known:
            visible = problem.visible
            is_finite = visible is None or finite_unseen(visible, problem.query, problem.key)
            self._known["finite unseen"] = problem if is_finite else zero_unseen(problem, only_not_finite=True)
        return cast(Problem, self._known["finite unseen"])

    def _of_heads(self, heads: Heads) -> Weights[ArrayT]:
        return type(self)(DerivedSource(self._source, heads.of), self._asked)

    def scores(self, index: Index = ...) -> ArrayT:
        """The raw scores at an index, before mask and bias: `score(query, key)[index]`."""
        whole = self._finite_unseen

        def tile(batch: slice, heads: slice, queries: slice, keys: slice) -> Tensor:
            with without_autocast(whole.sizes.device):
                return tiles.raw_scores(cut(whole, Region(batch, heads, queries, keys, masked=False)))

        return self._out(self._part(parse(index, self.shape, self._sizes), tile))

    def _tile(self, batch: slice, heads: slice, queries: slice, keys: slice) -> Tensor:
        """exp(score − log-sum-exp), the log-sum-exp over the whole of these rows."""
        problem = self._guarded._refresh_mode()
        engine = self._engine(problem)
        rows = cut(problem, Region(batch, heads, queries))
        with without_autocast(problem.sizes.device):
            if range(problem.sizes.keys)[keys] == range(problem.sizes.keys) or problem.needs_grad:
                scores = engine.scores(rows)
                return (tiles.weights(rows, scores) if scores.shape[-1] else scores)[..., keys]
            tile = engine.scores(cut(rows, Region(keys=keys)))
            if "rows" in self._known:  # computed before, for all rows
                maximum, log_sum = (t[batch, heads, queries] for t in self._known["rows"])
            else:
                maximum, log_sum = _rows(rows, engine)
            return tiles.weights_in(tile, maximum, log_sum)

    def logsumexp(self) -> ArrayT:
        """log Σ_j exp(s_ij) over the allowed keys and the sink, if any, (..., Lq); −∞ where a query sees nothing."""
        problem = self.problem
        known = self._known.get("rows")
        if known is None or problem.needs_grad:
            with without_autocast(problem.sizes.device):
                known = _rows(problem, self._engine(problem))
        if not known[1].requires_grad:
            self._known["rows"] = known
        return self._out(problem.sizes.restore(log_sum_exp(*known)))

    def _by_parts(self) -> bool:
        """Whether the whole is computed as a part is, since autograd or a transform follows the operations."""
        problem = self.problem
        return problem.needs_grad or problem.mode.operations_only

    def _in_graph(self) -> bool:
        return self._by_parts() or super()._in_graph()

    def _whole(self) -> Tensor:
        if self._by_parts():
            return super()._whole()
        problem, sizes = self.problem, self.problem.sizes
        dense = torch.zeros(sizes.shape, dtype=self.dtype, device=sizes.device)
        with torch.no_grad(), without_autocast(sizes.device):
            guarded, engine = self._guarded, self._engine(problem)
            look: Look
            for look in looks(guarded, list(engine.walk(guarded)), engine.scores):
                dense[(*look.at, look.region.keys)] = look.weights
        return sizes.restore(dense)

    @overload
    def reduce(self: Weights[Tensor], one: Reduction[R1], /) -> R1: ...
    @overload
    def reduce(self: Weights[Tensor], one: Reduction[R1], two: Reduction[R2], /) -> tuple[R1, R2]: ...
    @overload
    def reduce(
        self: Weights[Tensor], one: Reduction[R1], two: Reduction[R2], three: Reduction[R3], /
    ) -> tuple[R1, R2, R3]: ...
    @overload
    def reduce(
        self: Weights[Tensor], one: Reduction[R1], two: Reduction[R2], three: Reduction[R3], four: Reduction[R4], /
    ) -> tuple[R1, R2, R3, R4]: ...
    @overload
    def reduce(self, *reductions: Reduction[object]) -> ArrayT | tuple[ArrayT | tuple[ArrayT, ...], ...]: ...
    def reduce(self, *reductions: Reduction[object]) -> object:
        """Any reductions, in one streaming pass: the result of one, or a tuple of the results of several.

        >>> import torch, clearhead as ch
        >>> w = ch.weights(torch.rand(100, 8), torch.rand(100, 8))
        >>> entropy, (values, indices), received, image = w.reduce(
        ...     ch.reductions.Entropy(), ch.reductions.TopK(5), ch.reductions.Received(), ch.reductions.Pool(10))
        >>> values.shape, image.shape
        (torch.Size([100, 5]), torch.Size([10, 10]))
        >>> w.reduce(ch.reductions.MaxScore()).shape
        torch.Size([100])
        """
        results = self._reduced(*reductions)
        return results[0] if len(results) == 1 else results

    def _reduced(self, *reductions: Reduction[Any]) -> tuple[Any, ...]:
        wrong = [r for r in reductions if not isinstance(r, Reduction)]
        if wrong:
            raise ClearheadError(f"reduce takes reductions such as Entropy() or TopK(5), not {wrong[0]!r}.")
        problem: Problem = self.problem._refresh_mode()
        outputs = [r for r in reductions if isinstance(r, Output)]
        if len(outputs) > 1:
            raise ClearheadError("reduce takes one Output(value); join the values along their last dimension.")
        if outputs:
            problem = self._with_value(outputs[0].value)._refresh_mode()
        restore = problem.sizes.restore
        results = stream(problem, self._engine(problem), reductions)
        return tuple(
            tuple(self._out(restore(t)) for t in result)
            if isinstance(result, tuple)
            else self._out(restore(result), isinstance(reduction, Output))
            for result, reduction in zip(results, reductions, strict=True)
        )

    def topk(self, k: int) -> tuple[ArrayT, ArrayT]:
        """The k largest weights of each query and their keys: (values, indices), each (..., Lq, k). See `TopK`."""
        return cast(tuple[ArrayT, ArrayT], self._reduced(TopK(k))[0])

    def entropy(self) -> ArrayT:
        """The entropy of each query's weights in nats, (..., Lq). See `Entropy`."""
        return cast(ArrayT, self._reduced(Entropy())[0])

    def received(self) -> ArrayT:
        """The sum of each key's weights over the queries, (..., Lk). See `Received`."""
        return cast(ArrayT, self._reduced(Received())[0])

    def pool(self, size: int | tuple[int, int], how: Literal["max", "mean"] = "max") -> ArrayT:
        """A map of at most size × size cells. See `Pool`."""
        return cast(ArrayT, self._reduced(Pool(size, how))[0])

    def gradients(self, value: ArrayT, grad: ArrayT) -> WeightGradients[ArrayT]:
        """How much a loss changes with each weight: ∂L/∂A, as a lazy matrix, from the gradient of the output.

        `value`: (..., Lk, Ev), as for `attention`; `grad`: ∂L/∂O, of the output's shape (..., Lq, Ev). See
        `WeightGradients`. Raises a `ShapeError` where the two do not fit. Cost: one pass over the allowed pairs.
        """
        value, grad = (t.copy() if isinstance(t, np.ndarray) else t for t in (value, grad))
        problem: Problem = self._with_value(value)
        sizes: Sizes = problem.sizes
        assert problem.value is not None
        given: Tensor = to_tensor_float(grad, "grad")
        check_float(given, "grad")
        refuse_fakes({"value": problem.value, "grad": given})
        want = (*sizes.shown, sizes.queries, problem.value.shape[-1])
        if tuple(given.shape) != want:
            raise ShapeError(f"grad has shape {tuple(given.shape)}; expected that of the output, {want}.")
        given = given.detach().to(self.dtype).reshape(*sizes.shape[:3], want[-1])
        with torch.no_grad():
            detached = with_operands(problem, [None if t is None else t.detach() for t in operands(problem)])
            engine = choose(detached._replace(value=None), self._asked)
            rows = _rows(detached, engine)
        return WeightGradients(detached, engine, rows, given, self._source.numpy)

    def plot(
        self,
        *head: int | slice | Sequence[int],
        query_labels: Sequence[str] | None = None,
        key_labels: Sequence[str] | None = None,
        title: str | None = None,
        cmap: str | Colormap = "GnBu",
        scale: str | float = "linear",
        ax: Axes | None = None,
        bar: bool = True,
    ) -> Axes | np.ndarray:
        """Draw one head, or a grid of several with one scale, with matplotlib. Masked cells are hatched.

        `w.plot(0, 3)` is sequence 0, head 3 of (B, H, Lq, Lk); `w.plot(0)` all heads of sequence 0, `w.plot(0, [3, 5])`
        two of them, `w.plot(0, slice(4))` the first four: at most 64. `query_labels`, `key_labels`: a word for each
        query, for each key. `cmap`: a colour map of matplotlib. `scale`: "linear" from 0 to the largest weight that is
        drawn; "log" from 0.1 / Lk; a number, such as 1.0, is linear from 0 to this number, so that pictures of several
        calls have one scale. `ax`: the axes to draw one head on; None makes new axes. `bar`: whether to draw a bar of
        the colours. Up to 512 queries and keys (256 in a grid) every weight is a cell; beyond, a cell is the largest of
        several weights, found in O(Lq + Lk) memory. Up to 8 queries and keys each cell has its number, where it fits.
        Returns the axes, an array of them where there are several.
        """
        chosen = plot.picks(head, tuple(self.shape[:-2]))
        style = Style(title, cmap, scale, ax, bar)
        check_style(style)
        queries, keys = self.shape[-2:]
        most = plot.CELLS if len(chosen) == 1 else plot.IN_GRID
        meaning = "weight" if max(queries, keys) <= most else "largest weight in the cell"
        sides = Side("query", queries, query_labels, "query_labels"), Side("key", keys, key_labels, "key_labels")
        return draw(plot.panels(self, chosen, most), *sides, style, meaning)

    def _map(self, pick: tuple[int, ...], most: int) -> Tensor:
        """The largest weights of one head, in a map of at most most × most cells; no other head is computed."""
        part = parse(pick, self.shape, self._sizes)
        problem = cut(self.problem, Region(part.batches[0], part.heads))
        return cast(Tensor, stream(problem, self._engine(problem), (Pool(most),))[0][0, 0])

    def _repr_html_(self) -> str:
        """For notebooks: the text of `repr`, and small pictures of the first heads, up to 2²⁵ pairs."""
        return plot.html(self)

    def __matmul__(self, value: ArrayT | LazyMatrix[ArrayT]) -> ArrayT:
        """The attention output for these values, by the fastest engine that can; a lazy value is made dense."""
        value = value.dense() if isinstance(value, LazyMatrix) else value
        if isinstance(value, np.ndarray | Tensor) and value.ndim == 1:  # one number for each key
            return self._times(value[:, None])[..., 0]
        return self._times(value)

    def _times(self, value: ArrayT) -> ArrayT:
        """The attention output for a value (..., Lk, Ev)."""
        problem = self._with_value(value)
        with without_autocast(problem.sizes.device):
            output: Any = problem.sizes.restore(run(problem, choose(problem, self._asked), self._asked))
        return cast(ArrayT, output.detach().numpy() if self._source.numpy else output)

    def _out(self, tensor: Any, of_value: bool = False) -> ArrayT:
        """A result; `of_value`: it depends on a value, whose gradient it keeps."""
        source = self._source
        tensor = tensor.detach() if source.numpy or (source.detached and not of_value) else tensor
        return cast(ArrayT, tensor.numpy() if source.numpy else tensor)


def _rows(problem: Problem, engine: Engine) -> tuple[Tensor, Tensor]:
    """The log-sum-exp of each row in two numbers: see `Partial`."""
    return rows_of(summarised(problem, engine, Summary(rows=True)))


def weights(
    query: ArrayT,
    key: ArrayT,
    *value: Never,
    score: ScoreLike = None,
    mask: MaskLike = None,
    valid_lens: Integers | None = None,
    bias: BiasLike = None,
    scale: float | None = None,
    sinks: Array | None = None,
    align: AlignLike = None,
    layout: str = "BHLD",
    engine: str | Engine | None = None,
    **others: Never,
) -> Weights[ArrayT]:
    """The attention weights as a lazy matrix: nothing is computed until you look at a part or a summary of it.

    >>> import torch, clearhead as ch
    >>> w = ch.weights(torch.rand(1, 8, 4096, 64), torch.rand(1, 8, 4096, 64), mask=ch.Causal())
    >>> w[0, 3, 1000].shape
    torch.Size([4096])
    >>> w[0, 3, 1000, 2000]
    tensor(0.)

    Formula: w_i = softmax over the allowed keys j of score(query_i, key_j); all 0 where nothing is allowed.
    Arguments as for `attention`. Returns a `Weights` of shape (..., Lq, Lk), in any layout. Of nested tensors it is the
    matrix of the packed row, (1, H, T, T'), where T and T' count the positions of all sequences.
    Raises `ClearheadError`, `ShapeError` or `UnsupportedError` (`engine="sdpa"` does not show its weights).
    Cost: that of the parts you look at; see `Weights`.
    """
    if value or "value" in others:
        raise ClearheadError(
            "weights takes query and key alone: the weights depend on no value. Pass weights(query, key), with "
            "options as keywords; the output is attention(query, key, value)."
        )
    if others:
        raise_unknown_keywords("weights", weights, others)
    is_numpy(query=query, key=key)
    mask, bias = apply_valid_lens(mask, valid_lens, bias)
    if not is_arranged(query, key, layout):
        query, key, _, mask, bias, align, _ = arrange(query, key, None, mask, bias, align, layout)
    call = Arguments(query, key, None, score, mask, bias, scale, sinks, align, 0.0, engine)
    return Weights(FromCall(call), engine)
