"""The influence test: do outputs move when inputs change that must not reach them?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from clearhead.models.audits.probes import Probe

# A smaller movement, as a part of the usual one, is rounding where the gradient is exactly zero: a sum may be added in
# another order where other numbers change. Rounding was at most 2.4e-6, and true leaks at least 2.7e-3, in 840 cases
# over 255 architectures.
LARGEST_ROUNDING = 1e-3
MOST_NUMBERS = 2**20  # that are compared together
LEAK_CODES = {  # by the relation of an input to the output that it moves
    "padding": "padding-reaches-outputs",
    "another sequence": "sequences-mix",
    "another document": "documents-mix",
    "a later position": "later-positions-reach-outputs",
    "an earlier position": "window-exceeded",
}

Run = Callable[[Tensor | None], Tensor]  # the outputs (B, L, C) with the inputs of bool (B, L) changed; None: none
Differentiate = Callable[[Tensor], Tensor | None]  # the gradient of some outputs, bool (B, L), for each input (B, L)


@dataclass(eq=False)
class Leak:
    """Outputs that moved though none of the changed inputs may influence them.

    `moved`: bool (B, L). `size`: the largest movement, as a part of the usual movement of outputs that may move.
    `output`, `source`: one output that moved and one input that alone moves it, (sequence, position); None where no
    single input does.
    """

    probe: Probe
    moved: Tensor
    size: float
    output: tuple[int, int] | None = None
    source: tuple[int, int] | None = None


@dataclass
class Influence:
    """What the forward passes of an influence test showed.

    `leaks`: largest first. `unmoved`: outputs (B, L) that stayed though a changed input should influence them, a list
    by probe. `mixes`: whether any output moved with an input of another position. `usual`: the median movement of
    outputs that may move. `rounding`: the largest movement that was left out
    because it is rounding, as a part of the usual one.
    """

    leaks: list[Leak] = field(default_factory=list)
    unmoved: list[tuple[Probe, Tensor]] = field(default_factory=list)
    mixes: bool = False
    usual: float = 0.0
    rounding: float = 0.0


def measure_influence(run: Run, differentiate: Differentiate, probes: list[Probe]) -> Influence:
    """Run once as it is, and once for each probe, and compare to the bit.

    Movements by rounding are left out. The largest leak is traced to one input and output.
    """
    found, base = Influence(), run(None)
    movements = []
    for probe in probes:
        movement, moved = measure_distance(base, run(probe.changed))
        leak = moved & probe.fixed
        if bool(leak.any()):
            found.leaks.append(Leak(probe, leak, float(movement[leak].max())))
        if bool((probe.moving & ~moved).any()):
            found.unmoved.append((probe, probe.moving & ~moved))
        same_positions = probe.changed if probe.changed.shape == moved.shape else torch.zeros_like(moved)
        found.mixes |= bool((probe.moving & moved & ~same_positions).any())
        movements.append(movement[probe.moving & moved])
    all_moved = torch.cat(movements) if movements else torch.zeros(0, dtype=torch.float32, device="cpu")
    found.usual = float(all_moved.median()) if len(all_moved) else 0.0
    for one in found.leaks:
        one.size = one.size / found.usual if 0 < found.usual < math.inf else math.inf
    rounding = [one for one in found.leaks if _is_rounding(one, differentiate)]
    found.rounding = max((one.size for one in rounding), default=0.0)
    found.leaks = sorted((one for one in found.leaks if one not in rounding), key=lambda leak: -leak.size)
    if found.leaks:
        _trace(run, base, found.leaks[0])
    return found


def _is_rounding(leak: Leak, differentiate: Differentiate) -> bool:
    if leak.size > LARGEST_ROUNDING:
        return False
    try:
        gradient = differentiate(leak.probe.fixed)
    except Exception:  # not every model has a backward pass
        return True
    return gradient is None or not bool((gradient[leak.probe.changed] != 0).any())


def measure_distance(base: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """The largest difference at each position of two outputs (B, L, C), and whether any bit differs, (B, L) each.

    Infinite where one of two numbers alone is finite.
    """
    dtype = torch.promote_types(base.dtype, torch.float32)
    distance = torch.zeros(base.shape[:2], dtype=dtype, device=base.device)
    moved = torch.zeros_like(distance, dtype=torch.bool)
    for rows in _split_positions(base):
        differs = (base[:, rows] != other[:, rows]).any(-1)
        one, two = base[:, rows][differs], other[:, rows][differs]
        same = (one == two) | (one.isnan() & two.isnan())
        largest = (one.to(dtype) - two.to(dtype)).abs().masked_fill(same, 0.0).amax(-1)
        distance[:, rows][differs], moved[:, rows][differs] = largest.nan_to_num(math.inf, math.inf), ~same.all(-1)
    return distance.cpu(), moved.cpu()


def measure_size(outputs: Tensor) -> float:
    """The root mean square of the finite numbers in outputs (B, L, C), or 1 where it is 0."""
    total, count = 0.0, 0
    for rows in _split_positions(outputs):
        some = outputs[:, rows].double()
        finite = some.isfinite()
        total += float(some.masked_fill(~finite, 0.0).square().sum())
        count += int(finite.sum())
    return math.sqrt(total / max(count, 1)) or 1.0


def _split_positions(outputs: Tensor) -> Iterator[slice]:
    """Positions whose outputs (B, n, C) are compared together: the logits of a long text are large."""
    batch, length, width = outputs.shape
    step = max(1, MOST_NUMBERS // max(1, batch * width))
    return (slice(start, start + step) for start in range(0, length, step))


def _trace(run: Run, base: Tensor, leak: Leak) -> None:
    """Find one input that alone moves the output that moved most, by halving the set of changed inputs."""
    movement, moved = measure_distance(base, run(leak.probe.changed))
    flat = movement.masked_fill(~(leak.moved & moved), -1.0).flatten()
    sequence, position = leak.output = divmod(int(flat.argmax()), base.shape[1])

    def moves(inputs: list[list[int]]) -> bool:
        changed = torch.zeros_like(leak.probe.changed)  # inputs of an encoder may be more than the outputs
        changed[tuple(torch.tensor(inputs, device="cpu").T)] = True
        return bool(measure_distance(base, run(changed))[1][sequence, position])

    # the nearest inputs first: of several paths, the shortest is the easiest to understand
    inputs = sorted(leak.probe.changed.nonzero().tolist(), key=lambda at: (at[0] != sequence, abs(at[1] - position)))
    while len(inputs) > 1:
        half = inputs[: len(inputs) // 2]
        if moves(half):
            inputs = half
            continue
        rest = inputs[len(half) :]
        if not moves(rest):
            return  # only both halves together move it
        inputs = rest
    leak.source = inputs[0][0], inputs[0][1]
