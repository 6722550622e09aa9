"""Every kind of edit on sixteen architectures, beside a model whose attention is by hand, in float64."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import PARTS, AllInFloat64, Attention, by_hand
from small_models import MODELS, OWN_EAGER, inputs_of, pair
from torch import Tensor

import clearhead as ch

ALL: dict[str, Any] = MODELS | OWN_EAGER
for moe in ("DeepseekV3", "GptOss"):
    ALL[moe] = {**ALL[moe], "experts_implementation": "eager"}  # the other one multiplies no float64
CLOSE = 1e-10


@dataclass
class Run:
    """A model, the calls of a run on other inputs, by hand and recorded, and its own inputs."""

    model: Any
    inputs: dict[str, Tensor]
    there: list[Attention]
    seen: Any

    def output(self) -> Tensor:
        found: Tensor = self.model(**self.inputs).last_hidden_state
        return found


def double(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: one.double() if one.is_floating_point() else one for name, one in inputs.items()}


@functools.cache
def run_of(name: str) -> Run:
    model = pair(name, ALL[name])[0].double()
    if name == "GptOss":
        for part, weight in model.named_parameters():
            if "sinks" in part:
                torch.nn.init.normal_(weight)
    here = double(inputs_of(name))
    other = {key: one.flip(0).roll(1, -1) for key, one in here.items()}
    with torch.no_grad(), AllInFloat64():
        with by_hand(model) as there:
            model(**other)
        with ch.watch(model, values=True) as seen:
            model(**other)
    return Run(model, here, there, seen)


class Own(ch.edits.Edit):
    """An edit by functions."""

    def __init__(self, before: Any = None, after: Any = None, removed: Any = None, factor: float = 1.0, **at: Any):
        super().__init__(**at)
        self.first, self.last, self.gone, self.factor = before, after, removed, factor

    def before(self, problem: Any, spot: Any) -> Any:
        return problem if self.first is None else self.first(problem)

    def after(self, output: Tensor, spot: Any) -> Tensor:
        return output if self.last is None else self.last(output)

    def removed(self, spot: Any) -> Any:
        return None if self.gone is None else np.isin(np.arange(len(spot.keys)), self.gone)


def squared(weights: Tensor) -> Tensor:
    """The squares over their sum, mixed with equal weights for all keys, which a mask has to take away again."""
    square = weights**2
    return square / square.sum(-1, keepdim=True).clamp_min(1e-30) + 0.5 / weights.shape[-1]


def _scores(problem: Any, **parts: Any) -> Any:
    return problem._replace(scores=problem.scores._replace(**parts))


def with_(own: Attention, **parts: Callable[[Tensor], Tensor]) -> Attention:
    return replace(own, given={**own.given, **parts}, parts={})


def put(places: list[int], tensor: Tensor) -> Callable[[Tensor], Tensor]:
    """The same with these positions of another tensor."""

    def new(own: Tensor) -> Tensor:
        found = own.clone()
        found[:, :, places] = tensor[:, :, places]
        return found

    return new


class Drawn:
    """An edit of a call, and what it does by hand."""

    def __init__(self, run: Run, kind: str, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        generator = torch.Generator().manual_seed(seed)
        number = int(self.rng.integers(len(run.there)))
        there, recorded = run.there[number], run.seen.calls[number]
        _, heads, queries, keys = recorded.shape
        some, rows, columns = self.some(heads), self.some(queries), self.some(keys)
        self.number, self.heads, self.rows = number, some, rows
        at: dict[str, Any] = {"layers": recorded.layer.column, "heads": some, "queries": rows}
        bias = torch.randn(1, 1, queries, keys, generator=generator, dtype=torch.float64)
        keep = torch.rand(queries, keys, generator=generator) < 0.6
        gone = torch.zeros(keys, dtype=torch.bool)
        gone[columns] = True
        factor = float(self.rng.normal())
        pairs = lambda own: torch.ones(1, 1, queries, keys, dtype=torch.bool) if own.keep is None else own.keep
        cut = lambda own: replace(own, keep=pairs(own) & ~gone, parts={})
        zeroed = lambda w: w.masked_fill(gone, 0.0)
        parts = there.parts
        means = parts["output"].mean((0, 2))[None, :, None]
        resampled = parts["output"].flip(0)  # of two sequences the other one
        edits = ch.edits
        found: dict[str, Callable[[], tuple[Any, Callable[[Attention], Attention]]]] = {
            "knockout": lambda: (edits.Knockout(**at, keys=columns), cut),
            "knockout of all keys": lambda: (
                edits.Knockout(**at),
                lambda own: replace(own, keep=pairs(own) & False, parts={}),
            ),
            "knockout after": lambda: (
                edits.Knockout(**at, keys=columns, after=True),
                lambda own: with_(own, weights=zeroed),
            ),
            "scale": lambda: (
                edits.ScaleHeads(**at, factor=factor),
                lambda own: with_(own, output=lambda o: o * factor),
            ),
            "force": lambda: (edits.ForceMask(keep, **at), lambda own: replace(own, keep=keep, parts={})),
            "force a window": lambda: (
                edits.ForceMask(ch.Causal() & ch.SlidingWindow(before=2, after=0), **at),
                lambda own: replace(own, keep=torch.ones(queries, keys, dtype=torch.bool).tril().triu(-2), parts={}),
            ),
            "bias": lambda: (edits.AddBias(bias, **at), lambda own: replace(own, bias=own.bias + bias, parts={})),
            "freeze": lambda: (
                edits.Freeze(run.seen, **at),
                lambda own: with_(own, weights=lambda w: parts["weights"]),
            ),
            "freeze to a tensor": lambda: (
                edits.Freeze(bias.softmax(-1).expand(1, heads, -1, -1), **at),
                lambda own: with_(own, weights=lambda w: bias.softmax(-1).expand_as(w)),
            ),
            "ablate": lambda: (edits.Ablate(**at), lambda own: with_(own, output=torch.zeros_like)),
            "ablate to the mean": lambda: (
                edits.Ablate(**at, kind="mean", over=run.seen),
                lambda own: with_(own, output=lambda o: means.expand_as(o)),
            ),
            "resample": lambda: (
                edits.Ablate(**at, kind="resample", over=run.seen, seed=seed % 100),
                lambda own: with_(own, output=lambda o: resampled),
            ),
            "other positions": lambda: (
                edits.Patch(run.seen, **at, positions=(rows[:1], rows[-1:])),
                lambda own: with_(own, output=lambda o: self.moved(o, parts["output"], rows[0], rows[-1])),
            ),
            "a steeper softmax": lambda: (
                Own(lambda p: _scores(p, scale=2 * p.scores.scale), **at),
                lambda own: replace(own, scale=2 * own.scale, parts={}),
            ),
            "other keys": lambda: (
                Own(lambda p: _scores(p, key=p.key.flip(2)), **at),
                lambda own: replace(own, key=own.key.flip(2), parts={}),
            ),
            "other queries": lambda: (
                Own(lambda p: _scores(p, query=-p.query), **at),
                lambda own: replace(own, query=-own.query, parts={}),
            ),
            "other values": lambda: (
                Own(lambda p: p._replace(value=p.value.roll(1, 2)), **at),
                lambda own: replace(own, value=own.value.roll(1, 2), parts={}),
            ),
            "every pair": lambda: (
                Own(lambda p: p._replace(visible=None), **at),
                lambda own: replace(own, keep=None, parts={}),
            ),
            "another output": lambda: (
                Own(None, lambda o: o.tanh() + o.flip(0), **at),
                lambda own: with_(own, output=lambda o: o.tanh() + o.flip(0)),
            ),
            "removed": lambda: (
                Own(None, None, columns, factor, **at),
                lambda own: with_(own, weights=zeroed, output=lambda o: o * factor),
            ),
            "mapped weights": lambda: (
                edits.MapWeights(squared, **at),
                lambda own: with_(own, weights=lambda w: squared(w).masked_fill(~pairs(own), 0.0)),
            ),
            "mapped between others": lambda: (
                [
                    edits.Knockout(**at, keys=columns, after=True),
                    edits.MapWeights(lambda w: w.sin() - 0.1, **at),
                    edits.AddBias(bias, **at),
                    edits.ScaleHeads(**at, factor=factor),
                ],
                lambda own: with_(
                    replace(own, bias=own.bias + bias, parts={}),
                    weights=lambda w: (zeroed(w).sin() - 0.1).masked_fill(~pairs(own), 0.0),
                    output=lambda o: o * factor,
                ),
            ),
            "three at once": lambda: (
                [
                    edits.AddBias(bias, **at),
                    edits.Knockout(**at, keys=columns),
                    edits.Patch(run.seen, **at, part="value"),
                ],
                lambda own: replace(cut(own), bias=own.bias + bias, value=parts["value"]),
            ),
        }
        for part in PARTS:
            where = {"keys": columns} if part in ("key", "value") else {}
            own = put(columns, parts[part]) if where else lambda o, part=part: parts[part]
            found[f"patch of the {part}"] = lambda part=part, where=where, own=own: (
                edits.Patch(run.seen, **at, part=part, **where),
                lambda mine: with_(mine, **{part: own}),
            )
        self.kinds = list(found)
        made, self.change = found[kind]()
        self.edits = made if isinstance(made, list) else [made]
        if kind == "other positions":
            self.rows = rows[:1]

    def some(self, count: int) -> list[int]:
        found: list[int] = sorted(self.rng.choice(count, self.rng.integers(1, count + 1), replace=False).tolist())
        return found

    @staticmethod
    def moved(own: Tensor, other: Tensor, here: int, there: int) -> Tensor:
        new = own.clone()
        new[:, :, here] = other[:, :, there]
        return new

    def by_hand(self, number: int, own: Attention) -> Any:
        if number != self.number:
            return None
        where = torch.zeros(own.query.shape[1:3], dtype=torch.bool)
        where[torch.tensor(self.heads)[:, None], torch.tensor(self.rows, dtype=torch.long)] = True
        return self.change(own), where


KINDS = [
    *("knockout", "knockout of all keys", "knockout after", "scale", "force", "force a window", "bias", "freeze"),
    *("freeze to a tensor", "ablate", "ablate to the mean", "resample", "other positions", "a steeper softmax"),
    *("other keys", "other queries", "other values", "every pair", "another output", "removed"),
    *("mapped weights", "mapped between others", "three at once"),
    *(f"patch of the {part}" for part in PARTS),
]


def drawn(run: Run, kind: str, name: str, again: int = 0) -> Drawn:
    return Drawn(run, kind, zlib.crc32(f"{name}, {kind}, {again}".encode()))


def off(run: Run, one: Drawn) -> float:
    """The largest difference between the edited model and the one by hand, as a part of the largest number."""
    with torch.no_grad(), AllInFloat64():
        with ch.edit(run.model, *one.edits):
            got = run.output()
        with by_hand(run.model, one.by_hand) as calls:
            wanted = run.output()
    assert calls[one.number].parts["result"] is not calls[one.number].parts["output"]  # it was changed by hand
    return float((got - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", list(ALL))
def test_an_edit_is_what_it_is_by_hand(name: str, kind: str) -> None:
    assert off(run_of(name), drawn(run_of(name), kind, name)) < CLOSE


def test_every_kind_is_tried() -> None:
    assert Drawn(run_of("Llama"), "scale", 0).kinds == KINDS and len(ALL) == 16


@pytest.mark.parametrize("kind", ["freeze to a tensor", "freeze", "removed", "mapped weights", "force", "bias"])
def test_rows_with_other_sinks_are_recorded(kind: str) -> None:
    """GPT-OSS returns its weights, which have a sink; weights that are given have none."""
    run = run_of("GptOss")
    for again in range(4):
        one = drawn(run, kind, "GptOss", again)
        with torch.no_grad(), AllInFloat64():
            with ch.edit(run.model, *one.edits), ch.watch(run.model) as seen:
                returned = run.model(**run.inputs, output_attentions=True).attentions
            with by_hand(run.model, one.by_hand) as calls:
                run.output()
        changed, where = one.by_hand(one.number, calls[one.number])
        factor = changed.given["output"](torch.ones((), dtype=torch.float64)) if kind == "removed" else 1.0
        wanted = torch.where(where[None, :, :, None], changed.weights() * factor, calls[one.number].parts["weights"])
        for found in (seen[one.number].weights.dense(), returned[one.number]):
            assert (found - wanted).abs().max() < CLOSE


@pytest.mark.parametrize("name", list(ALL))
def test_estimates_of_small_edits_are_their_effects(name: str) -> None:
    """Attribution patching is exact to first order: for a change of 1e-5, to about as many digits."""
    run, small = run_of(name), 1e-5
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, generator=generator, dtype=torch.float64)
    metric = lambda out: (out.last_hidden_state @ weight).sin().sum(1)
    bias = small * torch.randn(1, 1, 64, 64, generator=generator, dtype=torch.float64)
    larger = lambda problem: _scores(problem, query=problem.query * (1 + small))
    for make in (
        lambda layer, head: ch.edits.ScaleHeads(layer, head, 1 - small),
        lambda layer, head: [ch.edits.AddBias(bias, layer, head), Own(larger, layers=layer, heads=head)],
        lambda layer, head: Own(lambda p: p._replace(value=p.value * (1 + small)), layers=layer, heads=head),
    ):
        with AllInFloat64():
            found = ch.models.attribution_patching(run.model, make, run.inputs, metric, exact=4)
        assert len(found.checked) == 4
        for row in found.checked:
            assert abs(row["error"]) < 1e-3 * abs(row["exact"]) and abs(row["exact"]) > 1e-9
