"""The attention call that a module of `clearhead.nn` makes, without a trace on the module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from inspect import BoundArguments, signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from clearhead._attention import Arguments, Attended
from clearhead.base.contexts import without_autocast
from clearhead.base.errors import ClearheadError, UnsupportedError
from clearhead.base.keyword_hints import raise_unknown_keywords
from clearhead.engines.choose import choose
from clearhead.engines.operation import run
from clearhead.nn._record import RecordingModule
from clearhead.nn.key_value_cache import KeyValueCache
from clearhead.nn.prepared_keys import PreparedKeys
from clearhead.problem.nested import is_nested
from clearhead.problem.problem import Problem


def bound(who: str, module: nn.Module, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> BoundArguments:
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


class Captured(NamedTuple):
    """One call: its arguments, its problem with a score by tiles, the heads' outputs, and the module's output."""

    call: Arguments
    problem: Problem
    heads: Any
    output: Any


def twin_of(module: RecordingModule, attend: Callable[..., Any]) -> RecordingModule:
    """A copy of the module, over the same parameters, that calls `attend` in place of `_attend`.

    The module's record stays as it is. Parameters that a first call makes are made in the copy alone.
    """
    twin = copy.deepcopy(module) if any(map(is_lazy, module.parameters())) else copy.copy(module)
    twin.__dict__["_attend"] = attend
    return twin


def for_twin(given: Any, module: RecordingModule, twin: RecordingModule) -> Any:
    """An input for the twin, which writes to a copy of a cache, and takes keys that the module prepared as its own."""
    if isinstance(given, KeyValueCache):
        branch = copy.deepcopy(given)
        branch._module = twin if given._module is module else given._module
        return branch
    mine = isinstance(given, PreparedKeys) and given._by == id(module)
    return PreparedKeys(given._key, given._value, twin) if mine else given


def captured(module: RecordingModule, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Captured:
    """Run a copy of the module that shares its parameters, and keep the arguments of its call of `attention`."""
    if any(map(is_nested, (*inputs, *keywords.values()))):
        raise UnsupportedError(
            f"explain shows the steps of a {type(module).__name__} on a batch, and its inputs are nested: pass one "
            "sequence of each, query[0][None]."
        )
    found: list[tuple[Arguments, Problem, Tensor]] = []

    def keep(query: Any, key: Any, value: Any, *, fresh: bool = False, cross: bool = False, **options: Any) -> Attended:
        call = Arguments(query, key, value, **options)
        problem = call.problem(by_tile=True)
        with without_autocast(problem.sizes.device):
            output = problem.sizes.restore(run(problem, choose(problem, None), None))
        found.append((call, problem, output))
        return Attended(output if isinstance(query, Tensor) else output.detach().numpy(), problem)

    twin = twin_of(module, keep)
    given = [for_twin(one, module, twin) for one in inputs]
    named = {name: for_twin(one, module, twin) for name, one in keywords.items()}
    with torch.random.fork_rng(devices=[]):  # the module's next call draws the same dropout
        output = twin.forward(*given, **named)
    return Captured(*found[0], output)
