"""The comparison of an engine with the reference engine in float64, for `clearhead.testing`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead._attention import attention
from clearhead.base.errors import UnsupportedError
from clearhead.base.shapes import Align, Sizes
from clearhead.biases.base import Bias
from clearhead.engines.base import Engine
from clearhead.engines.choose import ENGINES, choose
from clearhead.masks.base import Mask
from clearhead.problem.problem import Problem, make_problem
from clearhead.scores.base import Score

ALIGN: Align = "lower_right"  # the alignment of every comparison
EXACT = 1e-9  # float64 against float64: thousands of terms, each rounded at 1e-16 of numbers near 10
ROUNDED = 2e-6  # the same in float32: a few roundings
DRAWS = 32  # the inputs whose errors are added up, where the errors of one exceed the budget


def draw(*shape: int, generator: torch.Generator) -> Tensor:
    """Draw normal numbers in float64 on the default device, the same for every device."""
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return numbers.to(torch.get_default_device())


class Inputs(NamedTuple):
    """Query, key and value for a score, with two heads that share one key head."""

    query: Tensor
    key: Tensor
    value: Tensor

    @classmethod
    def draw(
        cls, score: tuple[Score, int, int], lengths: tuple[int, int], dtype: torch.dtype = torch.float64, seed: int = 0
    ) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        _, query_dim, key_dim = score
        queries, keys = lengths
        batch = 1 if queries >= 1000 else 3
        query, key, value = (
            draw(batch, heads, length, width, generator=generator).to(dtype)
            for heads, length, width in ((2, queries, query_dim), (1, keys, key_dim), (1, keys, 5))
        )
        return cls(query, key, value)

    @property
    def sizes(self) -> Sizes:
        batch, heads, queries, _ = self.query.shape
        return Sizes(batch, heads, queries, self.key.shape[2], self.query.device, align=ALIGN)


def outputs_and_gradients(
    inputs: Inputs,
    score: Score,
    mask: Any,
    engine: str | Engine,
    bias: Bias | None = None,
    dropout_p: float = 0.0,
    sinks: Tensor | None = None,
) -> dict[str, Tensor]:
    """Compute the output, and the gradients of a fixed random loss to inputs, sinks and parameters."""
    query, key, value = (t.detach().clone().requires_grad_() for t in inputs)
    torch.manual_seed(0)  # the seed of the dropout
    sinks = None if sinks is None else sinks.detach().to(query.dtype).requires_grad_()
    given: dict[str, Any] = {"score": score, "mask": mask, "bias": bias, "align": ALIGN, "dropout_p": dropout_p}
    output = attention(query, key, value, **given, sinks=sinks, engine=engine)
    loss = draw(*output.shape, generator=torch.Generator().manual_seed(1))
    leaves = {"query": query, "key": key, "value": value} | ({} if sinks is None else {"sinks": sinks})
    leaves |= {f"the score's parameter {name}": p for name, p in score.named_parameters()}
    if bias is not None:
        added = (*bias.named_parameters(), *bias.named_buffers())
        leaves |= {f"the bias's {name}": t for name, t in added if t.requires_grad}
    gradients = torch.autograd.grad(output, list(leaves.values()), loss.to(output.dtype), allow_unused=True)
    found = {"output": output.detach()}
    for name, gradient in zip(leaves, gradients, strict=True):
        assert gradient is not None, f"{engine}, {score}: no gradient to {name}; do tile() and lower() both use it?"
        found[name] = gradient
    return found


def compare(
    engine: str | Engine | list[str],
    score: tuple[Score, int, int],
    mask: Mask | None,
    lengths: tuple[int, int],
    bias: Bias | None = None,
    dropout_p: float = 0.0,
    sinks: Tensor | None = None,
) -> int:
    """Compare an engine, or each of several, with the reference in float64. Engines that object are left out.

    The output and all gradients are compared. An engine that takes no float64 computes in float32, and may err twice as
    far as the reference does in float32.
    """
    known, waiting = [candidate.name for candidate in ENGINES], engine if isinstance(engine, list) else [engine]
    count = len(waiting)
    for one in waiting:
        assert not isinstance(one, str) or one in known, (
            f"no engine is named {one!r}: there are {known}, or pass an Engine itself"
        )
    for dtype in (torch.float64, torch.float32):
        inputs = Inputs.draw(score, lengths, dtype)
        module, bias = score[0].to(dtype), None if bias is None else bias.to(dtype)
        beside: dict[str, Any] = {"bias": bias, "dropout_p": dropout_p, "sinks": sinks}
        problem = make_problem(*inputs, score=module, mask=mask, align=ALIGN, **beside)
        taking = [one for one in waiting if _takes(one, problem)]
        waiting = [one for one in waiting if one not in taking]
        about = f"{module}, {mask}, {bias}, {lengths}, {dtype}"
        errors = _errors(taking, inputs, module, mask, beside, about) if taking else []
        for one, totals in zip(taking, errors, strict=True):
            if dtype == torch.float32 and not all(total.within(dtype) for total in totals.values()):
                # the rounding error of one number differs by chance and between processors, so many are compared
                for seed in range(1, DRAWS):
                    more = Inputs.draw(score, lengths, dtype, seed)
                    for name, error in _errors([one], more, module, mask, beside, about)[0].items():
                        totals[name] = Error(*map(sum, zip(totals[name], error, strict=True)))
            for name, total in totals.items():
                off = f"{name} is off by {total.got:.3g}; eager code by {total.near:.3g}"
                assert total.within(dtype), f"{one}, {about}: {off}"
    return count - len(waiting)


def _takes(engine: str | Engine, problem: Problem) -> bool:
    try:
        choose(problem, engine)
    except UnsupportedError as refusal:
        assert str(refusal).count("  - ") >= 1, "an engine that refuses says why"
        return False
    return True


class Error(NamedTuple):
    """The errors of an engine and of the reference in the same dtype, against float64, and the size of the numbers."""

    got: float
    near: float
    size: float

    def within(self, dtype: torch.dtype) -> bool:
        if dtype == torch.float64:
            return self.got <= EXACT * self.size
        return self.got <= 2 * self.near + ROUNDED * self.size


def _errors(
    engines: Sequence[str | Engine], inputs: Inputs, score: Score, mask: Any, beside: dict[str, Any], about: str
) -> list[dict[str, Error]]:
    """Compute the errors of the output and of each gradient, for each engine; the reference runs once for all."""
    dtype, bias = inputs.query.dtype, beside["bias"]
    results = [outputs_and_gradients(inputs, score, mask, engine, **beside) for engine in engines]
    near = outputs_and_gradients(inputs, score, mask, "reference", **beside)
    want = near
    if dtype != torch.float64:
        wide = Inputs(*(t.double() for t in inputs))
        if bias is not None:
            bias.double()
        want = outputs_and_gradients(wide, score.double(), mask, "reference", **beside)
        score.to(dtype)
        if bias is not None:
            bias.to(dtype)
    found: list[dict[str, Error]] = []
    for engine, got in zip(engines, results, strict=True):
        found.append({})
        for name, truth in want.items():
            place = f"{engine}, {about}: {name}"
            assert got[name].shape == truth.shape, f"{place} is {tuple(got[name].shape)}, not {tuple(truth.shape)}"
            assert bool(got[name].isfinite().all()) == bool(truth.isfinite().all()), f"{place} is not finite"
            errors = (find_largest(t[name].double() - truth) for t in (got, near))
            found[-1][name] = Error(next(errors), next(errors), max(1.0, find_largest(truth)))
    return found


def find_largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0
