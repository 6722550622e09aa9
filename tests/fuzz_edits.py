"""Random edits of random small models, beside the whole model computed eagerly with each edit applied by hand.

    python tests/fuzz_edits.py 10000

runs ten thousand; `--from` and `--only` are those of `fuzz.py`. A number names a model (Llama with grouped heads, BERT,
GPT-2, a module that calls SDPA itself), its inputs, and one to three edits: clearhead's, with sources from another run
or drawn; and some of one's own by `before`, `weights`, `after`, `removed` and `factor`. Some give back, or take, what
does not fit. Then: the last output is that of the model by hand; what no edit names is the backend's to the bit, where
no edited layer stands before it; a wrong edit raises one ClearheadError and changes nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from fuzzing import numbered
from fuzzing.numbered import Choices
from torch import Tensor, nn

import clearhead as ch
from clearhead.base.errors import ClearheadError
from clearhead.biases.base import Added

os.environ["HF_HUB_OFFLINE"] = "1"
LENGTH = 10
NO_KEY = -torch.inf


class Draw(Choices):
    def some(self, count: int) -> list[int]:
        """Some of the first numbers, at least one."""
        return sorted(self.rng.choice(count, self.rng.integers(1, count + 1), replace=False).tolist())

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.torch)


# Models ---------------------------------------------------------------------------------------------------------------


@dataclass
class Model:
    module: nn.Module
    inputs: dict[str, Tensor]
    layers: int
    heads: int
    joined: list[nn.Module]  # of each layer, what the joined heads are passed to
    words: Tensor | None = None
    width: int = 8  # of a head
    key_heads: tuple[int, ...] = (4,)  # how many a source may have: those of attention, of which each serves a group

    def run(self) -> Tensor:
        found = self.module(**self.inputs)
        output: Tensor = found if isinstance(found, Tensor) else found.last_hidden_state
        return output if self.words is None else output[self.words]


class OwnLayer(nn.Module):
    """Attention of a model of one's own, by SDPA, or by what stands in its place."""

    instead: Callable[..., Tensor] | None = None

    def __init__(self, heads: int, key_heads: int, width: int, kind: str) -> None:
        super().__init__()
        self.heads, self.key_heads, self.width, self.kind = heads, key_heads, width, kind
        self.q, self.k, self.v = (nn.Linear(16, n * width) for n in (heads, key_heads, key_heads))
        self.o = nn.Linear(heads * width, 16)
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if OwnLayer.instead is not None:
            mask = {"causal": self.mask.tril(), "mask": self.mask, "none": None}[self.kind]
            out = OwnLayer.instead(self, q, k, v, mask, self.width**-0.5)
        else:
            options = {"causal": {"is_causal": True}, "mask": {"attn_mask": self.mask}, "none": {}}[self.kind]
            out = F.scaled_dot_product_attention(q, k, v, **options, enable_gqa=self.heads != self.key_heads)  # type: ignore[arg-type]
        return x + self.o(out.transpose(1, 2).flatten(2))


def model(draw: Draw) -> Model:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(int(draw.rng.integers(2**31)))
    kind = draw.one("Llama", "Bert", "GPT2", "own", "own")
    if kind == "own":
        heads, key_heads = draw.one((4, 2), (4, 4), (3, 1), (2, 1), (1, 1))
        width = draw.one(4, 5)
        layers = [OwnLayer(heads, key_heads, width, draw.one("causal", "mask", "none")) for _ in range(2)]
        made: nn.Module = nn.Sequential(*layers)
        given = {"input": draw.normal(2, LENGTH, 16)}
        served = (1, key_heads, heads)
        return Model(_sharp(made), given, 2, heads, [layer.o for layer in layers], width=width, key_heads=served)
    ids, small = torch.randint(3, 50, (2, LENGTH), generator=draw.torch), {"vocab_size": 50, "hidden_size": 32}
    small |= {"intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}
    words, key_heads = None, (4,)
    inputs = {"input_ids": ids}
    if kind == "Llama":
        served = draw.one(1, 2, 4)
        made = transformers.LlamaModel(transformers.LlamaConfig(**small, num_key_value_heads=served))
        key_heads = (1, served, 4)
        joined = [layer.self_attn.o_proj for layer in made.layers]
    elif kind == "GPT2":
        made = transformers.GPT2Model(
            transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=32)
        )
        joined = [layer.attn.c_proj for layer in made.h]
    else:
        made = transformers.BertModel(transformers.BertConfig(**small), add_pooling_layer=False)
        joined = [layer.attention.output.dense for layer in made.encoder.layer]
        inputs["attention_mask"] = torch.tensor([[1] * LENGTH, [1] * (LENGTH - 3) + [0] * 3])
        words = inputs["attention_mask"].bool()
    return Model(_sharp(made), inputs, 2, 4, joined, words, key_heads=key_heads)


def _sharp(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for weight in module.parameters():
            if weight.ndim > 1:
                weight *= 3  # else every row is nearly uniform, and a wrong one would not be seen
    return module.eval()


# By hand --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """A layer's attention before its softmax; heads are repeated. And what is done after it."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    mask: Tensor | None  # bool: True may attend; or added
    layer: int = 0
    bias: Tensor | float = 0.0
    cut: tuple[int, ...] = ()
    mapped: tuple[Callable[[Tensor], Tensor], ...] = ()  # what is done to the weights, in this order
    steps: tuple[Callable[[Tensor], Tensor], ...] = ()  # what is done to the output, in this order

    def weights(self) -> Tensor:
        scores = self.q @ self.k.mT * self.scale + self.bias
        if self.mask is not None and self.mask.dtype == torch.bool:
            scores = scores.masked_fill(~self.mask, NO_KEY)
        elif self.mask is not None:  # where a row is left with no key, none that is hidden by a finite number is seen
            scores = scores + self.mask.masked_fill(self.mask < -1e30, NO_KEY)
        scores[..., list(self.cut)] = NO_KEY
        weights = scores.softmax(-1).nan_to_num(0.0)
        for step in self.mapped:
            weights = step(weights).masked_fill(scores == NO_KEY, 0.0)
        return weights

    def output(self) -> Tensor:
        output = self.weights() @ self.v
        for step in self.steps:
            output = step(output)
        return output

    def map(self, step: Callable[[Tensor], Tensor]) -> State:
        return replace(self, mapped=(*self.mapped, step))

    def without(self, keys: list[int]) -> State:
        gone = torch.from_numpy(np.isin(np.arange(self.k.shape[2]), keys))
        return self.map(lambda weights: weights.masked_fill(gone, 0.0))

    def then(self, step: Callable[[Tensor], Tensor]) -> State:
        return replace(self, steps=(*self.steps, step))

    def times(self, number: float) -> State:
        return self.then(lambda output: output * number)


@dataclass
class Chosen:
    """An edit, its change by hand, and where it is at work."""

    edit: Any  # a source that does not fit may be refused at once: then a function that makes the edit
    by_hand: Callable[[State], State]
    layer: int | None
    heads: list[int]
    queries: list[int]
    wrong: str = ""

    def made(self) -> ch.edits.Edit:
        return self.edit if isinstance(self.edit, ch.edits.Edit) else self.edit()


def attended(edits: list[Chosen], layer: int, state: State) -> Tensor:
    """A layer's output: for each head and query with the edits that name it."""
    output = state.output()
    if not edits:
        return output
    where = torch.zeros(len(edits), *output.shape[1:3], dtype=torch.bool)
    for i, one in enumerate(edits):
        if one.layer in (None, layer):
            where[i, torch.tensor(one.heads)[:, None], torch.tensor(one.queries)] = True
    for some in where.flatten(1).unique(dim=1).T:
        changed = state
        for one in (edit for edit, there in zip(edits, some, strict=True) if there):
            changed = one.by_hand(changed)
        if some.any():
            at = (where == some[:, None, None]).all(0)
            output = torch.where(at[None, :, :, None], changed.output(), output)
    return output


@contextlib.contextmanager
def by_hand(made: Model, edits: list[Chosen], kept: dict[int, State] | None = None) -> Iterator[None]:
    """`kept`: takes the state of each layer."""
    numbers: dict[int, int] = {}

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        layer = numbers.setdefault(id(module), len(numbers))
        groups = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
        state = State(q, k, v, scale, mask, layer)
        if kept is not None:
            kept[layer] = state
        return attended(edits, layer, state)

    def eager(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: Any = None, **_: Any
    ) -> Any:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return attend(module, query, key, value, mask, scale).transpose(1, 2).contiguous(), None

    if not hasattr(made.module, "config"):
        OwnLayer.instead = attend
        try:
            yield
        finally:
            OwnLayer.instead = None
        return
    from transformers.modeling_utils import AttentionInterface

    before, original = made.module.config._attn_implementation, AttentionInterface.get_interface
    made.module.set_attn_implementation("eager")
    AttentionInterface.get_interface = lambda *_: eager
    try:
        yield
    finally:
        AttentionInterface.get_interface = original
        made.module.set_attn_implementation(before)


# Edits ----------------------------------------------------------------------------------------------------------------


class Own(ch.edits.Edit):
    """An edit by functions."""

    def __init__(
        self, change: Any = None, removed: Any = None, factor: float = 1.0, last: Any = None, **at: Any
    ) -> None:
        super().__init__(**at)
        self.change, self.gone, self.factor, self.last = change, removed, factor, last

    def before(self, problem: Any, spot: Any) -> Any:
        return problem if self.change is None else self.change(problem, spot)

    def after(self, output: Any, spot: Any) -> Any:
        return output if self.last is None else self.last(output)

    def removed(self, spot: Any) -> Any:
        return None if self.gone is None else np.isin(np.arange(len(spot.keys)), self.gone)


class Nearer(ch.edits.Edit):
    """One that changes weights by the distance of query and key."""

    def weights(self, weights: Tensor, spot: Any) -> Tensor:
        return weights * _nearness(torch.tensor(spot.rows), torch.tensor(spot.keys))


def _nearness(queries: Tensor, keys: Tensor) -> Tensor:
    return 1.0 / (1 + (queries[:, None] - keys).abs())


def _scores(problem: Any, **parts: Any) -> Any:
    return problem._replace(scores=problem.scores._replace(**parts))


WRONG: dict[str, Callable[[Any, Any], Any]] = {
    "fewer values": lambda p, s: p._replace(value=p.value[:, :, :-1]),
    "fewer keys": lambda p, s: _scores(p, key=p.key[:, :, :-1]),
    "fewer of both": lambda p, s: _scores(p._replace(value=p.value[:, :, :3]), key=p.key[:, :, :3]),
    "fewer queries": lambda p, s: _scores(p, query=p.query[:, :, 1:]),
    "another batch": lambda p, s: p._replace(value=p.value.repeat(2, 1, 1, 1)),
    "one sequence": lambda p, s: p._replace(value=p.value[:1]),
    "more heads": lambda p, s: _scores(p, key=p.key.repeat(1, p.sizes.heads + 1, 1, 1)),
    "a wider value": lambda p, s: p._replace(value=p.value.repeat(1, 1, 1, 2)),
    "a wider key": lambda p, s: _scores(p, key=p.key.repeat(1, 1, 1, 2)),
    "float64": lambda p, s: p._replace(value=p.value.double()),
    "meta": lambda p, s: p._replace(value=p.value.to("meta")),
    "sparse": lambda p, s: p._replace(value=p.value.to_sparse()),
    "no value": lambda p, s: p._replace(value=None),
    "nothing": lambda p, s: None,
    "the value": lambda p, s: p.value,
    "a bias too small": lambda p, s: p._replace(bias=Added(dense=torch.zeros(1, 1, 3, 3))),
    "a bias too long": lambda p, s: p._replace(bias=Added(relative=torch.zeros(1, 1, 99))),
    "a mask too large": lambda p, s: p._replace(visible=_longer(s, p)),
    "sinks": lambda p, s: p._replace(sinks=torch.zeros(p.sizes.heads + 1)),
    "a tensor as scale": lambda p, s: _scores(p, scale=torch.ones(())),
    "more keys said": lambda p, s: p._replace(sizes=p.sizes._replace(keys=p.sizes.keys + 5)),
    "a freed value": lambda p, s: p._replace(value=freed(p.value)),
    "a freed key": lambda p, s: _scores(p, key=freed(p.key)),
    "whole numbers": lambda p, s: p._replace(value=p.value.long()),
    "complex numbers": lambda p, s: _scores(p, query=p.query.to(torch.complex64)),
    "an array": lambda p, s: p._replace(value=p.value.numpy()),
    "a wider query": lambda p, s: _scores(p, query=p.query.repeat(1, 1, 1, 2)),
}
WRONG_AFTER: dict[str, Callable[[Tensor], Any]] = {
    "after: more queries": lambda o: o.repeat(1, 1, 2, 1),
    "after: no queries": lambda o: o[:, :, :0],
    "after: more heads": lambda o: o.repeat(1, 2, 1, 1),
    "after: one sequence": lambda o: o[:1],
    "after: wider": lambda o: o.repeat(1, 1, 1, 3),
    "after: narrower": lambda o: o[..., :-1],
    "after: flat": lambda o: o.flatten(),
    "after: float64": lambda o: o.double(),
    "after: whole numbers": lambda o: o.long(),
    "after: meta": lambda o: o.to("meta"),
    "after: sparse": lambda o: o.to_sparse(),
    "after: nothing": lambda o: None,
    "after: an array": lambda o: o.numpy(),
    "after: a number": lambda o: 1.0,
    "after: freed": lambda o: freed(o),
}
WRONG_SOURCE: dict[str, Callable[[Tensor], Any]] = {
    "source: three sequences": lambda t: t[:1].repeat(3, 1, 1, 1),
    "source: seven heads": lambda t: t[:, :1].repeat(1, 7, 1, 1),  # which divide no number of heads
    "source: wider": lambda t: t.repeat(1, 1, 1, 2),
    "source: shorter": lambda t: t[:, :, :-1],
    "source: longer": lambda t: t.repeat(1, 1, 2, 1),
    "source: float64": lambda t: t.double(),
    "source: whole numbers": lambda t: t.long(),
    "source: meta": lambda t: t.to("meta"),
    "source: sparse": lambda t: t.to_sparse(),
    "source: flat": lambda t: t[0],
    "source: freed": lambda t: freed(t),
    "source: a list": lambda t: t.tolist(),
    "source: nothing": lambda t: None,
    "source: no heads": lambda t: t[:, :0],
    "source: no sequences": lambda t: t[:0],
}
# What a message begins with, by what begins the name of the fault.
SAID = {"after": "Own.after gave", "source": "Patch: ", "": "Own.before gave"}


def freed(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def _longer(spot: Any, problem: Any) -> Any:
    from clearhead.problem.visible import resolve

    sizes = problem.sizes._replace(queries=LENGTH + 3, leading=None)
    return resolve(ch.DenseMask(torch.ones(LENGTH + 3, problem.sizes.keys, dtype=torch.bool)), sizes, False)


def edit(draw: Draw, made: Model, wrong: bool) -> Chosen:
    layer, heads, queries = draw.one(None, 0, 1), draw.some(made.heads), draw.some(LENGTH)
    at: dict[str, Any] = {"layers": layer, "heads": heads, "queries": queries}
    if len(heads) == made.heads and draw.one(True, False):
        at["heads"] = None
    every = draw.one(1, made.heads)
    bias, keep = draw.normal(1, every, LENGTH, LENGTH), draw.normal(1, every, LENGTH, LENGTH) > -0.4
    keep |= torch.eye(LENGTH, dtype=torch.bool)
    keys, number = draw.some(LENGTH), float(np.round(draw.rng.normal(), 2))
    if wrong:
        name = draw.one(*WRONG, *WRONG_AFTER, *WRONG_SOURCE)
        if name in WRONG_SOURCE:
            source, part = WRONG_SOURCE[name], draw.one(*PARTS)
            given = lambda: ch.edits.Patch(source(drawn_source(draw, made, part)[0]), part=part, **at)
            return Chosen(given, lambda s: s, layer, heads, queries, name)
        own = Own(WRONG[name], **at) if name in WRONG else Own(last=WRONG_AFTER[name], **at)
        return Chosen(own, lambda s: s, layer, heads, queries, name)
    elsewhere = draw.one(None, None, patch, of_another_run)
    if elsewhere is not None:
        return Chosen(*elsewhere(draw, made, at), layer, heads, queries)
    rolled = lambda t: t.roll(1, 2)
    choices: list[tuple[ch.edits.Edit, Callable[[State], State]]] = [
        (ch.edits.Knockout(**at, keys=keys), lambda s: replace(s, cut=(*s.cut, *keys))),
        (ch.edits.Knockout(**at, keys=keys, after=True), lambda s: s.without(keys)),
        (ch.edits.MapWeights(lambda w: w.sqrt() - number, **at), lambda s: s.map(lambda w: w.sqrt() - number)),
        (Nearer(**at), lambda s: s.map(lambda w: w * _nearness(*map(torch.arange, w.shape[2:])))),
        (ch.edits.ScaleHeads(**at, factor=number), lambda s: s.times(number)),
        (ch.edits.Ablate(**at), lambda s: s.then(torch.zeros_like)),
        (Own(last=lambda o: o.tanh() - o.flip(0), **at), lambda s: s.then(lambda o: o.tanh() - o.flip(0))),
        (ch.edits.AddBias(bias, **at), lambda s: replace(s, bias=s.bias + bias)),
        (ch.edits.AddBias(ch.ALiBi(made.heads), **at), lambda s: replace(s, bias=s.bias + _alibi(made.heads))),
        (ch.edits.ForceMask(keep, **at), lambda s: replace(s, mask=keep, cut=())),
        (Own(lambda p, s: _scores(p, key=-p.key), **at), lambda s: replace(s, k=-s.k)),
        (Own(lambda p, s: _scores(p, scale=2 * p.scores.scale), **at), lambda s: replace(s, scale=2 * s.scale)),
        (Own(lambda p, s: p._replace(value=p.value * number), **at), lambda s: replace(s, v=s.v * number)),
        (Own(lambda p, s: p._replace(value=rolled(p.value)), **at), lambda s: replace(s, v=rolled(s.v))),
        (Own(lambda p, s: _scores(p, query=p.query.flip(0)), **at), lambda s: replace(s, q=s.q.flip(0))),
        (
            Own(lambda p, s: p._replace(value=p.value.mean(2, keepdim=True).expand_as(p.value)), **at),
            lambda s: replace(s, v=s.v.mean(2, keepdim=True).expand_as(s.v)),
        ),
        (
            Own(lambda p, s: p._replace(visible=s.mask(ch.DenseMask(keep), p.sizes)), **at),
            lambda s: replace(s, mask=keep, cut=()),
        ),
        (Own(lambda p, s: p._replace(bias=_plus(p, Added(dense=s.tensor(bias, "bias")))), **at),
         lambda s: replace(s, bias=s.bias + bias)),
        (Own(lambda p, s: p._replace(bias=_plus(p, s.bias(ch.ALiBi(made.heads), p.sizes))), **at),
         lambda s: replace(s, bias=s.bias + _alibi(made.heads))),
        (Own(lambda p, s: p._replace(visible=None), **at), lambda s: replace(s, mask=None, cut=())),
        (Own(lambda p, s: p, keys, number, **at),
         lambda s: s.without(keys).times(number)),
    ]  # fmt: skip
    one, change = draw.one(*choices)
    return Chosen(one, change, layer, heads, queries)


PARTS = ("query", "key", "value", "output")
FIELDS = {"query": "q", "key": "k", "value": "v"}
By = Callable[[State], State]


def drawn_source(draw: Draw, made: Model, part: str) -> tuple[Tensor, Tensor]:
    """A tensor for a patch of a part, and the same for every query head."""
    key_heads = draw.one(*made.key_heads) if part in ("key", "value") else made.heads
    tensor = draw.normal(draw.one(1, 2), key_heads, LENGTH, made.width)
    return tensor, tensor.repeat_interleave(made.heads // key_heads, 1)


def put(part: str, source: Callable[[Any], Tensor], places: list[int]) -> By:
    """These positions of a part are the source's. `source`: is given the state."""

    def there(state: State) -> State:
        def new(tensor: Tensor) -> Tensor:
            found = tensor.clone()
            found[:, :, places] = source(state)[:, :, places]
            return found

        if part == "output":
            return state.then(new)
        return replace(state, **{FIELDS[part]: new(getattr(state, FIELDS[part]))})

    return there


def patch(draw: Draw, made: Model, at: dict[str, Any]) -> tuple[ch.edits.Edit, By]:
    """A patch or a freeze to tensors."""
    if draw.one(True, False, False):
        weights = draw.normal(1, draw.one(1, made.heads), LENGTH, LENGTH).mul(2).softmax(-1)
        kind = draw.one(ch.edits.Freeze, lambda source, **at: ch.edits.Patch(source, part="weights", **at))
        return kind(weights, **at), lambda s: replace(s, scale=0.0, mask=None, cut=(), bias=weights.log())
    part, keys = draw.one(*PARTS), draw.some(LENGTH)
    source, whole = drawn_source(draw, made, part)
    if part in ("key", "value"):
        return ch.edits.Patch(source, part=part, keys=keys, **at), put(part, lambda s: whole, keys)
    return ch.edits.Patch(source, part=part, **at), put(part, lambda s: whole, list(range(LENGTH)))


def of_another_run(draw: Draw, made: Model, at: dict[str, Any]) -> tuple[ch.edits.Edit, By]:
    """An edit whose source is a recording of the model on its inputs the other way round."""
    here = made.inputs
    made.inputs = {name: one.flip(1) if one.shape[1] == LENGTH else one for name, one in here.items()}
    kept: dict[int, State] = {}
    with torch.no_grad():
        with ch.watch(made.module, values=True) as seen:
            made.run()
        with by_hand(made, [], kept):
            made.run()
    made.inputs = here
    states = list(kept.values())

    def of(name: str) -> Callable[[State], Tensor]:
        return lambda state: getattr(states[state.layer], name)

    kind, keys = draw.one(*PARTS, "weights", "mean", "resample"), draw.some(LENGTH)
    if kind == "weights":
        frozen = lambda s: (lambda o: replace(s, q=o.q, k=o.k, scale=o.scale, mask=o.mask, bias=o.bias, cut=()))(
            states[s.layer]
        )
        return ch.edits.Freeze(seen, **at), frozen
    words = torch.ones(2, LENGTH) if made.words is None else made.inputs["attention_mask"].flip(1).float()
    if kind == "mean":

        def mean(s: State) -> State:
            found = (states[s.layer].output() * words[:, None, :, None]).sum((0, 2)) / words.sum()
            return s.then(lambda o: found[None, :, None].expand_as(o))

        return ch.edits.Ablate(kind="mean", over=seen, **at), mean
    if kind == "resample":  # of two sequences each has the other one's
        other = lambda s: s.then(lambda o: states[s.layer].output().flip(0))
        return ch.edits.Ablate(kind="resample", over=seen, **at), other
    if kind == "output":
        return ch.edits.Patch(seen, part="output", **at), lambda s: s.then(lambda o: states[s.layer].output())
    where = {"keys": keys} if kind in ("key", "value") else {}
    return (
        ch.edits.Patch(seen, part=kind, **where, **at),
        put(kind, of(FIELDS[kind]), keys if where else list(range(LENGTH))),
    )


def _plus(problem: Any, added: Added) -> Added:
    found: Added = added if problem.bias is None else problem.bias.plus(added)
    return found


def _alibi(heads: int) -> Tensor:
    slopes = torch.tensor(list(_slopes(heads)))
    apart = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs()
    return -slopes.view(1, -1, 1, 1) * apart


def _slopes(heads: int) -> list[float]:
    """Press et al. 2022: a geometric sequence; between powers of two, those of the next one, every second."""
    if heads & (heads - 1) == 0:
        return [2 ** (-8 * (i + 1) / heads) for i in range(heads)]
    lower = 2 ** (heads.bit_length() - 1)
    return _slopes(lower) + _slopes(2 * lower)[::2][: heads - lower]


# One number -----------------------------------------------------------------------------------------------------------


def drawn(number: int) -> tuple[Model, list[Chosen]]:
    draw = Draw(number)
    made = model(draw)
    count = draw.one(1, 1, 2, 3)
    spoilt = int(draw.rng.integers(count)) if draw.rng.random() < 0.3 else None
    return made, [edit(draw, made, i == spoilt) for i in range(count)]


def failures_of(number: int) -> Iterator[str]:
    """What is wrong with one of them."""
    made, edits = drawn(number)
    said = f"{number}: {type(made.module).__name__}, {[one.wrong or repr(one.edit)[:70] for one in edits]}"
    given: dict[str, list[Tensor]] = {}

    def run(into: str) -> Tensor:
        kept = given.setdefault(into, [])
        hooks = [m.register_forward_pre_hook(lambda _, args: kept.append(args[0].clone())) for m in made.joined]
        try:
            return made.run()
        finally:
            for hook in hooks:
                hook.remove()

    try:
        with torch.no_grad():
            plain = run("plain")
            wrong = next((one.wrong for one in edits if one.wrong), None)
            try:
                with ch.edit(made.module, *(one.made() for one in edits)):
                    got = run("edited")
            except ClearheadError as error:
                if wrong is None:
                    yield f"{said}: refused: {error}"
                elif SAID.get(wrong.partition(":")[0], SAID[""]) not in str(error):
                    yield f"{said}: {error}"
                elif not torch.equal(made.run(), plain):
                    yield f"{said}: an edit that was refused has changed the model"
                return
            if wrong is not None:
                yield f"{said}: taken"
                return
            with by_hand(made, edits):
                wanted = made.run()
            if not torch.equal(made.run(), plain):
                yield f"{said}: the model was changed"
        if not torch.allclose(got, wanted, rtol=2e-4, atol=2e-4 * float(wanted.abs().max().clamp(min=1.0))):
            yield f"{said}: off by {float((got - wanted).abs().max()):.3g} of {float(wanted.abs().max()):.3g}"
        first = 0 if any(one.layer in (None, 0) for one in edits) else 1
        for layer in range(first + 1):
            there = torch.zeros(made.heads, LENGTH, dtype=torch.bool)
            for one in edits:
                if one.layer in (None, layer):
                    there[torch.tensor(one.heads)[:, None], torch.tensor(one.queries)] = True
            before, after = (
                given[n][layer].unflatten(-1, (made.heads, -1)).transpose(1, 2) for n in ("plain", "edited")
            )
            if not torch.equal(before[:, ~there], after[:, ~there]):
                yield f"{said}: what no edit names has changed in layer {layer}"
    except Exception as error:
        yield f"{said}: {type(error).__name__}: {str(error).splitlines()[:1]}"


def main() -> int:
    warnings.simplefilter("ignore")
    return numbered.main(failures_of, "edited models", __doc__)


if __name__ == "__main__":
    sys.exit(main())
