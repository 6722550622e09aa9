"""The gradients of scores that user-defined functions compute: a score's tile(), its change, a bias rule.

Autograd computes the gradients of the scores of one block at a time, S = functions(query, key, *declared), and the
backward pass computes these scores once more. The softmax and the sum of values have the gradients of `backward.py`,
which end in Ṡ; autograd continues from Ṡ to the inputs of S.

Declared tensors are those that the functions read and that require grad: parameters of a module, tensors that the names
in a function refer to (`base/user_functions/function_reads.py`), and `reads=`. Another leaf in the graph of a block is
an error. If a declared tensor is no leaf, a function draws random numbers, or no input requires grad, each block has a
checkpoint.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from clearhead.base.arrays import in_memory_still
from clearhead.base.errors import UnsupportedError
from clearhead.base.torch_state.batched import Gradients, followed_back, unbatched, views
from clearhead.base.torch_state.contexts import without_autocast
from clearhead.base.torch_state.tensor_kind import has_own_dispatch, is_on_host, materialize_zeros
from clearhead.base.torch_state.torch_private import order_of
from clearhead.engines.tiled import tiles
from clearhead.engines.tiled.backward import find_seen, slope_of
from clearhead.engines.tiled.blocks import followed, in_blocks, make_replaced_error
from clearhead.problem import regions
from clearhead.problem.packing import Operands, in_dtypes, operands, with_operands, without_operands
from clearhead.problem.partial import Partial, Rows, rows_of, sinks_gradient
from clearhead.problem.problem import Problem
from clearhead.problem.region import Region
from clearhead.problem.regions import cut
from clearhead.problem.summary import Sent

PAIRS = 2**20  # pairs of a block for each thread: fewer blocks read the gradients of keys and values less often
FOLLOWED = 2  # the numbers of a block's largest tensor for each thread, as a multiple of regions.BUDGET


def _is_supported(problem: Problem) -> bool:
    """Return whether a problem has functions, and plain tensors on the host, where random draws are detected."""
    if problem.lowered is not None and not problem.by_function:
        return False
    if problem.mode.compiled or problem.mode.traced:
        return False
    return is_on_host(problem.query) and not any(t is not None and has_own_dispatch(t) for t in operands(problem))


def compute_output(problem: Problem, every: list[Region]) -> Tensor | None:
    """Compute the output of a guarded problem, with its gradients; None if each block needs a checkpoint."""
    if not _is_supported(problem):
        return None
    drawn, given, saved = torch.get_rng_state(), operands(problem), [1]
    declared = list({id(t): t for _, t in problem.read_by_functions() if t.requires_grad}.values())
    needs = [t is not None and t.requires_grad for t in given]

    def count(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        first, own = _compute_scores(cut(problem, regions.parts_seen(problem, every[0])[0]), needs)
    used, _ = _find_used(first, own, declared)
    # A declared tensor that is no leaf would get its gradient twice: here, and from autograd through its own graph.
    # Without any graph, a hidden tensor that only a later block reads would get no gradient and no error.
    if (any(needs) or declared) and all(t.is_leaf and not has_own_dispatch(t) for t in declared):
        # the largest tensor that autograd saves for the first block determines the size of blocks
        numbers = -(-max(saved) // max(first.numel(), 1))
        pairs = min(PAIRS, FOLLOWED * regions.BUDGET // numbers) * min(torch.get_num_threads(), 4)
        every = list(regions.walk(problem, pairs, 1))
        del first, own
        with torch.no_grad():
            kept = in_blocks(problem, every)
        if torch.equal(torch.get_rng_state(), drawn):
            found: Tensor = _Output.apply(problem, every, kept, declared, used, *given, *declared)  # type: ignore[no-untyped-call]
            return found
    torch.set_rng_state(drawn)
    return None


def _compute_scores(part: Problem, needs: list[bool]) -> tuple[Tensor, list[Tensor | None]]:
    """Compute the finished scores of a part, with their graph; also return the operands, its leaves."""
    own = [None if t is None else t.detach().requires_grad_(n) for t, n in zip(operands(part), needs, strict=True)]
    with torch.enable_grad():
        return tiles.scores(with_operands(part, own)), own


def _find_used(
    result: Tensor, own: list[Tensor | None], declared: list[Tensor], before: list[Tensor] | None = None
) -> tuple[list[Tensor], int]:
    """Find the declared tensors on which a result depends, and the number of its earliest operation.

    `before`: the declared tensors that the forward pass found.

    Raises:
        UnsupportedError: If the result depends on a leaf that is neither an operand nor declared, because the gradient
            of that leaf would be missing.
    """
    leaves = {id(t): t for t in (*own, *declared) if t is not None and t.grad_fn is None}
    inner = {(t.grad_fn, t.output_nr): t for t in (*own, *declared) if t is not None and t.grad_fn is not None}
    waiting: list[Any] = [(result.grad_fn, result.output_nr)]
    visited, found, unknown, earliest = set(), dict[int, Tensor](), list[Tensor](), sys.maxsize
    while waiting:
        edge = waiting.pop()
        if edge[0] is None or edge in visited:
            continue
        visited.add(edge)
        leaf = getattr(edge[0], "variable", None)
        tensor = inner.get(edge) if leaf is None else leaves.get(id(leaf))
        if tensor is not None:
            found[id(tensor)] = tensor
        elif leaf is None:
            waiting += edge[0].next_functions
            earliest = min(earliest, order_of(edge[0]))
        else:
            unknown.append(leaf)
    used = [tensor for tensor in declared if id(tensor) in found]
    if unknown:
        _check_used(before or [], used)
        raise UnsupportedError(
            f"the score or the bias of attention() reads a tensor of shape {tuple(unknown[0].shape)} that requires "
            "grad, but is neither a parameter nor named in its functions: its gradient would be missing.\n"
            "Name it: BiasFunction(fn, reads=[tensor]), Dot().then(fn, reads=[tensor]) or "
            "ScoreFunction(fn, reads=[tensor])."
        )
    return used, earliest


def _check_used(before: list[Tensor], now: list[Tensor]) -> None:
    """Raise if the backward pass does not depend on a tensor on which the forward pass depended."""
    if any(tensor.requires_grad and not any(tensor is other for other in now) for tensor in before):
        raise make_replaced_error()


class _Output(torch.autograd.Function):
    """The output, differentiable in the operands of a problem and in the declared tensors of its functions.

    The context holds the declared tensors themselves, since the functions read these and no copies.
    """

    @staticmethod
    def forward(
        ctx: Any,
        problem: Problem,
        every: list[Region],
        kept: Partial,
        declared: list[Tensor],
        used: list[Tensor],
        *tensors: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(*tensors[: len(tensors) - len(declared)], *kept[:3])
        ctx.problem, ctx.every, ctx.declared, ctx.finite = without_operands(problem), every, declared, kept.finite
        ctx.reads, ctx.used = ctx.problem.reads(), used
        return kept.output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.reads.check()
        grad, saved = grads[0], in_memory_still(ctx.saved_tensors)
        problem, kept = with_operands(ctx.problem, saved[:-3]), Partial(*saved[-3:])
        # a user may have frozen a tensor since the forward pass
        needs, frozen = ctx.needs_input_grad[5:], [not tensor.requires_grad for tensor in ctx.declared]
        count = len(needs) - len(frozen)
        wanted = (*needs[:count], *(n and not f for n, f in zip(needs[count:], frozen, strict=True)))
        again = torch.is_grad_enabled()  # True for create_graph=True

        def compute(grad: Tensor) -> Gradients:
            return _compute_gradients(ctx, problem._refresh_mode(), kept, materialize_zeros(grad), wanted)

        with without_autocast(problem.sizes.device):
            if again or has_own_dispatch(grad):
                with torch.enable_grad():
                    own = views(operands(problem))
                    found = followed(with_operands(problem._refresh_mode(), own), ctx.every, again=True)
                _check_used(ctx.used, _find_used(found, own, ctx.declared, ctx.used)[0])
                each = followed_back(found, grad, [*own, *ctx.declared], wanted, create_graph=again)
            else:
                each = unbatched(compute, grad)
        ctx.reads = ctx.problem.reads()  # a score may update its own buffers without an error
        return (None, None, None, None, None, *each)


def _compute_gradients(ctx: Any, problem: Problem, kept: Partial, grad: Tensor, wanted: tuple[bool, ...]) -> Gradients:
    """Compute the gradients of the operands and of the declared tensors; `ctx` is that of `_Output`."""
    given, declared, used = operands(problem), ctx.declared, ctx.used
    rows = Rows(*rows_of(kept), (grad * kept.output).sum(-1))
    # do not allocate a gradient that is not wanted
    sums = [
        None if t is None else torch.zeros_like(t, memory_format=torch.contiguous_format) if w else t.detach()
        for t, w in zip(given, wanted, strict=False)
    ]
    of_declared: list[Tensor | None] = [None] * len(declared)
    met, computed = list[Tensor](), False
    with torch.enable_grad():
        start = order_of(torch.ones((), dtype=torch.float32, device="cpu", requires_grad=True).neg().grad_fn)
    needs = [*wanted[:2], False, *wanted[3:6], False]  # the scores read neither value nor sinks
    with torch.no_grad():
        for seen in find_seen(problem, ctx.every):
            part, at = cut(problem, seen), seen.sides[:3]
            scores, own = _compute_scores(part, needs)
            now, earliest = _find_used(scores, own, declared, used)
            met, computed = [*met, *now], True
            to_value = sums[2] if wanted[2] else None
            some = Rows(*(row[at] for row in rows))
            slope = slope_of(part, scores.detach(), seen, to_value, some, grad[at], problem.groups, Sent())
            if not scores.requires_grad:
                continue
            each, want = [*own, *declared], [*needs, *wanted[len(given) :]]
            # keep a graph that began before this call, such as a cached parametrization: other blocks may share it
            found = followed_back(scores, slope, each, want, retain_graph=earliest < start)
            for total, one in zip(operands(cut(with_operands(problem, sums), seen)), found, strict=False):
                if total is not None and one is not None:
                    total.add_(one)
            for i, one in enumerate(found[len(given) :]):
                so_far = of_declared[i]
                of_declared[i] = so_far if one is None else one if so_far is None else so_far + one
    if computed:  # if every pair is masked there are no scores
        _check_used(used, met)
    totals = [total if want else None for total, want in zip(sums, wanted, strict=False)]
    if problem.sinks is not None and wanted[6]:
        totals[6] = sinks_gradient(problem.sinks, rows)
    return (*in_dtypes(Operands(*totals), given), *of_declared)
