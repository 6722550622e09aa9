"""What surrounds a call over ranks: derivatives, the compiler, sizes of 0, keys that are NaN. Run by every rank."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from ranks.words import said
from torch import Tensor

import clearhead as ch
from clearhead.distributed import needs

D = ch.distributed
LENGTH = 12
METHODS = ("exchange", "gather")


def _draw(*shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)]


def _parts(layout: Any, whole: list[Tensor]) -> list[Tensor]:
    return [layout.shard(t.detach(), -2).requires_grad_() for t in whole]


def derivatives(rank: int) -> dict[str, Any]:
    """What is refused, by method; and whether what is not is right, in calls that follow what was refused."""
    layout, found = D.ZigZag(LENGTH), {}
    whole = _draw(1, 2, LENGTH, 4)
    own = _parts(layout, whole)
    query = own[0].detach()
    alone = ch.attention(*whole, mask=ch.Causal())
    expected = [layout.shard(t, 2) for t in torch.autograd.grad(alone.square().sum(), whole, retain_graph=True)]
    losses = torch.stack([torch.ones_like(alone), torch.arange(alone.numel()).view_as(alone) / alone.numel()])
    parts = layout.shard(losses, 3)
    theirs = torch.autograd.grad(alone, whole, losses, is_grads_batched=True)
    for method in METHODS:

        def call(query: Tensor, key: Tensor, value: Tensor, method: str = method) -> Tensor:
            return D.attention(query, key, value, layout=layout, mask=ch.Causal(), method=method)

        def one(query: Tensor, call: Any = call) -> Tensor:
            return call(query, query, query)

        def dual(one: Any = one) -> None:
            with forward_ad.dual_level():
                one(forward_ad.make_dual(query, torch.ones_like(query)))

        def twice(call: Any = call) -> None:
            first = torch.autograd.grad(call(*own).square().sum(), own, create_graph=True)
            assert all(torch.allclose(g, t) for g, t in zip(first, expected, strict=True))
            torch.autograd.grad(sum(g.square().sum() for g in first), own, allow_unused=True)

        found[f"func {method}"] = said(lambda: torch.func.grad(lambda q: one(q).sum())(query), ch.UnsupportedError)
        found[f"vmap {method}"] = said(lambda: torch.func.vmap(one)(query), ch.UnsupportedError)
        found[f"dual {method}"] = said(dual, ch.UnsupportedError)
        found[f"twice {method}"] = said(twice, ch.UnsupportedError)
        mine = torch.autograd.grad(call(*own), own, parts, is_grads_batched=True)
        found[f"batched {method}"] = all(
            torch.allclose(a, layout.shard(b, 3)) for a, b in zip(mine, theirs, strict=True)
        )
    return found


def compiled(rank: int) -> list[str]:
    """What differs from eager code in code of one graph: masks, what is learnt, dropout, layouts that change."""
    wrong = []
    rule = ch.MaskFunction(lambda batch, head, query, key: (query + key) % 3 != 0)
    learnt = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    cases: list[dict[str, Any]] = [
        {"mask": ch.Causal()},
        {"mask": ch.Lengths([9]), "bias": ch.ALiBi(2), "score": ch.Gaussian(1.0), "dropout_p": 0.3},
        {"method": "gather", "mask": rule, "sinks": learnt, "bias": ch.RelativeBias(2).double()},
    ]
    for given in cases:

        def double(layout: Any, *inputs: Tensor, given: dict[str, Any] = given) -> Tensor:
            return 2 * D.attention(*(2 * t for t in inputs), layout=layout, **given)

        in_one = torch.compile(double, backend="aot_eager", fullgraph=True)
        other = D.Contiguous([LENGTH - 3] + [0] * (dist.get_world_size() - 2) + [3])
        for layout in (D.ZigZag(LENGTH), other) if given is cases[0] else (other,):
            own = _parts(layout, _draw(1, 2, LENGTH, 4))
            shared = [t for t in (learnt, *getattr(given.get("bias"), "parameters", list)()) if t.requires_grad]
            results = []
            for call in (double, in_one):
                torch.manual_seed(0)
                output = call(layout, *own)
                gradients = torch.autograd.grad(output.square().sum(), [*own, *shared], allow_unused=True)
                results.append([output, *(torch.zeros(()) if g is None else g for g in gradients)])
            same = [torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(*results, strict=True)]
            wrong += [] if all(same) else [f"{given} on {layout}: {same}"]

    def own_score(query: Tensor, key: Tensor) -> Tensor:
        return query @ key.transpose(-1, -2)

    try:
        D.attention(*own, layout=layout, score=own_score)
        torch.compile(lambda: D.attention(*own, layout=layout, score=own_score), fullgraph=True, backend="eager")()
        wrong.append("a score of one's own is in the graph")
    except torch._dynamo.exc.Unsupported as error:
        wrong += [] if "runs in eager code" in str(error) else [str(error)]
    return wrong


def layouts(rank: int) -> list[bool]:
    """In compiled code: one of nothing; one that is kept while many are made; one made in it, in several graphs."""

    def call(query: Tensor, layout: Any) -> Tensor:
        return D.attention(query, query, query, layout=layout, mask=ch.Causal())

    def makes(query: Tensor) -> Tensor:
        return call(query, D.Contiguous([7] * dist.get_world_size()))

    layout, query = D.Contiguous([7] * dist.get_world_size()), torch.ones(1, 2, 7, 4)
    in_one = torch.compile(call, backend="eager", fullgraph=True)
    found = [torch.allclose(in_one(query, layout), query)]
    nothing = D.Contiguous([0] * dist.get_world_size())
    found.append(in_one(query[:, :, :0], nothing).shape == (1, 2, 0, 4))  # a length that has become a symbol
    for length in range(1100):
        D.Contiguous(length)
    found.append(torch.allclose(in_one(query, layout), query))
    del layout
    for length in range(1100):
        D.Contiguous(length)
    return [*found, torch.allclose(torch.compile(makes, backend="eager")(query), query)]


def nothing(rank: int) -> list[Any]:
    """Shapes of outputs and gradients where there is no sequence, no head, or no width; then a call as any other."""
    layout, found = D.ZigZag(LENGTH), []
    for shape in ((0, 2, LENGTH, 4), (2, 0, LENGTH, 4), (2, 2, LENGTH, 0), (1, 1, LENGTH, 4)):
        sinks = torch.zeros(shape[1], 5, dtype=torch.float64)[:, 0]  # of one head still with a stride of 5
        for method in METHODS:
            own = _parts(layout, _draw(*shape))
            for score in (ch.Dot(), ch.Gaussian(1.0)):
                own = [t.detach().float().requires_grad_() for t in own]  # by the kernels, too
                output = D.attention(*own, layout=layout, method=method, score=score, sinks=sinks)
                gradients = torch.autograd.grad(output.sum(), own)
                found.append(all(t.shape == own[0].shape for t in (output, *gradients)))
    return found


def not_finite(rank: int) -> list[bool]:
    """A key that no query sees is NaN: gradients of the score's projections are those of one process, and finite."""
    layout, found = D.ZigZag(LENGTH), []
    for method in METHODS:
        torch.manual_seed(0)
        score = ch.Additive(4, 4, 3).double()
        whole = _draw(2, 2, LENGTH, 4)
        with torch.no_grad():
            whole[1][:, :, 5] = math.nan
        mask = ch.Padding(torch.arange(LENGTH).expand(2, LENGTH) != 5)
        given = [*whole, *score.parameters()]
        true = torch.autograd.grad(ch.attention(*whole, score=score, mask=mask).square().sum(), given)
        own = _parts(layout, whole)
        output = D.attention(*own, layout=layout, score=score, mask=mask, method=method)
        mine = torch.autograd.grad(output.square().sum(), [*own, *score.parameters()])
        found += [torch.allclose(a, layout.shard(b, 2)) for a, b in zip(mine[:3], true[:3], strict=True)]
        for part, expected in zip(mine[3:], true[3:], strict=True):
            dist.all_reduce(part)
            found.append(torch.allclose(part, expected))
    for spoilt, method in ((spoilt, method) for spoilt in (1, 2) for method in METHODS):  # a key; a value
        for number in (math.inf, math.nan):
            whole = [t.detach().float() for t in _draw(1, 2, LENGTH, 4)]
            whole[spoilt][:, :, 3, 1] = number
            true = layout.shard(ch.attention(*whole, mask=ch.Causal()), 2)
            mine = D.attention(*(layout.shard(t, 2) for t in whole), layout=layout, mask=ch.Causal(), method=method)
            found.append(torch.allclose(mine, true, atol=1e-6, equal_nan=True))
    return found


def everything(rank: int, compiles: bool) -> dict[str, Any]:
    each = (nothing, not_finite, derivatives, layouts, *((compiled,) if compiles else ()))
    return {f.__name__: f(rank) for f in each}


def unlike_turns(rank: int) -> list[bool]:
    """Layouts and windows under which ranks need different numbers of messages; gradients are those of one process."""
    found, length = [], 40
    ranks = dist.get_world_size()
    layouts = [D.ZigZag(length), D.Contiguous([length - 5 * (ranks - 1)] + [5] * (ranks - 1)), D.Contiguous(length)]
    needs.PIECE = 3
    for layout in layouts:
        for mask in (ch.SlidingWindow(before=2, after=9), ch.Causal()):
            whole = _draw(1, 2, length, 4)
            own = _parts(layout, whole)
            true = torch.autograd.grad(ch.attention(*whole, mask=mask).square().sum(), whole)
            mine = torch.autograd.grad(D.attention(*own, layout=layout, mask=mask).square().sum(), own)
            found += [torch.allclose(a, layout.shard(b, 2)) for a, b in zip(mine, true, strict=True)]
    return found
