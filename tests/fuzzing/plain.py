"""What a person would write: plain eager PyTorch in the inputs' own dtype, nothing of clearhead.

Its distance from the truth is the measure for an engine's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import torch
from oracle import Array, Found, Loss, Problem
from torch import Tensor


def plain(p: Problem, dtype: torch.dtype, loss: Array | Loss | None = None) -> Found:
    """What `oracle.attend` gives, computed in this dtype, gradients by autograd."""
    with np.errstate(all="ignore"):
        return _plain(p, dtype, Loss(loss) if isinstance(loss, np.ndarray) else loss)


def _plain(p: Problem, dtype: torch.dtype, loss: Loss | None) -> Found:
    sizes = oracle.Sizes(*(x.shape for x in p.inputs))
    leaf = lambda x: torch.from_numpy(np.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)).to(dtype).requires_grad_()
    leaves = {name: leaf(x) for name, x in zip(("query", "key", "value"), p.inputs, strict=True)}
    learnt = {name: leaf(x) for name, x in p.score[2].items()}
    leaves |= {f"score.{name}": x for name, x in learnt.items()} | ({} if p.sinks is None else {"sinks": leaf(p.sinks)})
    q, k, v = (fold(leaves[name], sizes) for name in ("query", "key", "value"))
    raw = scores(p, q, k, learnt)
    undo = {}
    s = raw
    for i, (name, given, tensors) in enumerate(p.biases):
        added, undo[i] = oracle.BIASES[name](sizes, p.align, **given, **tensors)
        s = s + torch.from_numpy(np.array(np.broadcast_to(added, sizes.shape))).to(dtype)
    if undo:
        leaves["added"] = s
        s.retain_grad() if s.requires_grad else s.requires_grad_()
    keep = torch.from_numpy(np.array(oracle.allowed(p.mask, sizes, p.align)))
    s = s.masked_fill(~keep, -torch.inf)
    blind = s.amax(-1, keepdim=True) == -torch.inf if s.shape[-1] else torch.ones(*s.shape[:-1], 1, dtype=torch.bool)
    s = s.masked_fill(blind, 0.0)
    finished = s.masked_fill(blind, -torch.inf)
    shares = s.softmax(-1).masked_fill(blind, 0.0) if s.shape[-1] else s
    if p.sinks is not None:
        s = torch.cat([s, leaves["sinks"].view(1, -1, 1, 1).expand(*s.shape[:-1], 1)], -1)
    lse = s.logsumexp(-1) if s.shape[-1] else s.sum(-1)
    w = s.softmax(-1)[..., : sizes.keys].masked_fill(blind, 0.0)
    sink = s.softmax(-1)[..., -1].masked_fill(blind[..., 0], 0.0) if p.sinks is not None else torch.zeros_like(lse)
    entropy = -(torch.xlogy(shares, shares)).sum(-1)
    dropped = w
    if p.dropout_p:
        dropped = w * torch.from_numpy(oracle.dropout(p.dropout_p, p.seed, sizes.shape)).to(dtype)
    output = dropped @ v
    lse = lse.masked_fill(blind[..., 0], -torch.inf)
    parts = (sizes.restore(t.detach().double().numpy()) for t in (raw, w, lse, entropy, output, shares, finished, sink))
    found = Found(*parts, {}, keep.numpy())
    if loss is not None:
        best = finished.amax(-1) if finished.shape[-1] else lse
        results = {"output": output, "weights": w, "shares": shares, "entropy": entropy, "logsumexp": lse, "sink": sink}
        results |= {"best": best}
        total = torch.zeros((), dtype=dtype, requires_grad=True)
        for name, grad in loss.arrays.items():
            grad = torch.from_numpy(grad.reshape(results[name].shape)).to(dtype)
            total = total + (results[name].masked_fill(grad == 0, 0.0) * grad).sum()
        gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        for (name, x), g in zip(leaves.items(), gradients, strict=True):
            found.gradients[name] = (torch.zeros_like(x) if g is None else g).double().numpy()
        ds = found.gradients.pop("added", None)
        for i, back in undo.items():
            found.gradients |= {f"bias.{i}.{name}": x for name, x in back(ds).items()}
    return found


def fold(t: Tensor, sizes: Any) -> Tensor:
    """(B, H, L, E), as `oracle.Sizes.fold`."""
    if sizes.depth <= 3:
        return t.expand(*sizes.outer, *t.shape[-2:]).reshape(sizes.batch, 1, *t.shape[-2:])
    t = t.reshape((1,) * (sizes.depth - t.ndim) + tuple(t.shape))
    if t.shape[-3] != sizes.heads:
        t = t.repeat_interleave(sizes.heads // t.shape[-3], -3)
    return t.expand(*sizes.outer, *t.shape[-3:]).reshape(sizes.batch, sizes.heads, *t.shape[-2:])


def scores(p: Problem, q: Tensor, k: Tensor, learnt: dict[str, Tensor]) -> Tensor:
    kind, settings, _ = p.score
    own, cap = settings.get("scale"), settings.get("softcap")
    own = (q.shape[-1] ** -0.5 if q.shape[-1] else 1.0) if kind == "dot" and own is None else own
    scale = own if p.scale is None else p.scale
    s = tile(kind, q, k, settings, learnt)
    s = s if scale is None else s * scale
    s = s if cap is None else cap * torch.tanh(s / cap)
    then = settings.get("then")
    return s if then is None else s * torch.from_numpy(oracle.nearness(s.shape, then)).to(s.dtype)


def tile(kind: str, q: Tensor, k: Tensor, settings: dict[str, Any], learnt: dict[str, Tensor]) -> Tensor:
    if kind == "dot":
        return q @ k.mT
    if kind == "bilinear":
        return q @ learnt["W"] @ k.mT
    if kind == "cosine":
        unit = lambda x: x / x.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
        return unit(q) @ unit(k).mT / settings["temperature"]
    if kind == "additive":
        q, k = (x if w is None else x @ w.T for x, w in ((q, learnt.get("W_q")), (k, learnt.get("W_k"))))
        return torch.tanh(q.unsqueeze(-2) + k.unsqueeze(-3)) @ learnt["w_v"]
    apart = q.unsqueeze(-2) - k.unsqueeze(-3)
    if kind == "gaussian":
        return -apart.square().sum(-1) / (2 * settings["bandwidth"] ** 2)
    return -torch.sqrt(1 + apart.square()).sum(-1) if kind == "smooth" else apart.sin() @ learnt["w"]
