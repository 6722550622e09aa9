"""The contract that every score, mask, bias and engine keeps, as checks for parts of your own.

>>> import clearhead as ch
>>> from clearhead.testing import check_mask, check_score
>>> class Manhattan(ch.extend.Score):
...     def tile(self, query, key):
...         return -(query.unsqueeze(-2) - key.unsqueeze(-3)).abs().sum(-1)
>>> check_score(Manhattan)
>>> check_mask(ch.Causal)

    check_score(MyScore), check_mask(MyMask), check_bias(MyBias)      classes, with an example() to try
    check_score(my_function), check_bias(BiasFunction(rule))          functions and objects
    check_engine("tiled"), check_engine(MyEngine())                   a name, or an engine of your own
    check_device("cuda")                                              every engine on a device, and a table of it

A package outside clearhead can do this in its own tests: `examples/own_parts` is such a package. Each check raises an
`AssertionError` that says what disagreed. The standard is the reference engine in float64, which computes the formula
as it stands.
"""

from __future__ import annotations

import inspect
import random
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead._attention import attention
from clearhead._engine_comparison import ALIGN, EXACT, ROUNDED, Inputs, compare, find_largest
from clearhead.base.errors import UnsupportedError
from clearhead.base.shapes import Sizes
from clearhead.biases.base import Bias
from clearhead.biases.bias_function import BiasFunction
from clearhead.engines.base import Engine
from clearhead.engines.choose import ENGINES
from clearhead.engines.tiled import tiles
from clearhead.inspection.weights import weights
from clearhead.masks.base import Mask, dense
from clearhead.masks.dense import DenseMask
from clearhead.masks.lengths import Lengths
from clearhead.masks.mask_function import MaskFunction
from clearhead.problem.problem import make_problem
from clearhead.scores.additive import Additive
from clearhead.scores.base import Score, capped
from clearhead.scores.dot import Dot
from clearhead.scores.score_function import ScoreFunction

LENGTHS = ((1, 1), (63, 63), (7, 63), (1000, 1000))


def scores() -> list[type[Score]]:
    """Every concrete score of clearhead."""
    return [cls for cls in _subclasses(Score) if cls.__module__.startswith("clearhead.scores")]


def masks() -> list[type[Mask]]:
    """Every concrete mask of clearhead."""
    return [cls for cls in _subclasses(Mask) if cls.__module__.startswith("clearhead.masks")]


def biases() -> list[type[Bias]]:
    """Every concrete bias of clearhead."""
    return [cls for cls in _subclasses(Bias) if cls.__module__.startswith("clearhead.biases")]


def engines() -> list[str]:
    """The names of the engines that are compared with the reference on the default device.

    On a CPU they are without "flex", which is compiled there for each kind of call and has no gradients, and without
    "triton", whose kernels are for a GPU.
    """
    left = ("reference", "flex", "triton") if torch.get_default_device().type == "cpu" else ("reference",)
    return [engine.name for engine in ENGINES if engine.name not in left]


def _subclasses(base: type[Any]) -> Iterator[type[Any]]:
    for subclass in base.__subclasses__():
        if not inspect.isabstract(subclass):
            yield subclass
        yield from _subclasses(subclass)


def _to_example(given: Any, base: type[Any], wrap: Callable[[Any], Any]) -> tuple[str, Callable[..., Any]]:
    """The name of a class, an object or a function, and what makes an example of it: its `example`, or a copy."""
    if inspect.isclass(given):
        assert issubclass(given, base), f"expected a class of {base.__name__}, an object or a function; got {given!r}"
        return given.__name__, given.example  # type: ignore[attr-defined]
    assert callable(given) or isinstance(given, base), f"expected a {base.__name__} or a function; got {given!r:.60}"
    one = given if isinstance(given, base) else wrap(given)
    return getattr(given, "__name__", type(given).__name__), lambda *sizes: deepcopy(one)


def _check_repeats(call: Callable[[], Tensor], name: str) -> None:
    """Check that a second call gives the same numbers, with the states of all generators moved between."""
    first = call().detach().clone()
    torch.rand((), dtype=torch.float32), np.random.rand(), random.random()
    assert torch.equal(first.nan_to_num(), call().detach().nan_to_num()), (
        f"{name}: the second call with the same arguments gave other numbers, and the backward pass calls it again. "
        "Draw random numbers before the call, and let it read them."
    )


def check_score(score: type[Score] | Score | Callable[..., Tensor], width: int | None = None) -> None:
    """Check a score: shapes, broadcasting, grouped heads, layouts, the lowering, gradients, on every engine.

    `score`: a class, an object, or a function of (query, key). `width`: that of queries and keys, for a score that
    takes no other; None is what the `example()` of its class says, or 4.
    """
    name, make = _to_example(score, Score, ScoreFunction)
    assert not inspect.isabstract(score), f"{name} has no tile(query, key): write one that gives (..., Lq, Lk)"

    def example() -> tuple[Score, int, int]:
        made = make()
        made = made if inspect.isclass(score) else (made, 4, 4)
        return made if width is None else (made[0], width, width)

    try:
        found = example()
    except TypeError as error:
        raise AssertionError(
            f"{name} needs arguments ({error}): give it a classmethod example() -> (score, Eq, Ek)"
        ) from error
    fits = isinstance(found, tuple) and len(found) == 3 and isinstance(found[0], Score)
    assert fits, f"{name}.example() gave {found!r:.60}; expected (score, width of queries, width of keys)"
    _check_score(found, name, example)


def _check_score(score: tuple[Score, int, int], name: str, example: Callable[[], tuple[Score, int, int]]) -> None:
    module = score[0].double()
    inputs = Inputs.draw(score, (7, 9))
    query, key, _ = inputs
    try:
        full = module(query, key)
    except (RuntimeError, ValueError) as error:
        raise AssertionError(
            f"{name} was tried with queries of width {score[1]} and keys of width {score[2]}, and raised "
            f"{type(error).__name__}: {error}\nIf it takes one width alone, say it: check_score({name}, "
            "width=…), or a classmethod example() -> (score, Eq, Ek)."
        ) from error
    assert full.shape == (3, 2, 7, 9), f"{module}: scores of shape {tuple(full.shape)}"
    _check_repeats(lambda: module(query, key), name)
    _close(module(query[0, 0], key[0, 0]), full[0, 0], EXACT, f"{module}: two dimensions")
    _close(module(query[:, 0], key[:, 0]), full[:, 0], EXACT, f"{module}: three dimensions")
    _close(module(query, key[:1])[0], full[0], EXACT, f"{module}: a batch of 1 broadcasts")
    strided = query.transpose(1, 2).contiguous().transpose(1, 2)
    _close(module(strided, key), full, EXACT, f"{module}: a transposed query")
    if module.changed_by is None:  # a change counts the positions of the part
        _close(module(query[:, :, 2:5], key[:, :, 1:4]), full[:, :, 2:5, 1:4], EXACT, f"{module}: a part of the matrix")
    for shift in (0.0, 1000.0):
        check_lowering(score, shift)
    for lengths in LENGTHS[:3]:
        compare(engines(), example(), None, lengths)


def check_lowering(score: tuple[Score, int, int], shift: float) -> None:
    """Check that the normal form gives the scores as exactly as the formula does in float32, on shifted inputs too."""
    module = score[0].double()
    inputs = Inputs.draw(score, (20, 30), seed=2)
    query, key = (inputs.query + shift).float(), (inputs.key + shift).float()
    if module.lower(query.double(), key.double()) is None:
        return
    truth = module(query.double(), key.double())
    module.float()
    naive = module(query, key).double()
    problem = make_problem(query, key, score=module)
    lowered = tiles.raw_scores(problem).double()
    module.double()
    allowed = 2 * (naive - truth).abs().max() + 4 * torch.finfo(torch.float32).eps * truth.abs().max()
    worst = (lowered - truth).abs().max()
    assert worst <= allowed, f"{module}: lower() is off by {worst:.2g} at shift {shift}; the formula by {allowed:.2g}"


def check_mask(mask: type[Mask] | Mask | Callable[..., Tensor]) -> None:
    """Check a mask: its spans and their residual, part by part against the whole, on every engine.

    `mask`: a class, an object that fits every size, or a rule of (batch, head, query_index, key_index).
    """
    name, example = _to_example(mask, Mask, MaskFunction)
    for lengths, align in (*((lengths, ALIGN) for lengths in LENGTHS[:3]), ((63, 7), "upper_left")):
        sizes = Sizes(3, 2, *lengths, torch.get_default_device(), align=align)
        made = example(sizes)
        spans = made._resolve(sizes)
        keep = dense(spans, sizes)
        _check_repeats(lambda: dense(made._resolve(sizes), sizes).double(), name)  # noqa: B023 - called at once
        assert keep.dtype == torch.bool and keep.shape == sizes.shape
        assert torch.equal(made._compute_matrix(sizes).expand(sizes.shape), keep), (
            f"{made}: the spans differ from the matrix"
        )
        for edge, shape in ((spans.start, "start"), (spans.stop, "stop")):
            assert edge.dtype == torch.int64, f"{made}: {shape} is {edge.dtype}"
            assert all(n in (1, size) for n, size in zip(edge.shape, sizes.shape, strict=False))
            assert bool(((edge >= 0) & (edge <= sizes.keys)).all()), f"{made}: {shape} outside [0, Lk]"
        part = (slice(1, 3), slice(0, 1), slice(0, lengths[0], 2), slice(lengths[1] // 3, lengths[1]))
        got = spans.keep(*part, sizes.keys).expand(keep[part].shape)
        assert torch.equal(got, keep[part]), f"{made}: a part differs from the whole"
        assert isinstance(repr(made), str) and made.title() in repr(made)
        other = made._resolve(sizes._replace(align="upper_left"))
        moved = not made.positional and not torch.equal(dense(other, sizes), keep)
        assert not moved, f"{made.title()}: the spans depend on the alignment; set positional = True on the class"
        if align == ALIGN:
            compare(engines(), Dot.example(), example(Inputs.draw(Dot.example(), lengths).sizes), lengths)


def check_bias(bias: type[Bias] | Bias | Callable[..., Tensor]) -> None:
    """Check a bias: its normal form, part by part against the whole, on every engine.

    `bias`: a class, an object that fits every size, or a rule of (batch, head, query_index, key_index).
    """
    name, example = _to_example(bias, Bias, BiasFunction)
    for lengths in LENGTHS[:3]:
        sizes = Sizes(3, 2, *lengths, torch.get_default_device(), align=ALIGN)
        made = example(sizes).double()
        added = made.lower(sizes)
        every = slice(None)
        whole = added.tile(every, every, every, every, sizes).detach().expand(sizes.shape)
        shapes = torch.zeros(*sizes[:3], 1), torch.zeros(*sizes[:2], sizes.keys, 1)
        _check_repeats(partial(made, *shapes, ALIGN), name)
        _close(made(*shapes, ALIGN).detach(), whole, 0.0, f"{made}")
        some = (slice(0, lengths[0], 2), slice(lengths[1] // 3, lengths[1])), (slice(1, 3), slice(0, 2))
        for queries, keys in some:
            sides = (slice(1, 3), slice(0, 1), queries, keys)
            got = added.tile(*sides, sizes).detach().expand(whole[sides].shape)
            _close(got, whole[sides], 0.0, f"{made}: a part differs from the whole")
        for mask in (None, _any_mask(sizes)):
            compare(engines(), Dot.example(), mask, lengths, example(Inputs.draw(Dot.example(), lengths).sizes))


def check_device(device: str | torch.device = "cuda") -> None:
    """Check every engine on a device against the reference there, print a table, and raise if something differed.

    The table has a line for each engine: the number of its comparisons (0: it objects to the device), the first
    difference, and the seconds that it took. The check takes minutes, and an engine's own proof at its first use on the
    device is part of them.
    """
    device = torch.device(device)
    title = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    print(f"clearhead on {title}, PyTorch {torch.__version__}")
    wrong = []
    with device:
        for engine in engines():
            began = time.monotonic()
            try:
                outcome = f"{check_engine(engine)} comparisons"
            except AssertionError as difference:
                outcome = f"differs: {difference}"
                wrong.append(f"{engine} {outcome}")
            print(f"  {engine:8} {outcome}, {time.monotonic() - began:.0f} s", flush=True)
    assert not wrong, "\n".join(wrong)


def check_engine(engine: str | Engine) -> int:
    """Check an engine, or the engine of this name: every score, mask and bias, dropout and sinks.

    Returns the number of comparisons. Problems to which the engine objects are left out.
    """
    count = 0
    for lengths in LENGTHS[:3]:
        sizes = Inputs.draw(Dot.example(), lengths).sizes
        for score in scores():
            for mask in [None, *masks()]:
                count += compare(engine, score.example(), None if mask is None else mask.example(sizes), lengths)
            for bias in biases():
                count += compare(engine, score.example(), _any_mask(sizes), lengths, bias.example(sizes), 0.3)
        sinks = torch.tensor([0.5, -1.0], dtype=torch.float64)
        for module in (Dot(), Dot(softcap=2.0), Additive(4, 4, 8, softcap=0.5)):
            for dropout_p in (0.0, 0.3):
                count += compare(engine, (module, 4, 4), _any_mask(sizes), lengths, None, dropout_p, sinks)
    return count


def check_precision(engine: str, score: tuple[Score, int, int], mask: Mask | None, dtype: torch.dtype) -> None:
    """Check an engine in one precision: its error is at most twice the error of plain eager code, and rounding.

    The budget comes from the data: eager code of the same dtype is computed too, with its sums in another order. So
    errors are compared as root mean squares, which hardly depend on that order. The largest error does depend on it,
    and on the processor: its budget, eight times that of eager code, finds a single element that is wrong.
    """
    inputs = Inputs.draw(score, (63, 63), dtype, seed=3)
    wide = Inputs(*(t.double() for t in inputs))
    module = score[0].to(dtype)
    try:
        got = attention(*inputs, score=module, mask=mask, engine=engine).detach()
    except UnsupportedError:
        return
    assert got.dtype == dtype
    key, value = (t.repeat_interleave(2, 1) for t in (inputs.key, inputs.value))
    eager = capped(
        module.tile(inputs.query, key).detach() * module._default_scale(inputs.query.shape[-1]), module.softcap
    )
    if mask is not None:
        eager = eager.masked_fill(~mask.dense(inputs.query, key), -torch.inf)
    naive = torch.nan_to_num(eager.softmax(-1)) @ value
    truth = attention(*wide, score=module.double(), mask=mask, engine="reference").detach()
    about = f"{engine}, {module}, {mask}, {dtype}"
    for name, size, times in (("root mean square", _rms, 2), ("largest", find_largest, 8)):
        off = size(got.double() - truth)
        allowed = times * size(naive.double() - truth) + torch.finfo(dtype).eps * size(truth)
        assert off <= allowed, f"{about}: the {name} error is {off:.3g}, allowed {allowed:.3g}"


def _rms(errors: Tensor) -> float:
    return float(errors.square().mean().sqrt())


def check_weights(score: tuple[Score, int, int], mask: Mask | None, lengths: tuple[int, int]) -> None:
    """Check the lazy weights: rows, dense and reductions, on the engines that show them."""
    beside: dict[str, Any] = {"mask": mask, "align": ALIGN}
    for engine, dtype in (("tiled", torch.float64), ("native", torch.float32)):
        inputs = Inputs.draw(score, lengths, dtype)
        module = score[0].to(dtype).requires_grad_(False)
        try:
            lazy = weights(inputs.query, inputs.key, engine=engine, score=module, **beside)
        except UnsupportedError:
            continue
        near = weights(inputs.query, inputs.key, engine="reference", score=module, **beside).dense(None)
        wide = inputs.query.double(), inputs.key.double()
        truth = weights(*wide, engine="reference", score=deepcopy(module).double(), **beside).dense(None)
        values, indices = lazy.topk(min(3, lengths[1]))
        looks: list[tuple[str, Any, Callable[[Tensor], Tensor]]] = [
            ("dense", lazy.dense(None), lambda w: w),
            ("a row", lazy[0, 1, lengths[0] // 2], lambda w: w[0, 1, lengths[0] // 2]),
            ("a column", lazy[..., lengths[1] // 2], lambda w: w[..., lengths[1] // 2]),
            ("entropy", lazy.entropy(), lambda w: -torch.xlogy(w, w).sum(-1)),
            ("received", lazy.received(), lambda w: w.sum(-2)),
            ("the largest", values, partial(_topk, k=values.shape[-1])),
            ("the largest's keys", values, partial(torch.gather, dim=-1, index=indices)),
            ("a map", lazy.pool(4), lambda w: _peaks(w, 4)),
        ]
        for name, got, of in looks:
            about = f"{engine}, {module}, {mask}, {dtype}: {name}"
            _close(got.double(), of(truth), EXACT if dtype == torch.float64 else ROUNDED, about, of(near))


def _any_mask(sizes: Sizes) -> Mask:
    """A mask that is no interval, and allows some queries no key."""
    return DenseMask.example(sizes) & Lengths.example(sizes)


def _topk(weights: Tensor, k: int) -> Tensor:
    return weights.topk(k).values


def _peaks(weights: Tensor, size: int) -> Tensor:
    """The largest weight of each cell, one by one."""
    rows, columns = (-(-n // size) or 1 for n in weights.shape[-2:])
    bands = [band.amax(-2) for band in torch.split(weights, rows, -2)]
    cells = [torch.stack([cell.amax(-1) for cell in torch.split(band, columns, -1)], -1) for band in bands]
    return torch.stack(cells, -2)


def _close(got: Tensor, want: Tensor, tolerance: float, what: str, near: Tensor | None = None) -> None:
    """Assert a difference within the tolerance, relative to the largest, plus twice the error of `near`, if given."""
    error = 0.0 if near is None else find_largest(near.double() - want)
    limit = tolerance * max(1.0, find_largest(want)) + 2 * error
    torch.testing.assert_close(got, want, rtol=0.0, atol=limit, check_dtype=False, msg=lambda said: f"{what}: {said}")
