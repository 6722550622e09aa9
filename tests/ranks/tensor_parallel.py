"""Modules whose layers are shared out by `parallelize_module`: what every rank runs, beside products of all weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from ranks.words import said
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import clearhead as ch
from clearhead.nn import AdditiveAttention, KeyValueCache, MultiHeadAttention, TorchMultiheadAttention

B, LENGTH, E, HEADS = 2, 6, 32, 8


def expected(module: MultiHeadAttention, x: Tensor, keep: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    """The output, by PyTorch's operations on the whole weights."""
    width = module.head_dim
    q, k, v = (layer(x).unflatten(-1, (-1, width)).transpose(1, 2) for layer in (module.W_q, module.W_k, module.W_v))
    q = q if module.query_norm is None else module.query_norm(q)
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = (q @ k.mT / width**0.5 + bias).masked_fill(~keep, -torch.inf)
    return module.W_o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def shared(module: nn.Module, layers: str = "qkvo", local: bool = True, norms: bool = False) -> Any:
    plan: dict[str, Any] = {f"W_{name}": ColwiseParallel(use_local_output=local) for name in layers if name != "o"}
    plan |= {"W_o": RowwiseParallel()} if "o" in layers else {}
    by_head = SequenceParallel(sequence_dim=1, use_local_output=local)
    plan |= {"query_norm": by_head, "key_norm": by_head} if norms else {}
    return parallelize_module(module, init_device_mesh("cpu", (dist.get_world_size(),)), plan)


def drawn(seed: int = 0, **options: Any) -> tuple[MultiHeadAttention, Tensor]:
    torch.manual_seed(seed)
    return MultiHeadAttention(E, HEADS, **options).double(), torch.randn(B, LENGTH, E, dtype=torch.float64)


def numbers(rank: int) -> dict[str, float]:
    """How far outputs, steps with a cache, and gradients are from those of the whole module, drawn at random."""
    generator, ranks, found = torch.Generator().manual_seed(5), dist.get_world_size(), {}
    choose = lambda *choices: choices[int(torch.randint(len(choices), (), generator=generator))]
    for number in range(12):
        groups = choose(*(n for n in (2, 4, 8) if n % ranks == 0))
        module, x = drawn(number, num_kv_heads=groups, head_dim=choose(None, 3, 6), bias=choose(True, False))
        window = choose(1, 3, 99)
        i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
        keep = (j <= i) & (i - j < window)
        want = expected(module, x, keep)
        loss = torch.autograd.grad(want.square().sum(), [*module.parameters()])
        shared(module)
        mask = choose(
            keep,
            ch.Causal() & ch.SlidingWindow(before=window - 1),
            ch.MaskFunction(lambda b, h, i, j, w=window: (j <= i) & (i - j < w)),
        )
        whole = module(x, x, x, mask)
        whole.square().sum().backward()
        grads = [p.grad.full_tensor() for p in module.parameters()]
        cache, steps = KeyValueCache(), []
        for step in x.split(2, 1):
            steps.append(module(step, step, step, ch.Causal() & ch.SlidingWindow(before=window - 1), cache=cache))
        apart = [whole - want, torch.cat(steps, 1) - want, *(a - b for a, b in zip(grads, loss, strict=True))]
        found[f"{number}: {module} {window}"] = max(float(t.detach().abs().max()) for t in apart)
        weights = module.attention_weights
        found[f"{number}: heads"] = abs(weights.shape[1] - HEADS // ranks)
    module, x = drawn()
    want = expected(module, x, torch.ones(LENGTH, LENGTH, dtype=torch.bool))
    got = shared(module, local=False)(x, x, x)
    found["outputs that are DTensors"] = float((got - want).abs().max())
    module, x = drawn()
    slopes = torch.randn(1, HEADS, LENGTH, LENGTH, dtype=torch.float64)
    want = expected(module, x, torch.ones(LENGTH, LENGTH, dtype=torch.bool), slopes)
    got = shared(module)(x, x, x, bias=slopes.chunk(ranks, 1)[rank])
    found["a bias of this rank's heads"] = float((got - want).abs().max())
    return found


def options(rank: int) -> dict[str, float]:
    """How far output and gradients are from those of one process, with the options of today."""
    ranks, found = dist.get_world_size(), {}
    per_head = lambda: nn.Parameter(torch.linspace(0.5, 2.0, HEADS).double())
    norms = lambda: {"query_norm": nn.RMSNorm(4), "key_norm": nn.LayerNorm(4)}
    frozen = nn.RMSNorm(4).requires_grad_(False)
    for name, given in {
        "norms": norms(), "sinks": {"sinks": True}, "gate, headwise": {"gate": "headwise"},
        "gate, elementwise": {"gate": "elementwise", "bias": False}, "scale": {"scale": per_head()},
        "temperature": {"temperature": per_head()}, "a number": {"scale": 0.7},
        "one number": {"scale": torch.tensor([0.7])},
        "a norm that is not trained": {"key_norm": frozen}, "rotary": {"rotary": ch.nn.RotaryEmbedding(4)},
        "all": {
            **norms(), "sinks": True, "gate": "headwise", "temperature": per_head(), "rotary": ch.nn.RotaryEmbedding(4)
        },
    }.items():  # fmt: skip
        module, x = drawn(**given)
        for parameter in module.parameters():
            nn.init.normal_(parameter, 0.3, 0.3)
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        want = module(x, x, x, ch.Causal())
        loss = dict(zip(trained, torch.autograd.grad(want.square().mean(), [*trained.values()]), strict=True))
        cut = [n for n in ("sinks", "scale", "temperature") if n in trained]
        shared(module, "qkvgo" if module.gate else "qkvo", norms="norms" in name or name == "all")
        for each in cut:
            setattr(module, each, nn.Parameter(trained[each].detach().chunk(ranks)[rank]))
        got = module(x, x, x, ch.Causal())
        got.square().mean().backward()
        apart = [got - want]
        for each, parameter in module.named_parameters():
            if each in loss:
                grad: Any = parameter.grad
                whole = loss[each].chunk(ranks)[rank] if each in cut else loss[each]
                apart.append((grad.full_tensor() if each not in cut else grad) - whole)
        found[name] = max(float(t.detach().abs().max()) for t in apart)
    return found


def refused(rank: int) -> dict[str, str]:
    """What cannot be right, and what is said."""

    def of_heads(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j <= i + h

    ranks = dist.get_world_size()
    calls: dict[str, Any] = {}
    for name, options, layers, given in (
        ("a head that is cut", {"num_kv_heads": 1}, "qkvo", {}),
        ("a head that one rank has", {"num_kv_heads": 1, "head_dim": 1}, "qkvo", {}),
        ("keys that are whole", {"num_kv_heads": HEADS // ranks}, "qo", {}),
        ("keys and values that are whole", {}, "qo", {}),
        ("values that are whole", {}, "qko", {}),
        ("the last layer whole", {}, "qkv", {}),
        ("the last layer alone", {}, "o", {}),
        ("a bias of all heads", {}, "qkvo", {"bias": ch.ALiBi(HEADS)}),
        ("a learnt bias of all heads", {}, "qkvo", {"bias": ch.RelativeBias(HEADS)}),
        ("a bias of all heads, joined", {}, "qkvo", {"bias": ch.ALiBi(HEADS) + ch.ALiBi(HEADS)}),
        ("a rule of the head", {}, "qkvo", {"mask": ch.MaskFunction(of_heads)}),
        ("a rule of the head, joined", {}, "qkvo", {"mask": ch.Causal() | ch.MaskFunction(of_heads)}),
        ("a bias by a rule of the head", {}, "qkvo", {"bias": ch.BiasFunction(lambda b, h, i, j: (h + i - j) / 2)}),
        ("a mask of all heads", {}, "qkvo", {"mask": torch.ones(B, HEADS, LENGTH, LENGTH).bool()}),
        ("a tensor of all heads", {}, "qkvo", {"bias": torch.zeros(B, HEADS, LENGTH, LENGTH).double()}),
        ("sinks of all heads", {"sinks": True}, "qkvo", {}),
        ("a scale of all heads", {"scale": torch.ones(HEADS)}, "qkvo", {}),
        ("a gate of all heads", {"gate": "headwise"}, "qkvo", {}),
        ("a bias of the module", {"score_bias": ch.ALiBi(HEADS)}, "qkvo", {}),
        ("a norm of all heads", {"query_norm": nn.RMSNorm(E // HEADS)}, "qkvo", {}),
        ("a temperature of all heads", {"temperature": nn.Parameter(torch.ones(()))}, "qkvo", {}),
        ("a learnt score of all heads", {"score": ch.Bilinear(E // HEADS, E // HEADS)}, "qkvo", {}),
        (
            "a learnt bias of every head",
            {"score_bias": ch.DenseBias(nn.Parameter(torch.ones(LENGTH, LENGTH)))},
            "qkvo",
            {},
        ),
    ):
        module, x = drawn(**options)
        calls[name] = partial(shared(module, layers), x, x, x, **given)
    module, x = drawn()
    calls["a cache beside DTensors"] = partial(shared(module, local=False), x, x, x, cache=KeyValueCache())
    module, x = drawn()
    calls["a mask beside DTensors"] = partial(shared(module, local=False), x, x, x, ch.Causal())
    for name, given, layers in (
        ("a norm beside DTensors", {"query_norm": nn.RMSNorm(E // HEADS)}, "qkvo"),
        ("a scale beside DTensors", {"scale": torch.ones(HEADS)}, "qkvo"),
        ("positions beside DTensors", {"rotary": ch.nn.RotaryEmbedding(4)}, "qkvo"),
        ("turns of one's own", {"rotary": lambda x, positions: x * positions[:, None, :, None].cos()}, "qkvo"),
        ("a gate beside DTensors", {"gate": "headwise"}, "qkvo"),
    ):
        module, x = drawn(**given)
        calls[name] = partial(shared(module, layers, local=False), x, x, x)
    module, x = drawn(num_kv_heads=1, head_dim=2 * ranks)
    calls["the whole again"] = partial(module, x, x, x)
    additive = AdditiveAttention(8).double()
    additive(x, x, x)
    calls["additive"] = partial(shared(additive, "qk"), x, x, x)
    theirs = TorchMultiheadAttention(E, HEADS, batch_first=True).double()
    mesh = init_device_mesh("cpu", (ranks,))
    calls["torch's"] = partial(parallelize_module(theirs, mesh, {"out_proj": RowwiseParallel()}), x, x, x)
    return {name: said(call, RuntimeError) for name, call in calls.items()}
