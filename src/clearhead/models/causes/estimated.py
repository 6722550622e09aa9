"""attribution_patching(): the effects of a sweep's edits, estimated from one gradient."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from clearhead.base.arrays import accumulated
from clearhead.base.errors import ClearheadError, UnsupportedError
from clearhead.base.managers import Uninterrupted
from clearhead.base.numbers import check_count
from clearhead.base.torch_state.contexts import without_function_modes
from clearhead.base.torch_state.mode import get_mode
from clearhead.models.causes.cells import Over, cells_of, checked_sides, edits_of, measured, number_of, sequences_of
from clearhead.models.causes.metrics import refuse_padding
from clearhead.models.causes.sweep import Sweep, names_of, sweep_of
from clearhead.models.edits.base import Edit
from clearhead.models.edits.changed import Change, changes, computing
from clearhead.models.edits.edit import Editor, refuse_edited
from clearhead.models.edits.spot import Unmasked
from clearhead.models.interception.intercept import intercept
from clearhead.models.interception.intercepted_call import InterceptedCall
from clearhead.models.interception.layers import Site
from clearhead.models.interception.place import Place
from clearhead.models.interception.refused import validate_model
from clearhead.models.model_calls import call_model, outside_inference
from clearhead.models.watch import watch_own
from clearhead.problem.problem import Problem
from clearhead.problem.record import copied, record


def attribution_patching(
    model: nn.Module,
    make_edit: Callable[..., Edit | Sequence[Edit]],
    inputs: object,
    metric: Callable[..., Tensor | float],
    over: Over | Sequence[Over] = ("layer", "head"),
    *,
    exact: int = 5,
    batch: int = 1,
) -> Sweep:
    """Estimate the effects of a sweep from one forward and one backward pass, and compute the largest exactly.

    >>> import torch, clearhead as ch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    ...                                      num_attention_heads=8, num_key_value_heads=2)).eval()
    >>> ids, others = torch.arange(10)[None], torch.arange(10, 20)[None]
    >>> with torch.no_grad(), ch.watch(model, values=True) as seen:
    ...     output = model(others)
    >>> patched = lambda layer, head: ch.edits.Patch(seen, layer, head)
    >>> found = ch.models.attribution_patching(model, patched, ids, ch.models.logit_difference(token=7), exact=3)
    >>> len(found), found.values.shape
    (16, torch.Size([2, 8]))
    >>> [sorted(row) for row in found.checked]
    [['effect', 'error', 'exact', 'head', 'layer'], ['effect', 'error', 'exact', 'head', 'layer'], ...]

    Formula: the effect of a cell is about Σ (o' − o) · ∂metric/∂o, over the outputs o of the attention calls that its
    edits change, with o' the output of the same call, on the inputs of the run without edits, with the edits. For
    patches of an output, a value or the weights, in which o is linear, this is (patched − plain) · ∂metric/∂activation.
    For a query or a key, and for edits before the softmax, the softmax is computed again and not linearised (the QK fix
    of AtP*).
    `make_edit`, `inputs`, `over`, `batch`: as for `sweep`; `make_edit` may give any edit. `metric`: as for `sweep`, and
    computed from the model's output by functions that have gradients. `exact`: the model runs with the edits of so many
    cells, those of the largest estimates, as in `sweep`.
    Gives a `Sweep`, whose `effect` is the estimate. Cells that were computed exactly have the `exact` effect and the
    `error`, effect − exact, NaN for the others; they are also in `checked`, the largest first. What later layers do
    about a large change is no part of the estimate, nor are effects of weights that the model reads from attention.
    Edits that hold later layers at their outputs of the run without edits, as path patching does, are no part of it
    either: the gradient goes through these layers. It warns of such edits; `sweep` computes them.
    Raises a `ClearheadError` for an edit that changed nothing, a metric without a gradient, or one that reads padding,
    as `sweep` does; an `UnsupportedError`
    for a model whose forward() switches gradients off, and for dropout.
    Cost: a forward pass with its graph, a backward pass, the attention of the changed heads once more for each cell,
    and `exact` runs of the model.
    Source: Nanda 2023, "Attribution Patching: Activation Patching At Industrial Scale"; Kramár et al. 2024, "AtP*".
    """
    sides = checked_sides(over, "attribution_patching")
    exact, batch = check_count(exact, 0, "attribution_patching: exact"), check_count(batch, 1, "batch")
    validate_model(model, "attribution_patching")
    refuse_edited(model, "attribution_patching")
    probe = Probe(model)
    with torch.inference_mode(False), torch.enable_grad():
        inputs = outside_inference(inputs)
        with watch_own(model) as seen, Uninterrupted(lambda: intercept(probe, innermost=True)):
            output = call_model(model, inputs)
            refuse_padding(metric, model, inputs, output)
            plain = number_of(metric, output)
    grads = probe.gradients(plain)
    cells = list(cells_of(seen.calls, sides))
    edits = [edits_of(make_edit, cell, "attribution_patching") for cell in cells]
    effects = [probe.effect(own, grads) for own in edits]
    if probe.held:
        warnings.warn(
            f"attribution_patching: some edits change a layer and leave the output of {probe.held}, behind it. If they "
            "hold it there, as path patching does, the estimate is wrong: use ch.models.sweep.",
            stacklevel=2,
        )
    before, shown = float(plain.detach()), [math.nan] * len(cells)
    count = sequences_of(inputs, seen.calls) if batch > 1 else 1
    largest = sorted(range(len(cells)), key=lambda n: -abs(effects[n]))[:exact]
    for some in (largest[start : start + batch] for start in range(0, len(largest), batch)):
        for n, value in zip(some, measured(model, [edits[n] for n in some], inputs, metric, count), strict=True):
            shown[n] = value - before
    rows = zip(cells, effects, shown, strict=True)
    return sweep_of(
        ({**cell, "effect": effect, "exact": right, "error": effect - right} for cell, effect, right in rows),
        before,
        metric,
        names_of(edits),
        estimated=True,
    )


class Met(NamedTuple):
    """A call as it ran, the place of its output, and zeros that were added to the output, whose gradient is its own."""

    call: Change
    place: Place
    zeros: Tensor


class Probe(Editor):
    """Keeps each call of a run, and then says what edits of the calls change to first order."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, [Edit()], own=True)  # of every call
        self.met: list[Met] = []
        self.run: tuple[Met, ...] = ()  # those of the run that has ended
        self.held = ""  # a layer that the edits of some cell left as it was, behind a layer that they changed

    @property
    def idle(self) -> bool:
        return get_mode().backward or super().idle  # a checkpoint runs a part of the model again

    def change(self, problem: Problem, site: Site, dropout_p: float, unmasked: Unmasked | None = None) -> Change:
        with torch.no_grad(), without_function_modes():
            kept, value = record(problem, copy=True).problem, problem.value
            kept = kept._replace(value=None if value is None else copied(value))
            if unmasked is not None:
                unmasked = Unmasked(copied(unmasked.query), copied(unmasked.blind))
            return Change(kept, self.spot(problem, site, dropout_p, unmasked), [], self.inside)

    def before(self, call: InterceptedCall) -> None:
        super().before(call)
        call.ran = None
        if not torch.is_grad_enabled():
            raise UnsupportedError(f"{self.name(call)} computes attention without gradients: use ch.models.sweep.")

    def after(self, call: InterceptedCall, result: Any) -> Any:
        place: Place = call.place  # type: ignore[assignment]  # `accept` raises where it is not known
        with without_function_modes():
            tensor = place.tensor(result)
            zeros = torch.zeros_like(tensor, requires_grad=True)
            self.met.append(Met(call.state, place.kept(), zeros))
            return place.result(result, tensor + zeros)

    def gradients(self, number: Tensor) -> list[Tensor | None]:
        """The gradient of a number by the output of each call, (B, H, Lq, Ev); None where it does not depend on it."""
        self.run = tuple(self.met)
        zeros = [met.zeros for met in self.run]
        found = torch.autograd.grad(number, zeros, allow_unused=True) if zeros and number.requires_grad else ()
        if zeros and all(grad is None for grad in found):
            raise ClearheadError(
                "attribution_patching: the metric has no gradient by the outputs of attention. Compute it without "
                ".item(), argmax or detach(), as ch.models.logit_difference(token); or use ch.models.sweep."
            )
        return [None if grad is None else met.place.gradient(grad) for met, grad in zip(self.run, found, strict=True)]

    @torch.no_grad()
    def effect(self, edits: list[Edit], grads: list[Tensor | None]) -> float:
        """The effect of edits on the number, to first order."""
        self.edits, self.used, self.places = edits, set(), []
        total, moved = 0.0, False
        for met, grad in zip(self.run, grads, strict=True):
            change = self.at(met.call.problem, met.call.spot)
            if change is None or grad is None:
                continue
            size = largest = 0.0
            with computing(change):
                for batch, heads, queries, old, new in changes(change):
                    exact = accumulated(new.dtype)
                    toward = grad[batch, heads][:, :, queries].to(exact)
                    before = old().to(exact)
                    step = new.to(exact) - before
                    total += float((step * toward).sum())
                    size, largest = max(size, float(before.abs().max())), max(largest, float(step.abs().max()))
            still = largest <= 32 * torch.finfo(grad.dtype).eps * size  # the same but for rounding
            if moved and still:
                self.held = self.held or str(met.call.spot.site.layer if met.call.spot.site else "a layer")
            moved = moved or not still
        self.check_used()
        return total
