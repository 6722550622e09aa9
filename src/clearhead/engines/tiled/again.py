"""Whether a caller's functions give in the backward pass the scores that they gave in the forward pass.

The backward pass computes scores again, and so it calls the functions of score, bias and mask again. Writes to the
tensors that they read are counted (`base/versions.py`), and nothing counts that an attribute is bound anew, or that a
random number is drawn. But the forward pass has kept the maximum and the log-sum of each row, so that the terms
exp(score − maximum − log_sum) of a row, with the sink's, must sum to 1.

Rounding alone moves such a sum by a few ε, and by N·ε where N terms are added in turn. Where the sum has an error above
√ε, the row is looked at by itself: operands that are moved by a few ε show how far rounding moves its scores, which is
far where they are differences of large numbers. What this explains is no error.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.base.errors import ClearheadError
from clearhead.base.rules import ByPair, Joined
from clearhead.base.tracing import compiling, readable
from clearhead.engines.tiled import tiles
from clearhead.masks.base import Spans
from clearhead.problem.packing import operands, with_operands
from clearhead.problem.partial import Rows
from clearhead.problem.problem import Problem
from clearhead.problem.region import Region
from clearhead.problem.regions import cut
from clearhead.scores.base import ByTile
from clearhead.scores.score_function import ScoreFunction

OF_SCORE = 16  # ε of the largest score: a product of matrices in blocks of another shape rounds by less
MOVED = 4  # ε by which operands are moved
TRIALS = 4  # how often they are
EXPLAINED = 16  # times what the moved operands change
ROWS = 8  # of the rows that are furthest off, as many are looked at by themselves
DEPTH = 8  # how many functions inside one another are looked into


def calls_functions(problem: Problem) -> bool:
    """Whether a caller's functions take part in the scores, so that a backward pass calls them again."""
    if compiling():
        return False
    if problem.lowered is None or problem.by_function:
        return True
    residual = None if problem.spans is None else problem.spans.residual
    return residual is not None and any(True for _ in _callers(residual))


def _callers(thing: Any, depth: int = DEPTH) -> Iterator[Any]:
    """The caller's functions that a function is, or has in its closure."""
    if not depth:
        return
    inside: Iterable[Any] = ()
    if isinstance(thing, ByPair):
        inside = thing.of
    elif isinstance(thing, Joined):
        inside = thing.leaves()
    elif isinstance(thing, Spans):
        inside = (thing.residual,)
    elif isinstance(thing, partial):
        inside = (thing.func, *thing.args)
    elif isinstance(thing, types.MethodType) and isinstance(thing.__self__, Spans):
        inside = (thing.__self__,)
    elif callable(thing):
        home = thing if isinstance(thing, types.FunctionType | types.MethodType) else type(thing)
        package = str(home.__module__).partition(".")[0]
        if package not in ("clearhead", "torch", "builtins"):
            yield thing
        elif package == "clearhead" and isinstance(thing, types.FunctionType):
            inside = (cell.cell_contents for cell in thing.__closure__ or ())
        elif package == "clearhead" and isinstance(thing, torch.nn.Module):  # such as a rule beside a cache
            inside = (*vars(thing).values(), *thing.children())
    for one in inside:
        yield from _callers(one, depth - 1)


class Block(NamedTuple):
    """Rows of which the scores were computed again. `problem`: a part with all that its rows see, over its operands."""

    problem: Problem
    first: tuple[int, int, int]  # the place of its first sequence, head and query
    off: Tensor  # (b, h, q), by how much the sum of a row's weights differs from that of the forward pass
    maximum: Tensor  # of the forward pass


def of_sums(problem: Problem, rows: Rows, sums: Tensor) -> Block:
    """The rows of a problem whose weights, by the rows of the forward pass, have these sums now."""
    maximum, log_sum = rows[:2]
    blind, sinks = log_sum == torch.inf, tiles.sinks(problem)
    due = torch.ones_like(sums)
    if sinks is not None:
        due = due - torch.exp((sinks.to(sums.dtype) - maximum) - log_sum)
    return Block(problem, (0, 0, 0), _known(sums - due.masked_fill(blind, 0.0), maximum, log_sum), maximum)


def of_rows(problem: Problem, region: Region, before: Sequence[Tensor], now: Sequence[Tensor]) -> Block:
    """The rows of a part of a problem, by their maximum and log_sum `before` and `now`."""
    apart = torch.expm1((now[0] - before[0]) + (now[1] - before[1]))
    apart = apart.masked_fill((before[1] == torch.inf) & (now[1] == torch.inf), 0.0)
    first = tuple(side.start or 0 for side in region.sides[:3])
    return Block(problem, first, _known(apart, *before), before[0])  # type: ignore[arg-type]


def check_again(problem: Problem, before: Any, now: Any) -> None:
    """Raise where two results of a problem, `Partial` or `Found`, are of other scores. Rows that are not known of both
    are not compared."""
    rows = [(found.maximum, found.log_sum) for found in (before, now)]
    if all(row is not None for pair in rows for row in pair):
        check([of_rows(problem, Region(), *([row.detach() for row in pair] for pair in rows))])


def _known(off: Tensor, maximum: Tensor, log_sum: Tensor) -> Tensor:
    """`off`, and 0 for rows that were NaN in the forward pass: their gradients are NaN."""
    return off.masked_fill(~maximum.isfinite() | log_sum.isnan(), 0.0)


def check(blocks: Sequence[Block]) -> None:
    """Raise where the scores of a row differ from those of the forward pass by more than rounding.

    The numbers of all blocks are read at once, since another device is waited for.
    """
    blocks = [block for block in blocks if block.off.numel()]
    if not blocks or not readable(blocks[0].off):
        return
    ratios = [(block.off.abs() / _free(block)).nan_to_num(nan=torch.inf) for block in blocks]
    largest = torch.stack([ratio.amax() for ratio in ratios])
    if float(largest.amax()) > 1:
        for place in sorted(range(len(blocks)), key=lambda place: -float(largest[place])):
            _look_into(blocks[place], ratios[place])


def _free(block: Block) -> Tensor:
    """By how much the sum of each row may be off without a look."""
    ε = torch.finfo(block.off.dtype).eps
    largest = block.maximum.abs().nan_to_num(0.0, 0.0, 0.0)
    return largest.mul(OF_SCORE).add_(block.problem.sizes.keys).mul_(ε).add_(math.sqrt(ε))


def _look_into(block: Block, ratio: Tensor) -> None:
    """Raise where rounding does not explain the rows that are furthest off."""
    far, at = ratio.flatten().topk(min(ROWS, ratio.numel()))
    free, most = _free(block), math.log(torch.finfo(block.off.dtype).max)  # a larger logarithm overflows
    for number, place in zip(far, at, strict=True):
        if number <= 1:
            return
        b, h, i = (int(n) for n in np.unravel_index(int(place), ratio.shape))
        row = cut(block.problem, Region(slice(b, b + 1), slice(h, h + 1), slice(i, i + 1)))
        once, twice, moved = _tried(row)
        off, finite = float(block.off[b, h, i]), once - once == 0
        with np.errstate(divide="ignore"):
            apart = np.minimum(np.abs(np.log1p(max(off, -1.0))), most)
        differs = finite and not abs(twice - once) <= float(free[b, h, i])
        if differs or not apart <= (EXPLAINED * moved if finite else 0.0):
            places = tuple(start + n for start, n in zip(block.first, (b, h, i), strict=True))
            raise _error(block.problem, places, off, int((ratio > 1).sum()), ratio.numel(), differs)


def _tried(row: Problem) -> tuple[float, float, float]:
    """What the functions give for a row as they are now: its log-sum-exp twice, and by how much a score that has some
    weight changes where operands are moved by a few ε."""
    device, dtype = row.query.device, accumulated(row.query.dtype)
    some, ε = torch.Generator(device).manual_seed(0), torch.finfo(dtype).eps

    def moved(tensor: Tensor) -> Tensor:
        signs = torch.rand(tensor.shape, generator=some, dtype=torch.float32, device=device).sub_(0.5).sign_()
        return tensor.to(dtype) * (1 + signs.to(dtype) * (MOVED * ε))

    with torch.no_grad():  # a checkpoint counts the tensors that autograd saves
        others = [[None if t is None else moved(t) for t in operands(row)] for _ in range(TRIALS)]
        found = []
        for problem in (row, row, *(with_operands(row, other) for other in others)):
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                torch.manual_seed(0)  # numbers that torch draws are put back by a checkpoint
                found.append(tiles.scores(problem).flatten().double())
    once, twice = (float(scores.logsumexp(-1)) for scores in found[:2])
    heavy = found[0] > found[0].amax() + math.log(ε) / 2
    changes = [(scores - found[0])[heavy].abs().amax() for scores in found[2:]] if heavy.any() else []
    return once, twice, max((float(change.nan_to_num(nan=math.inf)) for change in changes), default=0.0)


def _error(problem: Problem, place: tuple[int, ...], off: float, rows: int, of: int, differs: bool) -> ClearheadError:
    sequence, head, query = place
    return refused(
        problem,
        "numbers",
        f"exp(score − log-sum-exp) of query {query} (sequence {sequence}, head {head}) must have the sum that it had "
        f"there, and the sum is off by {off:.3g}; {rows:,} of {of:,} such rows are off.",
        differs,
    )


def refused(problem: Problem, what: str, off: str, differs: bool) -> ClearheadError:
    """The error where functions give something else in the backward pass. `differs`: whether they do so from one call
    to the next."""
    why = (
        "Called twice with the same arguments, it gives two results now: it draws random numbers, or counts its calls. "
        "Draw the numbers before the call, and let it read them."
        if differs
        else "The backward pass calls it again. Since the forward pass an attribute or a variable that it reads was "
        "bound anew (self.factor = …), or an array or a list was written to; or it draws random numbers, or changes "
        "itself in each call, as parametrizations.spectral_norm does in training.\nBind these after backward(), or "
        "give each call a function that holds its own: functools.partial(function, factor=factor)."
    )
    return ClearheadError(
        f"{' or '.join(_names(problem))} gave other {what} in the backward pass of attention() than in its forward "
        f"pass, so the gradients would be wrong: {off}\n{why}\nOr pass engine='reference', which keeps the scores of "
        "all pairs, and calls nothing again."
    )


def _names(problem: Problem) -> list[str]:
    """The caller's functions in the scores, as an error names them."""
    found, scores = [], problem.scores
    if isinstance(scores, ByTile):
        score = scores.score
        if isinstance(score, ScoreFunction):
            found.append(f"the function {_name(score.function)} of the score")
        elif not type(score).__module__.startswith("clearhead."):
            found.append(f"{type(score).__name__}.tile")
        if score.changed_by is not None:
            found.append(f"{type(score).__name__}.then({_name(score.changed_by)})")
    if problem.bias is not None:
        found += [f"the function {_name(rule)} of the bias" for rule in _callers(problem.bias.function)]
    if problem.spans is not None:
        found += [f"the function {_name(rule)} of the mask" for rule in _callers(problem.spans.residual)]
    return list(dict.fromkeys(found)) or ["a function"]


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
