"""Which of the layers that ran made a recorded query, key or value."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from clearhead.base.arrays import accumulated
from clearhead.base.steps import Step
from clearhead.explanation.modules.norm import Norm
from clearhead.explanation.modules.origin.chain import Chain, turns
from clearhead.explanation.modules.origin.layouts import layouts
from clearhead.explanation.modules.origin.places import AXES, Places, taken
from clearhead.explanation.modules.origin.ran import Origin, Ran
from clearhead.explanation.modules.projection import Linear

PROBES = 6  # positions by which a candidate is judged, before it is held to all


def find(name: str, given: Tensor, origin: Origin, places: Places, heads: tuple[int, int]) -> Chain | None:
    """The chain that gives what was recorded, `given` (B, H, L, E), in these sequences and heads; None: there is none.

    `heads`: those of the query, and of key and value. Each way in which models arrange their heads is computed for a
    few positions, and compared; a factor is looked for last, since a norm of one vector is one.
    """
    length = given.shape[2]
    few = sorted({n * (length - 1) // (PROBES - 1) for n in range(PROBES)})
    places = places._replace(positions=few)
    wanted = recorded(given, places)
    scaled = None
    sources = list(_sources(name, given, origin, places))
    for each, source in sources:
        for rows in layouts(name, _out(each), *heads, given.shape[-1]):
            plain = Chain(each, rows)
            doubt = plain.doubt(source, places)
            for chain in _chains(plain, name, source, places, origin, given, doubt):
                found = chain.steps(name, source, places)[-1].value
                if near(found, wanted, given.dtype, doubt):
                    return _beside(chain, name, sources, places, wanted, given.dtype)
                factor = float((found * wanted).sum() / found.square().sum().clamp_min(1e-30))
                if scaled is None and factor > 0 and near(found * factor, wanted, given.dtype, doubt):
                    scaled = chain._replace(factor=factor)
    return None if scaled is None else _beside(scaled, name, sources, places, wanted, given.dtype)


def _sources(name: str, given: Tensor, origin: Origin, places: Places) -> Iterator[tuple[Ran, Step]]:
    """The linear layers that ran before the call, each with its input in these places."""
    for each in origin.ran[: origin.before]:
        x = batched(each.x, given)
        if x is None or not isinstance(each.layer, Linear) or each.layer.weight.shape[-1] != x.shape[-1]:
            continue
        if each.stands:
            yield each, input_step("x", x, name, places, accumulated(given.dtype))


def _out(ran: Ran) -> int:
    """How many numbers a linear layer makes."""
    assert isinstance(ran.layer, Linear)
    return ran.layer.weight.shape[0]


def _beside(
    chain: Chain, name: str, sources: list[tuple[Ran, Step]], places: Places, wanted: Tensor, dtype: torch.dtype
) -> Chain:
    """The same chain, which knows the other layers that would give these numbers in the same way."""
    others = []
    for each, source in sources:
        if each.name != chain.ran.name and _out(each) == _out(chain.ran):
            other = chain._replace(ran=each)
            if near(other.steps(name, source, places)[-1].value, wanted, dtype, other.doubt(source, places)):
                others.append(each.name)
    return chain._replace(others=tuple(dict.fromkeys(others)))


def _chains(
    plain: Chain, name: str, source: Step, places: Places, origin: Origin, given: Tensor, doubt: Tensor
) -> Iterator[Chain]:
    """With and without each norm that ran on these numbers, and each rotation, in both orders."""
    batch, _, length, width = given.shape
    ways = list(turns(origin.turns, batch, length, width) if name != "value" else ())
    for chain in [plain, *(plain._replace(turn=turn) for turn in ways)]:
        norms = _norms(chain, name, source, places, origin, given, doubt)
        if chain.turn is None:
            for norm in [None, *norms]:
                for turn in [None, *ways]:
                    yield plain._replace(norm=norm, turn=turn)
        else:
            for norm in norms:
                if not norm[2]:
                    yield chain._replace(norm=norm, turned_first=True)


def _norms(
    plain: Chain, name: str, source: Step, places: Places, origin: Origin, given: Tensor, doubt: Tensor
) -> list[tuple[str, Norm, bool]]:
    """The norms that were given what this chain gives."""
    heads = plain.steps(name, source, places)[-1].value
    norms: list[tuple[str, Norm, bool]] = []
    for ran in origin.ran[: origin.before]:
        if isinstance(ran.layer, Norm) and ran.stands and _of(ran, heads, places, given, plain.rows.numel(), doubt):
            together = ran.x.shape[-1] != given.shape[-1]
            norm = ran.layer.to(source.value)
            norms += [(ran.name, norm, together)]
            if norm.weight is not None:  # Gemma's factor is 1 more than what it learns
                norms.append((ran.name, norm._replace(weight=1.0 + norm.weight), together))
    return norms


def _of(ran: Ran, heads: Tensor, places: Places, given: Tensor, size: int, doubt: Tensor) -> bool:
    """Whether a norm was given these numbers (B, H, L, E), as heads or side by side."""
    batch, count, length, width = given.shape
    x = ran.x
    own = x.numel() // max(batch * length * width, 1)  # heads: fewer, where each serves several
    if not own or x.numel() != batch * length * own * width or count % own or x.shape[-1] not in (width, size):
        return False
    both = [x.reshape(batch, length, own, width).transpose(1, 2), x.reshape(batch, own, length, width)]
    shapes = both if own == count else [shape.repeat_interleave(count // own, 1) for shape in both]
    return any(near(recorded(shape, places), heads, given.dtype, doubt) for shape in shapes)


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
    why = "What the next layer is given: one vector for each position of each sequence."
    return Step(label, why, rows, ("B", AXES[name], "in"))


def near(found: Tensor, wanted: Tensor, dtype: torch.dtype, doubt: Tensor | float = 0.0) -> bool:
    """Whether vectors agree, each but for its own roundings in this dtype: another arrangement is off by as much as
    they are. `doubt`: by how much roundings may have grown on the way, see `Chain.doubt`."""
    info = torch.finfo(dtype)
    bound = (1e-4 if info.bits >= 32 else 8 * info.eps) + 4 * info.eps * doubt
    off = torch.where(found.isnan() & wanted.isnan(), 0.0, (found - wanted).abs())
    return bool((off <= bound * found.abs().nan_to_num().amax(-1, keepdim=True)).all())
