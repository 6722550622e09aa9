"""How an answer is compared, and how an error says what is wrong with it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from traceback import extract_tb
from typing import Any

import numpy as np
import torch
from torch import Tensor

AXES = {"two axes": (), "three axes": (4,), "four axes": (2, 3)}  # the axes before the last two


class WrongAnswer(AssertionError):
    """What a check raises. A notebook shows its message alone: lines of the check would tell the right answer."""

    def _render_traceback_(self) -> list[str]:  # IPython asks for it in place of the traceback
        return [f"{type(self).__name__}: {self}"]


def alone(check: Callable[..., None]) -> Callable[..., None]:
    """A check whose errors are `WrongAnswer`, and come without the lines of the check."""

    @wraps(check)
    def checked(*answer: Any, **named: Any) -> None:
        try:
            return check(*answer, **named)
        except AssertionError as wrong:
            said = str(wrong)
        except Exception as error:
            said = f"this cannot be checked: {type(error).__name__}: {error}"
        raise WrongAnswer(said)

    return checked


def answered(what: str, *given: Any) -> None:
    """Raises where a part of the answer is still None."""
    if any(each is None for each in given):
        raise AssertionError(f"{what}: not answered yet. Write your lines in place of the dots, or of None.")


def numbers(given: Any, what: str) -> Tensor:
    """A tensor, an array, a number, or a list of numbers, as float64."""
    answered(what, given)
    try:
        tensor = given.detach() if isinstance(given, Tensor) else torch.as_tensor(np.asarray(given))
        return tensor.double()
    except (TypeError, ValueError, RuntimeError) as error:
        raise AssertionError(f"{what}: found {given!r:.80}, which is no number, array or tensor.") from error


def same(found: Any, expected: Any, what: str, tolerance: float = 1e-5, but: Mapping[str, Any] | None = None) -> None:
    """Raises unless both are of one shape and differ by `tolerance` at most. `but`: what each known mistake gives."""
    said = (lambda x: str(bool(x))) if isinstance(expected, bool) else "{:.6g}".format
    found, expected = numbers(found, what), numbers(expected, what)
    if found.shape == expected.shape and bool(((found - expected).abs() <= tolerance).all()):
        return  # NaN is not close to anything
    for reason, mistaken in (but or {}).items():
        mistaken = numbers(mistaken, what)
        if found.shape == mistaken.shape and torch.allclose(found, mistaken, 1e-4, tolerance, equal_nan=True):
            raise AssertionError(f"{what}: not right. It seems that {reason}.")
    if found.shape != expected.shape:
        raise AssertionError(f"{what}: the shape is {tuple(found.shape)}, and {tuple(expected.shape)} was asked for.")
    first = tuple(int(i) for i in (~((found - expected).abs() <= tolerance)).nonzero()[0])
    place = f" at [{', '.join(map(str, first))}]" if first else ""
    raise AssertionError(f"{what}: {said(found[first].item())}{place} is not right.")


def told(found: Any, expected: Any, what: str, but: Mapping[str, Any]) -> None:
    """Raises unless words, or lists of words, are equal. `but`: what each known mistake gives."""
    found = list(found) if isinstance(found, tuple) else found
    if found != expected:
        reason = next((f" It seems that {reason}." for reason, mistaken in but.items() if found == mistaken), "")
        raise AssertionError(f"{what}: {found!r:.100} is not right.{reason}")


def close(found: Any, expected: Any, what: str = "the answer", tolerance: float = 1e-5) -> None:
    """Numbers, or tensors of one shape, that differ by `tolerance` at most."""
    same(found, expected, what, tolerance)
    print(f"right: {what}")


def true(holds: Any, what: str) -> None:
    """That something holds: `what` says it in words."""
    if not bool(holds):
        raise AssertionError(f"not so: {what}")
    print(f"right: {what}")


def called(function: Callable[..., Any], *inputs: Any, what: str) -> Any:
    """What a function of the reader's gives for copies of the inputs."""
    copies = [x.clone() if isinstance(x, Tensor) else x.copy() if isinstance(x, np.ndarray) else x for x in inputs]
    try:
        result = function(*copies)
    except Exception as error:
        shapes = ", ".join(str(tuple(x.shape)) for x in inputs if hasattr(x, "shape"))
        where = f" for inputs of the shapes {shapes}" if shapes else ""
        raise AssertionError(f"{what}: {type(error).__name__}{where}: {error}{_line(function, error)}") from error
    answered(what, result)
    return result


def _line(function: Callable[..., Any], error: Exception) -> str:
    """The line of the reader's that an error came from."""
    file = getattr(getattr(function, "__code__", None), "co_filename", None)
    lines = [frame.line for frame in extract_tb(error.__traceback__) if frame.filename == file and frame.line]
    return f"\nIt was raised in your line:  {lines[-1]}" if lines else ""


def two(result: Any, what: str) -> tuple[Any, Any]:
    """Two results of one function."""
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise AssertionError(f"{what}: two results were asked for.")
    answered(what, *result)
    return result[0], result[1]


@contextmanager
def case(name: str, right: list[str]) -> Iterator[None]:
    """One of several inputs. Where the answer was right for others, an error says so."""
    try:
        yield
    except AssertionError as error:
        before = f" It is right for {' and '.join(right)}." if right else ""
        raise AssertionError(f"With {name}: {error}{before}") from error
    right.append(name)


def pairs(found: Any, wanted: Tensor, what: str) -> None:
    """The matrix of a mask; the first pair that differs is named."""
    found = numbers(found, what).bool()
    found = found.expand(wanted.shape) if found.dim() == 2 else found
    if found.shape != wanted.shape:
        raise AssertionError(f"{what}: the shape is {tuple(found.shape)}, and {tuple(wanted.shape)} was asked for.")
    wrong = (found != wanted).nonzero()
    if len(wrong):
        i, j = wrong[0].tolist()
        place = {0: "which is itself", 1: "one before it", 2: "two before it"}.get(i - j, "")
        place = "the first" if j == 0 else "which comes later" if j > i else place or f"{i - j} before it"
        raise AssertionError(f"{what}: query {i} may {'' if found[i, j] else 'not '}see key {j}, {place}.")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers that do not touch the generator of the page."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
