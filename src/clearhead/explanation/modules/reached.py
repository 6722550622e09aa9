"""The attention call that a module would make: the module is run no further."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from clearhead._attention import Arguments
from clearhead.base.errors import ClearheadError
from clearhead.explanation.modules.captured import bound, for_twin, twin_of
from clearhead.explanation.modules.multi_head import as_ours
from clearhead.nn._record import RecordingModule


class Reached(NamedTuple):
    """The call of attention that a module would make, the module as one of clearhead's, and the arguments of its call
    by their names."""

    call: Arguments
    module: RecordingModule
    given: dict[str, Any]


class _Stopped(Exception):
    """Raised in place of a module's attention, with its arguments."""

    def __init__(self, call: Arguments) -> None:
        super().__init__()
        self.call = call


def _stop(query: Any, key: Any, value: Any, *, fresh: bool = False, cross: bool = False, **options: Any) -> NoReturn:
    raise _Stopped(Arguments(query, key, value, **options))


def reached(who: str, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Reached:
    """Run a copy of the module, which shares its parameters, no further than to its attention.

    `who`: the function that was given the module, for errors.
    """
    if isinstance(module, nn.MultiheadAttention):
        bound(who, module, inputs, keywords)
        module = as_ours(module)
    if not isinstance(module, RecordingModule):
        raise ClearheadError(
            f"{who} knows the attention modules of clearhead.nn and torch.nn.MultiheadAttention; got a "
            f"{type(module).__name__}. {_OF_A_MODEL[who]}"
        )
    given = bound(who, module, inputs, keywords)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            twin = twin_of(module, _stop)
            named = {name: for_twin(one, module, twin) for name, one in given.kwargs.items()}
            twin(*(for_twin(one, module, twin) for one in given.args), **named)
    except _Stopped as stopped:
        return Reached(stopped.call, module, given.arguments)
    raise ClearheadError(f"{type(module).__name__} computed no attention for these inputs.")


_OF_A_MODEL = {
    "diagnose": "For a model, record its calls: with ch.watch(model) as seen: model(...); then seen.diagnose().",
    "plan": "For a model, record its calls: with ch.watch(model, values=True) as seen: model(...); then for one of "
    "them ch.plan(call.query, call.key, call.value, mask=call.mask).",
}
