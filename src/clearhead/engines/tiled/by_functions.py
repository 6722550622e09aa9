"""The gradients of a problem whose scores come from functions: a score's tile(), its change, a bias by a function.

Autograd follows the scores of one block at a time, S = functions(query, key, what they learn), which are computed once
more in the backward pass. What comes after the scores, the softmax and the sum of values, has the gradients of
`backward.py`, which end in Ṡ; autograd takes Ṡ on to the inputs of S.

What the functions learn is not known before they run. Autograd's graph of the first block shows it: parameters are its
leaves. What their code reads joins them, since another block may read other parameters. Where the graph goes on into
operations that were there before, or something random was drawn, the whole is left to checkpoints. A parameter that a
later block alone shows is an error, since its gradient would be missing; and so is it where the blocks of the backward
pass depend on none that the first one showed. The largest tensor that autograd keeps for the
first block says how large blocks may be.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead.base.arrays import in_memory_still
from clearhead.base.batched import Gradients, followed_back, unbatched, views
from clearhead.base.errors import UnsupportedError
from clearhead.base.torch_private import order_of
from clearhead.base.tracing import compiling, dispatches, on_the_host, traced, with_memory, without_autocast
from clearhead.base.versions import Versions
from clearhead.engines.tiled import tiles
from clearhead.engines.tiled.again import check, check_again, of_sums
from clearhead.engines.tiled.backward import slope_of
from clearhead.engines.tiled.fused import shown
from clearhead.engines.tiled.outputs import followed, in_blocks
from clearhead.problem import regions
from clearhead.problem.packing import Operands, in_dtypes, operands, with_operands, without_operands
from clearhead.problem.partial import Partial, Rows, rows_of, sinks_gradient
from clearhead.problem.problem import Problem
from clearhead.problem.region import Region
from clearhead.problem.regions import cut
from clearhead.problem.summary import Sent

PAIRS = 2**20  # of a block for each thread: fewer blocks pass over the gradients of keys and values fewer times
FOLLOWED = 2  # times regions.BUDGET, for each thread: the numbers of a block's largest tensor
_LEAF, _HIDES = "AccumulateGrad", "CheckpointFunction"  # a parameter; a checkpoint that hides what it computes


def serves(problem: Problem) -> bool:
    """Whether a problem has functions, and plain tensors on the host, where random draws are noticed."""
    if (problem.lowered is not None and not problem.by_function) or compiling() or traced():
        return False
    return on_the_host(problem.query) and not any(t is not None and dispatches(t) for t in operands(problem))


def output(problem: Problem, every: list[Region]) -> Tensor | None:
    """The output of a guarded problem, with its gradients; None where it is not known what the functions learn."""
    drawn, given, before = torch.get_rng_state(), operands(problem), _order_now()
    needs, saved = [t is not None and t.requires_grad for t in given], [1]

    def counted(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(counted, lambda tensor: tensor):
        begun, own = _scores(cut(problem, regions.parts_seen(problem, every[0])[0]), needs)
    first = None if before is None else _learnt(begun, own, before)
    learnt, shown_first = _with_those_read(first, problem), len(first or ()) if begun.numel() else 0
    if not learnt and not any(needs) and not shown(problem):
        learnt = None  # a later block may show the first parameter, and an output without a graph would lose it
    if learnt is not None:
        numbers = -(-max(saved) // max(begun.numel(), 1))
        pairs = min(PAIRS, FOLLOWED * regions.BUDGET // numbers) * min(torch.get_num_threads(), 4)
        every = list(regions.walk(problem, pairs, 1))
        del begun, own
        with torch.no_grad():
            kept = in_blocks(problem, every)
        if torch.equal(torch.get_rng_state(), drawn):
            parts = problem, every, kept, learnt, shown_first
            found: Tensor = _Output.apply(*parts, *given, *learnt)  # type: ignore[no-untyped-call]
            return found
    torch.set_rng_state(drawn)
    return None


def _scores(part: Problem, needs: list[bool]) -> tuple[Tensor, list[Tensor | None]]:
    """The finished scores of a part, with their graph, and the operands where it begins."""
    own = [None if t is None else t.detach().requires_grad_(n) for t, n in zip(operands(part), needs, strict=True)]
    with torch.enable_grad():
        return tiles.scores(with_operands(part, own)), own


def _order_now() -> int | None:
    """The place in autograd's order of an operation that is done now."""
    with torch.enable_grad():
        return order_of((torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True) * 1).grad_fn)


def _learnt(scores: Tensor, own: list[Tensor | None], before: int) -> list[Tensor] | None:
    """The parameters on which scores, or an output, depend beside the operands `own`; None where it is not known."""
    found: list[Tensor] = []
    nodes, met = [scores.grad_fn], {tensor.grad_fn for tensor in own if tensor is not None}
    while nodes:
        node = nodes.pop()
        if node is None or node in met:
            continue
        met.add(node)
        if _LEAF in node.name():
            leaf = node.variable  # type: ignore[attr-defined]
            if dispatches(leaf):
                return None
            if not any(leaf is operand for operand in own):
                found.append(leaf)
        elif _HIDES in node.name() or (order_of(node) or 0) <= before:
            return None
        nodes += [further for further, _ in node.next_functions]
    return found


def _with_those_read(learnt: list[Tensor] | None, problem: Problem) -> list[Tensor] | None:
    """What the functions learn, and the parameters that their code reads, of which the first block may use a part."""
    for _, tensor in problem.read_by_functions():
        if learnt is not None and tensor.requires_grad and not _among(tensor, learnt):
            learnt = [*learnt, tensor] if tensor.is_leaf and not dispatches(tensor) else None
    return learnt


def _among(tensor: Tensor, others: list[Tensor]) -> bool:
    return any(tensor is other for other in others)


def _checked(
    scores: Tensor, own: list[Tensor | None], learnt: list[Tensor], first: list[Tensor], before: int | None
) -> bool:
    """Whether scores depend on a parameter that the first block showed. An error for one that `learnt` lacks."""
    found = None if before is None else _learnt(scores, own, before)
    if found is None or not all(_among(tensor, learnt) for tensor in found):
        raise _other_parameters()
    return any(_among(tensor, first) for tensor in found)


def _other_parameters() -> UnsupportedError:
    return UnsupportedError(
        "in the backward pass the scores of attention() depend on other parameters than the first block showed in the "
        "forward pass: a gradient would be missing. Either a function in the score or the bias reads a parameter for "
        "some pairs alone: let it read all parameters for any pair, as torch.stack(parameters)[head] does. Or other "
        "parameters are in place now, as after torch.func.functional_call: take gradients by torch.func.grad. Or pass "
        "engine='reference'."
    )


def _reads(problem: Problem, learnt: list[Tensor]) -> tuple[Versions, Versions]:
    return problem.reads(), Versions(("the score, or the bias,", tensor) for tensor in learnt)


class _Output(torch.autograd.Function):
    """The output, differentiable in the operands of a problem and in what its functions learn.

    The parameters themselves are kept, since the functions read these and no copies.
    """

    @staticmethod
    def forward(
        ctx: Any,
        problem: Problem,
        every: list[Region],
        kept: Partial,
        learnt: list[Tensor],
        shown_first: int,
        *tensors: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(*tensors[: len(tensors) - len(learnt)], *kept[:3])
        ctx.problem, ctx.every, ctx.learnt, ctx.finite = without_operands(problem), every, learnt, kept.finite
        ctx.reads, ctx.first = _reads(ctx.problem, learnt), learnt[:shown_first]
        return kept.output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        for reads in ctx.reads:
            reads.check()
        grad, saved = grads[0], in_memory_still(ctx.saved_tensors)
        problem, kept = with_operands(ctx.problem, saved[:-3]), Partial(*saved[-3:])
        needs, frozen = ctx.needs_input_grad[5:], [not tensor.requires_grad for tensor in ctx.learnt]  # now
        of_operands = len(needs) - len(frozen)
        wanted = (*needs[:of_operands], *(n and not f for n, f in zip(needs[of_operands:], frozen, strict=True)))
        again = torch.is_grad_enabled()  # the gradient is to be differentiated
        first = [tensor for tensor in ctx.first if tensor.requires_grad]

        def compute(grad: Tensor) -> Gradients:
            return _gradients(problem, ctx.every, ctx.learnt, first, kept, with_memory(grad), wanted)

        with without_autocast(problem.sizes.device):
            if again or dispatches(grad):
                before = _order_now()
                with torch.enable_grad():
                    own = views(operands(problem))
                    found = followed(with_operands(problem, own), ctx.every, again=True)
                if not _checked(found.output, own, ctx.learnt, first, before) and first:
                    raise _other_parameters()
                check_again(problem, kept, found)
                each = followed_back(found.output, grad, [*own, *ctx.learnt], wanted, create_graph=again)
            else:
                each = unbatched(compute, grad)
        ctx.reads = _reads(ctx.problem, ctx.learnt)  # a score may write to its own buffers: that is no error
        return (None, None, None, None, None, *each)


def _gradients(
    problem: Problem,
    every: list[Region],
    learnt: list[Tensor],
    first: list[Tensor],
    kept: Partial,
    grad: Tensor,
    wanted: tuple[bool, ...],
) -> Gradients:
    """The gradients of the operands, and of what the functions learn."""
    given, before = operands(problem), _order_now()
    rows = Rows(*rows_of(kept), (grad * kept.output).sum(-1))
    weights = torch.zeros_like(rows.maximum)  # the sum of each row's
    # a gradient that is not wanted has no memory
    sums = [
        None if t is None else torch.zeros_like(t, memory_format=torch.contiguous_format) if w else t.detach()
        for t, w in zip(given, wanted, strict=False)
    ]
    of_learnt: list[Tensor | None] = [None] * len(learnt)
    met: list[bool] = []  # whether each block depends on what the first one showed
    needs = [*wanted[:2], False, *wanted[3:6], False]  # those of the operands that the scores read
    with torch.no_grad():
        for region in every:
            for seen in regions.parts_seen(problem, region):
                if seen.keys.stop <= seen.keys.start:
                    continue
                part, at = cut(problem, seen), seen.sides[:3]
                scores, own = _scores(part, needs)
                met.append(_checked(scores, own, learnt, first, before))
                to_value = sums[2] if wanted[2] else None
                some = Rows(*(row[at] for row in rows))
                more = some, grad[at], problem.groups, Sent(), weights[at]
                slope = slope_of(part, scores.detach(), seen, to_value, *more)
                if not scores.requires_grad:
                    continue
                found = followed_back(scores, slope, [*own, *learnt], [*needs, *wanted[len(given) :]])
                for total, one in zip(operands(cut(with_operands(problem, sums), seen)), found, strict=False):
                    if total is not None and one is not None:
                        total.add_(one)
                for i, one in enumerate(found[len(given) :]):
                    so_far = of_learnt[i]  # a block may use some of the parameters alone
                    of_learnt[i] = so_far if one is None else one if so_far is None else so_far + one
    if first and met and not any(met):
        raise _other_parameters()
    check([of_sums(problem, rows, weights)])
    totals = [total if want else None for total, want in zip(sums, wanted, strict=False)]
    if problem.sinks is not None and wanted[6]:
        totals[6] = sinks_gradient(problem.sinks, rows)
    return (*in_dtypes(Operands(*totals), given), *of_learnt)
