"""Calls of user-defined rules, which are written for one pair and called on all pairs of a part at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from clearhead.base.tracing import compiling, traced

_TRIED = 3  # elements of the tensors on which a rule is tried
_known: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()  # whether a rule reads rows


def call_rule(rule: Callable[..., Any], *arguments: Tensor) -> Any:
    """Call a rule on all pairs of a part, as if it were called on each pair alone.

    A rule that computes element by element is called once, on the arguments as they are. A rule that reads a row of a
    table, `(labels[q] & labels[k]).any()`, or reduces what it read, is mapped over the pairs by `torch.vmap`, as
    FlexAttention maps it.

    Args:
        rule: A function of the four indices (batch, head, query, key), or of a score and these.
        arguments: The index tensors, (B, 1, 1, 1), (1, H, 1, 1), (1, 1, Lq, 1) and (1, 1, 1, Lk), after scores
            (B, H, Lq, Lk) where the rule takes a score.

    Returns:
        The rule's result.
    """
    if all(argument.numel() for argument in arguments) and reads_rows(rule, arguments):
        indices = arguments[-4:]
        mapped = rule
        for dim in (3, 2, 1, 0):
            in_dims = tuple(0 if d == dim else None for d in range(4))
            mapped = torch.vmap(mapped, (0,) * (len(arguments) - 4) + in_dims)
        return mapped(*arguments[:-4], *(index.flatten() for index in indices))
    return rule(*arguments)


def reads_rows(rule: Callable[..., Any], arguments: tuple[Tensor, ...] | None = None) -> bool:
    """True if a rule gives one number for one pair, but not element by element. A rule is tried once, on one pair.

    Code that is compiled or traced tries no rule, so rules are tried where a mask, a bias or a score is made of them.
    """
    key = getattr(rule, "__func__", rule)
    try:
        if key in _known:
            return _known[key]
    except TypeError:  # an object without a hash, or to which no weak reference can be made
        key = None
    if arguments is None or compiling() or traced():
        return False
    first = [argument.detach().flatten()[:1].expand(_TRIED) for argument in arguments]
    found = False if _computes_elementwise(rule, first) else _gives_one_number(rule, first)
    if key is not None and found is not None:
        _known[key] = found
    return bool(found)


def try_rule(rule: Callable[..., Any], of_score: bool = False) -> None:
    """Find out whether a rule reads rows, where it was not tried before. `of_score`: it takes a score first."""
    indices = [torch.zeros((1,) * 4, dtype=torch.int64, device="cpu") for _ in range(4)]
    score = [torch.zeros((1,) * 4, dtype=torch.float32, device="cpu")] if of_score else []
    reads_rows(rule, (*score, *indices))


@torch.no_grad()
def _computes_elementwise(rule: Callable[..., Any], first: list[Tensor]) -> bool:
    """Whether each operation of a rule that is called on tensors (3,) gives a tensor (3,)."""
    try:
        with _Operations(first) as operations:
            rule(*first)
    except Exception:  # of any kind: the rule is the user's. One that wants a single pair fails on several
        return False
    return operations.elementwise


@torch.no_grad()
def _gives_one_number(rule: Callable[..., Any], first: list[Tensor]) -> bool | None:
    """Whether a rule, called on single numbers, gives a single number. None if it fails on them."""
    try:
        found = rule(*(argument[0] for argument in first))
    except Exception:
        return None
    return isinstance(found, Tensor) and found.ndim == 0


class _Operations(TorchFunctionMode):
    """Watches whether the operations on given tensors, and on what is computed from them, keep their shape."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()
        self.elementwise = True
        self._computed = {id(tensor): tensor for tensor in given}  # they are kept, so that no id is used again

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(id(leaf) in self._computed for leaf in tree_leaves((args, kwargs))):
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor):
                    self._computed[id(tensor)] = tensor
                    self.elementwise &= tensor.shape == (_TRIED,)
        return result
