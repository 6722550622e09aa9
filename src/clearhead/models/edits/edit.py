"""edit(): change some heads and queries of a model's attention, while its own backend stays in place."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils import checkpoint

from clearhead.base.errors import ClearheadError, UnsupportedError
from clearhead.base.managers import Managed, Uninterrupted
from clearhead.base.torch_state.contexts import without_function_modes
from clearhead.base.torch_state.mode import get_mode
from clearhead.base.torch_state.torch_private import generator_of_checkpoints
from clearhead.models.edits.base import Edit
from clearhead.models.edits.changed import Change, Part, changed
from clearhead.models.edits.recorded import RanEdited, with_weights
from clearhead.models.edits.spot import Spot, Unmasked, spot_of
from clearhead.models.interception.choice import check_layers, chosen, made_by
from clearhead.models.interception.handler import ModelHandler
from clearhead.models.interception.intercept import intercept
from clearhead.models.interception.intercepted_call import InterceptedCall, of_one_dtype
from clearhead.models.interception.layers import Site
from clearhead.models.interception.modules import Kind
from clearhead.models.interception.patch import replaced
from clearhead.models.interception.refused import validate_model
from clearhead.problem.problem import Problem


def edit(model: nn.Module, *edits: Edit) -> AbstractContextManager[None]:
    """Change the attention of some heads, queries and layers of a model while it runs inside the `with`.

    >>> import torch, clearhead as ch
    >>> from transformers import LlamaConfig, LlamaModel
    >>> model = LlamaModel(LlamaConfig(vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    ...                                num_attention_heads=8, num_key_value_heads=2)).eval()
    >>> ids = torch.arange(10)[None]
    >>> cut, ablated = ch.edits.Knockout(layers=0, heads=[2, 3], queries=9, keys=0), ch.edits.ScaleHeads(1, heads=5)
    >>> with ch.edit(model, cut, ablated):
    ...     edited = model(input_ids=ids).last_hidden_state
    >>> torch.equal(edited, model(input_ids=ids).last_hidden_state)
    False

    `model`: any model that `watch` recognises; its backend stays the same. `edits`: those of `clearhead.edits`, or
    `Edit`s of your own. Several edits of one head and query are applied in their order, scores before weights before
    outputs; where one `with` stands in another, the edits of the outer one come first. The results of an edit of your
    own are checked as `attention` checks its arguments.
    The model's own function runs. Then the outputs of the changed heads and queries are computed again from the same
    query, key, value, mask and bias, and put in their place. All other outputs of the layer are the backend's, to the
    bit. Gradients flow through the outputs that were computed again. `watch`, `monitor` and `lazy_attentions`, nested
    in either order, are given the edited weights and outputs; of a recorded call, `call.unedited` is the call without
    the edit. So are the weights that the model itself returns, where the changed rows have no gradient.
    Positions are those of the whole sequence, in a prompt and in each step of a generation with any cache.
    Gradient checkpointing computes layers again in the backward pass, so the backward pass belongs inside the `with`:
    after it, `backward()` raises a `ClearheadError`.
    `torch.nn`'s Transformer layers leave their fast path here, as they do in training: outputs at padding differ.
    Raises a `ClearheadError` at the end of the `with` for an edit that changed nothing, and for a layer among its
    `layers` that made no call; where a part of the model is edited already, or the model in another thread; an
    `UnsupportedError` for a compiled model, and for a call with dropout. Where an edit has no `layers`, it warns of
    attention modules that computed a softmax in their own code, which are not changed. A softmax by hand, as exp()
    divided by its sum, goes unnoticed. Cost: the attention of the changed heads and queries is computed once more.
    """
    validate_model(model, "edit")
    wrong = [one for one in edits if not isinstance(one, Edit)]
    if wrong or not edits:
        what = repr(wrong[0])[:60] if wrong else "none"
        raise ClearheadError(f"edit takes edits, such as ch.edits.Knockout(layers=3, heads=2, keys=0); got {what}.")
    return Managed("edit(...)", lambda: _editing(Editor(model, edits)))


def edit_own(model: nn.Module, edits: Sequence[Edit]) -> AbstractContextManager[None]:
    """`edit`, of the calls of this thread alone: for functions that run the model themselves."""
    return Uninterrupted(lambda: _editing(Editor(model, edits, own=True)))


_active: list[Editor] = []
_lock = threading.Lock()


@contextmanager
def _editing(editor: Editor) -> Iterator[None]:
    # innermost: all other handlers see the edited call
    with _among_others(editor), intercept(editor, innermost=True), following_checkpoints(editor):
        yield
    editor.check_used()
    if editor.unread and any(one.layers is None for one in editor.edits):
        warnings.warn(editor.told_of_unread("changed", f"{type(editor.edits[0]).__name__}(layers=…)"), stacklevel=4)


@contextmanager
def _among_others(editor: Editor) -> Iterator[None]:
    """Make this editor the one that is at work on its model.

    Inside of another `with` on the same model, it makes the other one's changes first, and the other one rests. Raise
    an error where only a part of the model is edited already, or in another thread: one edit would not have the other's
    changes.
    """
    with _lock:
        outer = next((other for other in _active if other.nests(editor)), None)
        others = [other for other in _active if other is not outer]
        instead = "Pass all edits to one: ch.edit(model, first, second)"
        _refuse_edited(editor.stack.names.keys(), others, "edit", instead)
        if outer is not None:
            _active.remove(outer)
            editor.follow(outer)
        _active.append(editor)
    try:
        yield
    finally:
        with _lock:
            _active.remove(editor)
            if outer is not None:
                outer.rests = False
                _active.append(outer)


def change_of(
    module: int, problem: Problem, dropout_p: float, unmasked: Unmasked | None = None, kind: Kind | None = None
) -> Change | None:
    """The change that an edit makes to the call that a module, given by its id, makes now; None where there is none."""
    with _lock:
        found = [one for one in _active if module in one.stack.names and not one.idle]
    if not found:
        return None
    editor = found[0]
    cross = editor.kind(kind, problem.query, problem.key) == "cross"
    site = editor.layers.site(editor.stack.names[module], cross, editor.stack.turns, made=False)
    return editor.change(problem, site, dropout_p, unmasked)


def editing() -> bool:
    """Whether any model is edited at present."""
    return bool(_active)


def unmasked(query: Tensor, blind: Tensor | None) -> Unmasked | None:
    return None if blind is None else Unmasked(query, blind)


def refuse_edited(model: nn.Module, who: str) -> None:
    """Raise an error where a part of the model is edited at present."""
    with _lock:
        _refuse_edited({id(one) for one in model.modules()}, _active, who, "Call it outside of the edit's `with`")


def _refuse_edited(modules: Set[int], editors: Iterable[Editor], who: str, instead: str) -> None:
    if any(modules & other.stack.names.keys() for other in editors):
        raise ClearheadError(f"{who}: edit() is at work on this model, here or in another thread. {instead}.")


class Editor(ModelHandler):
    """Computes the changed parts of each call again, and puts them into its result."""

    values = True
    differentiable = True
    keeps_fast_path = False  # the fast path gives the output of a whole layer, in which no head can be changed

    def __init__(self, model: nn.Module, edits: Sequence[Edit], own: bool = False) -> None:
        """`own`: whether the calls of this thread alone are changed."""
        super().__init__(model)
        self.edits: list[Edit] = list(edits)
        self.used: set[int] = set()  # the ids of the edits that changed something
        self.outer = 0  # how many of the edits, the first ones, are those of a `with` around this one
        self.rests = False
        self._thread = threading.get_ident()
        self.thread = self._thread if own else None
        self.changes = 0  # how many calls were changed
        self.places: list[range] = []  # the positions of queries, for the message

    @property
    def idle(self) -> bool:
        return self.rests or super().idle

    def nests(self, inner: Editor) -> bool:
        """Whether another editor may be at work inside of this one: on the same model, in the same thread."""
        return self.stack.model is inner.stack.model and self._thread == inner._thread

    def follow(self, outer: Editor) -> None:
        """Make the changes of the editor around this one first; it rests meanwhile."""
        outer.rests = True
        self.edits, self.outer = [*outer.edits, *self.edits], len(outer.edits)
        self.used, self.places, self.sites = outer.used, outer.places, outer.sites

    def check_used(self) -> None:
        """Raise for an edit that changed nothing; the edits of an outer `with` are told of at its own end."""
        own = self.edits[self.outer :]
        unused = [one for one in own if id(one) not in self.used]
        if unused:
            some = [place for place in dict.fromkeys(self.places) if place]  # a call may have no queries
            places = ", ".join(f"{place[0]} … {place[-1]}" for place in some[:3])
            there = f", with queries at positions {places}" if some else ", without queries" if self.places else ""
            lacks = "layer, head and position" if self.places else "layer"  # no edit is of a layer that made a call
            raise ClearheadError(
                f"{unused[0]!r} changed nothing: no call has such a {lacks}. Calls were made by "
                f"{made_by(self.sites)}, numbered from 0{there}."
            )
        for one in own:
            check_layers(one.layers, self.sites, type(one).__name__)

    def before(self, call: InterceptedCall) -> None:
        self.check(call.query, call.key, call)
        if get_mode().backward:  # the call is of a checkpoint, which runs a part of the model again
            name = self.name(call)
            if self.layers.repeats(name):
                raise UnsupportedError(f"{name} was called several times in a run: edit it without checkpoints.")
        site = self.site(call)
        if not self._of(site):
            return
        problem, without_mask = call.problem, None
        if problem is None:
            with without_function_modes():
                query, key, value = of_one_dtype(call.query, call.key, call.value)
                problem = call.masks.problem(query, key, call.score, call.sinks, value)
            without_mask = unmasked(query, call.masks.uniform)
        change = self.change(problem, site, call.dropout_p, without_mask)
        if change is None:
            return
        if call.place is None:
            raise UnsupportedError(f"{site.name} computes attention inside a fused layer: edit() can't change it.")
        self.changes += 1
        call.state, call.ran = change, RanEdited(change)

    def after(self, call: InterceptedCall, result: Any) -> Any:
        change: Change | None = call.state
        if change is None or call.place is None:
            return result
        return with_weights(change, changed(change, call.place, result))

    def _of(self, site: Site) -> list[int]:
        """The numbers of the edits that change a layer."""
        return [i for i, one in enumerate(self.edits) if one.chooses(site)]

    def change(self, problem: Problem, site: Site, dropout_p: float, unmasked: Unmasked | None = None) -> Change | None:
        """The change of a call of this layer; None where nothing is changed."""
        return self.at(problem, self.spot(problem, site, dropout_p, unmasked)) if self._of(site) else None

    def spot(self, problem: Problem, site: Site, dropout_p: float, unmasked: Unmasked | None) -> Spot:
        """The place of a call in the whole sequence."""
        if dropout_p:
            raise UnsupportedError(
                f"{site.name} was called with dropout {dropout_p}, and edit() computes some heads again, which would "
                "drop other weights. Pass model.eval(), or set the model's attention dropout to 0."
            )
        spot = spot_of(problem, self.innermost, site)
        # a model turns the keys of another text nowhere, but for a module of cross attention that has such a part
        turner = self.innermost.module if site.kind == "cross" else self.stack.model
        return spot._replace(unmasked=unmasked, site=site, turner=turner)

    def at(self, problem: Problem, spot: Spot) -> Change | None:
        """The change of a call at its place; None where nothing is changed."""
        assert spot.site is not None
        edits = self._of(spot.site)
        if not edits:
            return None
        self.places.append(spot.queries)
        regions = list(self._regions(problem, edits, spot, spot.site.name))
        return Change(problem, spot, regions, self.inside) if regions else None

    def _regions(self, problem: Problem, edits: list[int], spot: Spot, name: str) -> Iterator[Part]:
        """The parts of a call: sequences, heads and queries (rows of this call) that the same edits change."""
        heads = np.zeros((len(edits), problem.sizes.heads), dtype=bool)
        rows = np.zeros((len(edits), problem.sizes.queries), dtype=bool)
        for i, number in enumerate(edits):
            one = self.edits[number]
            heads[i, list(one.heads_of(problem.sizes.heads, name))] = True
            if one.acts(spot):
                rows[i] = chosen(one.queries, spot.queries, spot.queries.stop)
            if rows[i].any():
                self.used.add(id(one))
        for batch, among in self._batches(edits, problem.sizes.batch):
            for numbers, some, queries in _parts(heads[among], rows[among]):
                yield [self.edits[edits[among[i]]] for i in some], batch, numbers, queries

    def _batches(self, edits: list[int], batch: int) -> Iterator[tuple[slice, list[int]]]:
        """Sequences that the same edits change, and the places of these edits in the list."""
        if any((self.edits[number].sequences.stop or 0) > batch for number in edits):
            raise UnsupportedError(f"a call of {batch} sequences is one of all cells of a sweep. Pass batch=1.")
        places = [range(batch)[self.edits[number].sequences] for number in edits]
        edges = sorted({0, batch, *(edge for place in places for edge in (place.start, place.stop))})
        for start, stop in itertools.pairwise(edges):
            among = [i for i, place in enumerate(places) if start in place]
            if among:
                yield slice(None) if (start, stop) == (0, batch) else slice(start, stop), among


def _parts(heads: np.ndarray, rows: np.ndarray) -> Iterator[tuple[tuple[int, ...], list[int], np.ndarray]]:
    """Heads, edits and rows: the parts that the same edits change. `heads`, `rows`: those of each edit, (n, …)."""
    for of_heads in np.unique(heads.T, axis=0):
        if not of_heads.any():
            continue
        numbers = tuple(np.flatnonzero((of_heads == heads.T).all(1)).tolist())
        among = rows & of_heads[:, None]
        for of_rows in np.unique(among.T, axis=0):
            if of_rows.any():
                yield numbers, np.flatnonzero(of_rows).tolist(), (of_rows == among.T).all(1)


class CheckpointedPart:
    """The function of a checkpoint, which runs it again in the backward pass.

    It raises where one of its calls was edited and the edit is over: the gradients would be those of another forward.
    """

    def __init__(self, editor: Editor, function: Callable[..., Any]) -> None:
        self._editor, self._function = editor, function
        self._before, self._edited = editor.changes, False

    def ran(self) -> None:
        """Note whether a call was edited since the part began."""
        self._edited = self._edited or self._editor.changes > self._before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._edited and self._editor.stack.over:
            raise ClearheadError(
                "edit: a gradient checkpoint computes layers again in the backward pass, and the `with` of the edit "
                "has ended, so they would be computed without it.\nCall backward() inside the `with`."
            )
        result = self._function(*args, **kwargs)
        self.ran()
        return result


@contextmanager
def following_checkpoints(editor: Editor) -> Iterator[None]:
    """Inside the `with`, the functions of checkpoints are `CheckpointedPart`s."""

    def reentrant(forward: Callable[..., Any]) -> Callable[..., Any]:
        def following(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
            return forward(ctx, CheckpointedPart(editor, function), *args)

        return following

    def generating(generator: Callable[..., Any]) -> Callable[..., Any]:
        def following(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[Any]:
            part = CheckpointedPart(editor, function)
            yield from generator(part, *args, **kwargs)  # the function runs between its two steps
            part.ran()

        return following

    name = generator_of_checkpoints()
    with replaced(checkpoint.CheckpointFunction, "forward", reentrant), replaced(checkpoint, name, generating):
        yield
