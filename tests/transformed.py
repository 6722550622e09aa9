"""Random calls under random transforms of PyTorch's, beside the same transform of the formula in plain operations.

    python tests/transformed.py 2000               the first two thousand
    python tests/transformed.py 2000 --from 5000   those from number 5000 on
    python tests/transformed.py --only 1234        one again, with its traceback

A call that clearhead refuses in words is no failure; a number that is off, or an error of PyTorch's, is one. What
PyTorch cannot do with the formula either is left out.
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor
from torch.autograd import functional

import clearhead as ch
from clearhead.problem import regions

B, H, L, E = 2, 2, 4, 2
ROW, COLUMN = torch.arange(L)[:, None], torch.arange(L)[None]
SIDES = torch.arange(B)[:, None, None, None], torch.arange(H)[None, :, None, None], ROW[None, None], COLUMN[None, None]


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def smooth(query: Tensor, key: Tensor) -> Tensor:
    return -(1 + (query.unsqueeze(-2) - key.unsqueeze(-3)).square()).sqrt().sum(-1)


class Smooth(ch.extend.Score):
    """A score with tile() alone, and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.steepness = torch.nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def tile(self, query: Tensor, key: Tensor) -> Tensor:
        return self.steepness * smooth(query, key)


# A name: the argument, and the same in plain operations.
Pair = tuple[Any, Any]
BILINEAR, ADDITIVE = ch.Bilinear(E, E).double(), ch.Additive(E, E, 2).double()
SMOOTH, RELATIVE = Smooth(), ch.RelativeBias(H, num_buckets=4, max_distance=8).double()
KEEP = torch.rand(L, L, generator=torch.Generator().manual_seed(3)) < 0.6
ADDED = numbers(1, H, L, L, seed=4)


def unit(x: Tensor) -> Tensor:
    return x / (x * x).sum(-1, keepdim=True).sqrt()


def additive(q: Tensor, k: Tensor) -> Tensor:
    from_query, from_key, v = ADDITIVE.W_q, ADDITIVE.W_k, ADDITIVE.w_v
    return torch.tanh((q @ from_query.T).unsqueeze(-2) + (k @ from_key.T).unsqueeze(-3)) @ v


SCORES: dict[str, Pair] = {
    "dot": (None, lambda q, k: q @ k.mT / E**0.5),
    "capped": (ch.Dot(softcap=1.5), lambda q, k: 1.5 * torch.tanh(q @ k.mT / E**0.5 / 1.5)),
    "bilinear": (BILINEAR, lambda q, k: q @ BILINEAR.W @ k.mT),
    "cosine": (ch.Cosine(0.5), lambda q, k: unit(q) @ unit(k).mT / 0.5),
    "additive": (ADDITIVE, additive),
    "gaussian": (ch.Gaussian(), lambda q, k: -(q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1) / 2),
    "tile": (smooth, smooth),
    "score": (SMOOTH, lambda q, k: SMOOTH.steepness * smooth(q, k)),
}
WORDS = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0]])
MASKS: dict[str, Pair] = {
    "none": (None, torch.ones(L, L, dtype=torch.bool)),
    "causal": (ch.Causal(), COLUMN <= ROW),
    "window": (ch.SlidingWindow(before=2, after=1), (COLUMN >= ROW - 2) & (COLUMN <= ROW + 1)),
    "lengths": (ch.Lengths([3, 0]), (torch.tensor([3, 0]).view(2, 1, 1, 1) > COLUMN)),
    "padding": (ch.Padding(WORDS), WORDS.bool()[:, None, None]),
    "dense": (ch.DenseMask(KEEP), KEEP),
    "bool": (KEEP, KEEP),
    "rule": (
        ch.MaskFunction(lambda b, h, i, j: (i + j + h + b) % 3 != 0),
        (SIDES[0] + SIDES[1] + ROW + COLUMN) % 3 != 0,
    ),
    "gaps": (ch.Causal() & ~ch.SlidingWindow(before=1), (COLUMN <= ROW) & ~((COLUMN >= ROW - 1) & (COLUMN <= ROW))),
    "causal rule": (
        ch.Causal() & ch.MaskFunction(lambda b, h, i, j: (i * j) % 2 == 0),
        (COLUMN <= ROW) & ((ROW * COLUMN) % 2 == 0),
    ),
}
WAVE = torch.nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
BIASES: dict[str, Pair] = {
    "none": (None, lambda: 0.0),
    "alibi": (ch.ALiBi(H), lambda: ch.ALiBi(H).slopes.double().view(1, H, 1, 1) * -(ROW - COLUMN).abs()),
    "dense": (ADDED, lambda: ADDED),
    "relative": (RELATIVE, lambda: RELATIVE.weight.T[:, RELATIVE.bucket(COLUMN - ROW)][None]),
    "function": (
        ch.BiasFunction(lambda b, h, i, j: WAVE * torch.sin((b + 2 * h + i * 3 + j).double())),
        lambda: WAVE * torch.sin((SIDES[0] + 2 * SIDES[1] + ROW * 3 + COLUMN).double()),
    ),
}
ENGINES = (None, None, None, "native", "sdpa", "tiled", "reference")
RESULTS = (
    "output",
    "output",
    "output",
    "partial",
    "weights",
    "looked at",
    "entropy",
    "reductions",
    "softmax",
    "module",
)


def weights_of(s: Tensor, keep: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights and log-sum-exp; both of a row that sees nothing are 0, as nothing is compared of its log-sum-exp."""
    seen = keep.any(-1, keepdim=True).expand(*s.shape[:-1], 1)
    s = s.masked_fill(~keep, -torch.inf).masked_fill(~seen, 0.0)
    top = s.logsumexp(-1, keepdim=True)
    whole = top if sinks is None else torch.logaddexp(top, sinks.view(1, -1, 1, 1).expand_as(top))
    w = (s - whole).exp().masked_fill(~keep | ~seen, 0.0)
    return w, whole.masked_fill(~seen, 0.0).squeeze(-1)


class Case:
    """A call, as a function of query, key and value, ours and in plain operations; and a transform of both."""

    def __init__(self, number: int) -> None:
        r = random.Random(number)
        self.number = number
        self.score, self.mask, self.bias = r.choice([*SCORES]), r.choice([*MASKS]), r.choice(["none", "none", *BIASES])
        self.engine, self.result = r.choice(ENGINES), r.choice(RESULTS)
        self.sinks = numbers(H, seed=7) if r.random() < 0.2 else None
        self.groups = r.random() < 0.2
        self.blocks = r.choice([30, 100, 2**21])
        self.transform = r.choice([*TRANSFORMS])
        self.choose = random.Random(number + 1)
        self.inputs = (
            numbers(B, H, L, E, seed=number),
            numbers(B, 1 if self.groups else H, L, E, seed=number + 1),
            numbers(B, 1 if self.groups else H, L, 2, seed=number + 2),
        )
        self.only = r.choice([None, 0, 1, 2])  # the one input that is differentiated
        if self.result == "softmax":
            self.score, self.bias, self.sinks, self.mask = (
                "dot",
                "none",
                None,
                r.choice(["none", "dense", "lengths", "padding", "causal"]),
            )
        if self.result == "module":
            self.score, self.mask, self.bias, self.sinks = "dot", r.choice(["none", "causal", "lengths"]), "none", None
            self.module = ch.nn.MultiHeadAttention(E * 2, 2).double()

    def __str__(self) -> str:
        parts = [f"{self.result} under {self.transform}", self.score, self.mask, self.bias, f"engine {self.engine}"]
        parts += (
            ["sinks"] * (self.sinks is not None)
            + ["groups"] * self.groups
            + [f"of {self.only}", f"blocks {self.blocks}"]
        )
        return f"call {self.number}: " + ", ".join(parts)

    def ours(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        given = {"mask": MASKS[self.mask][0], "engine": self.engine}
        if self.result == "softmax":
            keep = {"none": None, "dense": KEEP, "lengths": [3, 0]}.get(self.mask, MASKS[self.mask][0])
            return ch.masked_softmax(query @ key.mT, keep)
        if self.result == "module":
            x = query.transpose(1, 2).reshape(query.shape[0], L, -1)
            return self.module(x, x, x, mask=given["mask"])
        given |= {"score": SCORES[self.score][0], "bias": BIASES[self.bias][0], "sinks": self.sinks}
        if self.result == "output":
            return ch.attention(query, key, value, **given)
        if self.result == "partial":
            found = ch.partial(query, key, value, **{n: x for n, x in given.items() if n != "sinks"})
            return found.output, found.logsumexp.masked_fill(found.logsumexp == -torch.inf, 0.0)
        w = ch.weights(query, key, **given)
        if self.result == "weights":
            return w[:, :, 1:4]
        if self.result == "looked at":
            return w @ value
        if self.result == "entropy":
            return w.reduce(ch.reductions.Entropy())
        received, distance, whole = w.reduce(
            ch.reductions.Received(), ch.reductions.MeanDistance(), ch.reductions.LogSumExp()
        )
        return received, distance, whole.masked_fill(whole == -torch.inf, 0.0)

    def formula(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        if self.result == "softmax":
            keep = MASKS[self.mask][1]
            return weights_of(query @ key.mT, keep, None)[0]
        if self.result == "module":
            x = query.transpose(1, 2).reshape(query.shape[0], L, -1)
            m = self.module
            q, k, v = (layer(x).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (m.W_q, m.W_k, m.W_v))
            w = weights_of(q @ k.mT / q.shape[-1] ** 0.5, MASKS[self.mask][1], None)[0]
            return m.W_o((w @ v).transpose(1, 2).flatten(2))
        first = lambda t: t[: max(len(query), len(key))] if isinstance(t, Tensor) and t.ndim == 4 else t  # under vmap
        s = SCORES[self.score][1](query, key) + first(BIASES[self.bias][1]())
        keep = first(MASKS[self.mask][1])
        w, whole = weights_of(s, keep, None if self.result == "partial" else self.sinks)
        if self.result in ("output", "looked at"):
            return w @ value
        if self.result == "partial":
            return w @ value, whole
        if self.result == "weights":
            return w[:, :, 1:4]
        shares = weights_of(s, keep, None)[0]
        if self.result == "entropy":
            return -(shares * shares.clamp(min=1e-300).log()).sum(-1)
        return w.sum(-2), (shares * (ROW - COLUMN).abs()).sum(-1), whole


# Transforms: functions of (f, inputs, the case's choices), which give tensors to compare. -----------------------------


def leaves(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    return [leaf for part in (x.values() if isinstance(x, dict) else x) if part is not None for leaf in leaves(part)]


def total(f: Callable[..., Any]) -> Callable[..., Tensor]:
    """A number of all that a function gives."""

    def summed(*x: Any) -> Tensor:
        return sum(
            (
                (leaf * torch.cos(torch.arange(leaf.numel(), dtype=leaf.dtype)).view(leaf.shape)).sum()
                for leaf in leaves(f(*x))
            ),
            torch.zeros(()),
        )

    return summed


def like(x: tuple[Tensor, ...], seed: int) -> tuple[Tensor, ...]:
    return tuple(numbers(*t.shape, seed=seed + i) for i, t in enumerate(x))


def func_vjp(f: Any, x: Any, r: Any) -> Any:
    out, pull = torch.func.vjp(f, *x)
    return out, pull(like(tuple(leaves(out)), 50) if isinstance(out, tuple) else like((out,), 50)[0])


def linearize(f: Any, x: Any, r: Any) -> Any:
    out, along = torch.func.linearize(f, *x)
    return out, along(*like(x, 40)), along(*like(x, 60))


def vmapped_pull(f: Any, x: Any, r: Any) -> Any:
    out, pull = torch.func.vjp(lambda *x: leaves(f(*x))[0], *x)
    return torch.func.vmap(pull, chunk_size=r.choice([None, 1, 2]))(numbers(3, *out.shape, seed=9))


def by_hand(f: Any, x: Any, r: Any) -> Any:
    moving = [r.random() < 0.7 for _ in x]
    moving[0] = True
    trained = [t.clone().requires_grad_() for t in x] if r.random() < 0.5 else list(x)
    with fwAD.dual_level():
        both = [fwAD.make_dual(t, d) if m else t for t, d, m in zip(trained, like(x, 40), moving, strict=True)]
        found = [fwAD.unpack_dual(out) for out in leaves(f(*both))]
        tangents = [torch.zeros_like(one.primal) if one.tangent is None else one.tangent for one in found]
    if not trained[0].requires_grad:
        return [one.primal for one in found], tangents
    grads = torch.autograd.grad(total(lambda *t: t)(*tangents), trained, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(grads, trained, strict=True)]


def batched(again: bool) -> Any:
    def run(f: Any, x: Any, r: Any) -> Any:
        own = [t.clone().requires_grad_() for t in x]
        out = leaves(f(*own))[0]
        grads = torch.autograd.grad(
            out, own, numbers(3, *out.shape, seed=9), is_grads_batched=True, create_graph=again, allow_unused=True
        )
        grads = [torch.zeros(3, *t.shape, dtype=t.dtype) if g is None else g for g, t in zip(grads, own, strict=True)]
        if not again:
            return grads
        more = torch.autograd.grad(total(lambda *t: t)(*grads), own, allow_unused=True)
        return [torch.zeros_like(t) if g is None else g for g, t in zip(more, own, strict=True)]

    return run


def by_vmap(inner: Any) -> Any:
    """`inner(f)` under vmap, over one, some or all inputs, along any dimension."""

    def run(f: Any, x: Any, r: Any) -> Any:
        dims = [r.choice([0, 1, -1, None]) for _ in x]
        if all(d is None for d in dims):
            dims[0] = 0
        stacked = tuple(t if d is None else torch.stack([t, t / 2, -t], d) for t, d in zip(x, dims, strict=True))
        given = {
            "in_dims": tuple(dims),
            "chunk_size": r.choice([None, None, 2]),
            "randomness": r.choice(["error", "same", "different"]),
        }
        return torch.func.vmap(inner(f), **given)(*stacked)

    return run


def func(name: str, **given: Any) -> Any:
    """A transform of torch.func that gives a function: of all its arguments."""
    return lambda f, x, r: getattr(torch.func, name)(f, argnums=tuple(range(len(x))), **given)(*x)


def jvp(f: Any) -> Any:
    return lambda *x: torch.func.jvp(f, x, tuple(0.3 * t + 0.1 for t in x))


def grad(f: Any) -> Any:
    return lambda *x: torch.func.grad(total(f), argnums=tuple(range(len(x))))(*x)


NESTED = {
    "jvp": jvp,
    "grad": grad,
    "jacfwd": lambda f: lambda *x: torch.func.jacfwd(f, argnums=0)(*x),
    "jacrev": lambda f: lambda *x: torch.func.jacrev(f, argnums=0)(*x),
    "vmap": lambda f: torch.func.vmap(lambda *x: f(*(t.unsqueeze(0) for t in x))),
    "functional.jacobian": lambda f: (
        lambda *x: functional.jacobian(lambda *x: leaves(f(*x))[0], x, create_graph=True, vectorize=True)
    ),
    "linearize": lambda f: lambda *x: torch.func.linearize(f, *x)[1](*(t + 1 for t in x)),
    "vjp": lambda f: (
        lambda *x: (lambda out, pull: pull(torch.ones_like(out)))(*torch.func.vjp(lambda *x: leaves(f(*x))[0], *x))
    ),
    "checkpoint": lambda f: lambda *x: torch.utils.checkpoint.checkpoint(f, *x, use_reentrant=False),
}
TRANSFORMS: dict[str, Any] = {
    "functional.jacobian": lambda f, x, r: functional.jacobian(f, x, create_graph=r.random() < 0.3),
    "functional.jacobian, vectorized": lambda f, x, r: functional.jacobian(
        f, x, vectorize=True, create_graph=r.random() < 0.3
    ),
    "functional.jacobian, forward": lambda f, x, r: functional.jacobian(f, x, vectorize=True, strategy="forward-mode"),
    "functional.hessian": lambda f, x, r: functional.hessian(total(f), x),
    "functional.hessian, vectorized": lambda f, x, r: functional.hessian(total(f), x, vectorize=True),
    "functional.hessian, forward": lambda f, x, r: functional.hessian(
        total(f), x, vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
    "functional.jvp": lambda f, x, r: functional.jvp(f, x, like(x, 40)),
    "functional.vjp": lambda f, x, r: functional.vjp(total(f), x),
    "functional.hvp": lambda f, x, r: functional.hvp(total(f), x, like(x, 40)),
    "functional.vhp": lambda f, x, r: functional.vhp(total(f), x, like(x, 40)),
    "jacfwd": func("jacfwd"),
    "jacfwd, same": func("jacfwd", randomness="same"),
    "jacrev": func("jacrev"),
    "jacrev, chunks": func("jacrev", chunk_size=3),
    "hessian": lambda f, x, r: torch.func.hessian(total(f), argnums=tuple(range(len(x))))(*x),
    "jvp": lambda f, x, r: torch.func.jvp(f, x, like(x, 40)),
    "vjp": func_vjp,
    "vjp, its pull in vmap": vmapped_pull,
    "linearize": linearize,
    "vmap": by_vmap(lambda f: f),
    "vmap of vmap": by_vmap(lambda f: torch.func.vmap(lambda *x: f(*(t.unsqueeze(0) for t in x)))),
    "forward_ad": by_hand,
    "is_grads_batched": batched(False),
    "is_grads_batched, again": batched(True),
    "checkpoint": lambda f, x, r: batched(False)(NESTED["checkpoint"](f), x, r),
}
for outer in NESTED:
    TRANSFORMS |= (
        {f"vmap along some of {outer}": by_vmap(NESTED[outer])} if outer not in ("vmap", "functional.jacobian") else {}
    )
    TRANSFORMS |= {
        f"{outer} of {inner}": (lambda f, x, r, o=outer, i=inner: NESTED[o](NESTED[i](f))(*x)) for inner in NESTED
    }
    TRANSFORMS[f"forward_ad of {outer}"] = lambda f, x, r, o=outer: by_hand(NESTED[o](f), x, r)
    TRANSFORMS[f"functional.jacobian, forward, of {outer}"] = lambda f, x, r, o=outer: functional.jacobian(
        lambda *x: leaves(NESTED[o](f)(*x))[0], x, vectorize=True, strategy="forward-mode"
    )


# What PyTorch itself says of its fused kernel, and of the constants of a linearize inside another transform.
LACKING = ("_flash_attention_for_cpu_backward is not implemented", "Tensor that doesn't have storage")


def run(case: Case, f: Callable[..., Any]) -> list[Tensor]:
    x = case.inputs
    if case.only is None or case.transform.startswith("vmap of vmap"):
        chosen, whole = x, f
    else:
        at = case.only
        chosen, whole = (x[at],), lambda t: f(*x[:at], t, *x[at + 1 :])
    torch.manual_seed(0)
    return [t.detach() for t in leaves(TRANSFORMS[case.transform](whole, chosen, random.Random(case.number)))]


def outcome(number: int, raised: bool = False) -> str:
    """ "right", "refused: …", "left out: …" (PyTorch cannot do it with the formula), or what is wrong."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _outcome(Case(number), raised)


def _outcome(case: Case, raised: bool) -> str:
    before = regions.BUDGET, regions.LOOK
    regions.BUDGET = regions.LOOK = case.blocks
    try:
        try:
            want = run(case, case.formula)
        except Exception as error:
            return f"left out: {case}\n    {type(error).__name__}: {str(error).splitlines()[0]}"
        try:
            got = run(case, case.ours)
        except ch.ClearheadError as refusal:
            return f"refused: {str(refusal).strip()}"
        except Exception as error:
            if any(words in str(error) for words in LACKING):
                return f"left out: {error}"
            if raised:
                raise
            return f"{case}\n    {type(error).__name__}: {str(error).splitlines()[0]}"
    finally:
        regions.BUDGET, regions.LOOK = before
    if [t.shape for t in got] != [t.shape for t in want]:
        return f"{case}\n    shapes {[tuple(t.shape) for t in got]}, not {[tuple(t.shape) for t in want]}"
    off = max(
        (float((a - b).abs().nan_to_num(1e9).max()) for a, b in zip(got, want, strict=True) if a.numel()), default=0.0
    )
    size = max((float(b.abs().max()) for b in want if b.numel()), default=0.0)
    return "right" if off <= 1e-9 * max(1.0, size) else f"{case}\n    off by {off:.3g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=1000)
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--only", type=int)
    parser.add_argument("--all", action="store_true", help="show what is refused or left out too")
    options = parser.parse_args()
    if options.only is not None:
        print(Case(options.only))
        print(outcome(options.only, raised=True))
        return 0
    found: Counter[str] = Counter()
    for number in range(options.first, options.first + options.count):
        result = outcome(number)
        kind = result.partition(":")[0] if result.startswith(("right", "refused", "left out")) else "wrong"
        found[kind] += 1
        if kind == "wrong" or (options.all and kind != "right"):
            print(result, flush=True)
    print(dict(found))
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
