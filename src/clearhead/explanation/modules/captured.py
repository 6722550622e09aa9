"""The attention call that a module of `clearhead.nn`, or PyTorch's, makes, without a trace on the module."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import suppress
from inspect import BoundArguments, signature
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from clearhead._attention import Arguments
from clearhead.base.errors import ClearheadError, UnsupportedError
from clearhead.base.keyword_hints import raise_unknown_keywords
from clearhead.base.torch_state.contexts import without_autocast
from clearhead.base.torch_state.torch_private import has_hooks
from clearhead.engines.choose import choose
from clearhead.engines.operation import run
from clearhead.nn._record import RecordingModule
from clearhead.nn.key_value_cache import KeyValueCache
from clearhead.nn.prepared_keys import PreparedKeys
from clearhead.nn.torch_multihead_attention import TorchMultiheadAttention
from clearhead.problem.problem import Problem


def bind_module(who: str, module: nn.Module, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> BoundArguments:
    """The arguments of a module's call, by their names. Raises an error for those that it does not take.

    `who`: the function that was given the module.
    """
    forward = signature(module.forward)
    taken = [name for name, one in forward.parameters.items() if one.kind is not one.VAR_KEYWORD]
    try:
        if isinstance(module, RecordingModule) or len(taken) == len(forward.parameters):
            raise_unknown_keywords(f"{type(module).__name__}.forward", module.forward, keywords)
        return forward.bind(*inputs, **keywords)
    except TypeError as error:
        three = str(error).startswith("missing") and {"query", "key", "value"} <= set(taken)
        advice = f" Pass its query, key and value; for self-attention: ch.{who}(module, x, x, x)." if three else ""
        raise ClearheadError(
            f"{who} calls {type(module).__name__} with the other arguments: {error}.{advice}"
        ) from None


def check_forward(module: nn.Module, *known: type[nn.Module], hooks: bool = True) -> None:
    """Raise where a module's forward() is not that of one of these classes; `hooks`: whether it may have hooks."""
    own = "forward" in vars(module) or type(module).forward not in [kind.forward for kind in known]
    if own or (not hooks and has_hooks(module)):
        raise UnsupportedError(
            "explain() shows multi-head attention from its layers' weights, and this "
            f"{type(module).__name__} computes something else: it has a forward() or hooks of its own. Explain one "
            "recorded call instead: ch.watch(module)."
        )


def as_ours(module: RecordingModule | nn.MultiheadAttention) -> RecordingModule:
    """A module of torch's as one with a record: it has torch's meanings, and a copy of the weights."""
    if isinstance(module, RecordingModule):
        return module
    check_forward(module, nn.MultiheadAttention)
    return TorchMultiheadAttention.from_torch(module)


class Captured(NamedTuple):
    """One call: its arguments, its problem with a score by tiles, and the heads' outputs."""

    call: Arguments
    problem: Problem
    heads: Tensor


def capture_call(module: RecordingModule, given: BoundArguments) -> Captured:
    """Run a copy of the module no further than to its call of `attention`, and compute that call. No hook runs."""
    with torch.random.fork_rng(devices=[]):  # the module's next call draws the same dropout
        call = _reach(module, given, hooks=False)
        problem = call.problem(by_tile=True)
        with without_autocast(problem.sizes.device):
            output = problem.sizes.restore(run(problem, choose(problem, None), None))
    return Captured(call, problem, output)


def reach_call(
    who: str, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[Arguments, RecordingModule, dict[str, Any]]:
    """Run a copy of the module, with its hooks, no further than to its attention.

    `who`: the function that was given the module, for errors. Returns the call of attention, the module as one of
    clearhead's, and the arguments of its call by their names.
    """
    if not isinstance(module, RecordingModule | nn.MultiheadAttention):
        raise ClearheadError(
            f"{who} knows the attention modules of clearhead.nn and torch.nn.MultiheadAttention; got a "
            f"{type(module).__name__}. For a model, record its calls: with ch.watch(model, values=True) as seen: "
            "model(...); then seen.diagnose(), or ch.plan(call.query, call.key, call.value, mask=call.mask) of a call."
        )
    given = bind_module(who, module, inputs, keywords)
    module = as_ours(module)
    with torch.no_grad():
        return _reach(module, given, hooks=True), module, given.arguments


class _Stopped(Exception):
    """Raised in place of a module's attention."""


def _reach(module: RecordingModule, given: BoundArguments, hooks: bool) -> Arguments:
    """The call of `attention` that a copy of the module makes, over the same parameters.

    The module's record and caches stay as they are. Parameters that a first call makes are made in the copy alone.
    """
    found: list[Arguments] = []

    def stop(query: Any, key: Any, value: Any, *, fresh: bool = False, cross: bool = False, **options: Any) -> NoReturn:
        found.append(Arguments(query, key, value, **options))
        raise _Stopped

    def of_twin(one: Any) -> Any:
        """An argument for the copy: a copy of a cache, and keys that the module prepared as the copy's own."""
        if isinstance(one, KeyValueCache):
            branch = copy.deepcopy(one)
            branch._module = twin if one._module is module else one._module
            return branch
        mine = isinstance(one, PreparedKeys) and one._by == id(module)
        return PreparedKeys(one._key, one._value, twin) if mine else one

    twin = copy.deepcopy(module) if any(map(is_lazy, module.parameters())) else copy.copy(module)
    twin.__dict__["_attend"] = stop
    forward = twin if hooks else twin.forward
    with suppress(_Stopped), torch.random.fork_rng(devices=[]):
        forward(*map(of_twin, given.args), **{name: of_twin(one) for name, one in given.kwargs.items()})
    return found[0]
