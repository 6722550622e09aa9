"""Random options of `MultiHeadAttention` beside its projections, and what they compute, in NumPy.

They are drawn from a stream of their own, so that the module of a number is otherwise the same with and without them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.nn import MultiHeadAttention, RotaryEmbedding, RotaryScaling

Array = np.ndarray
Scaling = tuple[str, dict[str, Any]] | None  # the name of a scaling, and its arguments


class Norm(NamedTuple):
    """A norm of vectors (..., E): of RMS, or of LayerNorm where it is `centred`."""

    weight: Array
    bias: Array
    eps: float
    centred: bool

    def of(self, x: Array, rounding: Any) -> Array:
        if self.centred:
            mean = x.mean(-1, keepdims=True)
            x = rounding.moved(x - mean, np.abs(x) + np.abs(mean))
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * self.weight
        return rounding.moved(x + self.bias, np.abs(x) + np.abs(self.bias))


class Extra(NamedTuple):
    """What a module has beside its projections. `scale`: (H, 1, 1), of the scores, or None: 1/√width. `gate`: weight,
    bias, and whether there is a factor for each number."""

    query_norm: Norm | None = None
    key_norm: Norm | None = None
    scale: Array | None = None
    sinks: Array | None = None
    slopes: Array | None = None  # (H, 1, 1): a bias of its own, −slope · distance
    buckets: Array | None = None  # (H, 8): a learnt bias by the distance, in 8 buckets
    gate: tuple[Array, Array | None, bool] | None = None


NONE = Extra()


def drawn(d: Any, heads: int, width: int) -> dict[str, Any]:
    """Keywords of the module."""
    if d.chance(0.5):
        return {}
    tensor = lambda low, high: torch.from_numpy(d.rng.uniform(low, high, d.of((), (1,), (heads,), (heads, 1, 1))))
    factor = lambda low, high: d.of(None, 0.6, tensor(low, high), nn.Parameter(tensor(low, high)))
    norm = lambda: d.of(None, None, nn.RMSNorm(width), nn.LayerNorm(width), nn.RMSNorm(width, eps=0.05))
    options = {
        "query_norm": norm(), "key_norm": norm(), "scale": factor(0.1, 1.5), "temperature": factor(0.6, 2.0),
        "sinks": d.chance(0.4), "gate": d.of(None, None, "elementwise", "headwise"),
        "score_bias": d.of(None, None, ch.ALiBi(heads), ch.RelativeBias(heads, 8, 5)),
    }  # fmt: skip
    for given in (options["query_norm"], options["key_norm"]):
        for parameter in () if given is None else given.parameters():
            nn.init.normal_(parameter, 0.5, 0.5)
    return options


class OwnRotary(nn.Module):
    """A rotation of one's own: the pairs (2i, 2i + 1) of all entries, each by base^(−2i/E) a step."""

    def __init__(self, dim: int, base: float) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved, self.drawn = dim, base, True, None

    def forward(self, x: Tensor, *, positions: Tensor) -> Tensor:
        steps = torch.arange(0, self.dim, 2, dtype=torch.float64, device=x.device)
        angles = (positions[:, None, :, None] * self.base ** (-steps / self.dim)).to(
            torch.promote_types(x.dtype, torch.float32)
        )
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1).flatten(-2)


def rotary(d: Any, plain: RotaryEmbedding | None, width: int) -> Any:
    """The rotation of a module: the one that was drawn, a slower one, or one of one's own."""
    if plain is None or d.chance(0.5):
        return plain
    if width % 2 == 0 and d.chance(0.3):
        return OwnRotary(width, d.of(7.0, 10000.0))
    factor, length = d.of(1.0, 2.0, 8.0), d.of(4, 32, 4096)
    kind, given = d.of(
        ("linear", {"factor": factor}),
        ("llama3", {"factor": factor, "original_length": length}),
        ("yarn", {"factor": factor, "original_length": length, "truncate": d.chance(0.7)}),
    )
    scaled = RotaryEmbedding(plain.dim, plain.base, plain.interleaved, getattr(RotaryScaling, kind)(**given))
    scaled.drawn = kind, given
    return scaled


def filled(d: Any, module: MultiHeadAttention) -> None:
    """Sinks that are not 0."""
    if module.sinks is not None:
        with torch.no_grad():
            module.sinks.copy_(torch.from_numpy(d.rng.standard_normal(module.sinks.shape)))


def extreme(d: Any, module: MultiHeadAttention) -> None:
    """Factors of the scores near 0, or below it, as a training may leave them; not so near that what they make of the
    queries is beyond float16."""
    for factor in (module.scale, module.temperature):
        if isinstance(factor, Tensor) and d.chance(0.2):
            near = d.rng.uniform(0.002, 1, factor.shape) * d.rng.choice([-1, 1], factor.shape)
            with torch.no_grad():
                factor.copy_(torch.as_tensor(near * d.of(0.1, 1.0, 3.0)))


def cut(module: MultiHeadAttention, heads: int) -> None:
    """The options of the first heads, for a module that was pruned to them."""
    for name in ("sinks", "scale", "temperature"):
        given = getattr(module, name)
        if isinstance(given, Tensor) and given.numel() == module.num_heads and given.ndim:
            kept = given.detach()[:heads]
            setattr(module, name, nn.Parameter(kept) if isinstance(given, nn.Parameter) else kept)
    if module.W_g is not None:
        rows = heads * (module.head_dim if module.gate == "elementwise" else 1)
        module.W_g.weight = nn.Parameter(module.W_g.weight.detach()[:rows])
        module.W_g.bias = None if module.W_g.bias is None else nn.Parameter(module.W_g.bias.detach()[:rows])


def read(module: MultiHeadAttention) -> Extra:
    """The options of a module, in NumPy."""
    array = lambda t: t.detach().double().numpy()
    scale = None
    if module.scale is not None or module.temperature is not None:
        both = [module.head_dim**-0.5 if module.scale is None else module.scale]
        both.append(1.0 if module.temperature is None else module.temperature)
        numbers = (np.reshape(array(f) if isinstance(f, Tensor) else f, (-1, 1, 1)) for f in both)
        scale = next(numbers) / next(numbers)
    gate = None
    if module.W_g is not None:
        bias = None if module.W_g.bias is None else array(module.W_g.bias)
        gate = array(module.W_g.weight), bias, module.gate == "elementwise"
    slopes, own = None, module.score_bias
    buckets = array(own.weight).T if isinstance(own, ch.RelativeBias) else None
    if isinstance(own, ch.ALiBi):
        power = 2 ** int(np.log2(module.num_heads))
        places = [*range(1, power + 1), *(n + 0.5 for n in range(module.num_heads - power))]
        exact = 2.0 ** (-8 * np.array(places) / power)
        slopes = (exact if own.slopes.dtype == torch.float64 else np.float32(exact).astype(np.float64))[:, None, None]
    return Extra(
        norm_of(module.query_norm), norm_of(module.key_norm), scale,
        None if module.sinks is None else array(module.sinks), slopes, buckets, gate,
    )  # fmt: skip


def norm_of(norm: nn.Module | None) -> Norm | None:
    if norm is None:
        return None
    weight = norm.weight.detach()
    bias = getattr(norm, "bias", None)
    kind = torch.float64 if weight.dtype == torch.float64 else torch.float32
    eps = torch.finfo(kind).eps if norm.eps is None else norm.eps
    weight = weight.double().numpy()
    shift = np.zeros_like(weight) if bias is None else bias.detach().double().numpy()
    return Norm(weight, shift, eps, isinstance(norm, nn.LayerNorm))


def places(d: Any, batch: int | None, length: int) -> tuple[Tensor | None, Array | None]:
    """Positions, and those of each sequence, (B, L); `batch` None: of inputs without a batch."""
    shape = (length,) if batch is None or d.chance(0.5) else (batch, length)
    numbers = d.rng.integers(0, 60, shape)
    return torch.from_numpy(numbers), np.broadcast_to(numbers, (batch or 1, length))
