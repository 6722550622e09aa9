"""Edits that put what a head had in another run in its place here."""

from __future__ import annotations

from typing import Any, Literal, get_args

from torch import Tensor

from clearhead.base.errors import ClearheadError, ShapeError, UnsupportedError
from clearhead.base.output.text import listed
from clearhead.base.selected import is_number, items_of
from clearhead.models.edits.base import Edit
from clearhead.models.edits.from_run import FromRun, Source
from clearhead.models.edits.spot import Spot, of_weights, turned_by
from clearhead.models.interception.choice import Heads, Layers, Pairs, Positions, checked_positions, chosen
from clearhead.problem.problem import Problem
from clearhead.problem.region import Region
from clearhead.problem.regions import cut

PatchedPart = Literal["query", "key", "value", "output", "weights"]


class Patch(Edit):
    """Some heads have the query, key, value, output or weights that they had in another run.

    >>> import torch, clearhead as ch
    >>> block, x, other = ch.nn.DotProductAttention(), torch.rand(1, 4, 10, 8), torch.rand(1, 4, 10, 8)
    >>> with ch.watch(block, values=True) as seen:
    ...     before = block(other, other, other)
    >>> with ch.edit(block, ch.edits.Patch(seen, heads=2, part="output", queries=9)):
    ...     output = block(x, x, x)
    >>> torch.allclose(output[:, 2, 9], before[:, 2, 9], atol=1e-6), torch.equal(output[:, 0], block(x, x, x)[:, 0])
    (True, True)

    `source`: a `Recording` of `watch(model, values=True)`, of one run, which gives each layer what the same layer had;
    one of its calls; or a tensor of all heads and positions, (B, H, L, E), for key and value also (B, Hk, L, E), or
    (B, H, Lq, Lk) for weights, whose rows sum to 1. It has as many sequences as this run, or one for all.
    `part`: "query" and "output" are replaced at the positions `queries`; "key" and "value" at the positions `keys`, for
    the queries `queries`; "weights" are those of the source, over the values of this run, for the queries `queries`.
    None chooses all.
    `positions`: where the texts differ in length, the positions that correspond, ([of this text], [of the source]), as
    `clearhead.models.match_tokens` finds them; None: equal positions. Positions of this run that have no partner stay
    as they are. In a model with rotary embeddings the query and key of a record were turned by the position where they
    stood, so for these parts `positions` may pair equal positions alone. A tensor is taken as it is: turned, where it
    is to be, for the positions of this text. `layers`, `heads`: see `Edit`.
    The source is not changed, and has no gradient. Raises an error where the model calls attention if heads, widths,
    lengths or dtypes of the two runs differ, and an `UnsupportedError` for a record's query or key at another position
    in a model that a part named "rotary" or "rope" belongs to; in cross attention, where the module itself has such a
    part. Code that turns vectors without such a name is not seen.
    Source: Vig et al. 2020, "Investigating Gender Bias in Language Models Using Causal Mediation Analysis"; Meng et al.
    2022, "Locating and Editing Factual Associations in GPT".
    """

    def __init__(
        self,
        source: Source,
        layers: Layers = None,
        heads: Heads = None,
        part: PatchedPart = "output",
        queries: Positions = None,
        keys: Positions = None,
        *,
        positions: Pairs | None = None,
    ) -> None:
        super().__init__(layers, heads, queries)
        who = type(self).__name__
        if not isinstance(part, str) or part not in get_args(PatchedPart):
            raise ClearheadError(f"{who}: part is {part!r:.60}; expected one of {listed(get_args(PatchedPart))}.")
        if keys is not None and part not in ("key", "value"):
            raise ClearheadError(f"{who}: keys choose positions of part='key' and part='value'; this is part={part!r}.")
        self.source, self.part = FromRun(source, who), part
        self.keys = checked_positions(keys, f"{who}: keys")
        self.positions = None if positions is None else _pairs(positions, who)
        if self.positions is not None and part == "weights":
            raise ClearheadError(f"{who}: weights are of all keys of a text; positions=… is for the other parts.")
        if self.positions is not None and self.queries is None and part in ("query", "output"):
            self.queries = tuple(self.positions)
        if part == "weights" and isinstance(self.source.source, Tensor):
            _check_weights(self.source.source, who)

    def acts(self, spot: Spot) -> bool:
        return self.part == "weights" or bool(self._places(spot)[0])

    def before(self, problem: Problem, spot: Spot) -> Problem:
        if self.part == "weights":
            return self._weighted(problem, spot)
        if self.part == "output":
            return problem
        if self.part != "query":
            problem = _by_head(problem)  # the source may have more key heads than this run
        tensor = {"query": problem.query, "key": problem.key, "value": problem.value}[self.part]
        if tensor is None:
            return problem
        here, there = self._places(spot)
        new = tensor.clone()
        new[:, :, here] = self.source.taken(self.part, spot, tensor, there)
        if self.part == "value":
            return problem._replace(value=new)
        scores = problem.scores
        return problem._replace(scores=scores._replace(query=new) if self.part == "query" else scores._replace(key=new))

    def after(self, output: Tensor, spot: Spot) -> Tensor:
        if self.part != "output":
            factor = self.frozen_factor(spot)
            return output if factor is None else output * factor.unsqueeze(-1).to(output.dtype)
        known = self._positions(spot)
        here = [n for n, row in enumerate(spot.rows) if row in known]
        new = output.clone()
        new[:, :, here] = self.source.taken("output", spot, output, [known[spot.rows[n]] for n in here])
        return new

    def frozen_factor(self, spot: Spot) -> Tensor | None:
        """The factors of weights that are the source's, (B or 1, h, q), where the source itself was edited."""
        factor = self.source.call(spot.site).factor if self.part == "weights" and self.source.call_of else None
        if factor is None:
            return None
        rows = [row - spot.queries.start for row in spot.rows]
        return factor[:, spot.heads.start : spot.heads.stop][:, :, rows]

    def _positions(self, spot: Spot) -> dict[int, int]:
        """The positions of this call that have a partner in the source, with their partners."""
        places = spot.queries if self.part in ("query", "output") else range(spot.keys.start, spot.newest)
        if self.positions is None:
            length = self.source.length(self.part, spot.site)  # type: ignore[arg-type]
            if places.start == 0 and len(places) != length and len(spot.queries) > 1:
                raise ShapeError(
                    f"{type(self).__name__}: the source's {self.part} has {length} positions, and this run has "
                    f"{len(places)}. Pass positions=([of this text], [of the source]), as ch.models.match_tokens gives."
                )
            return {place: place for place in places if place < length}
        return {place: self.positions[place] for place in places if place in self.positions}

    def _places(self, spot: Spot) -> tuple[list[int], list[int]]:
        """The chosen places among the rows or the keys of the call, and their positions in the source."""
        by_query = self.part in ("query", "output")
        start, selected = (spot.queries.start, self.queries) if by_query else (spot.keys.start, self.keys)
        total = spot.queries.stop if by_query else spot.newest
        wanted = chosen(selected, range(total), total)
        pairs = [(place - start, other) for place, other in self._positions(spot).items() if wanted[place]]
        if self.part in ("query", "key") and self.source.call_of and spot.turner is not None:
            moved = [(place + start, other) for place, other in pairs if place + start != other]
            turned = turned_by(spot.turner) if moved else ""  # it looks at every module
            if turned:
                raise UnsupportedError(
                    f"{type(self).__name__}: the model turns queries and keys by their position ({turned}), and "
                    f"positions=… pairs position {moved[0][0]} with position {moved[0][1]} of the source. Pass "
                    "part='value' or part='output', or a tensor (B, H, L, E), turned for the positions of this text."
                )
        return [place for place, _ in pairs], [other for _, other in pairs]

    def _weighted(self, problem: Problem, spot: Spot) -> Problem:
        """The problem whose weights are those of the source."""
        sizes = problem.sizes
        if isinstance(self.source.source, Tensor):
            name = f"{type(self).__name__}: source"
            weights = spot.tensor(self.source.source, name).to(problem.query)
            return of_weights(problem, weights)._replace(visible=None)
        call = self.source.call(spot.site)
        theirs = call.problem
        whole = (sizes.batch, spot.all_heads, sizes.queries, sizes.keys)
        if theirs.sizes.shape != whole:
            raise ShapeError(
                f"{type(self).__name__}: the source's weights of {call.layer} are {theirs.sizes.shape} (B, H, Lq, Lk), "
                f"and this call's are {whole}. Pass a run on as many texts of the same length."
            )
        theirs = theirs._replace(value=None, sizes=theirs.sizes._replace(leading=None))
        own = cut(theirs, Region(heads=slice(spot.heads.start, spot.heads.stop)))
        if own.groups != problem.groups:
            own, problem = _by_head(own), _by_head(problem)
        return problem._replace(
            scores=own.scores, visible=own.visible, bias=own.bias, sinks=own.sinks, poison=own.poison
        )


class Freeze(Patch):
    """Some heads have the weights that they had in another run, over the values of this run.

    >>> import torch, clearhead as ch
    >>> block, x, other = ch.nn.DotProductAttention(), torch.rand(1, 4, 10, 8), torch.rand(1, 4, 10, 8)
    >>> with ch.watch(block) as seen:
    ...     before = block(other, other, other)
    >>> with ch.edit(block, ch.edits.Freeze(seen)):
    ...     output = block(x, x, x)
    >>> torch.allclose(output, seen[0].weights.dense() @ x, atol=1e-6)
    True

    It is `Patch(source, part="weights")`. Its inverse, the values of another run under the weights of this one, is
    `Patch(source, part="value")`. `source`: a `Recording` of `watch(model)`, of one run, one of its calls, or weights
    (B, H, Lq, Lk) whose rows sum to 1. `layers`, `heads`, `queries`: see `Edit`.
    """

    def __init__(self, source: Source, layers: Layers = None, heads: Heads = None, queries: Positions = None) -> None:
        super().__init__(source, layers, heads, "weights", queries)


def _by_head(problem: Problem) -> Problem:
    """The problem with a key and a value of every query head: those of a group may be replaced by different ones."""
    if problem.groups == 1:
        return problem
    value = None if problem.value is None else problem.value.repeat_interleave(problem.groups, 1)
    key = problem.key.repeat_interleave(problem.groups, 1)
    return problem._replace(scores=problem.scores._replace(key=key), value=value)


def _pairs(positions: Any, who: str) -> dict[int, int]:
    """The positions of the source by those of this text."""
    sides = [items_of(side) for side in items_of(positions)]
    if len(sides) == 2 and all(is_number(n) and n >= 0 for side in sides for n in side):
        mine, theirs = sides
        if len(mine) == len(theirs) == len(set(mine)) and mine:
            return dict(zip(mine, theirs, strict=True))
    raise ClearheadError(
        f"{who}: positions is {positions!r:.60}; expected two lists of equal length, ([of this text], [of the source]),"
        " of numbers from 0 on, each position of this text once."
    )


def _check_weights(weights: Tensor, who: str) -> None:
    sums = weights.double().sum(-1)
    near = ((sums - 1).abs() <= 1e-3) | (sums == 0)
    if bool((weights < 0).any()) or not bool(near.all()):
        raise ClearheadError(
            f"{who}: source has shape {tuple(weights.shape)} as weights, and its rows sum to {float(sums.min()):.3g} … "
            f"{float(sums.max()):.3g}; expected rows of numbers from 0 on that sum to 1, or to 0."
        )
