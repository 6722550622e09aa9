"""Tests that run a model: of the pairs that its calls allow, and of the outputs of two backends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.base.arrays import Array
from clearhead.base.errors import ClearheadError, UnsupportedError, require
from clearhead.base.managers import Uninterrupted
from clearhead.base.output.text import brief, listed, said
from clearhead.base.torch_state.torch_private import tree_map_only
from clearhead.models.audits.audit import TOLERANCE, Expected
from clearhead.models.edits.edit import refuse_edited
from clearhead.models.interception.layers import FIRST, LayerName
from clearhead.models.interception.modules import Kind
from clearhead.models.interception.transformers_private import backend_of, has_backend, set_backend, takes_backends
from clearhead.models.recorder.departure import of_call
from clearhead.models.recordings.attention_call import AttentionCall
from clearhead.models.recordings.call import Call
from clearhead.models.recordings.calls import Calls
from clearhead.models.watch import watch_own


@dataclass(frozen=True)
class ComparedCall(Call):
    """A backend's output of one call, compared with the formula on that call's own inputs.

    `number`: which call of the run it is. `error`: the largest difference of a number of the output, as a part of the
    largest number of `value`, over the queries that see a key and are no padding; `sequence`, `head`, `query`: its
    place. `departs`: whether the error is above `tolerance`, or NaN.
    """

    name: str
    kind: Kind
    backend: str
    number: int
    error: float
    tolerance: float
    sequence: int
    head: int
    query: int
    run: int = 0
    layer: LayerName = FIRST
    _columns = "layer", "call", "module", "kind", "backend", "error", "tolerance", "departs"

    @property
    def departs(self) -> bool:
        return not self.error <= self.tolerance


class Comparison(Calls[ComparedCall]):
    """The calls of two backends, compared with their formula. `compare_backends` gives it.

    `calls`: the calls of both backends, each a `ComparedCall`. They are found as in a `Recording`, by number, module
    and run, where a run is a backend. `first`: the first call that departs from its formula; None where none does.
    The columns of `table()`: layer, call (its number), module, kind, backend, error, tolerance, departs.
    """

    @property
    def first(self) -> ComparedCall | None:
        """The earliest call that departs from its formula; where both backends do, the call with the larger error."""
        wrong = [call for call in self.calls if call.departs]
        return min(wrong, key=lambda call: (call.number, call.error == call.error, -call.error), default=None)

    def ok(self) -> bool:
        """Whether both backends compute their formula in every call."""
        return self.first is None

    def __str__(self) -> str:
        return said(self, self._said)

    def _said(self) -> str:
        first = self.first
        by_backend = [
            f"  {run.calls[0].backend}: {sum(call.departs for call in run.calls)} of {len(run.calls)} calls depart, "
            f"the largest error is {max(run.calls, key=lambda call: (call.error != call.error, call.error)).error:.2g}"
            for run in self.runs
        ]
        if first is None:
            return "\n".join(["Both backends compute their formula in every call.", *by_backend])
        lines = [
            f"{first.backend} departs from its formula first in {first.layer}, {first.name}:",
            f"  an error of {first.error:.2g} of the largest value, where {first.tolerance:.2g} is rounding, at head "
            f"{first.head}, query {first.query} of sequence {first.sequence}",
            *by_backend,
            "  On these inputs the backend computed something other than the scale, softcap, mask, bias and sinks that "
            "the model passed to it.",
        ]
        return "\n".join(lines)


def compared(call: AttentionCall, number: int, backend: str, run: int, tolerance: float | None) -> ComparedCall:
    """A call that was watched with its values, compared with its formula."""
    output, value = call.output, call.value
    assert value is not None and call.outcome is not None
    if call.outcome.output is None:
        raise UnsupportedError(f"{call.name} gives no output by head that could be compared with the formula.")
    found = of_call(call, value, output)
    most = found.tolerance if tolerance is None else tolerance
    return ComparedCall(call.name, call.kind, backend, number, found.error, most, *found.at, run, call.layer)


def assert_attends(
    model: nn.Module, inputs: object, mask: Expected, *, padding: Array | None = None, tolerance: float = TOLERANCE
) -> None:
    """Raise an AssertionError, unless every attention call of the model allows exactly the pairs of the mask.

    >>> import torch, torch.nn.functional as F, clearhead as ch
    >>> class Block(torch.nn.Module):
    ...     def forward(self, x):
    ...         return F.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> ch.models.assert_attends(Block(), torch.rand(1, 2, 4, 8), ch.Causal())
    >>> ch.models.assert_attends(Block(), torch.rand(1, 2, 4, 8), ch.Causal() & ch.SlidingWindow(before=1))
    Traceback (most recent call last):
        ...
    AssertionError: 1 of 1 calls do not attend as expected. The first:
    ...

    `model` is run once on `inputs`, without gradients, in the mode that it is in: a dict of keywords, such as a
    tokenizer gives, a tuple of arguments, or one argument. `mask`: as for `Recording.check`. `padding`: as for `watch`.
    `tolerance`: how much of a query's softmax may be leaked or hidden; 0 allows no pair to differ.
    The message names the first call that differs, its worst head and query, the keys on which the mass is, and a likely
    cause. Raises a `ClearheadError` where no call is seen, or the mask does not fit one. Cost: a run of the model under
    `watch`, and the cost of `check`.
    """
    with watch_own(model, padding) as seen:
        run(model, inputs)
    audit = seen.check(mask)
    if not audit.ok(tolerance):
        raise AssertionError(audit.told(tolerance))


@torch.no_grad()
def run(model: nn.Module, inputs: Any) -> Any:
    """The model's output on these inputs, without gradients."""
    return ran(model, inputs)


def ran(model: nn.Module, inputs: Any) -> Any:
    """The model's output on a mapping of keywords, a tuple of arguments, or one argument, which are not written to."""
    if isinstance(inputs, Mapping):
        return model(**{name: _own(value) for name, value in inputs.items()})
    try:
        return model(*map(_own, inputs)) if isinstance(inputs, tuple) else model(_own(inputs))
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        first = inputs[0] if isinstance(inputs, list | tuple) and inputs else inputs
        if not isinstance(first, str | bytes | int | list):  # a text, or tokens in the place of tensors
            raise
        raise ClearheadError(
            f"inputs is {brief(inputs)}, a text or tokens: pass what the tokenizer makes of it, "
            'tokenizer(text, return_tensors="pt"), or the ids as a tensor (B, L).'
        ) from error


def outside_inference(inputs: Any) -> Any:
    """The inputs for a run with gradients: copies of tensors of inference mode, which autograd does not keep."""
    given = dict(inputs) if isinstance(inputs, Mapping) else inputs
    return tree_map_only(Tensor, lambda tensor: tensor.clone() if tensor.is_inference() else tensor, given)


def _own(value: Any) -> Any:
    """A copy of an argument that a model may write to, such as a key/value cache; a tensor is not copied."""
    return value if isinstance(value, Tensor) else deepcopy(value)


@contextmanager
def on_backend(model: Any, backend: str) -> Iterator[None]:
    """Set another backend for a model of transformers and all models inside it, and set the old ones back after."""
    before = [(config, backend_of(config)) for config in _configs(model) or [model.config]]
    try:
        model.set_attn_implementation(backend)
        yield
    finally:
        for config, implementation in before:  # a configuration sets the inner ones too, which come after it
            set_backend(config, implementation)


def _configs(model: nn.Module) -> list[Any]:
    """Every configuration of the model, inner ones after the outer ones."""
    own = (part.config for part in model.modules() if has_backend(getattr(part, "config", None)))
    found = list({id(config): config for config in own}.values())
    for config in found:  # the list grows
        inner = (getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ())
        found += [one for one in inner if one is not None and all(one is not other for other in found)]
    return found


def compare_backends(
    model: nn.Module, one: str, other: str, inputs: object, *, tolerance: float | None = None
) -> Comparison:
    """Run a model of transformers on two backends, and find the first call whose output is not its formula's.

    >>> import torch, clearhead as ch
    >>> from transformers import LlamaConfig, LlamaModel
    >>> model = LlamaModel(LlamaConfig(vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    ...                                num_attention_heads=8, num_key_value_heads=2)).eval()
    >>> found = ch.models.compare_backends(model, "sdpa", "eager", torch.arange(10)[None])
    >>> print(found.first)
    None
    >>> [(row["module"], row["backend"]) for row in found.table()][:3]
    [('layers.0.self_attn', 'sdpa'), ('layers.1.self_attn', 'sdpa'), ('layers.0.self_attn', 'eager')]

    Each call's output is compared with softmax(score + mask) · value on that call's own inputs, computed in float32 at
    least: so an error in one layer is not found again in later layers, and a backend that leaves out a scale, a
    softcap, a mask or sinks is named with the call. The two runs are not compared with each other, because a difference
    of rounding grows from layer to layer.
    `model`: a model of transformers in eval mode; its backend is set, and set back at the end or after an error.
    `one`, `other`: names of backends, such as "sdpa", "eager", or a registered one. `inputs`: as for
    `assert_attends`. `tolerance`: the largest error, as a part of the largest value, that counts as rounding; None
    takes it from the dtype and the largest score s: (1 + s / 4) times 4e-6 in float32, 1e-3 in float16, 8e-3 in
    bfloat16. Queries that see no key, and padding, are left out: backends differ there.
    Gives a `Comparison`: `first`, `table()`, and `str()`. Raises a `ClearheadError` for another model or an unknown
    backend. Cost: two runs of the model under `watch(values=True)`, and each call's output once more.
    """
    transformers = require("transformers", "models", "compare_backends")
    if not isinstance(model, transformers.PreTrainedModel):
        raise ClearheadError(f"compare_backends takes a model of transformers; got a {type(model).__name__}.")
    if any(part.training for part in model.modules()):
        raise ClearheadError("compare_backends takes a model in eval mode, without dropout: model.eval().")
    there = ["eager", *transformers.AttentionInterface().valid_keys()]
    for backend in (one, other):
        if backend not in there:  # transformers would look for it on the network, and run what it finds
            raise ClearheadError(f"compare_backends: there is no backend {backend!r}; there are {listed(there)}.")
    if not takes_backends(model):
        raise ClearheadError(f"{type(model).__name__} computes attention in its own code, on no other backend.")
    refuse_edited(model, "compare_backends")
    found: list[ComparedCall] = []
    for number, backend in enumerate((one, other)):
        switched = Uninterrupted(partial(on_backend, model, backend))
        with switched, watch_own(model, values=True, compares=False) as seen:
            run(model, inputs)
        found += [compared(call, i, backend, number, tolerance) for i, call in enumerate(seen.calls)]
    return Comparison(found)
