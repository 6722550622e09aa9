"""Calls of user-defined rules, which are written for one pair and called on all pairs of a part at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from clearhead.base.tracing import compiling, traced

_TRIED = 3  # elements of the tensors on which a rule is tried


def call_rule(rule: Callable[..., Any], by_rows: bool, *arguments: Tensor) -> Any:
    """Call a rule on all pairs of a part, as if it were called on each pair alone.

    Args:
        rule: A function of the four indices (batch, head, query, key), or of a score and these.
        by_rows: The answer of `reads_rows`. If True, `torch.vmap` maps the rule over the pairs, as FlexAttention does.
            If False, the rule computes element by element, and is called once on the arguments as they are.
        arguments: The index tensors, (B, 1, 1, 1), (1, H, 1, 1), (1, 1, Lq, 1) and (1, 1, 1, Lk), after scores
            (B, H, Lq, Lk) where the rule takes a score.

    Returns:
        The rule's result.
    """
    if not by_rows or not all(argument.numel() for argument in arguments):
        return rule(*arguments)
    mapped = rule
    for dim in (3, 2, 1, 0):
        in_dims = tuple(0 if d == dim else None for d in range(4))
        mapped = torch.vmap(mapped, (0,) * (len(arguments) - 4) + in_dims)
    return mapped(*arguments[:-4], *(index.flatten() for index in arguments[-4:]))


def reads_rows(rule: Callable[..., Any], of_score: bool = False) -> bool:
    """True if a rule gives one number for one pair, but not element by element: `(labels[q] & labels[k]).any()`.

    The rule is tried on a few pairs on the CPU. Code that is compiled or traced tries no rule, and gets False.

    Args:
        rule: A function of the four indices, or, with `of_score`, of a score and these.
    """
    if compiling() or traced():
        return False
    first = [torch.zeros(_TRIED, dtype=torch.int64, device="cpu") for _ in range(4)]
    if of_score:
        first.insert(0, torch.zeros(_TRIED, dtype=torch.float32, device="cpu"))
    with torch.random.fork_rng(devices=[]):  # a rule may draw random numbers
        return not _computes_elementwise(rule, first) and _maps_to_numbers(rule, first)


@torch.no_grad()
def _computes_elementwise(rule: Callable[..., Any], first: list[Tensor]) -> bool:
    """Whether each operation of a rule that is called on tensors (3,) gives a tensor (3,)."""
    operations = _Operations(first)
    try:
        with operations:
            rule(*first)
    except Exception:  # of any kind: the rule is the user's. One that wants a single pair fails on several
        return False
    return operations.elementwise


@torch.no_grad()
def _maps_to_numbers(rule: Callable[..., Any], first: list[Tensor]) -> bool:
    """Whether a rule can be mapped over pairs, and gives a single number for each."""
    try:
        found = torch.vmap(rule)(*first)
    except Exception:
        return False
    return isinstance(found, Tensor) and found.shape == (_TRIED,)


class _Operations(TorchFunctionMode):
    """Watches whether the operations on given tensors, and on what is computed from them, keep their shape."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()
        self.elementwise: bool = True
        self._computed = {id(tensor): tensor for tensor in given}  # they are kept, so that no id is used again

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(id(tensor) in self._computed for tensor in _tensors_in((args, kwargs))):
            for tensor in _tensors_in(result):
                self._computed[id(tensor)] = tensor
                self.elementwise &= tensor.shape == (_TRIED,)
        return result


def _tensors_in(given: Any) -> Iterator[Tensor]:
    """The tensors in the arguments or the result of an operation."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, list | tuple | dict):
        for part in given.values() if isinstance(given, dict) else given:
            yield from _tensors_in(part)
