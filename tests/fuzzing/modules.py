"""Random modules and calls of them, right and wrong, beside `module_oracle`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.nn import (
    AdditiveAttention,
    DotProductAttention,
    KeyValueCache,
    MultiHeadAttention,
    RotaryEmbedding,
    TorchMultiheadAttention,
)
from fuzzing import options
from fuzzing.module_oracle import Array, Rounding, apart, sequence, softmax

BY_TORCH = ("W_", "outputs that are DTensors")  # the mistakes for which PyTorch itself raises
RANKS = 1  # among how many the heads are shared out
DTYPES = [torch.float32] * 4 + [torch.float64, torch.bfloat16, torch.float16]


class Draw:
    """What is drawn for one number, and whether anything in it is wrong."""

    def __init__(self, number: int, stream: int = 31) -> None:
        self.rng = np.random.default_rng([number, stream])
        # what is drawn of these changes nothing else
        self.beside, self.around = (Draw(number, 37), Draw(number, 41)) if stream == 31 else (self, self)
        self.wrong: list[str] = []
        self.said: list[str] = []
        self.beyond: list[str] = []  # what else is not right
        self.alone = False  # whether this is no draw for several ranks
        self.lengths: tuple[int, ...] = ()  # of the sequences, where they may be shared out over ranks
        self.another = False  # whether a changed input may make another problem, which has a meaning of its own
        torch.manual_seed(number)
        self.dtype = self.of(*DTYPES)
        self.autocast = stream == 31 and self.around.chance(0.2)
        if RANKS > 1 and self.around.chance(0.5):  # gradients are compared in float64
            self.dtype = torch.float64

    def of(self, *choices: Any) -> Any:
        found = choices[int(self.rng.integers(len(choices)))]
        return found

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def mistake(self, name: str) -> None:
        self.wrong.append(name)

    def tensor(self, *shape: int) -> Tensor:
        """Normal numbers in a random layout: contiguous, transposed, with gaps, a view in the middle of others."""
        x = torch.from_numpy(self.rng.standard_normal(shape)).to(self.dtype)
        layout = self.of("whole", "whole", "turned", "gaps", "inside")
        if layout == "turned" and x.ndim > 1:
            return x.transpose(0, -1).contiguous().transpose(0, -1)
        if layout == "gaps":
            return torch.stack([x, x], -1)[..., 0]
        if layout == "inside" and x.ndim > 1:
            return torch.cat([x, x, x], -2)[..., shape[-2] : 2 * shape[-2], :]
        return x


def compiled(d: Draw, module: Any) -> Any:
    """What PyTorch's compiler makes of a module, where nothing is wrong."""
    torch._dynamo.reset()
    return module if d.wrong else torch.compile(module, backend="aot_eager", dynamic=d.around.of(None, None, True))


RUN: Callable[[Draw, Any], Any] = lambda d, module: module  # what runs the module of a draw, such as `compiled`


def surrounded(d: Draw, graph: bool) -> ExitStack:
    """The modes in which a module is called."""
    stack = ExitStack()
    stack.enter_context(torch.set_grad_enabled(graph))
    stack.enter_context(torch.autocast("cpu", torch.bfloat16, enabled=d.autocast))
    return stack


def array(x: Any) -> Array:
    return x.detach().double().numpy()


def layers_of(module: Any, names: tuple[str, ...]) -> dict[str, tuple[Array, Array | None]]:
    every = ((name, getattr(module, name)) for name in names)
    return {name: (array(layer.weight), None if layer.bias is None else array(layer.bias)) for name, layer in every}


def spoiled(d: Draw, tensors: dict[str, Any]) -> None:
    """One of the inputs, made wrong, or the same in another form."""
    name = d.of(*tensors)
    x = tensors[name]
    change = d.of("width", "dtype", "integers", "dimensions", "list", "length", "batch", "sparse", "none")
    changed = {
        "width": lambda: torch.cat([x, x], -1), "dtype": lambda: x.to(d.of(*{*DTYPES} - {x.dtype})),
        "integers": x.long, "dimensions": lambda: x[None, None], "list": x.tolist, "none": lambda: None,
        "length": lambda: torch.cat([x, x[..., :1, :], x[..., :1, :]], -2), "sparse": lambda: x.to_sparse(),
        "batch": lambda: torch.cat([x[:1]] * (len(x) + 2)) if x.ndim > 2 and len(x) else x[..., 0],
    }[change]()  # fmt: skip
    tensors[name] = changed
    d.another = change in ("dimensions", "batch", "length") or (name, change) == ("value", "width")
    d.mistake(f"{name}: {change}")


def mask_of(d: Draw, b: int, h: int, lq: int, lk: int, first: int | None, depth: int) -> tuple[Any, Array]:
    """A mask, and what it keeps, (B, H, Lq, Lk). `first`: where query 0 stands; None: a mask of positions is wrong."""
    keep = np.ones((b, h, lq, lk), bool)
    i, j = np.arange(lq)[:, None] + (first or 0), np.arange(lk)
    kind = d.of("none", "none", "causal", "window", "tensor", "tensor", "padding", "both", "rule", "wrong")
    if kind in ("causal", "window", "both") and first is None:
        kind = "padding"
    if kind == "causal":
        return ch.Causal(), keep & (j <= i)
    if kind == "window":
        before = d.of(0, 1, 3)
        return ch.Causal() & ch.SlidingWindow(before=before), keep & (j <= i) & (i - j <= before)
    if kind in ("padding", "both"):
        kept = d.rng.random((b, lk)) < 0.7
        mask, keep = ch.Padding(torch.from_numpy(kept)), keep & kept[:, None, None]
        return (mask & ch.Causal(), keep & (j <= i)) if kind == "both" else (mask, keep)
    if kind == "rule":
        rule = ch.MaskFunction(lambda b, h, i, j: (b + h + i + 2 * j) % 3 > 0)
        rows = [np.arange(n).reshape((-1,) + (1,) * (3 - at)) for at, n in enumerate((b, h, lq, lk))]
        return rule, keep & ((rows[0] + rows[1] + rows[2] + 2 * rows[3]) % 3 > 0)
    if kind == "tensor":
        shapes = [(lq, lk), (b, lq, lk)] + ([(b, h, lq, lk), (1, h, 1, lk), (b, 1, lq, 1)] if depth == 4 else [])
        kept = d.rng.random(d.of(*shapes)) < 0.7
        spread = kept[:, None] if kept.ndim == 3 else kept
        return torch.from_numpy(kept), keep & spread
    if kind == "wrong" and d.chance(0.5):
        d.mistake("mask")
        shape = d.of((lq + 1, lk), (b + 2, lq, lk), (lk,), (b, h + 1, lq, lk), (1, 1, 1, lq, lk))
        return d.of(torch.ones(shape).bool(), torch.ones(shape).long(), "causal", ch.Causal, ch.Padding), keep
    return None, keep


def documents_of(d: Draw, b: int, lq: int, lk: int, first: int) -> tuple[Any, Array]:
    """A mask of packed documents, and what it keeps, (B or 1, 1, Lq, Lk)."""
    ids = np.sort(d.rng.integers(0, 3, d.of((lk,), (b, lk))), -1)
    rows, at = ids.reshape(-1, lk), np.arange(lq) + first
    own = np.where((at >= 0) & (at < lk), rows[:, np.clip(at, 0, max(lk - 1, 0))] if lk else -1, -1)
    keep = own[:, None, :, None] == rows[:, None, None, :]
    if d.chance(0.5):
        return ch.Documents(ids) & ch.Causal(), keep & (np.arange(lk) <= at[:, None])
    return ch.Documents(ids), keep


def lengths_of(d: Draw, b: int, lq: int, lk: int) -> tuple[Any, Array]:
    """Valid lengths, or None, and what they keep, (B, 1, Lq or 1, Lk)."""
    if d.chance(0.7):
        return None, np.ones((b, 1, 1, lk), bool)
    lens = d.rng.integers(0, lk + 1, d.of((b,), (b, lq)))
    keep = np.arange(lk) < lens.reshape(b, 1, -1, 1)
    if d.chance(0.2):
        d.mistake("lengths")
        return d.of(lens + lk + 1, lens - lk - 1, lens + 0.5, lens > 0, torch.ones(b + 3).long(), "all"), keep
    return d.of(lens, lens.tolist(), torch.from_numpy(lens)), keep


def heads_module(d: Draw) -> MultiHeadAttention:
    """A module, some of whose layers are replaced, pruned, or changed so that they do not fit."""
    kv, group, width = d.of(1, 2, 3), d.of(1, 1, 2, 3), d.of(1, 2, 4, 5)
    kv *= RANKS if RANKS > 1 and d.around.chance(0.85) else 1
    e, heads = d.of(3, 4, 6, 8), kv * group
    rotary = RotaryEmbedding(2 * d.of(*range(1, width // 2 + 1)), d.of(10.0, 10000.0), d.chance(0.5)) if (
        width > 1 and d.chance(0.4)
    ) else None  # fmt: skip
    sizes = {"kdim": d.of(None, None, 5), "vdim": d.of(None, None, 7)}
    given = options.drawn(d.beside, heads, width)
    rotary = options.rotary(d.beside, rotary, width)
    at_once = {"dtype": d.dtype} if d.beside.chance(0.3) else {}
    module = MultiHeadAttention(
        e, heads, bias=d.chance(0.7), head_dim=width, num_kv_heads=kv, rotary=rotary, **sizes, **given, **at_once
    ).to(d.dtype)
    options.filled(d.beside, module)
    options.extreme(d.around, module)
    if kv > 1 and d.chance(0.2):  # pruned by hand
        left = int(d.rng.integers(1, kv))
        for layer, rows in ((module.W_q, left * group), (module.W_k, left), (module.W_v, left)):
            layer.weight = nn.Parameter(layer.weight.detach()[: rows * width])
            layer.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach()[: rows * width])
        module.W_o.weight = nn.Parameter(module.W_o.weight.detach()[:, : left * group * width])
        d.said.append(f"pruned to {left} key heads")
        if d.beside.chance(0.8):
            options.cut(module, left * group)
        elif any(isinstance(f, Tensor) and f.numel() > 1 for f in (module.scale, module.temperature, module.sinks)):
            d.mistake("options of all heads")
        elif module.gate is not None:
            d.mistake("a gate of all heads")
        if module.score_bias is not None:
            d.mistake("a bias of all heads")
    if d.chance(0.12):
        name = d.of("W_q", "W_k", "W_v", "W_o")
        layer, weight = getattr(module, name), getattr(module, name).weight.detach()
        other = torch.float64 if d.dtype != torch.float64 else torch.float32
        change = d.of("rows", "columns", "dtype", "bias", "vector", "layer", "head")
        if change == "dtype":
            layer.to(other)
        elif change == "bias":
            layer.bias = nn.Parameter(d.tensor(len(weight) + d.of(0, 1)))
        elif change == "layer":
            setattr(module, name, nn.Linear(weight.shape[1], len(weight) + d.of(0, width, 1)).to(d.dtype))
        else:
            shape = weight.shape
            new = {"rows": (shape[0] + 1, shape[1]), "columns": (shape[0], shape[1] + 1), "vector": shape[:1],
                   "head": (shape[0] + width, shape[1])}[change]  # fmt: skip
            layer.weight = nn.Parameter(d.tensor(*new))
            if change == "head" and layer.bias is not None:
                layer.bias = nn.Parameter(d.tensor(new[0]))
        d.mistake(f"{name}: {change}")
    d.alone = bool(d.wrong)
    return module.eval()


LAYERS = ("W_q", "W_k", "W_v", "W_o")


def numbers(module: MultiHeadAttention) -> tuple[Any, ...]:
    """What `sequence` needs of a module, but for its options."""
    r = module.rotary
    turns = None if r is None else (r.dim, r.base, r.interleaved, getattr(r, "drawn", None))
    return layers_of(module, LAYERS), module.head_dim, turns


def bias_of(d: Draw, b: int, h: int, lq: int, lk: int, first: int | None) -> tuple[Any, Array | float]:
    kind = d.of("none", "none", "none", "tensor", "alibi")
    if kind == "tensor":
        given = torch.from_numpy(d.rng.standard_normal(d.of((lq, lk), (b, h, lq, lk), (1, h, 1, 1)))).to(d.dtype)
        return given, np.broadcast_to(array(given), (b, h, lq, lk))
    if kind == "alibi" and first is not None:
        power = 2 ** int(np.log2(h))
        places = [*range(1, power + 1), *(n + 0.5 for n in range(h - power))]
        slopes = np.float32(2.0 ** (-8 * np.array(places) / power))  # ALiBi's buffer and its bias are of float32
        far = np.float32(np.abs(np.arange(lk) - np.arange(lq)[:, None] - first))
        return ch.ALiBi(h), np.broadcast_to(-slopes[:, None, None] * far, (b, h, lq, lk)).astype(np.float64)
    return None, np.zeros((b, h, lq, lk))


def check_heads(d: Draw) -> Iterator[str]:
    """One call, of raw or of prepared keys."""
    module = heads_module(d)
    b, lq, lk, batched = d.of(1, 2, 3), d.of(0, 1, 2, 5), d.of(0, 1, 3, 6), d.chance(0.85)
    d.alone |= not (lq and lk)  # PyTorch's layers take no DTensor without numbers
    d.lengths = lq, lk
    read = [
        (layer.in_features if d.wrong else layer.weight.shape[-1]) for layer in (module.W_q, module.W_k, module.W_v)
    ]
    sizes = [b if not d.chance(0.1) else 1, b]
    query, key, value = (
        d.tensor(*((n,) if batched else ()), length, width)
        for n, length, width in zip((sizes[0], b, b), (lq, lk, lk), read, strict=True)
    )
    b = b if batched else 1
    tensors = {"query": query, "key": key, "value": value}
    if d.chance(0.12):
        spoiled(d, tensors)
    h = len(module.W_q.weight) // module.head_dim or 1
    first = d.of(0, lk - lq, None) if lq != lk else d.of(0, None, 1)
    align = first
    first = 0 if first is None and lq == lk else first
    mask, keep = mask_of(d, b, h, lq, lk, first, 4)
    if mask is None and first is not None and lk and d.beside.chance(0.3):
        mask, keep = documents_of(d.beside, b, lq, lk, first)
        keep = np.broadcast_to(keep, (b, h, lq, lk))
    lens, kept = lengths_of(d, b, lq, lk)
    bias, added = bias_of(d, b, h, lq, lk, first)
    if module.score_bias is not None and first is None:
        d.mistake("a bias of positions without an alignment")
    if h != module.num_heads and (isinstance(bias, ch.extend.Bias) or isinstance(mask, ch.MaskFunction)):
        d.mistake("a bias or a rule of all heads")
    d.said.append(f"{module!r:.60} {[tuple(t.shape) for t in (query, key, value)]} {mask=!s:.30} {lens=} {align=}")
    keywords = {"mask": mask, "valid_lens": lens, "bias": bias, "align": align}
    at: list[Any] = [0, 0]
    own: list[Any] = [None, None]
    if (module.rotary is not None and d.beside.chance(0.5)) or d.beside.chance(0.03):
        each = zip((sizes[0], b), (lq, lk), strict=True)
        both = [options.places(d.beside, n if batched else None, k) for n, k in each]
        own, at = [given for given, _ in both], [np.broadcast_to(x, (b, x.shape[1])) for _, x in both]
        if module.rotary is None:
            d.mistake("positions that nothing reads")
    with surrounded(d, d.chance(0.5)):
        run = RUN(d, module)
        if d.chance(0.3):
            prepared = run.prepare(tensors["key"], tensors["value"], positions=own[1])
            got = run(tensors["query"], prepared, positions=own[0], **keywords)
        else:
            got = run(*tensors.values(), positions=own[0], key_positions=own[1], **keywords)
    if d.another:
        return
    extra = options.read(module)
    given = [array(t) if batched else array(t)[None] for t in tensors.values()]
    given = [np.broadcast_to(x, (b, *x.shape[1:])) for x in given]
    shown = keep & kept

    def truth(rounding: Rounding) -> Array:
        rows = []
        for n in range(b):
            first_of, key_first = (x if isinstance(x, int) else x[n] for x in at)
            rows.append(
                sequence(
                    *numbers(module), *(x[n] for x in given), first_of, shown[n], added[n], rounding, key_first, extra,
                    first or 0,
                )
            )  # fmt: skip
        return np.stack(rows) if batched else rows[0]

    yield from found(d, got, truth)


def check_decoding(d: Draw) -> Iterator[str]:
    """Steps with a cache, which is cropped, reordered and copied between them."""
    module = heads_module(d)
    if d.wrong:
        return
    b, (layers, width, rotary) = d.of(1, 2, 3), numbers(module)
    held_window, first = d.of(3, 6), d.of(0, 2)
    kind = d.of("grows", "capacity", "window")
    if kind == "window" and module.score_bias is not None:
        d.mistake("a bias beside a window")
    cache = {
        "grows": KeyValueCache, "capacity": lambda: KeyValueCache(capacity=90),
        "window": lambda: KeyValueCache(window=held_window, first=first),
    }[kind]()  # fmt: skip
    e, k_width, v_width = (layers[name][0].shape[1] for name in LAYERS[:3])
    held: list[list[Array]] = [[np.zeros((0, k_width)), np.zeros((0, v_width)), np.zeros(0)] for _ in range(b)]
    extra, own = options.read(module), module.rotary is not None and d.beside.chance(0.4)
    d.said.append(f"{module!r:.60}")
    run = RUN(d, module)
    eager = getattr(run, "_orig_mod", run)
    for _ in range(d.of(2, 4, 8)):
        size = d.of(1, 1, 2, 9)
        query, key, value = d.tensor(b, size, e), d.tensor(b, size, k_width), d.tensor(b, size, v_width)
        counts = d.rng.integers(0, size + 1, b) if d.chance(0.3) else None
        window = d.of(None, 2, 5)
        mask = d.of(ch.Causal(), None) if window is None else ch.Causal() & ch.SlidingWindow(before=window)
        starts = [len(keys) for keys, *_ in held]
        places, at = options.places(d.beside, b, size) if own else (None, np.array(starts)[:, None] + np.arange(size))
        new = np.full(b, size) if counts is None else counts
        with surrounded(d, d.chance(0.4) and kind == "grows"):
            step = eager if kind == "grows" and counts is not None else run  # it reads new_lens on the host
            got = step(query, key, value, mask, cache=cache, new_lens=counts, positions=places)
        for n in range(b):
            parts = zip(held[n], (array(key)[n], array(value)[n], at[n]), strict=True)
            held[n] = [np.concatenate([old, more[: new[n]]]) for old, more in parts]
        for n in range(b):
            i, j = np.arange(new[n])[:, None] + starts[n], np.arange(len(held[n][0]))
            keep = (j <= i) | (mask is None)
            keep = keep & (i - j <= (window if window is not None else 10**6))
            keep = keep & ((i - j < held_window) | (j < first) | (kind != "window"))
            given = array(query)[n, : new[n]], *held[n][:2], at[n, : new[n]], keep, 0.0
            beside = {"key_first": held[n][2], "extra": extra, "align": starts[n]}
            yield from found(d, got[n, : new[n]], partial(sequence, layers, width, rotary, *given, **beside))
        if cache.lengths != tuple(len(keys) for keys, *_ in held):
            yield f"the cache says {cache.lengths}"
        change = d.of("nothing", "nothing", "crop", "crop each", "reorder", "copy", "another")
        d.said.append(f"{kind} {size=} {counts=} {mask!s:.8} then {change}")
        if kind == "window" and "crop" in change:  # positions that have left are gone
            change = "nothing"
        if change == "crop":
            most = int(d.rng.integers(0, len(cache) + 1))
            cache.crop(most)
            held = [[x[:most] for x in pair] for pair in held]
        elif change == "crop each":
            left = [int(d.rng.integers(0, len(pair[0]) + 1)) for pair in held]
            cache.crop(left)
            held = [[x[:most] for x in pair] for pair, most in zip(held, left, strict=True)]
        elif change == "reorder":
            order = d.rng.integers(0, b, d.of(1, b, 4))
            cache.reorder(torch.from_numpy(order))
            held, b = [held[n] for n in order], len(order)
        elif change == "copy":  # a branch that writes other keys
            branch = d.of(copy.copy, copy.deepcopy)(cache)
            with surrounded(d, False):
                eager(query[:1].expand(b, -1, -1), *(x[:1].expand(b, -1, -1) for x in (key, value)), cache=branch)
        elif change == "another":
            try:
                copy.deepcopy(module)(query, key, value, cache=cache)
                yield "the cache of another module was taken"
            except ch.ClearheadError:
                pass


def check_plain(d: Draw) -> Iterator[str]:
    """AdditiveAttention and DotProductAttention, of inputs with and without heads."""
    additive, depth = d.chance(0.6), d.of(2, 3, 3, 4)
    b, h, lq, lk = d.of(1, 2, 3), d.of(1, 2), d.of(0, 1, 4), d.of(0, 1, 5)
    lead = {2: (), 3: (b,), 4: (b, h)}[depth]
    b, h = (b if depth > 2 else 1), (h if depth == 4 else 1)
    e_q, e_k, e_v = (d.of(1, 3, 6), d.of(2, 5), d.of(1, 4)) if additive else (d.of(1, 4),) * 2 + (3,)
    tensors: dict[str, Any] = {
        "query": d.tensor(*lead, lq, e_q), "key": d.tensor(*lead, lk, e_k), "value": d.tensor(*lead, lk, e_v)
    }  # fmt: skip
    module = (AdditiveAttention(d.of(1, 4, 7)) if additive else DotProductAttention()).to(d.dtype).eval()
    given = [array(t).reshape(b, h, *t.shape[-2:]) for t in tensors.values()]
    if additive:
        module(*(torch.zeros(1, 1, width, dtype=d.dtype) for width in (e_q, e_k, e_v)))
        if d.chance(0.15):
            name, change = d.of("W_q", "W_k"), d.of("rows", "columns", "dtype", "bias")
            layer, (rows, columns) = getattr(module, name), getattr(module, name).weight.shape
            if change == "dtype":
                layer.to(torch.float64 if d.dtype != torch.float64 else torch.float32)
            elif change == "bias":
                layer.bias = nn.Parameter(d.tensor(rows))
            else:
                layer.weight = nn.Parameter(d.tensor(rows + (change == "rows"), columns + (change == "columns")))
            d.mistake(f"{name}: {change}")
    if d.chance(0.12):
        spoiled(d, tensors)
    mask, keep = mask_of(d, b, h, lq, lk, lk - lq, depth)
    if isinstance(mask, Tensor) and mask.ndim == 3 and depth != 3:
        mask, keep = None, np.ones_like(keep)
    lens, kept = lengths_of(d, b, lq, lk)
    d.said.append(f"{module} {[tuple(x.shape) for x in given]} {depth=} {mask=!s:.30} {lens=}")
    with surrounded(d, d.chance(0.5)):
        run = RUN(d, module)
        if additive and d.chance(0.3):
            prepared = run.prepare(tensors["key"], tensors["value"])
            got = run(tensors["query"], prepared, valid_lens=lens, mask=mask, align="lower_right")
        else:
            got = run(*tensors.values(), valid_lens=lens, mask=mask, align="lower_right")

    def truth(rounding: Rounding) -> Array:
        q, k, v = given
        if additive:
            q, k = (rounding.linear(x, array(layer.weight), None) for x, layer in ((q, module.W_q), (k, module.W_k)))
            pairs = q[..., :, None, :] + k[..., None, :, :]
            hidden = np.tanh(rounding.moved(pairs, np.abs(pairs)))
            scores = rounding.product(rounding.moved(hidden, np.abs(hidden)), array(module.w_v)[:, None])[..., 0]
        else:
            scores = rounding.product(q, np.swapaxes(k, -1, -2)) / q.shape[-1] ** 0.5
        weights = softmax(rounding.moved(scores, np.abs(scores)), keep & kept)
        return rounding.product(rounding.moved(weights, weights), v).reshape(*lead, lq, e_v)

    yield from found(d, got, truth)


def check_torch(d: Draw) -> Iterator[str]:
    """TorchMultiheadAttention: torch's call, and torch's meaning of masks."""
    heads, width, first = d.of(1, 2, 3), d.of(1, 2, 4), d.chance(0.5)
    e, b, lq, lk = heads * width, d.of(1, 2, 3), d.of(1, 2, 5), d.of(1, 3, 6)
    sizes = {"kdim": d.of(None, 5), "vdim": d.of(None, 3)}
    module = TorchMultiheadAttention(e, heads, bias=d.chance(0.7), batch_first=first, **sizes).to(d.dtype).eval()
    if heads > 1 and d.chance(0.2) and module.in_proj_weight is not None:
        kept = [*range(width)]
        rows = [part * e + n for part in range(3) for n in kept]
        module.in_proj_weight = nn.Parameter(module.in_proj_weight.detach()[rows])
        if module.in_proj_bias is not None:
            module.in_proj_bias = nn.Parameter(module.in_proj_bias.detach()[rows])
        module.out_proj.weight = nn.Parameter(module.out_proj.weight.detach()[:, kept])
        heads = 1
    x = {"query": d.tensor(b, lq, e), "key": d.tensor(b, lk, module.kdim), "value": d.tensor(b, lk, module.vdim)}
    given = {name: array(t) for name, t in x.items()}
    tensors = {name: t if first else t.transpose(0, 1) for name, t in x.items()}
    if d.chance(0.12):
        spoiled(d, tensors)
    keep, added, masks = np.ones((b, heads, lq, lk), bool), np.zeros((b, heads, lq, lk)), {}
    for name, shape in (("attn_mask", d.of((lq, lk), (b * heads, lq, lk))), ("key_padding_mask", (b, lk))):
        if d.chance(0.5):
            continue
        hidden, number = d.rng.random(shape) < 0.3, d.rng.standard_normal(shape)
        floats = torch.from_numpy(number).to(d.dtype)
        as_four = lambda m, name=name, shape=shape: (
            m[:, None, None] if name != "attn_mask" else m.reshape(b, heads, lq, lk) if len(shape) == 3 else m
        )
        if d.chance(0.5):
            masks[name], keep = torch.from_numpy(hidden), keep & ~as_four(hidden)
        else:
            masks[name], added = floats, added + as_four(array(floats))
        if d.chance(0.08):
            masks[name] = d.of(masks[name][..., :-1], masks[name].long(), masks[name].tolist())
            d.mistake(name)
    d.said.append(f"{module} {[tuple(t.shape) for t in given.values()]} {list(masks)} {heads=}")
    with surrounded(d, d.chance(0.5)):
        got, weights = RUN(d, module)(*tensors.values(), need_weights=d.chance(0.5), **masks)
    if d.another:
        return
    got = got if first else got.transpose(0, 1)
    parts = zip(LAYERS, [*module._projections(), ("", module.out_proj.weight, module.out_proj.bias)], strict=True)
    layers = {name: (array(w), None if c is None else array(c)) for name, (_, w, c) in parts}

    def truth(rounding: Rounding) -> Array:
        rows = zip(*given.values(), keep, added, strict=True)
        return np.stack([sequence(layers, width, None, q, k, v, 0, m, a, rounding) for q, k, v, m, a in rows])

    yield from found(d, got, truth)
    if weights is not None and tuple(weights.shape) != (b, lq, lk):
        yield f"weights of shape {tuple(weights.shape)}"


def found(d: Draw, got: Tensor, truth: Any) -> Iterator[str]:
    """Where a result, which was given without an error, is not right."""
    if d.another:
        return
    try:
        cast = d.autocast and d.dtype != torch.float64  # which autocast leaves alone
        kind = torch.finfo(torch.bfloat16 if cast else got.dtype)
        said = apart(array(got), truth, kind.eps, kind.tiny)
    except (ValueError, IndexError, TypeError, ZeroDivisionError) as error:
        said = f"it was computed, and has no meaning: {error}"
    if said:
        yield said


CHECKS = (check_heads, check_heads, check_decoding, check_plain, check_torch)


def tried(number: int, checks: tuple[Any, ...] = CHECKS) -> tuple[list[str], str]:
    """What fails in one problem, a result beyond its budget or an error where all is right; and how it ended."""
    d = Draw(number)
    kind = d.of(*checks)
    named = lambda: f"{number}: {kind.__name__} {d.dtype}{' autocast' * d.autocast} {d.said}"
    try:
        failures = [*kind(d), *d.beyond]
        return [f"{named()} {d.wrong}\n    {failure}" for failure in failures], "right"
    except RuntimeError as error:  # a ClearheadError is one, and PyTorch's own error of a layer that does not fit
        if not isinstance(error, ch.ClearheadError) and not any(one.startswith(BY_TORCH) for one in d.wrong):
            raise
        return [] if d.wrong else [f"{named()}\n    refused: {error}"], f"refused: {', '.join(d.wrong)}"


def check(number: int) -> list[str]:
    """What fails in one problem."""
    return tried(number)[0]
