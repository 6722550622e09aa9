"""Calls of user-defined rules, which are written for one pair and called on all pairs of a part at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from clearhead.base.errors import UnsupportedError
from clearhead.base.torch_state.mode import get_mode

_TRIED = 3  # pairs on which a rule is tried
_PART = (2, 3, 5, 7)  # sequences, heads, queries and keys


def call_rule(rule: Callable[..., Any], by_rows: bool | None, *arguments: Tensor) -> Any:
    """Call a rule on all pairs of a part, as if it were called on each pair alone.

    Args:
        rule: A function of the four indices (batch, head, query, key), or of a score and these.
        by_rows: The answer of `reads_rows`. If True, `torch.vmap` maps the rule over the pairs, as FlexAttention does.
            If False, the rule computes element by element, and is called once on the arguments as they are. If None,
            the rule is tried now. Code that dynamo compiles or `make_fx` traces maps it; dynamo exports it as it is.
        arguments: The index tensors, (B, 1, 1, 1), (1, H, 1, 1), (1, 1, Lq, 1) and (1, 1, 1, Lk), after scores
            (B, H, Lq, Lk) where the rule takes a score.

    Returns:
        The rule's result.
    """
    if by_rows is None and (is_dynamo_compiling() or get_mode().traced):
        by_rows = not get_mode().exported
    # torch.export takes no torch.vmap
    elif by_rows is None or (by_rows and get_mode().compiled and not is_dynamo_compiling()):
        by_rows = reads_rows(rule, len(arguments) > 4, arguments[0].device)
    if not by_rows or not all(argument.numel() for argument in arguments):
        return rule(*arguments)
    mapped = rule
    for dim in (3, 2, 1, 0):
        in_dims = tuple(0 if d == dim else None for d in range(4))
        mapped = torch.vmap(mapped, (0,) * (len(arguments) - 4) + in_dims)
    found = mapped(*arguments[:-4], *(index.flatten() for index in arguments[-4:]))
    return found.flatten(3) if isinstance(found, Tensor) and found.shape[4:].numel() == 1 else found


def must_ask_again(by_rows: bool | None) -> bool:
    """Whether an answer of `reads_rows` is not known yet, such as for a table on another device, in eager code."""
    return by_rows is None and not get_mode().compiled


def reads_rows(rule: Callable[..., Any], of_score: bool = False, device: torch.device | str = "cpu") -> bool | None:
    """True if a rule gives one number for one pair, but not element by element: `(labels[q] & labels[k]).any()`.

    The rule is tried on a few pairs.

    Args:
        rule: A function of the four indices, or, with `of_score`, of a score and these.
        device: The device of the pairs. On the CPU a rule may fail that computes with a table on another device.

    Returns:
        None where it is not known: code that dynamo compiles or `make_fx` traces tries no rule, and a rule fails while
        a table that it reads is not there yet.

    Raises:
        UnsupportedError: If `torch.export` meets a rule whose result for a pair depends on the pairs beside it.
    """
    if is_dynamo_compiling() or get_mode().traced:
        return None
    with torch.random.fork_rng(devices=[]):  # a rule may draw random numbers
        if not get_mode().compiled:  # an exported program keeps the operations of a trial, also of one that fails
            pairs = _zeros([(_TRIED,)] * 4, (_TRIED,), of_score, device)
            with torch.no_grad():
                failure, _, elementwise = _try(rule, pairs, _Operations(pairs, exact=True))
                if failure is None and elementwise:
                    return False
                not_mapped, found, _ = _try(torch.vmap(rule, randomness="different"), pairs)
            if not_mapped is None:
                return isinstance(found, Tensor) and found.numel() == _TRIED
            if failure is None:
                return False
        # a rule that fails on single pairs may compute with the four dimensions of its arguments
        sides = [tuple(size if d == dim else 1 for d in range(4)) for dim, size in enumerate(_PART)]
        part = _zeros(sides, _PART, of_score, device)
        failure, found, by_pair = _try(rule, part, _Operations(part, exact=False))
    if failure is not None:
        return None
    if not get_mode().compiled or (by_pair and isinstance(found, Tensor) and found.ndim == len(_PART)):
        return False
    raise UnsupportedError(
        f"{getattr(rule, '__name__', type(rule).__name__)} computes with many pairs at once, and torch.export takes no "
        "torch.vmap, which maps it over single pairs.\n"
        "Reduce over the last dimension alone: (labels[i] & labels[j]).any(-1)."
    )


def _zeros(
    indices: list[tuple[int, ...]], scores: tuple[int, ...], of_score: bool, device: torch.device | str
) -> list[Tensor]:
    found = [torch.zeros(shape, dtype=torch.int64, device=device) for shape in indices]
    return [torch.zeros(scores, dtype=torch.float32, device=device), *found] if of_score else found


def _try(
    rule: Callable[..., Any], arguments: list[Tensor], operations: _Operations | None = None
) -> tuple[Exception | None, Any, bool]:
    """The error and the result of a call of a user's rule, and whether its operations kept the shape."""
    try:
        with operations or nullcontext():
            found = rule(*arguments)
    except Exception as error:  # of any kind: the rule is the user's
        return error, None, False
    return None, found, operations is not None and operations.keeps_shape


class _Operations(TorchFunctionMode):
    """Watches whether the operations on given tensors, and on what is computed from them, keep their shape.

    `exact`: False where results may have more dimensions behind those of the given tensors.
    """

    def __init__(self, given: list[Tensor], exact: bool) -> None:
        super().__init__()
        self.keeps_shape: bool = True
        self._dims, self._exact = given[0].ndim, exact
        self._computed = {id(tensor): tensor for tensor in given}  # they are kept, so that no id is used again

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = [tensor.shape[: self._dims] for tensor in _tensors_in((args, kwargs)) if id(tensor) in self._computed]
        made = getattr(func, "__name__", "").startswith("new_")  # its numbers follow from no index
        for tensor in _tensors_in(result) if read and not made else ():
            self._computed[id(tensor)] = tensor
            shape = tensor.shape if self._exact else tensor.shape[: self._dims]
            self.keeps_shape = self.keeps_shape and shape == torch.broadcast_shapes(*read)  # type: ignore[no-untyped-call]
        return result


def _tensors_in(given: Any) -> Iterator[Tensor]:
    """The tensors in the arguments or the result of an operation."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, list | tuple | dict):
        for part in given.values() if isinstance(given, dict) else given:
            yield from _tensors_in(part)
