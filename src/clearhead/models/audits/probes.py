"""Which inputs an influence test changes together, so that few forward passes test many of the forbidden pairs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from clearhead.models.audits.reachability import CrossReachability, Reachability

MOST_GROUPS = 64  # groups of positions that are told apart
MOST_NUMBERS = 2**23  # of the pairs of sampled outputs with all inputs
Place = tuple[int, int]  # a sequence and a position in it
Relation = Literal["padding", "another sequence", "another document", "a later position", "an earlier position"]
RELATIONS: tuple[Relation, ...] = get_args(Relation)


class Probe(NamedTuple):
    """A set of inputs that are changed in one forward pass, and what must follow.

    `changed`: the inputs, bool (B, Li). `fixed`: the outputs that none of them may influence, so every bit must stay.
    `moving`: the outputs that some of them may influence, through one layer where the number of layers is not known.
    Both are bool (B, Lo); padding is in neither.
    """

    changed: Tensor
    fixed: Tensor
    moving: Tensor


class Positions:
    """The inputs and outputs of a batch, and which of them may influence which.

    `tokens`: the outputs that count, bool (B, Lo), False for padding. `input_tokens`: the same of the inputs, (B, Li).
    `changeable`: the inputs that may be changed. `group`, `input_group`: int64, equal for all that is connected by any
    path, as the positions of one document are; −1 for padding.
    """

    def __init__(
        self,
        reach: Reachability | CrossReachability,
        tokens: Tensor,
        input_tokens: Tensor | None = None,
        changeable: Tensor | None = None,
    ) -> None:
        self.reach, self.tokens = reach, tokens
        self.input_tokens = tokens if input_tokens is None else input_tokens
        self.changeable = torch.ones_like(self.input_tokens) if changeable is None else changeable
        self.group, self.input_group = _find_groups(reach, tokens, self.input_tokens)

    def list_groups(self) -> list[int]:
        """The numbers of the groups."""
        return sorted(set(self.group.flatten().tolist()) - {-1})

    def make_probe(self, changed: Tensor) -> Probe:
        """The probe that changes these inputs, bool (B, Li)."""
        reached = self.reach.find_outputs(changed[None])[0]
        return Probe(changed, self.tokens & ~reached, self.tokens & self.reach.least.find_outputs(changed[None])[0])

    def relate(self, output: Place, source: Place) -> Relation:
        """How an input is related to an output that it must not influence."""
        return next(name for name, inputs in self.split_forbidden(output) if bool(inputs[source]))

    def split_forbidden(self, output: Place) -> Iterator[tuple[Relation, Tensor]]:
        """All inputs, bool (B, Li), by the relation to an output that they have if they must not influence it."""
        sequence, position = output
        beside = torch.zeros_like(self.input_tokens)
        beside[sequence] = True
        alike = (self.input_group == self.group[output]) | ~beside
        later = torch.arange(beside.shape[1], device="cpu") > position
        inside = beside & self.input_tokens
        yield "padding", beside & ~self.input_tokens
        yield "another sequence", ~beside
        yield "another document", inside & ~alike
        yield "a later position", inside & alike & later
        yield "an earlier position", inside & alike & ~later


def _find_groups(
    reach: Reachability | CrossReachability, tokens: Tensor, input_tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Numbers for the outputs (B, Lo) and the inputs (B, Li), equal where a path leads from one to the other."""
    batch = len(tokens)
    sequences = torch.arange(batch, device="cpu")
    group, input_group = (
        torch.full(some.shape, -1, dtype=torch.int64, device="cpu") for some in (tokens, input_tokens)
    )
    for number in range(MOST_GROUPS):
        left = (group < 0) & tokens
        if not bool(left.any()):
            break
        found = torch.zeros_like(tokens)
        found[sequences, left.int().argmax(1)] = True  # the first output of each sequence that has no group yet
        found &= left
        while True:
            inputs = reach.find_inputs(found[None])[0] & input_tokens
            grown = found | (reach.find_outputs(inputs[None])[0] & tokens)
            if torch.equal(grown, found):
                break
            found = grown
        numbers = sequences[:, None] + batch * number
        group = torch.where(found & (group < 0), numbers, group)
        input_group = torch.where(inputs & (input_group < 0), numbers, input_group)
    return group, input_group


class Coverage:
    """How many of the forbidden pairs some probes test, estimated from outputs that are drawn at random.

    All outputs are used where they are few. `shares`: by relation, the share of the forbidden pairs that are tested.
    """

    def __init__(self, positions: Positions, generator: torch.Generator) -> None:
        outputs = positions.tokens.flatten().nonzero()[:, 0]
        most = max(16, min(512, MOST_NUMBERS // max(positions.input_tokens.numel(), 1)))
        self._outputs = outputs[torch.randperm(len(outputs), generator=generator, device="cpu")[:most]].sort().values
        shape, number = positions.tokens.shape, len(self._outputs)
        alone = torch.zeros(number, shape.numel(), dtype=torch.bool, device="cpu")
        alone[torch.arange(number, device="cpu"), self._outputs] = True
        forbidden = ~positions.reach.find_inputs(alone.view(number, *shape)) & positions.changeable
        self._left = {name: torch.zeros_like(forbidden) for name in RELATIONS}
        for row, output in enumerate(self._outputs.tolist()):
            for name, inputs in positions.split_forbidden(divmod(output, shape[1])):
                self._left[name][row] = inputs & forbidden[row]
        self._total = {name: int(pairs.sum()) for name, pairs in self._left.items()}

    def count_new(self, probe: Probe) -> float:
        """What a probe would test for the first time: the sum over relations of the share of their pairs."""
        fixed = probe.fixed.flatten()[self._outputs]
        new = ((pairs[fixed] & probe.changed).sum() / total for pairs, total in self._present())
        return float(sum(new))

    def add(self, probe: Probe) -> None:
        """Count the pairs of a probe as tested."""
        fixed = probe.fixed.flatten()[self._outputs]
        for pairs in self._left.values():
            pairs[fixed] &= ~probe.changed

    def _present(self) -> Iterator[tuple[Tensor, int]]:
        return ((self._left[name], total) for name, total in self._total.items() if total)

    @property
    def shares(self) -> dict[str, float]:
        return {name: 1 - int(self._left[name].sum()) / total for name, total in self._total.items() if total}


def choose_probes(
    positions: Positions, number: int, generator: torch.Generator, candidates: int = 32
) -> tuple[list[Probe], Coverage]:
    """Up to `number` probes that change many inputs, then up to two that change one input of each group.

    The first ones find leaks: each is the best of some candidates, which keep the outputs of some groups up to a
    random position, and change all that these outputs may not depend on. The last ones find outputs that do not depend
    on what they should: their one input is the one that reaches the most outputs.
    """
    coverage, probes = Coverage(positions, generator), []
    groups = positions.list_groups()
    for _ in range(number if groups else 0):
        tried = (_draw_probe(positions, groups, i, generator) for i in range(candidates))
        best = max(tried, key=coverage.count_new)
        if not coverage.count_new(best):
            break
        coverage.add(best)
        probes.append(best)
    for changed in _choose_single_inputs(positions, groups):
        probe = positions.make_probe(changed)
        coverage.add(probe)
        probes.append(probe)
    return probes, coverage


def _draw_probe(positions: Positions, groups: Sequence[int], number: int, generator: torch.Generator) -> Probe:
    """A probe that protects one output of some groups, drawn at random: all that it may not depend on is changed."""

    def draw(most: int) -> int:
        return int(torch.randint(most, (), generator=generator, device="cpu"))

    kept = [group for group in groups if len(groups) == 1 or draw(2)] or [groups[draw(len(groups))]]
    protected = torch.zeros_like(positions.tokens)
    for group in kept:
        members = (positions.group == group).nonzero()
        # the middle and the end are the likeliest borders; the others are drawn
        place = (len(members) // 2, len(members) - 1, draw(len(members)), draw(len(members)))[number % 4]
        protected[tuple(members[place])] = True
    return positions.make_probe(~positions.reach.find_inputs(protected[None])[0] & positions.changeable)


def _choose_single_inputs(positions: Positions, groups: Sequence[int]) -> list[Tensor]:
    """One input of each group, that reaches the most outputs; and one that reaches its first output from far behind."""
    most, ahead = torch.zeros_like(positions.input_tokens), torch.zeros_like(positions.input_tokens)
    for group in groups:
        free = ((positions.input_group == group) & positions.changeable).nonzero()
        if not len(free):
            continue
        tried = free[torch.tensor([0, len(free) // 2, len(free) - 1], device="cpu")]
        alone = torch.zeros(len(tried), *positions.input_tokens.shape, dtype=torch.bool, device="cpu")
        alone[torch.arange(len(tried), device="cpu"), tried[:, 0], tried[:, 1]] = True
        reached = (positions.reach.find_outputs(alone) & positions.tokens).flatten(1).sum(1)
        most[tuple(tried[int(reached.argmax())])] = True
        sequence, position = (positions.group == group).nonzero()[0].tolist()
        first = torch.zeros_like(positions.tokens)
        first[sequence, position] = True
        sources = positions.reach.find_inputs(first[None])[0, sequence] & positions.changeable[sequence]
        last = int((sources & positions.input_tokens[sequence]).nonzero()[-1:].sum())
        if last > position:
            ahead[sequence, last] = True
    return [changed for changed in (most, ahead) if bool(changed.any())]
