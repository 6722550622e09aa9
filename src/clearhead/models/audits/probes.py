"""Which inputs an influence test changes together, so that few forward passes test many of the forbidden pairs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from clearhead.models.audits.reachability import Reachability

MOST_GROUPS = 64  # groups of positions that are told apart; the rest of a batch is one more
MOST_NUMBERS = 2**23  # of the pairs of sampled outputs with all inputs
RELATIONS = "padding", "another sequence", "another document", "a later position", "an earlier position"


class Probe(NamedTuple):
    """A set of inputs that are changed in one forward pass, and what must follow.

    `changed`: the inputs. `fixed`: the outputs that none of them may influence, so every bit must stay. `moving`: the
    outputs that some of them may influence. All are bool (B, L); outputs that are padding are in neither.
    """

    changed: Tensor
    fixed: Tensor
    moving: Tensor


class Positions:
    """The positions of a batch, and which of them may influence which.

    `tokens`: bool (B, L), False for padding, whose outputs do not count. `changeable`: bool (B, L), the inputs that may
    be changed. `group`: int64 (B, L), equal where positions are connected by any path, as those of one document are.
    """

    def __init__(self, reach: Reachability, tokens: Tensor, changeable: Tensor) -> None:
        self.reach, self.tokens, self.changeable = reach, tokens, changeable
        self.group = _find_groups(reach, tokens)

    def make_probe(self, changed: Tensor) -> Probe:
        """The probe that changes these inputs, bool (B, L)."""
        moving = self.reach.find_outputs(changed[None])[0] & self.tokens
        return Probe(changed, self.tokens & ~moving, moving)

    def relate(self, output: tuple[int, int], source: tuple[int, int]) -> str:
        """How an input is related to an output that it must not influence: one of `RELATIONS`."""
        if output[0] != source[0]:
            return "another sequence"
        if not bool(self.tokens[source]):
            return "padding"
        if int(self.group[output]) != int(self.group[source]):
            return "another document"
        return "a later position" if source[1] > output[1] else "an earlier position"

    def split_forbidden(self, output: tuple[int, int], forbidden: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The inputs, bool (B, L), that must not influence this output, by their relation to it."""
        sequence, position = output
        beside = torch.zeros_like(forbidden)
        beside[sequence] = True
        alike = self.group == self.group[output]
        later = torch.arange(forbidden.shape[1]) > position
        inside = beside & self.tokens
        yield "padding", forbidden & beside & ~self.tokens
        yield "another sequence", forbidden & ~beside
        yield "another document", forbidden & inside & ~alike
        yield "a later position", forbidden & inside & alike & later
        yield "an earlier position", forbidden & inside & alike & ~later


def _find_groups(reach: Reachability, tokens: Tensor) -> Tensor:
    """A number for each position (B, L): equal where one may influence the other, directly or by way of others."""
    batch, length = tokens.shape
    group, sequences = torch.full((batch, length), -1), torch.arange(batch)
    for number in range(MOST_GROUPS):
        left = (group < 0) & tokens
        if not bool(left.any()):
            break
        found = torch.zeros_like(tokens)
        found[sequences, left.int().argmax(1)] = True  # the first position of each sequence that has no group yet
        found &= left
        while True:
            grown = found | (reach.find_inputs(found[None])[0] & tokens)
            grown |= reach.find_outputs(grown[None])[0] & tokens
            if torch.equal(grown, found):
                break
            found = grown
        group = torch.where(found & (group < 0), sequences[:, None] + batch * number, group)
    return group


class Coverage:
    """How many of the forbidden pairs some probes test, estimated from outputs that are drawn at random.

    All outputs are used where they are few. `shares`: by relation, the share of the forbidden pairs that are tested.
    """

    def __init__(self, positions: Positions, generator: torch.Generator) -> None:
        outputs = positions.tokens.flatten().nonzero()[:, 0]
        most = max(16, min(512, MOST_NUMBERS // max(positions.tokens.numel(), 1)))
        some = outputs[torch.randperm(len(outputs), generator=generator)[:most]].sort().values
        batch, length = positions.tokens.shape
        self.rows = some
        alone = torch.zeros(len(some), batch * length, dtype=torch.bool)
        alone[torch.arange(len(some)), some] = True
        reached = positions.reach.find_inputs(alone.view(-1, batch, length)) if len(some) else alone.view(-1, batch, length)
        forbidden = ~reached & positions.changeable
        self._left = {name: torch.zeros_like(forbidden) for name in RELATIONS}
        for number, output in enumerate(some.tolist()):
            for name, inputs in positions.split_forbidden(divmod(output, length), forbidden[number]):
                self._left[name][number] = inputs
        self._total = {name: int(pairs.sum()) for name, pairs in self._left.items()}

    def count_new(self, probe: Probe) -> float:
        """What a probe would test for the first time: the sum over relations of the share of their pairs."""
        fixed = probe.fixed.flatten()[self.rows]
        new = ((pairs[fixed] & probe.changed).sum() / total for pairs, total in self._present())
        return float(sum(new))

    def add(self, probe: Probe) -> None:
        """Count the pairs of a probe as tested."""
        fixed = probe.fixed.flatten()[self.rows]
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
    members = [(positions.group == group).nonzero() for group in positions.group.unique().tolist() if group >= 0]
    for _ in range(number if members else 0):
        tried = (_draw_probe(positions, members, i, generator) for i in range(candidates))
        best = max(tried, key=coverage.count_new)
        if not coverage.count_new(best):
            break
        coverage.add(best)
        probes.append(best)
    for changed in _choose_single_inputs(positions, members):
        probe = positions.make_probe(changed)
        coverage.add(probe)
        probes.append(probe)
    return probes, coverage


def _draw_probe(positions: Positions, members: Sequence[Tensor], number: int, generator: torch.Generator) -> Probe:
    """A probe that protects one output of some groups, drawn at random: all that it may not depend on is changed."""

    def draw(most: int) -> int:
        return int(torch.randint(most, (), generator=generator))

    kept = [group for group in members if len(members) == 1 or draw(2)] or [members[draw(len(members))]]
    protected = torch.zeros_like(positions.tokens)
    for group in kept:
        # the middle and the end are the likeliest borders; the others are drawn
        place = (len(group) // 2, len(group) - 1, draw(len(group)), draw(len(group)))[number % 4]
        protected[tuple(group[place])] = True
    return positions.make_probe(~positions.reach.find_inputs(protected[None])[0] & positions.changeable)


def _choose_single_inputs(positions: Positions, members: Sequence[Tensor]) -> list[Tensor]:
    """One input of each group, that reaches the most outputs, and one that reaches its first output from far behind."""
    most, ahead = torch.zeros_like(positions.tokens), torch.zeros_like(positions.tokens)
    for group in members:
        free = group[positions.changeable[tuple(group.T)]]
        if not len(free):
            continue
        tried = free[torch.tensor([0, len(free) // 2, len(free) - 1])]
        alone = torch.zeros(len(tried), *positions.tokens.shape, dtype=torch.bool)
        alone[torch.arange(len(tried)), tried[:, 0], tried[:, 1]] = True
        reached = (positions.reach.find_outputs(alone) & positions.tokens).flatten(1).sum(1)
        most[tuple(tried[int(reached.argmax())])] = True
        first = torch.zeros_like(positions.tokens)
        first[tuple(group[0])] = True
        sources = positions.reach.find_inputs(first[None])[0] & positions.changeable & positions.tokens
        last = sources[group[0, 0]].nonzero()
        if len(last) and int(last[-1, 0]) > int(group[0, 1]):
            ahead[group[0, 0], last[-1, 0]] = True
    return [changed for changed in (most, ahead) if bool(changed.any())]
