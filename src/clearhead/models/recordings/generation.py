"""The calls of one module, step by step of a generation, and their join into one matrix."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, SupportsIndex, overload

import torch
from torch import Tensor

from clearhead.base.arrays import Array
from clearhead.base.errors import ClearheadError
from clearhead.base.managers import caller
from clearhead.base.output.text import brief, listed
from clearhead.base.output.words import ids_of
from clearhead.base.torch_state.versions import Versions, bits
from clearhead.biases.base import Added
from clearhead.inspection.source import FromRecord
from clearhead.inspection.weights import Weights
from clearhead.models.recordings.attention_call import AttentionCall, CallInputs, CallResult
from clearhead.models.recordings.cached import Cached, alone
from clearhead.models.recordings.call import Outcome
from clearhead.models.recordings.equal_keys import equal
from clearhead.models.recordings.generation_steps import Placed, Step, join_padding, join_spans, refuse_join
from clearhead.models.recordings.weights import weights_of
from clearhead.problem._recorded import RecordedMask
from clearhead.problem.record import Record
from clearhead.problem.visible import visible


class Generation(list[AttentionCall]):
    """The calls of a module in order, as `seen[name]` gives them: a list, which can be joined.

    >>> import torch, torch.nn.functional as F, clearhead as ch
    >>> class Block(torch.nn.Module):
    ...     def forward(self, x, past):
    ...         keys = torch.cat([past, x], 2)
    ...         return F.scaled_dot_product_attention(x, keys, keys, is_causal=x.shape[2] > 1), keys
    >>> block, past = Block(), torch.rand(1, 4, 0, 8)
    >>> with ch.watch(block) as seen:
    ...     for length in (5, 1, 1):
    ...         output, past = block(torch.rand(1, 4, length, 8), past)
    >>> [tuple(call.weights.shape) for call in seen["Block"]]
    [(1, 4, 5, 5), (1, 4, 1, 6), (1, 4, 1, 7)]
    >>> seen["Block"].joined().shape
    torch.Size([1, 4, 7, 7])
    """

    def joined(self, sequences: Array | None = None) -> Weights:
        """All steps of a generation as one lazy matrix, as a forward over the final sequence would give it.

        The generation is the last one among these calls: the last call, and the calls whose keys it continues. Where
        several took turns, `seen[name][:n].joined()` is the one that made call n − 1. A call that computes all keys
        again (`use_cache=False`) continues none, and is joined to none. Each step's queries are rows of the matrix.
        `sequences`: the ids that `generate` returned, (N, L) or (L,). Then row i of the batch is sequences[i], found by
        the tokens that the model read; of one beam that ended early, its own steps are joined. None: row i is what row
        i of the last step continues, where beams were reordered too. Beam search returns its sequences in another
        order, that of their scores, so a warning asks for `sequences` there.
        Rejected tokens have no rows: those in whose places a later step read others, and, in the last step, those that
        the model's cache dropped after it, by `crop`. With `sequences` the rows end where the sequences end. Masks,
        biases and padding are those of each step, placed at its keys; the empty slots of a static cache are left out.
        In cross attention all steps see the same keys. Keys that a window had dropped before the first recorded call
        have no columns: see `positions`.
        Formula: row i is the row of the step that had query i, its keys at their places in the sequence.
        Gives `Weights` (B, H, Lq, Lk): Lk counts all keys that the cache ever held, Lq the queries of these calls.
        Raises a `ClearheadError` for calls of several modules; where earlier keys were changed, as quantised caches do;
        where steps are missing; where beams cannot be told apart, because in each watched layer a window has dropped
        all keys in which they differ; where scales, softcaps or sinks differ; for `sequences` that no row has
        read; and for one that rows of several inputs have read, where not all sequences are given in their order.
        Cost: a copy of the queries, of the keys, and of the values that were kept, once.
        """
        if sequences is None:
            call = joined_call(self)
            warn_of_beams(self[-1].cached_key)
        else:
            call = joined_call(*found_rows(self, sequences))
        said: dict[str, Any] = {"score": call.score, "mask": call.mask}
        if self[-1].cached_key.chain.first:  # a window had dropped keys before the first recorded call
            starts = (side.start for side in self.positions)
            places = zip(("queries", "keys"), starts, call.shape[2:], strict=True)
            said |= {name: f"{start} … {start + length - 1}" for name, start, length in places}
        return weights_of(FromRecord(call.record, said), call.padding, call.factor)

    @property
    def positions(self) -> tuple[range, range]:
        """Where the queries and the keys of `joined()` stand in the whole sequence, as the model's cache counts it.

        In a recording that was read from a file, both are counted from the first key that it holds.
        """
        return _places(_steps(self))

    @overload
    def __getitem__(self, which: SupportsIndex) -> AttentionCall: ...

    @overload
    def __getitem__(self, which: slice) -> Generation: ...

    def __getitem__(self, which: Any) -> Any:
        found = super().__getitem__(which)
        return Generation(found) if isinstance(which, slice) else found


def joined_call(calls: Sequence[AttentionCall], rows: Tensor | None = None, stop: int | None = None) -> AttentionCall:
    """All steps of a generation as one call; values are joined too, where they were kept. `rows`: of the last step;
    None is all. `stop`: see `_steps`."""
    names = dict.fromkeys(call.name for call in calls)
    if len(names) != 1:
        raise ClearheadError(f"joined: these are calls of {listed(names)}; pass the name of one, seen[name].joined().")
    steps = [step.only(rows) for step in _steps(calls, stop)]
    last, call, keys = steps[-1], steps[-1].call, steps[-1].end
    for step in steps[:-1]:
        _check_alike(step, last)
    sizes = last.problem.sizes._replace(queries=sum(step.queries for step in steps), keys=keys)
    sizes = sizes if rows is None else sizes._replace(batch=len(rows))
    if call.kind == "self":  # the last step may stand before the empty slots of a cache
        sizes = sizes._replace(align="lower_right")
    scores = last.problem.scores._replace(
        query=torch.cat([step.of_queries(step.problem.query) for step in steps], 2),
        key=last.of_rows(call.cached_key.between(0, keys)),
    )
    spans = join_spans(steps, sizes)
    bias, biases = None, [(step.problem.bias, step.problem.sizes) for step in steps]
    if any(one is not None for one, _ in biases):
        tiles = [None if one is None else partial(one.tile, sizes=its) for one, its in biases]
        bias = Added(function=Placed(steps, tiles, 0.0, sizes.shape).part)
    problem = last.problem._replace(scores=scores, sizes=sizes, visible=visible(spans, sizes), bias=bias)
    value = call.cached_value
    inputs = CallInputs(
        torch.cat([step.of_queries(step.call.query) for step in steps], 2),
        alone(scores.key),
        call.score,
        RecordedMask(spans, sizes),
        Record(problem, Versions(()), copied=True),
        None if value is None else alone(last.of_rows(value.between(0, keys))),
        padding=join_padding(steps, keys),
        ids=_read(steps),
    )
    edited = any(step.call.edited for step in steps)
    result = CallResult(None if value is None else Outcome(), _factor(steps), edited)
    begins = tuple(itertools.accumulate((step.queries for step in steps[:-1]), initial=0))
    return AttentionCall(inputs, result, call.context._replace(origin=None, begins=begins))


def warn_of_beams(newest: Cached, every: Sequence[Cached] = ()) -> None:
    """Warn where row i need not be sequence i of those that `generate` returned.

    Rows were reordered, or they began with the same keys in all of `every`, the newest keys of each module, and differ
    now: the last step may have been followed by another order.
    """
    before = newest.before()
    moved = any(link.parents is not None for link, _ in before)
    if not moved and every and len(before) > 1:
        alike = torch.stack([_as_the_next(one.before()[-1][0].new) for one in every]).all(0)
        moved = bool((alike & ~_as_the_next(newest.between(0, newest.link.filled))).any())
    if moved:
        caller().warn(
            "joined: these rows are beams, or samples of one prompt, and beam search returns its sequences in another "
            "order. Pass the ids that generate returned, joined(sequences): then row i is sequences[i]."
        )


def _as_the_next(keys: Tensor) -> Tensor:
    """Whether each row but the last has the keys of the next one, (B − 1,): beams of one prompt are neighbours."""
    same = bits(keys)
    return (same[1:] == same[:-1]).flatten(1).all(1)


def found_rows(calls: Sequence[AttentionCall], sequences: Array) -> tuple[Sequence[AttentionCall], Tensor, int]:
    """The calls to join, the row of the last one that has read each of the `sequences`, and the place where the
    tokens that it has read of them end.

    A beam that has ended is continued by no row of later steps: then the calls are those up to its own last step.
    """
    ids = ids_of(sequences)
    if ids is None or not ids.numel():
        raise ClearheadError(
            f"joined: sequences is {brief(sequences)}; expected the ids that generate returned, integers (N, L)."
        )
    for count in range(len(calls), 0, -1) if len(ids) == 1 else (len(calls),):
        found = _rows(calls[:count], ids.cpu())
        if found is not None:
            return calls[:count], *found
    raise ClearheadError(
        f"joined: sequences are {len(ids)} of {ids.shape[1]} tokens, and not each is the text of a row of "
        f"{calls[-1].name}. Where a beam ended early, join it alone, without padding: joined(sequences[i, :length])."
    )


def _rows(calls: Sequence[AttentionCall], ids: Tensor) -> tuple[Tensor, int] | None:
    """The row of the last call that has read each sequence of `ids`, and the place where what was read of them ends;
    None where one was read by none."""
    steps = _steps(calls, sys.maxsize)
    read = _read(steps)
    if read is None:
        raise ClearheadError(
            f"joined: which tokens {calls[-1].name} has read is not known: it had no input_ids, or the recording is "
            "from a file. Leave sequences out, and take the rows out.beam_indices[:, -1]."
        )
    own = read.cpu()
    start, sure = _places(steps)[0].start, own.shape[1] - steps[-1].queries
    ids = ids[:, start:]
    if len(ids) > len(own):
        return None
    # the last token of a text need not have been read, and the last step may have read others that were rejected
    for length in range(min(own.shape[1], ids.shape[1]), max(sure, ids.shape[1] - 2), -1):
        same = (own[None, :, :length] == ids[:, None, :length]).all(-1)
        if bool(same.any(1).all()):
            rows = _one_of_each(same, steps[-1]).to(calls[-1].query.device)
            return rows, (steps[0].link.query or 0) + length
    return None


def _one_of_each(same: Tensor, last: Step) -> Tensor:
    """The row of each sequence, (N,), where several rows may have its text. `same`: bool (N, B), on the CPU.

    Encoders may have read other texts for rows that answer the same. `generate` keeps the order of its inputs: of N
    sequences and B rows, each in `parts` equal parts, the sequences of a part are of the rows of that part.
    """
    count, batch = same.shape
    parts = math.gcd(count, batch)
    sequences, rows = (torch.arange(n, dtype=torch.int64, device=same.device) for n in (count, batch))
    part = sequences[:, None] * parts // count == rows * parts // batch
    same = torch.where((same & part).any(1, keepdim=True), same & part, same)
    first = same.int().argmax(1)
    sequence, row = same.nonzero().unbind(1)
    if bool((row != first[sequence]).any()):
        keys = last.call.cached_key.between(0, last.end).flatten(1).float()
        apart = (keys[row] - keys[first[sequence]]).abs().amax(1).cpu()
        near = torch.finfo(last.call.query.dtype).eps ** 0.5 * float(keys.abs().max())
        if bool((apart > near).any()):
            at = int(sequence[(apart > near).nonzero()[0]])
            raise ClearheadError(
                f"joined: sequence {at} is the text of several rows of {last.call.name} whose keys differ. Pass all "
                "sequences, in the order in which generate returned them; or generate for this input alone."
            )
    return first


def _read(steps: list[Step]) -> Tensor | None:
    """The tokens that the rows have read, (B, Lq); None where a step's are not known."""
    known = [step.of_rows(step.call.ids)[:, : step.queries] for step in steps if step.call.ids is not None]
    return torch.cat(known, 1) if len(known) == len(steps) else None


def _places(steps: list[Step]) -> tuple[range, range]:
    """Where the rows and the columns of the joined matrix stand in the whole sequence."""
    first = steps[-1].call.cached_key.chain.first
    start = first + (steps[0].link.query or 0)
    return range(start, start + sum(step.queries for step in steps)), range(first, first + steps[-1].end)


def _factor(steps: list[Step]) -> Tensor | None:
    """The factor by which an edit multiplied each row; None where no edit did."""
    known = next((step.call.factor for step in steps if step.call.factor is not None), None)
    if known is None:
        return None
    sizes = [step.problem.sizes.shape[:3] for step in steps]
    given = [step.call.factor for step in steps]
    every = [known.new_ones(size) if one is None else one for one, size in zip(given, sizes, strict=True)]
    return torch.cat([step.of_queries(one) for step, one in zip(steps, every, strict=True)], 2)


def _steps(calls: Sequence[AttentionCall], stop: int | None = None) -> list[Step]:
    """The last call and the calls that it continues, in order. `stop`: the place of the first token that is not in the
    text; None: that of the first one that was rejected."""
    last = calls[-1]
    newest, chain = last.cached_key, last.cached_key.chain
    mine = {call.cached_key.number: call for call in calls if chain.has(call.cached_key)}
    first = chain.links[0]
    if last.kind == "self" and first.query and not chain.has(calls[0].cached_key) and 0 in mine:
        refuse_join(
            last.name,
            f"its keys of {first.query} positions before a step are not those that it had at the step before",
            "A quantised cache changes them: use another cache, or join those from there on: seen[name][n:].joined()",
        )
    steps: list[Step] = []
    moved = any(link.parents is not None for link in chain.links[: newest.number + 1])
    end = newest.link.filled
    for number, (link, rows) in zip(range(newest.number, -1, -1), newest.before(), strict=True):
        call = mine.pop(number, None)
        if call is None:
            if mine and number > min(mine):
                refuse_join(last.name, f"step {number} is not among these calls", "Pass all of its calls: seen[name]")
            break
        count = call.query.shape[2]
        if steps:
            upto = steps[-1].link.query
            if link.query is None or upto is None:
                refuse_join(last.name, "no self attention was recorded beside it", "Watch all layers, without layers=")
            if last.kind == "self" and link.query + count < upto:
                missing = f"the queries of positions {link.query + count} … {upto - 1} are not in the recording"
                refuse_join(last.name, missing, "Watch every run of the model, without every=")
            count, end = max(min(count, upto - link.query), 0), min(end, upto)
        else:
            more = link.rejected if stop is None else (link.query or 0) + count - stop
            more = max(min(more, count - 1), 0)
            count, end = count - more, end - more
        if count:
            steps.append(Step(call, link, rows, count, newest.link.length if last.kind == "cross" else end))
        if moved and number and _unsure(call.cached_key, rows):
            alike = f"at step {number} beams had the same keys in the window, and others before it"
            refuse_join(last.name, alike, "Watch all layers, or look at each step by itself: seen[name][i].weights")
    return steps[::-1]


def _unsure(cached: Cached, rows: Tensor | None) -> bool:
    """Whether these rows may continue several rows of the step before that differ in keys a window has dropped."""
    may = cached.link.rows
    if may is None or not cached.link.base:
        return False
    may = may if rows is None else may[rows]
    several = may[may.sum(1) > 1]
    if not len(several):
        return False
    past = Cached(cached.chain, cached.number - 1).between(0, cached.link.base)
    firsts = several.int().argmax(1).tolist()
    return any(not equal(past[firsts[row]][None], past[of][None]) for row, of in several.nonzero().tolist())


def _check_alike(step: Step, last: Step) -> None:
    """Raise where two steps would not be computed alike."""
    one, other = step.problem, last.problem
    for name in ("heads", "phi", "scale", "softcap"):
        sides = (one.sizes, other.sizes) if name == "heads" else (one.lowered, other.lowered)
        mine, theirs = (getattr(side, name, None) for side in sides)
        if mine != theirs:
            refuse_join(step.call.name, f"one has {name} {mine}, a later one {theirs}", "Join those that have the same")
    if one.lowered is None or one.lowered.weight is not None or other.lowered is None:
        refuse_join(
            step.call.name, f"{type(step.call.score).__name__} is no dot product", "Look at each step's weights"
        )
    sinks = one.sinks, other.sinks
    if (sinks[0] is None) != (sinks[1] is None) or (sinks[0] is not None and not torch.equal(*sinks)):  # type: ignore[arg-type]
        refuse_join(step.call.name, "their sinks are not the same", "Join those that have the same")
