"""The recorder, which makes a record of each call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from clearhead._attention import Arguments
from clearhead.base.errors import ClearheadError, UnsupportedError
from clearhead.base.shapes import Sizes
from clearhead.base.torch_state.active import any_autocast
from clearhead.base.torch_state.contexts import without_autocast, without_function_modes
from clearhead.base.torch_state.mode import get_mode
from clearhead.biases.base import Bias
from clearhead.inspection.deviation import Deviation, measure_deviation
from clearhead.inspection.reductions.by_query import Output
from clearhead.masks.base import Mask
from clearhead.models.edits.changed import Change
from clearhead.models.edits.edit import change_of, editing, unmasked
from clearhead.models.edits.recorded import edited
from clearhead.models.edits.spot import Unmasked
from clearhead.models.interception.handler import ModelHandler
from clearhead.models.interception.intercepted_call import InterceptedCall, of_one_dtype
from clearhead.models.interception.keywords import MASKED, NAME, dot
from clearhead.models.interception.layers import Site
from clearhead.models.interception.modules import Running
from clearhead.models.interception.padding import as_said, fits
from clearhead.models.interception.padding import of_call as padding_of
from clearhead.models.interception.patch import wrappers
from clearhead.models.interception.place import Place
from clearhead.models.interception.refused import uncompiled
from clearhead.models.recorder import missed
from clearhead.models.recorder.asked import Asked
from clearhead.models.recorder.layer_notes import Origins, origin_of
from clearhead.models.recordings.attention_call import (
    AttentionCall,
    CallContext,
    CallInputs,
    CallResult,
    find_uncounted_rows,
)
from clearhead.models.recordings.cached import alone
from clearhead.models.recordings.caches import Caches, CallFacts
from clearhead.models.recordings.call import Outcome, whole_or_shape, with_key
from clearhead.models.recordings.equal_keys import comparable
from clearhead.models.recordings.reduced import ReducedCall, reduced
from clearhead.problem._recorded import RecordedMask
from clearhead.problem.arguments import as_score
from clearhead.problem.problem import Problem, make_problem, with_given
from clearhead.problem.reads import tensors_in
from clearhead.problem.record import Record, copied, frozen, now, record
from clearhead.problem.words import Words
from clearhead.scores.base import ByTile, Score
from clearhead.scores.dot import Dot

# the record of a call; its query and key, before projections of the score; and its score and mask, as they were given
Parts = tuple[Record, Tensor, Tensor, Score, Mask | None]


class Recorder(ModelHandler):
    def __init__(self, model: nn.Module, asked: Asked, padding: Tensor | None = None) -> None:
        super().__init__(model)
        self.thread = threading.get_ident() if asked.own else None
        self.left: dict[str, None] = {}  # the modules whose calls were made in other threads, and left alone
        self.calls: list[AttentionCall] = []
        self.reduced: list[ReducedCall] = []
        self.asked = asked
        self.deviations: dict[Site, Deviation | None] = {}  # of the first calls that functions of others computed
        self.missing: dict[Site, str] = {}  # the layers whose calls could not be recorded, each with the first reason
        self.undecided = ""  # why the choice of layers cannot be made, which is an error at the end
        self.padding = padding  # the argument of watch(padding=)
        self.fitted = False  # whether the padding fitted any call
        self.sizes: set[tuple[int, int]] = set()  # (batch, keys) of the calls
        self._runs: dict[int, int] = {}  # the number of each run, by the entry of the stack
        self.caches = Caches(asked.every)
        self._origins = Origins()
        self._ids: tuple[int, Any, Tensor | None] = -1, None, None  # a run, its ids, and their copy
        self.stack.notes = self._origins if asked.values and self.copies and asked.judge is None else None

    @property
    def values(self) -> bool:  # type: ignore[override]
        return self._copies_values or self.asked.fuse or editing()  # an edit of the caller's own may read values

    @property
    def idle(self) -> bool:
        """Whether nothing is to be recorded, such as in a run that was not asked for."""
        if self.elsewhere and self.stack.innermost is not None:
            self.left[self.name(None)] = None
            return True
        # gradient checkpointing runs a module again in the backward pass, with the same calls
        return self._apart() or get_mode().backward or self.run % self.asked.every > 0

    @property
    def run(self) -> int:
        """The number of this run of the model, among the runs that made a call."""
        with self._lock:
            return self._runs.setdefault(self.stack.entry, len(self._runs))

    @property
    def copies(self) -> bool:
        """Whether query and key are kept. Otherwise the call is reduced before they can be written to."""
        return self.asked.keep is None and self.asked.each is None

    @property
    def _copies_values(self) -> bool:
        return self.asked.values or self.asked.gradients

    def begin(self, read: Callable[[], InterceptedCall]) -> InterceptedCall | None:
        """Leave a call out that cannot be recorded: a recorder never ends the run that it records. A function that runs
        the model itself needs every layer, so there the error is raised."""
        self.inside.site, call = None, None
        try:
            call = read()
            call.instead = self.before(call)
        except Exception as error:
            if self.asked.own:
                raise
            self._leave_out(self.inside.site or self.site(None), error)
        return call

    def _leave_out(self, site: Site, error: Exception) -> None:
        try:
            if not self.asked.chooses(site):
                return
        except ClearheadError as undecided:
            self.undecided = str(undecided)
        self.missing.setdefault(site, missed.reason(error))

    def before(self, call: InterceptedCall) -> Any:
        self.check(call.query, call.key, call)
        site = self.site(call)
        if not self.asked.chooses(site):
            return None
        if call.dropout_p and self.asked.gradients:
            raise UnsupportedError(
                f"{site.name} was called with dropout {call.dropout_p}, and gradients=True is of weights before "
                "dropout: the two do not belong together. Pass model.eval(), or set the model's attention dropout to 0."
            )
        if call.problem is not None and call.arguments is not None:
            return self._keep(call, site, read(call.problem, call.arguments, self.copies), None)
        with without_function_modes():  # else the watch's function mode would see each operation here
            query, key, _ = of_one_dtype(call.query.detach(), call.key.detach())
            query = copied(query) if self.copies else query
            masks, score = call.masks, call.score
            sinks = None if call.sinks is None else call.sinks.detach().clone()
            problem = masks.problem(query, key, score, sinks)
            if masks.align is None and site.kind == "self":
                sizes, in_use = problem.sizes, filled(problem, masks.uniform, self.innermost)
                if in_use < sizes.keys:  # empty slots of a static cache stand behind the last query
                    problem = problem._replace(sizes=sizes._replace(align=max(in_use - sizes.queries, 0)))
        return self._keep(call, site, (now(problem), query, problem.key, score, masks.mask), masks.uniform)

    def _change(self, call: InterceptedCall, site: Site, problem: Problem, unmasked: Unmasked | None) -> Change | None:
        """The change that an edit makes to this call; None where no edit changes it."""
        if not editing():
            return None
        names = self.stack.names
        module = next((number for number in names if names[number] == site.name), id(self.innermost.module))
        value = None if call.value is None else call.value.detach().to(problem.query.dtype)
        return change_of(module, problem._replace(value=value), call.dropout_p, unmasked, site.kind)

    def _keep(self, given: InterceptedCall, site: Site, parts: Parts, uniform: Tensor | None) -> Any:
        """Keep a call, as its edits change it. Gives the call's result where the statistics have computed it."""
        record, query, key, score, mask = parts
        innermost, place, dropped = self.innermost, given.place, bool(given.dropout_p)
        value = given.value if self._copies_values else None
        change = self._change(given, site, record.problem, unmasked(query, uniform))
        backend = NAME if given.backend == MASKED else given.backend
        problem, name, kind = record.problem, site.name, site.kind
        sizes = problem.sizes
        in_use = sizes.keys if kind == "cross" else filled(problem, uniform, innermost)
        padding = padding_of(innermost.told, kind, problem, uniform, in_use, infers=self.asked.judge is None)
        if self.padding is not None and fits(self.padding, kind, sizes):
            self.fitted = True
            own = innermost.told.own
            knows_more = own is not None and own.shape[1] > self.padding.shape[1]  # a generation's mask grows with it
            if not (knows_more or (kind == "self" and self._decodes(name))):
                padding = as_said(self.padding, kind, sizes, in_use)
        outcome = Outcome(dropped=dropped) if self._copies_values else None
        instead, joins = None, self.copies and key is problem.key
        if self.asked.judge is not None:  # when the call ends, and is judged, its tensors may have been written to
            with without_function_modes():
                keys, values = alone(copied(key)), None if value is None else alone(copied(value))
        elif not self.copies:
            keys, values = alone(key), None if value is None else alone(value)
        else:
            tokens = innermost.tokens if kind == "self" else None
            steps = CallFacts(kind, self.run, sizes.queries, in_use, joins, tokens, innermost.cache)
            with without_function_modes():
                keys, values = self.caches.add(name, steps, key, value, fresh=given.arguments is not None)
        if joins:
            record = record._replace(problem=with_key(problem, whole_or_shape(keys)))
        origin = given.origin or origin_of(innermost)
        ids, windows = self._tokens(innermost.ids, sizes), self.stack.windows_of(sizes.batch)
        call = AttentionCall(
            CallInputs(query, keys, score, mask, record, values, uniform, padding, ids),
            CallResult(outcome),
            CallContext(name, kind, backend, site.layer, self.run, origin, windows_of=windows),
        )
        if change is not None:
            call = self._edited(call, change, joins)
        if outcome is not None and origin is not None:
            self._origins.made(outcome, origin)
        self.sizes.add((sizes.batch, sizes.keys))
        if self.asked.each is not None:
            with without_function_modes(), self.inside:
                self.asked.each(call)
        elif self.asked.keep is None:
            if self.asked.judge is None:
                self.calls.append(call)
        else:
            with without_function_modes(), self.inside:  # a reduction of the caller's own may compute attention
                value = _fused_value(given, padding) if self.asked.fuse else None
                if value is None or place is None:
                    found = reduced(call, self.asked.keep, self.asked.heads)
                else:
                    both = reduced(call, (*self.asked.keep, Output(value)))
                    found = replace(both, reductions=both.reductions[:-1], results=both.results[:-1])
                    output: Any = both.results[-1]
                    instead = place.made(output.to(value.dtype))
            if self.asked.merge is None:
                self.reduced.append(found)
            else:
                self.asked.merge.add(found)
        looks: list[Callable[[Any], None]] = []
        if outcome is not None and self.copies:
            looks.append(outcome.of(place, self.asked.gradients))
        if self.asked.judge is not None:
            looks.append(uncompiled(partial(self._judge, call, self.asked.judge)))
        compares = self.asked.judge is None and change is None and not dropped and site not in self.deviations
        if compares and given.foreign:
            looks.append(uncompiled(partial(self._compare, site, call, place, given.value)))
        given.state = (site, looks) if looks else None
        return instead

    def after(self, call: InterceptedCall, result: Any) -> Any:
        if call.state is None:
            return result
        site, looks = call.state
        try:
            for look in looks:
                look(result)
        except Exception as error:
            if self.asked.own:
                raise
            self._leave_out(site, error)
        return result

    def _judge(self, call: AttentionCall, judge: Callable[[AttentionCall], None], _: Any) -> None:
        with without_function_modes(), self.inside, without_autocast(call.query.device):
            judge(call)

    def _compare(self, site: Site, call: AttentionCall, place: Place | None, value: Tensor | None, result: Any) -> None:
        """Compare a result with the record: what the function of another project adds is not known."""
        output = None if place is None else place.by_head(place.tensor(result))
        self.deviations[site] = None
        if output is not None and value is not None:
            with without_function_modes(), self.inside, without_autocast(output.device):
                call.record.check()
                rows = find_uncounted_rows(call)
                self.deviations[site] = measure_deviation(call.problem, value.detach(), output.detach(), rows)

    def _tokens(self, given: Any, sizes: Sizes) -> Tensor | None:
        """A copy of the ids that the model was given, (B, Lq), one for the layers of a run; None without ids."""
        if not self.copies or type(given) is not Tensor or given.shape != (sizes.batch, sizes.queries):
            return None
        run, known, ids = self._ids
        if run != self.run or known is not given:
            with without_function_modes():
                ids = copied(given) if comparable(given) else None
            self._ids = self.run, given, ids
        return ids

    def _edited(self, call: AttentionCall, change: Change, joins: bool) -> AttentionCall:
        """The call with the changes of an edit. `joins`: its key is of a chain of keys, which no edit changes."""
        with without_function_modes(), self.inside, change.inside:  # an edit of one's own may compute attention
            ran = edited(change, call.score, call.query, call.uniform, call.name, self._copies_values)
        problem, mask = ran.problem, call.mask
        if problem.visible is not change.problem.visible and problem.spans is not None:
            said = "no mask" if mask is None else mask.title()
            mask = RecordedMask(problem.spans, problem.sizes, f"{said}, edited")
        unedited = None
        if self.copies:  # its output is not the backend's: it is computed where it is looked at
            outcome = None if call.outcome is None else Outcome(dropped=call.outcome.dropped)
            unedited = AttentionCall(call.inputs, CallResult(outcome), call.context)
        inputs = call.inputs._replace(
            query=ran.query,
            mask=mask,
            record=now(with_key(problem, call.inputs.record.problem.key) if joins else problem),
            uniform=ran.uniform,
            cached_value=call.cached_value if ran.value is None else alone(ran.value),
        )
        return AttentionCall(inputs, CallResult(call.outcome, ran.factor, True, unedited), call.context)

    def _decodes(self, name: str) -> bool:
        """Whether a module belongs to the decoder of an encoder–decoder: its own sequence is not the padded one."""
        config = getattr(self.stack.model, "config", None)
        return bool(getattr(config, "is_encoder_decoder", False)) and "decoder" in name.split(".")


def _fused_value(call: InterceptedCall, padding: Words | None) -> Tensor | None:
    """The value of a call whose output can be computed in the same pass as its statistics; None for other calls.

    None is returned where the call has gradients, dropout, or a dtype that autocast chooses; with padding, which
    statistics leave out; where the same function also computes a projection of the output; on a backend, or by a
    function of another project, that may give more, or other, outputs; and where another handler looks at the model's
    calls, since the call would not be made.
    """
    query, key, value = call.query, call.key, call.value
    if value is None or call.dropout_p or padding is not None or any_autocast() or call.foreign:
        return None
    if type(call.place) is not Place or call.backend not in ("sdpa", NAME, MASKED) or wrappers() > 1:
        return None
    if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)):
        return None
    return value.detach() if query.dtype == key.dtype == value.dtype else None


def filled(problem: Problem, uniform: Tensor | None, running: Running) -> int:
    """The number of keys in use. A static cache has empty slots after them, and the last key of a sparse mask may be
    any of them: so the cache's count and the model's positions are read too."""
    keys, queries, align = problem.sizes.keys, problem.sizes.queries, problem.sizes.align
    if problem.edges is None or queries >= keys:
        return keys
    stop = problem.edges[1]
    if uniform is not None:  # queries with uniform weights see the empty slots too
        stop = np.where(uniform[..., 0].cpu().numpy(), 0, stop)
    if isinstance(align, int | Tensor):
        counted = queries + int(torch.as_tensor(align).max())
    else:
        counted = running.tokens or running.reached(queries)
    return max(int(stop.max(initial=0)), min(counted, keys)) or keys


def read(problem: Problem, call: Arguments, copy: bool) -> Parts:
    """The record and the parts of a call of clearhead's own attention."""
    kept = record(problem._replace(sizes=problem.sizes._replace(leading=None)), copy=copy)
    scores, given = kept.problem.scores, as_score(call.score)
    if not copy:
        return kept, scores.query, scores.key, given, None
    kept = kept._replace(problem=_with_bias(kept.problem, call))
    if isinstance(scores, ByTile):
        return kept, scores.query, scores.key, scores.score, _mask(call.mask, kept.problem)
    if isinstance(given, Dot):
        return kept, scores.query, scores.key, dot(scores.scale, scores.softcap), _mask(call.mask, kept.problem)
    # the inputs of its projections, of the dtype that autocast gave them
    written = make_problem(call.query, call.key, call.value, score=given, scale=call.scale, as_written=True).scores
    query, key = (t.detach().to(problem.query.dtype, copy=True) for t in (written.query, written.key))
    return kept, query, key, frozen(given), _mask(call.mask, kept.problem)


def _mask(given: Any, problem: Problem) -> Mask | None:
    """A copy of the given mask, or its spans where the mask holds a matrix; None where it is only a bias."""
    if problem.spans is None:
        return None
    few = 4 * (problem.sizes.queries + problem.sizes.keys) * problem.sizes.batch
    if isinstance(given, Mask) and _numbers_in(given) <= few:
        return deepcopy(given)
    return RecordedMask(problem.spans, problem.sizes)


def _with_bias(problem: Problem, call: Arguments) -> Problem:
    """The problem with a copy of the given bias, if the bias has steps to show and is no larger than query and key."""
    added = with_given(problem, call.bias, call.mask).bias
    given = None if added is None else added.given
    if added is None or given is None or type(given).steps is Bias.steps or problem.by_function:
        return problem
    if _numbers_in(given) > problem.query.numel() + problem.key.numel():
        return problem
    return problem._replace(bias=added._replace(given=frozen(given)))


def _numbers_in(given: Any) -> int:
    return sum(tensor.numel() for tensor in tensors_in(given))
