"""Rules beside a cache: they are asked with the positions of the queries, which stand after the keys of the cache."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.base.shapes import moved
from clearhead.base.torch_state.mode import get_mode
from clearhead.base.torch_state.torch_private import OF_MODULES, parts_of
from clearhead.base.user_functions.rules import entry
from clearhead.biases.base import Bias, Sum
from clearhead.biases.bias_function import BiasFunction
from clearhead.masks._read import KEPT
from clearhead.masks.base import Mask
from clearhead.masks.combined import with_leaves
from clearhead.masks.mask_function import MaskFunction
from clearhead.scores.base import Score, name_of
from clearhead.scores.change_in_documents import copy_with_change


class OffsetRule(nn.Module):
    """A rule, or a change of a score, whose query index counts from the end of the cache.

    `past`: the number of keys in the cache, or (B,), one for each sequence. It is kept as a tensor, so that a kernel
    that a rule is compiled into takes it as an input, and the next step needs no other kernel.
    """

    def __init__(self, rule: Any, past: int | Tensor, device: torch.device) -> None:
        super().__init__()
        self.rule = rule
        with torch.inference_mode(False):
            if isinstance(past, Tensor):
                self.past = moved(past, device)
            else:
                self.past = torch.full((1,), past, dtype=torch.int64, device=device)
        self.__name__ = f"{name_of(rule)} after the cache"

    def extra_repr(self) -> str:
        return self.__name__

    def forward(self, *given: Tensor) -> Tensor:
        *first, query_index, key_index = given  # (score,) batch, head
        found: Tensor = self.rule(*first, query_index + entry(self.past, first[-2]), key_index)
        return found


def offset_rules(
    mask: Any, bias: Any, score: Score, past: int | Tensor, device: torch.device
) -> tuple[Any, Any, Score]:
    """Mask, bias and score of a call whose queries stand after `past` keys. Other masks and biases know their places
    from the call's alignment."""
    if isinstance(past, int) and past == 0:
        return mask, bias, score
    after = partial(OffsetRule, past=past, device=device)
    changed = score if score.changed_by is None else copy_with_change(score, after(score.changed_by))
    return _offset_part(mask, after), _offset_part(bias, after), changed


def _offset_part(given: Any, after: Callable[[Any], OffsetRule]) -> Any:
    """A mask, a bias, or what one holds: a list, a tuple or a dict of them; a copy where a rule is in it."""
    if isinstance(given, Mask):
        return with_leaves(given, lambda leaf: _offset_held(leaf, after))
    if isinstance(given, Bias):
        return _offset_bias(given, after)
    if type(given) is dict:
        return _replace(given, lambda part: _offset_part(part, after))
    if not isinstance(given, list | tuple):
        return given
    parts = [_offset_part(part, after) for part in given]
    if all(map(operator.is_, given, parts)):
        return given
    return given._make(parts) if hasattr(given, "_make") else type(given)(parts)  # a named tuple takes them one by one


def _offset_bias(bias: Bias, after: Callable[[Any], OffsetRule]) -> Bias:
    if get_mode().compiled:  # the compiler can't list the parts of a module that it has just made, such as a sum
        if type(bias) is Sum:
            return Sum(_offset_bias(bias.left, after), _offset_bias(bias.right, after))
        if type(bias) is BiasFunction:
            made = BiasFunction(after(bias.fn), bias.reads)
            made._by_rows = bias._by_rows
            return made
    found: Bias = _offset_held(bias, after)
    return found


def _offset_held(given: Any, after: Callable[[Any], OffsetRule]) -> Any:
    """A mask that is no expression, a bias, or a module inside of one; a copy where a rule is in it."""
    held = {name: part for name, part in vars(given).items() if not name.startswith(KEPT)}
    changed = {name: part if name in OF_MODULES else _offset_part(part, after) for name, part in held.items()}
    if isinstance(given, nn.Module):
        parameters, buffers, modules = parts_of(given)
        inside = _replace(modules, lambda part: None if part is None else _offset_held(part, after))
        changed.update(zip(OF_MODULES, (parameters, buffers, inside), strict=True))
    if isinstance(given, MaskFunction | BiasFunction):
        changed["fn"] = after(given.fn)
    elif all(map(operator.is_, held.values(), changed.values())):
        return given
    copied = given.__new__(type(given))
    copied.__dict__.update(changed)
    return copied


def _replace(parts: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The parts, each changed; the dict itself where none is."""
    changes = {name: change(part) for name, part in parts.items()}
    return parts if all(map(operator.is_, parts.values(), changes.values())) else changes
