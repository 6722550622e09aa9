"""Attention of a sharded sequence, beside the same in one process: what every rank runs."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import clearhead as ch
from clearhead import testing
from clearhead._engine_comparison import draw
from clearhead.base.shapes import Sizes
from clearhead.biases.bias_in_documents import BiasInDocuments
from clearhead.distributed import channel, exchange, needs
from clearhead.problem.visible import intervals_of

LENGTH = 37
EXACT = 1e-12  # float64, of sums of some tens of numbers near 10
ROUNDED = 2e-5  # float32, the same
SUMMED = 2e-4  # float32, where a number is a sum over all pairs of all sequences and heads: eight thousand of them
D = ch.distributed


class Counter:
    """Counts what is sent and computed, where it happens; and delays messages, where that is wanted."""

    def __init__(self) -> None:
        self.sent = self.pairs = 0
        self.delays: random.Random | None = None
        post, engine_of = channel.Channel.post, exchange.engine_of

        def counted(own: Any, to: int, tensor: Tensor | None, source: int, room: Tensor | None) -> Any:
            if self.delays is not None:
                time.sleep(self.delays.random() * 0.01)
            self.sent += 0 if tensor is None else tensor.nbytes
            return post(own, to, tensor, source, room)

        def seen(problem: Any) -> Any:
            self.pairs += pairs_of(problem)
            return engine_of(problem)

        channel.Channel.post, exchange.engine_of = counted, seen  # type: ignore[method-assign]

    def taken(self) -> tuple[int, int]:
        found = self.sent, self.pairs
        self.sent = self.pairs = 0
        return found


def pairs_of(problem: Any) -> int:
    """The pairs that the intervals of a problem allow, one by one."""
    sizes = problem.sizes
    if problem.visible is None:
        return sizes.batch * sizes.heads * sizes.queries * sizes.keys
    start, stop = (torch.from_numpy(edge) for edge in intervals_of(problem.visible))
    every = (
        sizes.batch,
        sizes.heads,
        sizes.queries,
        start.shape[-1] if start.shape[-1] >= stop.shape[-1] else stop.shape[-1],
    )
    return int((stop.expand(every) - start.expand(every)).clamp(min=0).sum())


def layouts(ranks: int, mask: Any) -> list[Any]:
    uneven = [LENGTH - 9, *[0] * (ranks - 2), 9] if ranks > 2 else [0, LENGTH]
    found = [D.ZigZag(LENGTH), D.Contiguous(LENGTH), D.Contiguous(uneven)]
    return [*found, D.Balanced(mask, LENGTH, batch=3)] if isinstance(mask, ch.extend.Mask) else found


def cases(ranks: int) -> Iterator[dict[str, Any]]:
    """Every score with every mask; biases, sinks, dropout, layouts, methods and dtypes go round at their own pace."""
    sizes = Sizes(3, 2, LENGTH, LENGTH)
    torch.manual_seed(0)  # the same on every rank
    masks = [None, *(cls.example(sizes) for cls in testing.masks())]
    masks += [ch.SlidingWindow(before=4) | ch.PrefixLM(3), ch.Lengths([30, 0, 5]) & ch.Causal()]
    biases = [None, *(cls.example(sizes) for cls in testing.biases())]
    number = itertools.count()
    for cls, mask in itertools.product(testing.scores(), masks):
        at = next(number)
        torch.manual_seed(at)
        every = layouts(ranks, mask)
        bias = biases[at % len(biases)]
        if isinstance(bias, BiasInDocuments) and isinstance(mask, ch.extend.Mask) and mask._document_edges is not None:
            bias = bias.bias  # the mask's own documents count it
        yield {
            "score": cls.example(),
            "mask": mask,
            "bias": bias,
            "sinks": at % 3 == 0,
            "dropout_p": 0.25 if at % 5 == 0 else 0.0,
            "layout": every[at % len(every)],
            "method": "gather" if at % 7 == 3 else "exchange",
            "dtype": torch.float32 if at % 4 == 1 else torch.float64,
            "delayed": at % 6 == 0,
            "piece": 5 if at % 2 else 4096,
        }


def everything(rank: int, every: int) -> dict[str, Any]:
    """Runs one of `every` cases; how many there were, and what was wrong."""
    torch.set_default_dtype(torch.float64)
    counter, wrong, count, by_plan = Counter(), [], 0, 0
    for number, case in enumerate(cases(dist.get_world_size())):
        if random.Random(number).random() * every >= 1:  # not each so-and-so-manyth, which would go round as they do
            continue
        counter.delays = random.Random(f"{rank} {number}") if case.pop("delayed") else None
        needs.PIECE = case.pop("piece")
        found = one(rank, case, counter)
        if found is None:
            continue
        count, by_plan = count + 1, by_plan + (case["method"] == "exchange")
        wrong += [f"case {number} on rank {rank}, {case}: {each}" for each in found]
    return {"count": count, "by_plan": by_plan, "wrong": wrong}


def one(rank: int, case: dict[str, Any], counter: Counter) -> list[str] | None:
    """What is wrong with a case; None where it is refused, by one process as by several."""
    layout, method, dtype = case["layout"], case["method"], case["dtype"]
    score = case["score"][0].to(dtype)
    bias = case["bias"].to(dtype) if isinstance(case["bias"], torch.nn.Module) else case["bias"]
    inputs = testing.Inputs.draw(case["score"], (LENGTH, LENGTH), dtype)
    whole = [t.requires_grad_() for t in inputs]
    sinks = torch.tensor([0.3, -1.0], dtype=dtype, requires_grad=True) if case["sinks"] else None
    shared = (
        [*score.parameters(), *(t for t in (*bias.parameters(), *bias.buffers()) if t.requires_grad)]
        if bias
        else [*score.parameters()]
    )
    shared += [] if sinks is None else [sinks]
    given = {"score": score, "mask": case["mask"], "bias": bias, "sinks": sinks, "dropout_p": case["dropout_p"]}
    own = [layout.shard(t.detach(), 2).requires_grad_() for t in whole]
    torch.manual_seed(rank)  # the first rank's generator gives the dropout's seed
    try:
        output = D.attention(*own, layout=layout, method=method, **given)
    except ch.UnsupportedError:
        output = None
    sent = [counter.taken()]
    torch.manual_seed(0)
    try:
        expected = ch.attention(*whole, **given)
    except ch.UnsupportedError:
        return None if output is None else ["it is refused in one process alone"]
    if output is None:
        return ["it is refused"]
    loss = draw(*expected.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    gradients = torch.autograd.grad(output, [*own, *shared], layout.shard(loss, 2), allow_unused=True)
    sent.append(counter.taken())
    truth = torch.autograd.grad(expected, [*whole, *shared], loss, allow_unused=True)
    found = {"output": (output, layout.shard(expected, 2))}
    for name, mine, true in zip(("query", "key", "value"), gradients[:3], truth[:3], strict=True):
        found[name] = mine, layout.shard(true, 2)
    for at, (mine, true) in enumerate(zip(gradients[3:], truth[3:], strict=True)):
        mine = torch.zeros_like(shared[at]) if mine is None else mine.clone()
        dist.all_reduce(mine)
        found[f"shared {at}"] = mine, torch.zeros_like(mine) if true is None else true
    wrong = []
    for name, (mine, true) in found.items():
        rounded = SUMMED if name.startswith("shared") else ROUNDED
        budget = rounded if dtype is torch.float32 else EXACT
        apart = float((mine - true).abs().max()) if mine.numel() else 0.0
        if (
            mine.shape != true.shape
            or mine.dtype != true.dtype
            or not apart <= budget * (1 + float(true.abs().max() if true.numel() else 0))
        ):
            wrong.append(f"{name} is {apart:.2g} apart, {tuple(mine.shape)} {mine.dtype}")
    by_autograd = (
        method == "gather"
        or isinstance(score, ch.scores.ScoreFunction)
        or bool(given["bias"] and "Function" in repr(type(bias)))
    )
    return wrong if by_autograd else [*wrong, *_against_plan(rank, own, layout, given, sent)]


def _against_plan(
    rank: int, own: list[Tensor], layout: Any, given: dict[str, Any], sent: list[tuple[int, int]]
) -> Iterator[str]:
    """Bytes and pairs as they were counted, beside the plan's."""
    arguments = {name: value for name, value in given.items() if name != "dropout_p"}
    share = D.plan(*own, layout=layout, **arguments).shares[rank]
    if sent != [(share.sent, share.pairs), (share.sent_backward, share.pairs)]:
        yield f"bytes and pairs, forward and backward, were {sent}; planned were {share}"
