"""Random problems, every engine against the reference in float64: outputs and all gradients.

    python tests/fuzz.py 10000            the first ten thousand
    python tests/fuzz.py --only 1234      one again, shown

A problem is all in its number. The budget of an error is derived from the problem: twice the error of plain eager code
of the same dtype, and what the result moves by when every input is moved by a few roundings of that dtype, and so are
the log-sum-exp that a backward pass begins with and the two numbers whose difference the softmax's gradient is. In
float64, where the reference rounds too, it is that of `clearhead.testing`.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import clearhead as ch
from clearhead import _dropout, _tiles
from clearhead._problem import make_problem
from clearhead._shapes import Sizes
from clearhead.engines.choose import ENGINES
from clearhead.masks import Intervals
from clearhead.testing import EXACT

ROUNDINGS = 4  # how many roundings each input may be moved by
DTYPES = (torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float16)


class Cubic(ch.Score):
    """A score with tile() alone, and something to learn."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(width) / width)

    def tile(self, query: Tensor, key: Tensor) -> Tensor:
        return (query.unsqueeze(-2) - key.unsqueeze(-3)).sin() @ self.w


def smooth(query: Tensor, key: Tensor) -> Tensor:
    return -torch.sqrt(1 + (query.unsqueeze(-2) - key.unsqueeze(-3)).square()).sum(-1)


@dataclass
class Case:
    """One problem: what to pass to attention(), in float64, and the dtype to compute it in."""

    number: int
    inputs: list[Tensor]
    dtype: torch.dtype
    score: ch.Score
    mask: Any
    bias: Any
    dropout_p: float
    budget: int  # of the tiled engine's blocks
    layout: Callable[[Tensor], Tensor]
    words: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        shapes = " ".join(str(tuple(t.shape)) for t in self.inputs)
        mask = self.mask.title() if isinstance(self.mask, ch.Mask) else type(self.mask).__name__
        parts = [shapes, str(self.dtype), str(self.score), f"mask {mask}", f"bias {self.bias}", *self.words]
        return f"problem {self.number}: " + ", ".join(parts).replace("\n", " ")


def draw(number: int) -> Case:
    r, g = random.Random(number), torch.Generator().manual_seed(number)
    dtype = r.choice(DTYPES)
    batch, key_heads, groups = r.choice([1, 2, 3]), r.choice([1, 1, 2]), r.choice([1, 1, 2, 3])
    queries = r.choice([1, 2, 5, 17, 40])
    keys = queries if r.random() < 0.6 else r.choice([1, 3, 8, 33, 64])
    width, value_width = r.choice([1, 3, 8]), r.choice([1, 4, 8])
    depth = r.choice([2, 3, 4, 4, 4, 5])
    heads = key_heads * groups if depth > 3 else 1
    key_heads = key_heads if depth > 3 else 1
    lead = {2: (), 3: (batch,), 4: (batch,), 5: (2, batch)}[depth]
    folded = {2: 1, 3: batch, 4: batch, 5: 2 * batch}[depth]
    sizes = Sizes(folded, heads, queries, keys)
    size = r.choice([0.3, 1.0, 3.0])
    inputs = [
        torch.randn(*lead, *([h] if depth > 3 else []), n, e, generator=g, dtype=torch.float64) * size
        for h, n, e in ((heads, queries, width), (key_heads, keys, width), (key_heads, keys, value_width))
    ]
    align: Any = None if queries == keys else r.choice(["upper_left", "lower_right", "each"])
    if align == "each":
        align = torch.randint(-3, keys + 3, (folded,), generator=g)
    mask: Any = expression(r, g, sizes, align, r.choice([0, 1, 1, 2, 3])) if r.random() < 0.7 else None
    if mask is None and r.random() < 0.3:
        mask = torch.rand(queries, keys, generator=g) > r.random()
    bias = one_bias(r, g, sizes, align, depth) if r.random() < 0.5 else None
    torch.manual_seed(number)
    score = one_score(r, g, width, heads).double()
    layouts = {"as it is": lambda t: t, "length first": lambda t: t.transpose(0, -2).contiguous().transpose(0, -2)}
    layouts["every second"] = lambda t: t.repeat_interleave(2, -1)[..., ::2]
    layout = r.choice(list(layouts))
    dropout_p, budget = r.choice([0.0, 0.0, 0.0, 0.3, 0.9]), r.choice([1, 50, 300, 2**21])
    words = [f"align {align}", f"dropout {dropout_p}", f"blocks of {budget}", layout]
    return Case(number, inputs, dtype, score, mask, bias, dropout_p, budget, layouts[layout], words)


def one_score(r: random.Random, g: torch.Generator, width: int, heads: int) -> ch.Score:
    kind = r.choice(["dot", "dot", "dot", "bilinear", "additive", "cosine", "gaussian", "function", "tile"])
    if kind == "dot":
        sinks = torch.randn(heads, generator=g) * 2 if r.random() < 0.4 else None
        return ch.Dot(r.choice([None, 0.5, -1.0]), r.choice([None, None, 2.0]), sinks)
    if kind == "function":
        return ch.scores.Function(smooth)
    made: dict[str, Callable[[], ch.Score]] = {
        "bilinear": lambda: ch.Bilinear(width, width),
        "additive": lambda: ch.Additive(width, width, r.choice([1, 5])),
        "cosine": lambda: ch.Cosine(r.choice([1.0, 0.2])),
        "gaussian": lambda: ch.Gaussian(r.choice([1.0, 3.0])),
        "tile": lambda: Cubic(width),
    }
    return made[kind]()


def leaf(r: random.Random, g: torch.Generator, s: Sizes, align: Any) -> ch.Mask:
    numbers = lambda *shape, most=s.keys: torch.randint(0, most + 1, shape, generator=g)
    a, b = numbers(s.queries), numbers(s.queries)
    factors = [r.randrange(4) for _ in range(4)]
    made: dict[str, Callable[[], ch.Mask]] = {
        "lengths": lambda: ch.Lengths(numbers(s.batch)),
        "per query": lambda: ch.Lengths(numbers(s.batch, s.queries)),
        "padding": lambda: ch.Padding(numbers(s.batch, s.keys, most=1)),
        "right": lambda: ch.Padding(torch.arange(s.keys) < numbers(s.batch, 1)),
        "causal": lambda: ch.Causal(align),
        "window": lambda: ch.SlidingWindow(r.randrange(9), r.randrange(5), align),
        "documents": lambda: ch.Documents(torch.arange(s.keys) // r.choice([1, 3, 7]), align),
        "recurring": lambda: ch.Documents(numbers(s.batch, s.keys, most=3), align),
        "prefix": lambda: ch.PrefixLM(numbers(s.batch), align),
        "intervals": lambda: Intervals(a, b),
        "where": lambda: ch.Where(lambda *i: sum(f * x for f, x in zip(factors, i, strict=True)) % 3 > 0),
    }
    return made[r.choice(list(made))]()


def expression(r: random.Random, g: torch.Generator, s: Sizes, align: Any, depth: int) -> ch.Mask:
    if not depth:
        return leaf(r, g, s, align)
    if r.random() < 0.25:
        return ~expression(r, g, s, align, depth - 1)
    left, right = (expression(r, g, s, align, depth - 1) for _ in range(2))
    return left & right if r.random() < 0.6 else left | right


def one_bias(r: random.Random, g: torch.Generator, s: Sizes, align: Any, depth: int) -> ch.Bias:
    shape = [r.choice([1, n]) for n in (s.queries, s.keys)]
    if depth in (3, 4):
        shape = [r.choice([1, s.batch]), *([r.choice([1, s.heads])] if depth == 4 else []), *shape]
    dense = torch.randn(*shape, generator=g, dtype=torch.float64)
    if r.random() < 0.3:
        dense = dense.masked_fill(torch.rand(dense.shape, generator=g) < 0.3, -torch.inf)
    made: dict[str, Callable[[], ch.Bias]] = {
        "alibi": lambda: ch.ALiBi(s.heads, align),
        "relative": lambda: ch.RelativeBias(s.heads, 8, 20, r.random() < 0.5, align),
        "dense": lambda: ch.DenseBias(torch.nn.Parameter(dense) if r.random() < 0.5 else dense),
    }
    first = made[r.choice(list(made))]()
    return first + made[r.choice(list(made))]() if r.random() < 0.3 else first


def run(case: Case, dtype: torch.dtype, attend: Callable[..., Tensor], move: int | None = None) -> dict[str, Tensor]:
    """The output and all gradients, in float64, of a fixed random loss; `move` moves the inputs by some roundings."""
    g = torch.Generator().manual_seed(0 if move is None else move)

    def moved(t: Tensor) -> Tensor:
        t = t.detach().to(case.dtype).double()  # the numbers that every run begins with
        if move is None:
            return t
        step = torch.randint(-ROUNDINGS, ROUNDINGS + 1, t.shape, generator=g) * torch.finfo(case.dtype).eps / 2
        return t * (1 + step)

    query, key, value = (case.layout(moved(t).to(dtype)).requires_grad_() for t in case.inputs)
    leaves = {"query": query, "key": key, "value": value}
    for owner, module in (("score", case.score), ("bias", case.bias)):
        if module is None:
            continue
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            before = _given.setdefault(id(tensor), (tensor, tensor.detach().clone().double()))[1]
            tensor.data = moved(before).to(dtype)
            tensor.requires_grad_()
            tensor.grad = None
            leaves[f"{owner}.{name}"] = tensor
    torch.manual_seed(case.number)
    output = attend(query, key, value)
    loss = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = torch.autograd.grad(output, list(leaves.values()), moved(loss).to(output.dtype), allow_unused=True)
    zeros = (torch.zeros_like(t) for t in leaves.values())
    gradients = (z if t is None else t for t, z in zip(found, zeros, strict=True))
    return {"output": output.detach().double()} | {n: t.double() for n, t in zip(leaves, gradients, strict=True)}


_given: dict[int, tuple[Tensor, Tensor]] = {}  # learnt tensors as they were drawn


def eager(case: Case, move: int | None = None) -> Callable[..., Tensor]:
    """What a person would write, in the inputs' own dtype; `move` moves the scores' gradient by some roundings."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        problem = make_problem(query.detach(), key.detach(), mask=case.mask)
        s = problem.sizes
        if query.ndim > 3:
            key, value = (t.repeat_interleave(s.heads // t.shape[-3], -3) for t in (key, value))
        scores = case.score.tile(query, key)
        if case.bias is not None:
            scores = scores + case.bias(query.detach(), key.detach()).to(scores.dtype)
        if problem.spans is not None:
            every = slice(None)
            keep = s.restore(problem.spans.keep(every, every, every, every, s.keys).expand(s.shape))
            scores = scores.masked_fill(~keep, -torch.inf)
        blind = scores.amax(-1, keepdim=True) == -torch.inf
        scores = finished = scores.masked_fill(blind, 0.0)
        sinks = getattr(case.score, "sinks", None)
        if sinks is not None:
            column = sinks.view(-1, 1, 1) if query.ndim > 3 else sinks
            scores = torch.cat([scores, column.expand(*scores.shape[:-1], 1)], -1)
        weights = scores.softmax(-1)[..., : s.keys].masked_fill(blind, 0.0)
        if case.dropout_p:
            seed, every = _dropout.draw_seed(s.device), (slice(None),) * 4
            weights = weights * s.restore(_dropout.factors(seed, case.dropout_p, every, s, weights.dtype))
        output = weights @ value
        if move is not None:
            g, upstream = torch.Generator().manual_seed(move), []
            known, rounding = weights.detach(), torch.finfo(case.dtype).eps / 2
            steps = lambda *shape: torch.randint(-ROUNDINGS, ROUNDINGS + 1, shape, generator=g) * rounding
            row = steps(*known.shape[:-1], 1) * finished.detach().logsumexp(-1, keepdim=True)
            terms = lambda: steps(*known.shape) * known * (upstream[0].abs() @ value.detach().abs().transpose(-1, -2))
            output.register_hook(upstream.append)
            finished.register_hook(lambda gradient: gradient * (1 + row) + terms())
            value.register_hook(lambda gradient: gradient + (known * row).transpose(-1, -2) @ upstream[0])
        return output

    return attend


def check(case: Case) -> Iterator[str]:
    """What is beyond its budget, in words."""
    options = {"score": case.score, "mask": case.mask, "bias": case.bias, "dropout_p": case.dropout_p}

    def by(engine: str) -> Callable[..., Tensor]:
        return lambda *inputs: ch.attention(*inputs, engine=engine, **options)

    truth = run(case, torch.float64, by("reference"))
    plain = run(case, case.dtype, eager(case))
    moved = [run(case, torch.float64, eager(case, move), move) for move in range(1, 7)]
    eps = torch.finfo(case.dtype).eps
    for engine in (e.name for e in ENGINES):
        try:
            got = run(case, case.dtype, by(engine))
        except ch.UnsupportedError:
            continue
        for name, want in truth.items():
            if not want.numel():
                continue
            budget = 2 * (plain[name] - want).abs().max() + eps * want.abs().max() + torch.finfo(case.dtype).tiny
            budget = budget + (EXACT * max(1.0, want.abs().max()) if case.dtype == torch.float64 else 0.0)
            budget = budget + 2 * max((other[name] - want).abs().max() for other in moved)
            worst = (got[name] - want).abs().max()
            if not worst <= budget and not budget.isnan():
                yield f"{engine}: {name} is off by {worst:.3g}, allowed {budget:.3g}"


def fuzz(numbers: Iterator[int] | range, progress: Callable[[Any], Any] = iter) -> list[str]:
    """The failures of these problems."""
    failures, budget = [], _tiles.BUDGET
    for number in progress(numbers):
        case = draw(number)
        _given.clear()
        _tiles.BUDGET = case.budget
        try:
            failures += [f"{case}\n    {problem}" for problem in check(case)]
        except Exception as error:  # a crash is a failure too, and the next problem is another
            failures.append(f"{case}\n    {type(error).__name__}: {error}")
        finally:
            _tiles.BUDGET = budget
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", type=int)
    options = parser.parse_args()
    if options.only is not None:
        print(draw(options.only))
        numbers = range(options.only, options.only + 1)
    else:
        numbers = range(options.first, options.first + options.count)
    from tqdm import tqdm

    failures = fuzz(numbers, tqdm)
    print("\n".join(failures[:20]))
    print(f"{len(numbers)} problems, {len(failures)} beyond their budget")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
