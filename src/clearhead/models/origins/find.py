"""Which of the layers that ran made a recorded query, key or value, and which was given the outputs of the heads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.base.symbolic.steps import Step
from clearhead.base.torch_state.tensor_kind import has_own_dispatch, is_freed, is_readable
from clearhead.explanation.modules.projection import Linear, Norm
from clearhead.models.origins.chain import AXES, Chain, Places, Turn, doubt, taken, turns
from clearhead.models.origins.ran import Origin, Ran

SIDES = ("query", "key", "value")


def layouts(side: str, out: int, heads: int, key_heads: int, width: int) -> Iterator[Tensor]:
    """The rows (H, E) that may make the heads of a query, a key or a value of this width, in a layer of `out` rows.

    The layer may be for one side; for key and value, one behind the other; or for all three: one behind the other
    (GPT-2), or by head, or by group of heads that share a key head, as queries, key and value (GPT-NeoX, Falcon). Its
    heads may be wider than `width`, with further numbers before or behind. It may make fewer key heads than attention
    is given, each of which is repeated.
    """
    mine = heads if side == "query" else key_heads
    yield from _alone(side, out, mine, width)
    yield from _together(side, out, heads, key_heads, width)
    block = out // max(mine, 1)
    if out == mine * block and block > width:
        rows = torch.arange(out, device="cpu").view(mine, block)
        yield rows[:, :width]
        yield rows[:, block - width :]
    for fewer in (n for n in range(key_heads - 1, 0, -1) if key_heads % n == 0):
        together = _together(side, out, heads, fewer, width)
        if side == "query":
            yield from together
            continue
        for each in itertools.chain(_alone(side, out, fewer, width), together):
            yield each.repeat_interleave(key_heads // fewer, 0)
            yield each.repeat(key_heads // fewer, 1)


def _alone(side: str, out: int, mine: int, width: int) -> Iterator[Tensor]:
    """The rows in a layer for one side, or for key and value."""
    rows = torch.arange(mine * width, device="cpu").view(mine, width)
    if out == mine * width:
        yield rows
    if out == 2 * mine * width and side != "query":
        yield rows + (SIDES.index(side) - 1) * mine * width


def _together(side: str, out: int, heads: int, key_heads: int, width: int) -> Iterator[Tensor]:
    """The rows in a layer for query, key and value."""
    if out != (heads + 2 * key_heads) * width or heads % key_heads:
        return
    mine = heads if side == "query" else key_heads
    head, entry = torch.arange(mine, device="cpu").unsqueeze(1), torch.arange(width, device="cpu")
    place, group = SIDES.index(side), heads // key_heads
    start = 0 if place == 0 else heads + (place - 1) * key_heads
    yield (start + head) * width + entry
    block = group + 2
    if side == "query":
        yield (head // group * block + head % group) * width + entry
    else:
        yield (head * block + group + place - 1) * width + entry


Pair = tuple[int, int, float | None]
PROBES = 6  # positions at which a candidate is compared
ROWS = 64  # numbers of a layer's result that are compared


def find(name: str, given: Tensor, origin: Origin, places: Places, heads: tuple[int, int]) -> Chain | None:
    """The chain that gives the recorded `given` (B, H, L, E) in these sequences and heads; None where none does.

    `heads`: the number of query heads, and of key heads.
    """
    return _Search(name, given, origin, places).run(heads)


class _Search:
    """The search for the layers that made a query, a key or a value, at a few positions of some sequences and heads.

    Each way in which models arrange their heads is computed, and compared with the `wanted` numbers.
    """

    def __init__(self, name: str, given: Tensor, origin: Origin, places: Places) -> None:
        self.name, self.given, self.turns = name, given, origin.turns
        self.before = origin.ran[: origin.before]
        self.places = places._replace(positions=_few(given.shape[2], PROBES))
        self.wanted = recorded(given, self.places)
        inputs = [(ran, batched(ran.x, given)) for ran in self.before if ran.kind is Linear]
        self.sources = [
            (ran, input_step("x", x, name, self.places, self.wanted.dtype))
            for ran, x in inputs
            if x is not None and ran.can_be_read()
        ]

    def run(self, heads: tuple[int, int]) -> Chain | None:
        """The first chain that gives the wanted numbers. A factor is the last resort, since a norm of a single vector
        is a factor too."""
        scaled = None
        for ran, source in self.sources:
            for rows in layouts(self.name, ran.out, *heads, self.given.shape[-1]):
                plain = Chain(ran, rows)
                doubt = plain.doubt(source, self.places)
                for chain in self._chains(plain, source, doubt):
                    found = self._last(chain, source)
                    if near(found, self.wanted, self.given.dtype, doubt):
                        return self._with_others(chain)
                    factor = float((found * self.wanted).sum() / found.square().sum().clamp_min(1e-30))
                    if scaled is None and factor > 0 and near(found * factor, self.wanted, self.given.dtype, doubt):
                        scaled = chain._replace(factor=factor)
        return None if scaled is None else self._with_others(scaled)

    def _last(self, chain: Chain, source: Step) -> Tensor:
        return chain.steps(self.name, source, self.places)[-1].value

    def _with_others(self, chain: Chain) -> Chain:
        """The same chain, with the names of other layers that would give these numbers in the same way."""
        others = []
        for ran, source in self.sources:
            if ran.name != chain.ran.name and ran.out == chain.ran.out:
                other = chain._replace(ran=ran)
                doubt = other.doubt(source, self.places)
                if near(self._last(other, source), self.wanted, self.given.dtype, doubt):
                    others.append(ran.name)
        return chain._replace(others=tuple(dict.fromkeys(others)))

    def _chains(self, plain: Chain, source: Step, doubt: Tensor) -> Iterator[Chain]:
        """The chain with and without each norm that ran on these numbers, and each rotation, in both orders."""
        batch, _, length, width = self.given.shape
        ways = list(turns(self.turns, batch, length, width) if self.name != "value" else ())
        for norm in [None, *self._norms(plain, source, doubt)]:
            for turn in [None, *ways]:
                yield plain._replace(norm=norm, turn=turn)
        for turned in (plain._replace(turn=turn) for turn in ways):
            for norm in self._norms(turned, source, doubt):
                if not norm[2]:
                    yield turned._replace(norm=norm, turned_first=True)

    def _norms(self, chain: Chain, source: Step, doubt: Tensor) -> list[tuple[str, Norm, bool]]:
        """The norms whose input was the result of this chain."""
        heads = self._last(chain, source)
        norms: list[tuple[str, Norm, bool]] = []
        for ran in self.before:
            if ran.kind is Norm and ran.stands and self._takes(ran.x, heads, chain.rows.numel(), doubt):
                together, norm = ran.x.shape[-1] != self.given.shape[-1], ran.layer
                assert isinstance(norm, Norm)
                norm = norm.to(source.value)
                norms.append((ran.name, norm, together))
                if norm.weight is not None:  # Gemma's factor is 1 more than what it learns
                    norms.append((ran.name, norm._replace(weight=1.0 + norm.weight), together))
        return norms

    def _takes(self, x: Tensor, heads: Tensor, size: int, doubt: Tensor) -> bool:
        """Whether a norm's input was these numbers (B, H, L, E), as heads or side by side."""
        batch, count, length, width = self.given.shape
        own = x.numel() // max(batch * length * width, 1)  # heads: fewer, where each serves several
        if not own or x.numel() != batch * length * own * width or count % own or x.shape[-1] not in (width, size):
            return False
        both = [x.reshape(batch, length, own, width).transpose(1, 2), x.reshape(batch, own, length, width)]
        shapes = both if own == count else [shape.repeat_interleave(count // own, 1) for shape in both]
        return any(near(recorded(shape, self.places), heads, self.given.dtype, doubt) for shape in shapes)


def batched(x: Tensor, given: Tensor) -> Tensor | None:
    """A layer's input as (B, L, in), if it has a vector for each position of each sequence; it may be (L, B, in)."""
    batch, length = given.shape[0], given.shape[2]
    if x.ndim == 3 and x.shape[:2] == (length, batch) != (batch, length):
        return x.transpose(0, 1)
    return x.reshape(batch, length, -1) if x.shape[:-1].numel() == batch * length else None


def recorded(given: Tensor, places: Places) -> Tensor:
    """The recorded numbers in these places, in the dtype of the steps."""
    rows = taken(taken(taken(given, 0, places.batches), 1, places.heads), 2, places.positions)
    return rows.to(accumulated(given.dtype))


def input_step(label: str, x: Tensor, name: str, places: Places, dtype: torch.dtype) -> Step:
    rows = taken(taken(x, 0, places.batches), 1, places.positions).to(dtype)
    why = "The next layer's input: one vector for each position of each sequence."
    return Step(label, why, rows, ("B", AXES[name], "in"))


def near(found: Tensor, wanted: Tensor, dtype: torch.dtype, doubt: Tensor | float = 0.0) -> bool:
    """Whether all vectors agree up to roundings in this dtype. (Another arrangement is off by as much as the numbers.)

    `doubt`: the factor by which roundings may have grown, see `Chain.doubt`.
    """
    return bool(agree(found, wanted, dtype, doubt).all())


def agree(found: Tensor, wanted: Tensor, dtype: torch.dtype, doubt: Tensor | float = 0.0) -> Tensor:
    """Whether each vector agrees, bool (…, 1): see `near`."""
    info = torch.finfo(dtype)
    bound = (1e-4 if info.bits >= 32 else 8 * info.eps) + 4 * info.eps * doubt
    same = (found == wanted) | (found.isnan() & wanted.isnan())  # ∞ − ∞ is NaN
    off = torch.where(same, 0.0, (found - wanted).abs())
    return (off <= bound * found.abs().nan_to_num(posinf=0.0).amax(-1, keepdim=True)).all(-1, keepdim=True)


def frequencies(origin: Origin, query: Tensor, key: Tensor, sequence: int) -> tuple[Pair, ...]:
    """For each pair of entries its two places, and in how many positions it turns once; () where no pair is turned.

    Formula: the product of a pair is r cos(ω(i − j) + δ), of one frequency ω (Su et al. 2021, "RoFormer"); 2π/ω is
    None where positions do not follow each other.

    Args:
        origin: the layers that ran, and the cosines and sines that they were given.
        query, key: (B, H, Lq, E) and (B, Hk, Lk, E), as they were recorded.
    """
    heads = query.shape[1], key.shape[1]
    found = [
        find(name, given, origin, Places([sequence], [0], list(range(given.shape[2]))), heads)
        for name, given in (("query", query), ("key", key))
    ]
    first, second = (None if chain is None else chain.turn for chain in found)
    if first is None or second is None or (first.dim, first.interleaved) != (second.dim, second.interleaved):
        return ()
    half = first.dim // 2
    ones = range(0, first.dim, 2) if first.interleaved else range(half)
    away = 1 if first.interleaved else half
    return tuple((one, one + away, _period(second, sequence, one)) for one in ones)


def _period(turn: Turn, sequence: int, entry: int) -> float | None:
    """The number of positions in which an entry's angle grows by 2π; None where it does not grow evenly."""
    place = [sequence if turn.cos.shape[0] > 1 else 0]
    cos, sin = (taken(part, 0, place)[0, :, entry].double() for part in (turn.cos, turn.sin))
    steps = torch.atan2(sin[1:] * cos[:-1] - cos[1:] * sin[:-1], cos[1:] * cos[:-1] + sin[1:] * sin[:-1])
    if len(steps) == 0 or not bool(((steps - steps.mean()).abs() <= 1e-3 * steps.mean().abs() + 1e-5).all()):
        return None
    speed = abs(float(steps.mean()))
    return None if speed == 0 else 2 * math.pi / speed


def given_heads(x: Tensor, heads: Tensor) -> bool:
    """Whether a layer with this input was given the outputs of all heads, (B, H, Lq, Ev), side by side."""
    joined, given = heads.shape[1] * heads.shape[3], batched(x, heads)
    if given is None or given.shape[-1] != joined:
        return False
    return near(given.detach(), heads.transpose(1, 2).flatten(2).to(given), heads.dtype)


def gives(layer: Linear, x: Tensor, result: Tensor, heads: Tensor, batches: list[int], queries: list[int]) -> bool:
    """Whether the layer's result is that of its weights and bias on x, for some of the queries of the heads."""
    given, wanted = batched(x, heads), batched(result, heads)
    if given is None or wanted is None:
        return False
    given, wanted = (taken(taken(t, 0, batches), 1, queries) for t in (given, wanted))
    given = given.to(accumulated(heads.dtype))
    layer = layer.to(given)
    made = torch.nn.functional.linear(given, layer.weight, layer.bias)
    return made.shape == wanted.shape and near(made, wanted.to(made), heads.dtype, doubt(layer, given, 1).squeeze(2))


def writes(ran: Ran, result: Tensor, heads: Tensor) -> bool:
    """Whether a layer that has just run was given these heads, and gave what its weights make of them. The latter
    is tried at a few positions, for some numbers of the result; for a layer that is called, when it is read."""
    layer = ran.source
    if ran.kind is not Linear or not is_readable(ran.x) or has_own_dispatch(ran.x):
        return False
    if not isinstance(layer, Linear):
        return given_heads(ran.x, heads)
    if is_freed(layer.weight) or not given_heads(ran.x, heads):
        return False
    rows = _few(layer.weight.shape[0], ROWS)
    some, every = layer.rows(torch.tensor(rows, device=layer.weight.device)), list(range(heads.shape[0]))
    result = taken(result.detach(), result.ndim - 1, rows)
    return gives(some, ran.x, result, heads, every, _few(heads.shape[2], PROBES))


def _few(count: int, most: int) -> list[int]:
    """At most so many of the numbers below `count`, evenly spaced, the first and the last among them."""
    return sorted({n * (count - 1) // (most - 1) for n in range(most)}) if count else []
