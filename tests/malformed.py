"""Problems of which one part is wrong: each engine refuses them in one error, or gives what the formulas give.

    python tests/malformed.py 10000

draws ten thousand of them. A number names a valid problem and one change of one of its parts: a tensor of another
shape, dtype, layout or device, edges beyond the keys, a map of blocks of another mask, and so on. `failures_of` passes
it on in two ways: through `problem.checked`, as what comes from an edit or a file goes, to every engine; and to the
kernels without a check before them: any error may be raised, but no process may end, and no number be wrong.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import oracle
import other_kernels
import torch
from fuzzing import numbered
from fuzzing.numbered import Choices

import clearhead as ch
from clearhead.base.errors import ClearheadError
from clearhead.biases.base import Added
from clearhead.engines import operation
from clearhead.engines.base import Engine
from clearhead.engines.choose import ENGINES
from clearhead.engines.native import bindings
from clearhead.engines.native.engine import Native
from clearhead.engines.summarised import summarised
from clearhead.masks.base import Spans
from clearhead.masks.dense import DenseMask
from clearhead.problem.checked import checked
from clearhead.problem.guard import guard
from clearhead.problem.packing import operands, with_operands
from clearhead.problem.partial import Partial, Rows
from clearhead.problem.problem import Problem, make_problem
from clearhead.problem.summary import Summary
from clearhead.problem.visible import Memo, Visible, visible
from clearhead.scores.base import Pairwise

EVERY = (slice(None),) * 4
NATIVE = next(engine for engine in ENGINES if isinstance(engine, Native))


class Draw(Choices):
    """A random source with the choices that are made here."""

    def count(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.torch)


def valid(draw: Draw) -> Problem:
    """A problem as `attention` makes it."""
    batch, key_heads, groups = draw.count(1, 3), draw.count(1, 3), draw.one(1, 1, 2)
    heads, queries, keys = key_heads * groups, draw.count(1, 9), draw.one(1, 5, 12, 67, 130)
    width, value_width, dtype = (
        draw.count(1, 9),
        draw.count(1, 9),
        draw.one(torch.float32, torch.float32, torch.float64),
    )
    inputs = [(batch, heads, queries, width), (batch, key_heads, keys, width), (batch, key_heads, keys, value_width)]
    query, key, value = (draw.normal(*shape).to(dtype) for shape in inputs)
    keep = draw.normal(draw.one(1, batch), draw.one(1, heads), queries, keys) > -0.5
    edges = torch.arange(queries) % (keys + 1), (torch.arange(queries) * 3) % (keys + 1)
    from clearhead.masks import Intervals

    mask = draw.one(
        None,
        ch.Causal(),
        Intervals(*edges),
        DenseMask(keep),
        ch.Lengths([draw.count(0, keys) for _ in range(batch)]),
        ch.SlidingWindow(before=3) | ch.Lengths([min(2, keys)]),
        ch.Documents([i // 3 for i in range(keys)]) if queries == keys else None,
        ch.MaskFunction(lambda b, h, i, j: (b + h + i * 3 + j) % 4 < 3),
    )
    bias = draw.one(
        None,
        None,
        ch.DenseBias(draw.normal(draw.one(1, batch), draw.one(1, heads), queries, draw.one(1, keys))),
        ch.ALiBi(heads),
        ch.BiasFunction(lambda b, h, i, j: torch.sin((b + h + i + j).double())),
    )
    score = draw.one(ch.Dot(), ch.Dot(), ch.Dot(softcap=2.0), ch.Gaussian(2.0), "additive")
    if score == "additive":
        score = ch.Additive.from_weights(None, None, draw.normal(width).to(dtype))
    sinks = draw.one(None, None, draw.normal(heads).to(dtype))
    return make_problem(
        query, key, value, score=score.to(dtype), mask=mask, bias=bias, sinks=sinks, align="lower_right"
    )


# What is wrong -------------------------------------------------------------------------------------------------------

Change = Callable[[Draw, torch.Tensor], Any]
CHANGES: dict[str, Change] = {
    "fewer": lambda d, t: t[_along(d, t, lambda n: slice(0, max(n - d.count(1, 3), 0)))],
    "none": lambda d, t: t[_along(d, t, lambda n: slice(0, 0))],
    "one of them": lambda d, t: t[_along(d, t, lambda n: slice(0, 1))],
    "twice": lambda d, t: torch.cat([t, t], _dim(d, t)) if t.ndim else t,
    "one dimension more": lambda d, t: t.unsqueeze(0),
    "two dimensions more": lambda d, t: t[None, None],
    "one dimension less": lambda d, t: t[0] if t.ndim and t.shape[0] else t,
    "turned": lambda d, t: t.mT if t.ndim > 1 else t,
    "another order": lambda d, t: t.movedim(0, -1).contiguous().movedim(-1, 0) if t.ndim else t,
    "steps of two": lambda d, t: torch.stack([t, t], -1).flatten(-2)[..., ::2] if t.ndim else t,
    "one number": lambda d, t: t.flatten()[:1].expand(t.numel()).view(t.shape) if t.numel() and t.ndim else t,
    "float64": lambda d, t: t.double(),
    "float16": lambda d, t: t.half(),
    "int32": lambda d, t: t.int(),
    "bool": lambda d, t: t.bool(),
    "complex": lambda d, t: t.to(torch.complex64),
    "meta": lambda d, t: t.to("meta"),
    "sparse": lambda d, t: t.to_sparse(),
    "nested": lambda d, t: (
        torch.nested.nested_tensor(list(t)) if t.ndim > 1 and t.shape[0] and t.is_floating_point() else t
    ),
    "an array": lambda d, t: t.detach().numpy(),
    "a number": lambda d, t: 1.0,
    "nothing": lambda d, t: None,
}


def _dim(draw: Draw, tensor: torch.Tensor) -> int:
    return draw.count(0, max(tensor.ndim - 1, 0))


def _along(draw: Draw, tensor: torch.Tensor, side: Callable[[int], slice]) -> tuple[slice, ...]:
    dim = _dim(draw, tensor)
    return tuple(side(n) if i == dim else slice(None) for i, n in enumerate(tensor.shape))


def tensors_in(problem: Problem) -> dict[str, torch.Tensor]:
    """Its tensors by name."""
    names = dict(zip(("query", "key", "value", "weight", "dense", "relative", "sinks"), operands(problem), strict=True))
    if problem.spans is not None:
        names |= dict(zip(("start", "stop", "gap_start", "gap_stop"), problem.spans.edges(), strict=False))
    return {name: tensor for name, tensor in names.items() if tensor is not None}


def with_tensor(problem: Problem, name: str, tensor: Any) -> Problem:
    """The problem with another in a tensor's place."""
    if name in ("start", "stop", "gap_start", "gap_stop"):
        assert problem.visible is not None
        spans = problem.visible.spans
        if name in ("start", "stop"):
            spans = spans._replace(**{name: tensor})
        else:
            assert spans.gaps is not None
            spans = spans._replace(gaps=(tensor, spans.gaps[1]) if name == "gap_start" else (spans.gaps[0], tensor))
        return problem._replace(visible=problem.visible._replace(spans=spans, memo=Memo()))
    if name in ("query", "key", "weight"):
        return problem._replace(scores=problem.scores._replace(**{name: tensor}))
    if name in ("dense", "relative"):
        assert problem.bias is not None
        return problem._replace(bias=problem.bias._replace(**{name: tensor}))
    return problem._replace(**{name: tensor})


def a_tensor(draw: Draw, problem: Problem) -> tuple[Problem, str]:
    found = tensors_in(problem)
    name, change = draw.one(*found), draw.one(*CHANGES)
    return with_tensor(problem, name, CHANGES[change](draw, found[name])), f"{name}: {change}"


def edges(draw: Draw, problem: Problem) -> tuple[Problem, str]:
    """Intervals that reach beyond the keys, or that run backward."""
    if problem.visible is None:
        return a_tensor(draw, problem)
    far = draw.one(-1, -5, problem.sizes.keys + 1, problem.sizes.keys + 70, 2**40, -(2**40))
    found = {n: t for n, t in tensors_in(problem).items() if n in ("start", "stop", "gap_start", "gap_stop")}
    name = draw.one(*found)
    tensor = torch.where(draw.normal(*found[name].shape) > 0, far, found[name])
    return with_tensor(problem, name, tensor), f"{name} of {far}"


def blocks(draw: Draw, problem: Problem) -> tuple[Problem, str]:
    """A map of blocks, or the host's edges, of another mask."""
    if problem.visible is None:
        return a_tensor(draw, problem)
    sizes = problem.sizes
    changes = {draw.one("batch", "heads", "queries", "keys"): draw.one(1, 2, 5, 100, 500)} if draw.count(0, 1) else {}
    other = sizes._replace(**changes)
    found = visible(Spans(*(torch.zeros(1, 1, 1, dtype=torch.int64) + n for n in (0, min(1, other.keys)))), other)
    made = bindings.kernels().Blocks(1, 1, other.queries, other.keys)
    made.add(found.spans.start, found.spans.stop, None, None, None, 0, other.keys, 0, other.queries)
    if draw.count(0, 1):
        return problem._replace(visible=problem.visible._replace(known=found.edges)), f"edges of {other.shape}"
    memo = Memo(blocks=made, intervals=found.edges, bytes=1)
    return problem._replace(visible=problem.visible._replace(memo=memo)), f"a memo of {other.shape}" if other.shape[
        2:
    ] != sizes.shape[2:] else "a memo that fits"


def parts(draw: Draw, problem: Problem) -> tuple[Problem, str]:
    """A part that is no tensor."""
    sizes, scores = problem.sizes, problem.scores
    wide = torch.zeros(1, 1, sizes.queries + 1, sizes.keys + 1)
    whole = [torch.zeros(1, 1, 1, dtype=torch.int64) + n for n in (0, sizes.keys)]
    residuals = [
        lambda *sides: wide[sides] > -1,
        lambda *sides: torch.ones(3, 3, 3, 3, dtype=torch.bool),
        lambda *sides: wide,
        lambda *sides: None,
        lambda *sides: torch.ones((), dtype=torch.bool, device="meta"),
    ]
    functions = [
        lambda *sides: wide,
        lambda *sides: wide.long(),
        lambda *sides: None,
        lambda *sides: wide[0].to("meta"),
    ]
    mask = Visible(Spans(*whole, draw.one(*residuals)), None, "inside", Memo())  # type: ignore[arg-type]
    sides = dict(zip(("batch", "heads", "queries", "keys"), sizes.shape, strict=True))
    side = draw.one(*sides)
    choices: dict[str, Callable[[], Problem]] = {
        "a residual": lambda: problem._replace(visible=mask),
        "a function": lambda: problem._replace(bias=Added(function=draw.one(*functions))),
        "no bias": lambda: problem._replace(bias=Added()),
        "a size": lambda: problem._replace(
            sizes=sizes._replace(**{side: draw.one(0, sides[side] + 1, 2 * sides[side], -1)})
        ),
        "a device": lambda: problem._replace(sizes=sizes._replace(device=torch.device("meta"))),
        "a scale": lambda: problem._replace(scores=scores._replace(scale=draw.one(math.nan, "1", None, torch.ones(3)))),
        "a softcap": lambda: problem._replace(scores=scores._replace(softcap=draw.one(-1.0, 0.0, math.inf, "1"))),
        "dropout": lambda: problem._replace(dropout_p=draw.one(1.0, -0.5, 2.0, "1", 0.5)),
        "a seed": lambda: problem._replace(dropout_p=0.5, seed=draw.one(1.5, torch.ones(3), torch.ones(()))),
        "gaps": lambda: problem._replace(
            visible=Visible(
                Spans(*whole, gaps=draw.one(whole, (whole[0],), (whole[0][..., None], whole[1]))),
                None,
                "inside",
                Memo(),
            )
        ),
    }
    name = draw.one(*choices)
    return choices[name](), name


def drawn(number: int) -> tuple[Problem, str]:
    """The problem of this number, and what is wrong with it."""
    draw = Draw(number)
    return draw.one(a_tensor, a_tensor, a_tensor, edges, blocks, parts)(draw, valid(draw))


# What is right -------------------------------------------------------------------------------------------------------


def truth(problem: Problem, grad: np.ndarray) -> oracle.Found:
    """The oracle's, from the problem's tensors as they are. Raises where they do not fit each other."""
    numpy = lambda t: t.detach().double().numpy()
    query, key, value = (numpy(t) for t in (problem.query, problem.key, problem.value))
    sizes = oracle.Sizes(query.shape, key.shape, value.shape)
    assert query.ndim == key.ndim == value.ndim == 4 and sizes.shape[:3] == problem.sizes.shape[:3]
    assert key.shape[:3] == value.shape[:3] and key.shape[0] == query.shape[0] and query.shape[1] == problem.sizes.heads
    assert problem.poison is None and not problem.dropout_p, "the oracle reads neither"
    scores = problem.scores
    assert isinstance(scores, Pairwise) and key.shape[-1] == query.shape[-1]
    biases: list[Any] = []
    if scores.phi == "mul" and scores.weight is None:
        score: Any = ("dot", {"scale": scores.scale}, {})
        if scores.softcap is not None:
            score[1]["softcap"] = scores.softcap
    else:  # as a bias: a score's gradients are the kernels' own tests
        pair, other = query[..., None, :], np.repeat(key, sizes.heads // key.shape[1], 1)[..., None, :, :]
        phi = {"mul": np.multiply, "tanh_add": lambda a, b: np.tanh(a + b), "sq_diff": lambda a, b: (a - b) ** 2}
        weight = 1.0 if scores.weight is None else numpy(scores.weight)
        assert np.ndim(weight) == 0 or weight.shape == query.shape[-1:]
        raw = scores.scale * (weight * phi[scores.phi](pair, other)).sum(-1)
        raw = raw if scores.softcap is None else scores.softcap * np.tanh(raw / scores.softcap)
        score, biases = ("dot", {"scale": 0.0}, {}), [("dense", {}, {"tensor": raw})]
    added = problem.bias
    if added is not None:
        for tensor in (added.dense, None if added.function is None else added.function(*EVERY)):
            if tensor is not None:
                biases.append(("dense", {}, {"tensor": np.broadcast_to(numpy(tensor), sizes.shape)}))
        if added.relative is not None:
            along, apart = (
                numpy(added.relative),
                np.arange(sizes.keys) - np.arange(sizes.queries)[:, None] + sizes.queries - 1,
            )
            assert along.shape[-1] == sizes.queries + sizes.keys - 1
            biases.append(("dense", {}, {"tensor": np.broadcast_to(along[..., apart], sizes.shape)}))
    sinks = None if problem.sinks is None else numpy(problem.sinks)
    assert sinks is None or sinks.shape == (sizes.heads,)
    mask = None if problem.spans is None else ("dense", _keep(problem.spans, sizes.shape))
    return oracle.attend(
        oracle.Problem(query, key, value, score, mask, None, tuple(biases), sinks=sinks), oracle.Loss(grad)
    )


def _keep(spans: Spans, shape: tuple[int, ...]) -> np.ndarray:
    at = np.arange(shape[3])
    start, stop = (edge.numpy()[..., None] for edge in (spans.start, spans.stop))
    keep = (at >= start) & (at < stop)
    if spans.gaps is not None:
        low, high = (edge.numpy()[..., None, :] for edge in spans.gaps)
        keep = keep & ~((at[:, None] >= low) & (at[:, None] < high)).any(-1)
    if spans.residual is not None:
        keep = keep & spans.residual(*(slice(0, n) for n in shape)).numpy()
    return np.broadcast_to(keep, shape)


# What the engines give -----------------------------------------------------------------------------------------------


def entries(problem: Problem, engine: Engine, grad: torch.Tensor) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Every way into an engine, by name: results by the names of `wanted`."""
    dtype = problem.query.dtype

    def attend() -> dict[str, Any]:
        leaves = [None if t is None else t.detach().requires_grad_() for t in operands(problem)]
        own = with_operands(problem, leaves)
        output = operation.run(own, engine)
        named = dict(zip(("query", "key", "value"), leaves[:3], strict=True))
        found = torch.autograd.grad(output, list(named.values()), grad.to(output.dtype), allow_unused=True)
        return {"output": output} | {f"to_{n}": g for n, g in zip(named, found, strict=True) if g is not None}

    def plain() -> dict[str, Any]:
        return {"output": engine.forward(problem).output}

    def partial() -> dict[str, Any]:
        found = operation.partial(problem, engine)
        assert found.maximum is not None and found.log_sum is not None
        return {
            "output": found.output,
            "lse": torch.where(found.log_sum.isinf(), -torch.inf, found.maximum + found.log_sum),
        }

    def summary() -> dict[str, Any]:
        keys = problem.sizes.keys
        places = torch.zeros(1, 1, problem.sizes.queries, dtype=torch.int64)
        asked = Summary(
            output=True, rows=True, distance=places, best=True, top=min(3, keys), received=True, mean=(2, 5)
        )
        found = summarised(problem, engine, asked)
        best = torch.where(found.best.isnan(), -torch.inf, found.best)  # type: ignore[union-attr]
        named = {"output": found.output, "best": best, "received": found.received, "distance": found.distance}
        return named | {"values": found.values, "mean": found.mean}

    def scores() -> dict[str, Any]:
        with torch.no_grad():  # else it is PyTorch that computes them
            return {"scores": engine.scores(guard(problem))}

    def rows() -> Rows:
        found = engine.forward(problem, rows=True)
        assert found.maximum is not None and found.log_sum is not None
        return Rows(found.maximum, found.log_sum, torch.zeros_like(found.log_sum))

    def contributions() -> dict[str, Any]:
        given = guard(problem), rows(), grad.to(torch.promote_types(dtype, torch.float32)), None
        names = ("by_query", "by_key")
        return {name: engine.contributions(*given, by_key=by_key) for by_key, name in enumerate(names)}

    def merge() -> dict[str, Any]:
        lead, wide = problem.sizes.shape[:3], torch.promote_types(dtype, torch.float32)
        zeros = torch.zeros(lead, dtype=wide)
        width = problem.value.shape[-1]  # type: ignore[union-attr]
        into = Partial(torch.zeros(*lead, width, dtype=wide), zeros, torch.full(lead, torch.inf, dtype=wide))
        engine.merge(problem, into)
        return {"output": into.output}

    yield "attend", attend
    yield "plain", plain
    if engine.name == "sdpa":  # it gives an output alone
        return
    yield "partial", partial
    yield "summary", summary
    yield "scores", scores
    if problem.value is not None and engine.name in ("native", "tiled"):
        yield "contributions", contributions
    if problem.sinks is None:
        yield "merge", merge


def wanted(found: oracle.Found, grad: np.ndarray, value: np.ndarray) -> dict[str, np.ndarray]:
    weights, groups = found.weights, found.weights.shape[1] // value.shape[1]
    products = weights * (grad @ np.repeat(value, groups, 1).swapaxes(-1, -2))
    queries, keys = weights.shape[2:]
    cells = np.add.reduceat(np.add.reduceat(weights, np.arange(0, queries, 2), 2), np.arange(0, keys, 5), 3)
    return {
        "output": found.output,
        "lse": found.logsumexp,
        "scores": found.scores,
        "best": found.scores.max(-1),
        "received": weights.sum(2),
        "mean": cells,
        "values": oracle.largest(weights, min(3, keys)),
        "distance": (weights * np.arange(keys)).sum(-1),
        "by_query": products.sum(-1),
        "by_key": products.sum(2),
        **{f"to_{name}": found.gradients[name] for name in ("query", "key", "value")},
    }


def failures_of(number: int) -> Iterator[str]:
    """What fails in one problem."""
    problem, what = drawn(number)
    try:
        passed = checked(problem, "a test")
    except ClearheadError as refusal:
        if not str(refusal).startswith("a test") and "a test" not in str(refusal):
            yield f"{number}: {what}: the error does not say who: {refusal}"
    except Exception as error:
        yield f"{number}: {what}: checked raised {type(error).__name__}: {str(error).splitlines()[0]}"
    else:
        for engine in ENGINES[:-1]:  # the reference takes what is as written alone
            try:
                willing = not engine.objections(passed)
            except Exception as error:
                yield f"{number}: {what}: {engine.name} objects by {type(error).__name__}: {error}"
                continue
            if willing and engine.name != "flex":  # which is compiled for each kind of problem
                yield from _tried(number, what, passed, engine, strict=True)
    yield from _tried(number, what, problem, NATIVE, strict=False)


def _tried(number: int, what: str, problem: Problem, engine: Engine, strict: bool) -> Iterator[str]:
    """What an engine's entries give that is wrong; `strict`: what they raise that is no ClearheadError too."""
    if getattr(problem, "value", None) is None:
        return
    if not strict and (
        problem.by_function or what in ("a scale", "a softcap", "a memo that fits") or 0 in problem.sizes.shape
    ):
        return  # numbers are no matter of memory, nor is what a map of the right size says; no kernel reads functions
    try:
        grad = torch.from_numpy(
            np.random.default_rng(number).normal(size=(*problem.sizes.shape[:3], problem.value.shape[-1]))
        )  # type: ignore[union-attr]
        every = list(entries(problem, engine, grad))
    except Exception:  # nothing that an engine could be called with
        if strict:
            raise
        return
    right: dict[str, np.ndarray] | None = None
    for name, entry in every:
        try:
            got = entry()
        except ClearheadError:
            continue
        except NotImplementedError:
            continue
        except Exception as error:
            if strict:
                yield f"{number}: {what}: {engine.name}, {name}: {type(error).__name__}: {str(error).splitlines()[0]}"
            continue
        if right is None:
            try:
                assert problem.value is not None
                if name == "scores":  # which reads no value
                    lead = *problem.key.shape[:3], grad.shape[-1]
                    problem = problem._replace(value=torch.zeros(lead), sinks=None)
                found = truth(problem, grad.numpy())
                right = wanted(found, grad.numpy(), problem.value.detach().double().numpy())
            except ClearheadError:  # no pair is seen, so that no engine has asked for what is wrong
                return
            except Exception as error:
                if problem.dropout_p or (strict and problem.scores.weight is not None):  # type: ignore[union-attr]
                    return
                yield f"{number}: {what}: {engine.name}, {name} gave a result of what fits nothing ({error!r:.200})"
                return
        for part, tensor in got.items():
            tensor = tensor.detach().double().numpy()
            scores_alone = part in ("to_query", "to_key") and not (
                problem.lowered is not None and problem.lowered.phi == "mul" and problem.lowered.weight is None
            )
            if scores_alone:
                continue
            if tensor.shape != right[part].shape:
                yield f"{number}: {what}: {engine.name}, {name}: {part} is {tensor.shape}, not {right[part].shape}"
                continue
            rough = 3e-2 if torch.float16 in (t.dtype for t in operands(problem) if t is not None) else 2e-4
            if not np.allclose(tensor, right[part], rtol=rough, atol=rough, equal_nan=True):
                far = np.abs(np.nan_to_num(tensor - right[part])).max()
                yield f"{number}: {what}: {engine.name}, {name}: {part} is off by {far:.3g}"


def main() -> int:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser()
    parser.add_argument("--kernels", help="a folder with another build of them")
    return numbered.main(failures_of, "problems", __doc__, parser, begin)


def begin(given: argparse.Namespace) -> None:
    if given.kernels:
        other_kernels.use(given.kernels)
        bindings._known.clear()
    if given.only is not None:
        print(drawn(given.only)[1], flush=True)


if __name__ == "__main__":
    sys.exit(main())
