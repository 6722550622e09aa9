"""Kernels between protected pages: each case is run in ordinary memory and between pages, and must find the same.

    python tests/guard_pages.py avx2 1

runs all cases, or one in so many of them, on one instruction set, with the protected page after each buffer, and before
it. The case at work is printed before it is run, so that the last line names the one that ended the process.
`tests/test_guard_pages.py` does this for every instruction set.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import other_kernels
import torch
from drawn import draw
from guarded_memory import guarding
from torch import Tensor

LENGTHS = [(1, 1), (1, 67), (2, 16), (3, 65), (4, 129), (5, 70), (7, 9), (48, 64), (49, 63), (53, 1), (97, 130)]
WIDTHS = [(1, 1), (3, 5), (7, 3), (16, 16), (17, 33), (20, 11), (64, 64), (65, 1)]
DTYPES = [torch.float32, torch.bfloat16, torch.float32, torch.float16]


def scores(width: int) -> dict[str, Callable[[], Any]]:
    import clearhead as ch

    return {
        "dot": lambda: ch.Dot(),
        "softcap and sinks": lambda: ch.Dot(softcap=2.0),
        "additive": lambda: ch.Additive.from_weights(None, None, draw(width, seed=3)),
        "gaussian": lambda: ch.Gaussian(3.0),
    }


def masks(queries: int, keys: int) -> dict[str, Any]:
    import clearhead as ch
    from clearhead.masks import Intervals

    some = lambda *shape: draw(*shape, seed=5) > 0.3
    edges = torch.arange(queries) % (keys + 1), (torch.arange(queries) * 3) % (keys + 1)
    return {
        "none": None,
        "causal": ch.Causal(),
        "intervals": Intervals(*edges),
        "one length a query": ch.Lengths(edges[0].expand(3, -1)),
        "dense": ch.DenseMask(some(queries, keys)),
        "dense of each head": ch.DenseMask(some(1, 4, queries, keys)) & ch.Lengths([keys, keys // 2, 0]),
        "a column": ch.DenseMask(some(queries, 1)),
        "padding": ch.Padding(some(3, keys)),
    }


def biases(queries: int, keys: int, dtype: torch.dtype) -> dict[str, Any]:
    import clearhead as ch

    parameter = lambda *shape: torch.nn.Parameter(draw(*shape, seed=6))
    return {
        "none": lambda: None,
        "dense": lambda: ch.DenseBias(parameter(queries, keys)).to(dtype),
        "a row": lambda: ch.DenseBias(parameter(1, 4, 1, keys)),
        "relative": lambda: ch.RelativeBias(4, 8, 20),
        "both": lambda: ch.ALiBi(4) + ch.DenseBias(parameter(3, 1, queries, 1)),
    }


def cases() -> Iterator[tuple[str, Callable[[], list[Tensor]]]]:
    """Every pair of lengths and widths; the rest takes turns, in periods that do not divide each other."""
    for i, ((queries, keys), (width, value_width)) in enumerate(itertools.product(LENGTHS, WIDTHS)):
        turns = []
        dtype, dropout_p = DTYPES[(i + i // 5) % len(DTYPES)], 0.3 * (i % 4 == 1)
        for j, choices in enumerate((scores(width), masks(queries, keys), biases(queries, keys, dtype))):
            turns.append(list(choices.items())[(i + i // (7 + j)) % len(choices)])
        name = ", ".join([f"{queries}×{keys}, {width}×{value_width}, {dtype}", *(name for name, _ in turns)])
        shapes = (3, 4, queries, width), (3, 2, keys, width), (3, 2, keys, value_width)
        inputs = [draw(*shape, seed=n).to(dtype) for n, shape in enumerate(shapes)]
        yield name, lambda i=inputs, t=turns, p=dropout_p: run(i, t[0][1](), t[1][1], t[2][1], p)


def run(inputs: list[Tensor], score: Any, mask: Any, make_bias: Callable[[], Any], dropout_p: float) -> list[Tensor]:
    """Output, gradients, summaries, a row and a part of the weights."""
    import clearhead as ch

    torch.manual_seed(0)
    score, bias = score.to(inputs[0].dtype), make_bias()
    leaves = [x.detach().requires_grad_() for x in inputs]
    options = {"score": score, "mask": mask, "bias": bias, "align": "lower_right", "engine": "native"}
    sinks = [torch.tensor([0.5, -1.0, 0.1, 3.0], requires_grad=True)] if score.softcap else []
    options["sinks"] = sinks[0] if sinks else None
    output = ch.attention(*leaves, **options, dropout_p=dropout_p)
    learnt = [*sinks, *score.parameters(), *(bias.parameters() if bias is not None else ())]
    found = [output.detach(), *torch.autograd.grad(output, [*leaves, *learnt], draw(*output.shape, seed=9).to(output))]
    query, key, value = inputs
    with torch.no_grad():
        weights = ch.weights(query, key, **options)
        keys = key.shape[2]
        for k in {1, min(5, keys), min(64, keys)}:
            found += weights.reduce(ch.reductions.TopK(k))
        every = (
            ch.reductions.Entropy(),
            ch.reductions.Received(),
            ch.reductions.Pool((3, 5), "mean"),
            ch.reductions.Output(value),
        )
        found += [
            *weights.reduce(*every),
            weights.reduce(ch.reductions.Pool((5, 7))),
            weights.logsumexp(),
            weights.dense(),
        ]
        found += [weights[1, 2, -1], weights[..., keys // 2 :]]
        found += added_up(weights.problem, value)
    return [t.clone() for t in found]


def added_up(problem: Any, value: Tensor) -> Iterator[Tensor]:
    """An output that is merged with itself, and gradients that are added twice to what is there."""
    from clearhead.engines.native import bindings
    from clearhead.engines.native.engine import Native
    from clearhead.problem.guard import guard
    from clearhead.problem.packing import Operands
    from clearhead.problem.partial import Partial, Rows
    from clearhead.problem.problem import with_value

    problem, zeros = guard(with_value(problem, value)._replace(sinks=None)), bindings._zeros
    lead = problem.sizes.shape[:3]
    into = Partial(zeros(*lead, value.shape[-1]), zeros(*lead), zeros(*lead).fill_(torch.inf))
    inputs = problem.query, problem.key, problem.value
    sums = Operands(*(zeros(*t.shape) for t in inputs if t is not None))
    assert into.maximum is not None and into.log_sum is not None
    for _ in range(2):
        Native().merge(problem, into)
        rows = Rows(into.maximum, into.log_sum, zeros(*lead))
        Native().add_gradients(problem, rows, draw(*lead, value.shape[-1], seed=9), sums)
    return (t for t in (*into[:3], *sums[:3]) if t is not None)


def main() -> int:
    instructions, every, *folder = sys.argv[1:]
    if folder:
        other_kernels.use(folder[0])
    from clearhead.engines.native import bindings, engine
    from clearhead.engines.tiled import tiles  # it makes the sums of gradients

    kernels = bindings.chosen(instructions)
    left_out = bindings.kernels().available().index(instructions) % 3  # each set leaves out another third of the cases
    bindings.chosen = lambda instructions=None: kernels
    wrong = 0
    for number, (name, case) in enumerate(cases()):
        if number % 3 == left_out or number % int(every):
            continue
        print(name, flush=True)
        want = case()
        for side in ("after", "before"):
            print(f"{name}: the protected page {side}", flush=True)
            with guarding(side, bindings, engine, tiles) as guard:
                got = case()
            for i, (a, b) in enumerate(zip(got, want, strict=True)):
                if not torch.equal(a.nan_to_num(7e7), b.nan_to_num(7e7)):
                    wrong += 1
                    print(f"DIFFERENT: {name}, {side}: result {i}", flush=True)
            guard.free()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
