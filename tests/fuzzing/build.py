"""What to pass to clearhead for a problem that is plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import oracle
import torch
from oracle import Array
from torch import Tensor

import clearhead as ch
from clearhead.masks import Intervals
from clearhead.scores import ScoreFunction
from fuzzing.draw import Spec


class Distances(ch.extend.Bias):
    """One number for each distance, (…, Lq + Lk − 1)."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table

    def lower(self, sizes: Any) -> ch.extend.Added:
        return ch.extend.Added(relative=self.table.reshape((1,) * (3 - self.table.ndim) + tuple(self.table.shape)))


class Sines(ch.extend.Score):
    """A score with tile() alone, and something to learn."""

    def __init__(self, w: Tensor, softcap: float | None = None) -> None:
        super().__init__(softcap=softcap)
        self.w = torch.nn.Parameter(w)

    def tile(self, query: Tensor, key: Tensor) -> Tensor:
        return (query.unsqueeze(-2) - key.unsqueeze(-3)).sin() @ self.w


class Nearer:
    """The oracle's `nearness`, as a change of scores."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, score: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score / (1 + self.rate * (i - j + head - batch).abs().to(score.dtype))


def smooth(query: Tensor, key: Tensor) -> Tensor:
    return -torch.sqrt(1 + (query.unsqueeze(-2) - key.unsqueeze(-3)).square()).sum(-1)


@dataclass
class Built:
    """A problem as clearhead takes it; `leaves` are the tensors that gradients are asked for, by the oracle's names."""

    spec: Spec
    inputs: list[Tensor]
    options: dict[str, Any]
    leaves: dict[str, Tensor] = field(default_factory=dict)

    def attend(self, query: Any, key: Any, value: Any, engine: str | None) -> Any:
        if self.spec.problem.dropout_p:
            torch.manual_seed(self.spec.number)
        options = self.options | {"dropout_p": self.spec.problem.dropout_p, "engine": engine}
        return ch.attention(query, key, value, **options)


def build(spec: Spec) -> Built:
    p, dtype = spec.problem, getattr(torch, spec.dtype)
    inputs = [laid_out(x, spec.layout, dtype) for x in p.inputs]
    leaves = dict(zip(("query", "key", "value"), inputs, strict=True))
    score, learnt = _score(p.score, dtype)
    leaves |= learnt
    sizes = oracle.Sizes(*(x.shape for x in p.inputs))
    options: dict[str, Any] = {"score": score, "mask": _mask(p.mask, spec, sizes), "scale": p.scale}
    options["align"] = placed(p.align) if isinstance(p.align, np.ndarray) else p.align
    if p.sinks is not None:
        leaves["sinks"] = options["sinks"] = tensor(p.sinks, getattr(torch, spec.bias_dtype))
    modules = []
    for i, one in enumerate(p.biases):
        module, name = _bias(one, spec, sizes)
        modules.append(module)
        if getattr(module, name).requires_grad:
            leaves[f"bias.{i}.{name}"] = getattr(module, name)
    if modules:
        options["bias"] = sum(modules[1:], modules[0]) if spec.bias_as == "bias" else modules[0].tensor
    for leaf in leaves.values():
        leaf.requires_grad_()
    return Built(spec, inputs, options, leaves)


def tensor(x: Array, dtype: torch.dtype) -> Tensor:
    return placed(np.array(x, order="C")).to(dtype)


def placed(x: Array) -> Tensor:
    """On the default device, which `pytest --device` sets."""
    return torch.from_numpy(x).to(torch.get_default_device())


def laid_out(x: Array, layout: str, dtype: torch.dtype) -> Tensor:
    """The same numbers, otherwise in memory."""
    t = tensor(x, dtype)
    if layout == "length first":
        return t.transpose(0, -2).contiguous().transpose(0, -2)
    if layout == "every second":
        return t.repeat_interleave(2, -1)[..., ::2]
    if layout == "unaligned":
        return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)
    if layout == "expanded" and t.ndim > 2 and t.shape[0]:
        return t[:1].expand(t.shape)
    if layout == "overlapping" and t.shape[-1] and t.shape[-2]:
        base = torch.cat([t[..., 0], t[..., -1, 1:]], -1)
        return base.unfold(-1, t.shape[-1], 1)
    if layout == "negated" and dtype in (torch.float32, torch.float64):
        return torch.complex(torch.zeros_like(t), -t).conj().imag
    return t


def _score(score: Any, dtype: torch.dtype) -> tuple[Any, dict[str, Tensor]]:
    kind, settings, learnt = score
    settings = dict(settings)
    then = settings.pop("then", None)
    given = {name: tensor(x, dtype) for name, x in learnt.items()}
    cap = settings.get("softcap")
    made: dict[str, Callable[[], Any]] = {
        "dot": lambda: ch.Dot(**settings),
        "bilinear": lambda: ch.Bilinear.from_weights(given["W"], softcap=cap),
        "additive": lambda: ch.Additive.from_weights(given.get("W_q"), given.get("W_k"), given["w_v"], softcap=cap),
        "cosine": lambda: ch.Cosine(**settings),
        "gaussian": lambda: ch.Gaussian(**settings),
        "smooth": lambda: smooth if cap is None else ScoreFunction(smooth, softcap=cap),
        "sines": lambda: Sines(given["w"], cap),
    }
    module = made[kind]()
    if then is not None:
        module = (module if isinstance(module, ch.extend.Score) else ScoreFunction(module)).then(Nearer(then))
    return module, {f"score.{name}": getattr(module, name) for name in given}


def _mask(mask: Any, spec: Spec, sizes: Any) -> Any:
    if mask is None or spec.mask_as == "mask":
        return None if mask is None else expression(mask)
    keep = placed(mask[1])
    if spec.mask_as == "bool":
        return keep
    return torch.zeros(keep.shape, dtype=getattr(torch, spec.dtype)).masked_fill(~keep, -torch.inf)


def expression(mask: Any) -> ch.extend.Mask:
    kind, *given = mask
    if kind in ("and", "or"):
        left, right = (expression(one) for one in given)
        return left & right if kind == "and" else left | right
    if kind == "not":
        return ~expression(given[0])
    given = [placed(x) if isinstance(x, np.ndarray) else x for x in given]
    made: dict[str, Callable[..., ch.extend.Mask]] = {
        "lengths": ch.Lengths,
        "padding": ch.Padding,
        "causal": ch.Causal,
        "window": lambda before, after: ch.SlidingWindow(before=before, after=after),
        "documents": ch.Documents,
        "packed": _packed,
        "prefix": ch.PrefixLM,
        "intervals": Intervals,
        "where": lambda factors: ch.MaskFunction(
            lambda *i: sum(f * x for f, x in zip(factors, i, strict=True)) % 3 > 0
        ),
        "dense": ch.DenseMask,
    }
    return made[kind](*given)


def _packed(cu_q: Any, cu_k: Any, inside: Any) -> ch.extend.Mask:
    documents = ch.Documents.from_cu_seqlens(cu_q, cu_k)
    return documents if inside is None else expression(inside) & documents


def _bias(one: Any, spec: Spec, sizes: Any) -> tuple[ch.extend.Bias, str]:
    kind, settings, learnt = one
    dtype = getattr(torch, spec.bias_dtype)
    (name, x), *_ = learnt.items()
    if kind == "alibi":
        bias: ch.extend.Bias = ch.ALiBi(sizes.heads).to(dtype)
        bias.slopes.requires_grad_(spec.learn_bias)
    elif kind == "relative":
        bias = ch.RelativeBias(sizes.heads, **settings).to(dtype)
        bias.weight.data = tensor(x, dtype)
        bias.weight.requires_grad_(spec.learn_bias)
    else:
        made = tensor(x, dtype)
        made = torch.nn.Parameter(made) if spec.learn_bias else made
        bias = (ch.DenseBias if kind == "dense" else Distances)(made)
    return bias, name
