"""Looks at the weights, constructors, statistics, encodings and tools around a module, as cases of `calls.py`."""

import torch
from torch import nn

import clearhead as ch
from clearhead.nn import (
    LearnedPositionalEncoding,
    MultiHeadAttention,
    RotaryEmbedding,
    RotaryScaling,
    SinusoidalPositionalEncoding,
    TorchMultiheadAttention,
)

WIDTH, HEADS = 32, 4


def cases(query, key, value, x):
    """Each case by its name, of inputs (B, H, L, 32) and (B, L, 128) on the device."""
    torchs = nn.MultiheadAttention(HEADS * WIDTH, HEADS, batch_first=True).cuda()
    ours = MultiHeadAttention(HEADS * WIDTH, HEADS).cuda()
    encodings = {
        "LearnedPositionalEncoding": LearnedPositionalEncoding(256, HEADS * WIDTH).cuda(),
        "SinusoidalPositionalEncoding": SinusoidalPositionalEncoding(HEADS * WIDTH).cuda(),
    }
    rotary = RotaryEmbedding(WIDTH).cuda()
    slow = RotaryEmbedding(WIDTH, scaling=RotaryScaling.yarn(4.0, 64)).cuda()
    turning = MultiHeadAttention(HEADS * WIDTH, HEADS, rotary=rotary, sinks=True, gate="headwise").cuda()
    places = torch.arange(x.shape[1], device="cpu") % 100
    bilinear = ch.Bilinear(WIDTH, WIDTH).cuda()
    square, wide = torch.eye(WIDTH).cuda(), torch.ones(16, 2 * WIDTH).cuda()
    line, groups = torch.ones(16).cuda(), torch.arange(query.shape[2], device="cuda") % 3
    factors = torch.ones(query.shape[0], query.shape[1], query.shape[2], device="cuda")
    sinks = torch.zeros(HEADS, device="cuda")

    def weights(**options):
        return ch.weights(query, key, mask=ch.Causal(), **options)

    def trained(**options):
        return torch.autograd.grad(ch.attention(query, key, value, **options).sum(), query)

    def reduced(statistic, **options):
        with torch.no_grad():
            return weights(**options).reduce(statistic)

    def watched():
        with torch.no_grad(), ch.watch(ours) as found:
            ours(x, x, x, ch.Causal())
        return found

    def edited(change):
        with torch.no_grad(), ch.edit(ours, change):
            return ours(x, x, x, ch.Causal())

    with torch.no_grad(), ch.watch(ours, values=True) as before:
        ours(x, x, x, ch.Causal())

    changes = {
        "ScaleHeads": ch.edits.ScaleHeads(heads=[0], factor=0.5),
        "Knockout": ch.edits.Knockout(heads=[0]),
        "AddBias": ch.edits.AddBias(ch.ALiBi(HEADS)),
        "ForceMask": ch.edits.ForceMask(ch.SlidingWindow(before=9)),
        "Patch": ch.edits.Patch(before, heads=[0]),
        "Freeze": ch.edits.Freeze(before, heads=[0]),
        "Ablate": ch.edits.Ablate(heads=[0]),
        "MapWeights": ch.edits.MapWeights(torch.sqrt, heads=[0]),
    }

    methods = ("amax", "amin", "argmax", "argmin", "max", "mean", "min", "sum")
    return {
        **{f"Weights.{name}": lambda name=name: getattr(weights(), name)(dim=-1) for name in methods},
        **{f"Weights.{name}": lambda name=name: getattr(weights(), name)() for name in ("dense", "scores")},
        **{
            f"Weights.{name}": lambda name=name: getattr(weights(), name)()
            for name in ("entropy", "logsumexp", "received")
        },
        "Weights.topk": lambda: weights().topk(3),
        "Weights.pool": lambda: weights().pool(16),
        "Weights.gradients": lambda: weights().gradients(value, torch.ones_like(value))[0, 0, 3],
        "Weights, an index": lambda: weights()[0, 1, 4:9],
        "reductions.Mass": lambda: reduced(ch.reductions.Mass(groups)),
        "reductions.MeanDistance": lambda: reduced(ch.reductions.MeanDistance()),
        "reductions.Output": lambda: reduced(ch.reductions.Output(value)),
        "reductions.Pool": lambda: reduced(ch.reductions.Pool(16)),
        "reductions.SinkShare": lambda: reduced(ch.reductions.SinkShare(), sinks=sinks),
        "Received of some queries": lambda: reduced(ch.reductions.Received(queries=factors)),
        "scaled_dot_product_attention": lambda: ch.scaled_dot_product_attention(query, key, value, is_causal=True),
        "Bilinear": lambda: trained(score=ch.Bilinear.from_weights(square)),
        "Bilinear, built before": lambda: trained(score=bilinear),
        "Additive.from_weights": lambda: trained(
            score=ch.Additive.from_weights(None, None, torch.ones_like(square[0])), engine="tiled"
        ),
        "Additive.from_concatenated": lambda: trained(score=ch.Additive.from_concatenated(wide, line), engine="tiled"),
        "DenseBias": lambda: trained(bias=ch.DenseBias(torch.zeros(1, HEADS, query.shape[2], 1, device="cuda"))),
        "check_shape": lambda: ch.check_shape(query, "B H L E"),
        "Documents.from_position_ids": lambda: trained(mask=ch.Documents.from_position_ids([*range(query.shape[2])])),
        "Documents.from_lengths": lambda: trained(mask=ch.Documents.from_lengths([100, query.shape[2] - 100])),
        "Documents.from_cu_seqlens": lambda: trained(mask=ch.Documents.from_cu_seqlens([0, 100, query.shape[2]])),
        **{name: lambda module=module: module(x) for name, module in encodings.items()},
        "RotaryEmbedding": lambda: rotary(query),
        "RotaryScaling": lambda: slow(query),
        "MultiHeadAttention, positions on the host": lambda: turning(x, x, x, ch.Causal(), positions=places),
        "MultiHeadAttention.from_torch": lambda: MultiHeadAttention.from_torch(torchs)(x, x, x),
        "MultiHeadAttention.to_torch": lambda: ours.to_torch(),
        "MultiHeadAttention.prepare": lambda: ours(x, ours.prepare(x, x)),
        "TorchMultiheadAttention.from_torch": lambda: TorchMultiheadAttention.from_torch(torchs)(
            x, x, x, need_weights=False
        ),
        "plan": lambda: ch.plan(query, key, value, mask=ch.Causal()),
        "watch": watched,
        **{f"edits.{name}": lambda change=change: edited(change) for name, change in changes.items()},
    }
