"""How an answer to an exercise is compared, and how an error says what is wrong with it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from traceback import extract_tb
from typing import Any, ParamSpec

import numpy as np
import torch
from torch import Tensor

from clearhead.base.torch_state.torch_private import tree_map_only

Given = ParamSpec("Given")


class WrongAnswer(AssertionError):
    """The error of a check of an exercise. A notebook shows its message alone, since lines of a check tell the answer.

    >>> from clearhead import exercises
    >>> try:
    ...     exercises.close(3.0, 1.5, "the mean", mistakes={"this is the sum": 3.0})
    ... except exercises.WrongAnswer as wrong:
    ...     print(wrong)
    the mean: not right. It seems that this is the sum.

    A check of your own that raises it is shown in the same way.
    """

    def _render_traceback_(self) -> list[str]:  # IPython asks for it in place of the traceback
        return [f"{type(self).__name__}: {self}"]


def alone(check: Callable[Given, None]) -> Callable[Given, None]:
    """A check whose errors are `WrongAnswer`, and come without the lines of the check."""

    @wraps(check)
    def checked(*answer: Given.args, **named: Given.kwargs) -> None:
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
    if any(each is None or each is ... for each in given):
        raise AssertionError(f"{what}: not answered yet. Write your lines in place of the dots, or of None.")


def numbers(given: Any, what: str) -> Tensor:
    """A tensor, an array, a number, or a list of these, as float64, or complex128, on the host."""
    answered(what, given)
    try:
        found = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu().to(_wide(tensor)).resolve_conj(), given)
        tensor = found if isinstance(found, Tensor) else torch.as_tensor(np.asarray(found), device="cpu")
        return tensor.to(_wide(tensor))
    except (TypeError, ValueError, RuntimeError) as error:
        raise AssertionError(f"{what}: found {given!r:.80}, which is no number, array or tensor.") from error


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _right(found: Tensor, expected: Tensor, tolerance: float) -> Tensor:
    """Which numbers are right: equal, as infinite ones may be, or no further apart than the tolerance. NaN is not."""
    return (found == expected) | ((found - expected).abs() <= tolerance)


def same(found: Any, expected: Any, what: str, tolerance: float = 1e-5, but: Mapping[str, Any] | None = None) -> None:
    """Raises unless both are of one shape and differ by `tolerance` at most. `but`: what each known mistake gives."""
    said = (lambda x: str(bool(x))) if isinstance(expected, bool) else "{:.6g}".format
    found, expected = numbers(found, what), numbers(expected, what)
    if found.shape == expected.shape and bool(_right(found, expected, tolerance).all()):
        return
    for reason, mistaken in (but or {}).items():
        mistaken = numbers(mistaken, what)
        alike = found.shape == mistaken.shape and found.dtype == mistaken.dtype
        if alike and torch.allclose(found, mistaken, 1e-4, tolerance, equal_nan=True):
            raise AssertionError(f"{what}: not right. It seems that {reason}.")
    if found.shape != expected.shape:
        raise AssertionError(f"{what}: the shape is {tuple(found.shape)}, and {tuple(expected.shape)} was asked for.")
    first = tuple(int(i) for i in (~_right(found, expected, tolerance)).nonzero()[0])
    place = f" at [{', '.join(map(str, first))}]" if first else ""
    raise AssertionError(f"{what}: {said(found[first].item())}{place} is not right.")


def told(found: Any, expected: Any, what: str, but: Mapping[str, Any]) -> None:
    """Raises unless words, or lists of words, are equal. `but`: what each known mistake gives."""
    found = list(found) if isinstance(found, tuple) else found
    if found != expected:
        reason = next((f" It seems that {reason}." for reason, mistaken in but.items() if found == mistaken), "")
        raise AssertionError(f"{what}: {found!r:.100} is not right.{reason}")


def called(function: Callable[..., Any], *inputs: Any, what: str) -> Any:
    """What a function of the reader's gives for copies of the inputs."""
    answered(what, function)
    try:
        result = function(*_copies(inputs))
    except Exception as error:
        shapes = ", ".join(str(tuple(x.shape)) for x in inputs if hasattr(x, "shape"))
        where = f" for inputs of the shapes {shapes}" if shapes else ""
        said = f"{error}".rstrip(".")
        raise AssertionError(f"{what}: {type(error).__name__}{_line(function, error)}{where}: {said}.") from error
    answered(what, result)
    return result


def _copies(inputs: Sequence[Any]) -> list[Any]:
    """The inputs, where tensors, arrays, lists and dicts are copies: a function may write to what it is given."""
    copies: list[Any] = tree_map_only(Tensor, Tensor.clone, tree_map_only(np.ndarray, np.ndarray.copy, list(inputs)))
    return copies


def _line(function: Callable[..., Any], error: Exception) -> str:
    """The line of the reader's that an error came from."""
    file = getattr(getattr(function, "__code__", None), "co_filename", None)
    lines = [frame.line for frame in extract_tb(error.__traceback__) if frame.filename == file and frame.line]
    return f" in your line `{lines[-1]}`" if lines else ""


@contextmanager
def case(name: str, right: list[str]) -> Iterator[None]:
    """One of several inputs. Where the answer was right for others, an error says so."""
    try:
        yield
    except AssertionError as error:
        before = f" It is right for {' and '.join(right)}." if right else ""
        raise AssertionError(f"With {name}: {error}{before}") from error
    right.append(name)


@alone
def close(
    found: object,
    expected: object,
    what: str = "the answer",
    tolerance: float = 1e-5,
    mistakes: Mapping[str, object] | None = None,
) -> None:
    """Check numbers, or arrays of one shape: right, or an error that says what is wrong and not what is right.

    >>> import torch
    >>> from clearhead import exercises
    >>> scores = torch.tensor([[1.0, 3.0]])
    >>> exercises.close(scores.softmax(-1), [[0.1192, 0.8808]], "the weights", tolerance=1e-4)
    right: the weights

    `found`: the answer: a number, an array, a tensor, or lists; None and `...` are "not answered yet". `what`: what it
    is, in the messages. `mistakes`: what each frequent mistake gives, by words that say it: `{"this is the sum": 3}`.
    Right is found = expected, or |found − expected| ≤ tolerance, for every number. Prints `right: …`.
    Raises a `WrongAnswer`: the mistake whose result was found, else the shape, else the first number that is not right.
    Cost: a pass over the numbers, and one for each mistake where the answer is wrong.
    """
    same(found, expected, what, tolerance, mistakes)
    print(f"right: {what}")


@alone
def true(holds: object, what: str) -> None:
    """Check that something holds, which `what` says in words.

    >>> from clearhead import exercises
    >>> exercises.true(3 > 2, "three is more than two")
    right: three is more than two

    Raises a `WrongAnswer` where it does not hold. Cost: none.
    """
    if holds is ...:
        answered(what, holds)
    if not bool(holds):
        raise AssertionError(f"not so: {what}")
    print(f"right: {what}")


@alone
def tried(
    function: Callable[..., object],
    solution: Callable[..., object],
    inputs: Mapping[str, Sequence[object]],
    what: str = "the result",
    tolerance: float = 1e-5,
    mistakes: Mapping[str, Callable[..., object]] | None = None,
) -> None:
    """Check a function on several inputs, such as those of other shapes, against a solution.

    >>> import torch
    >>> from clearhead import exercises
    >>> mistakes = {"the softmax runs over the queries": lambda s: s.softmax(-2)}
    >>> inputs = {"two axes": [torch.rand(2, 3)], "three axes": [torch.rand(4, 2, 3)]}
    >>> solution = lambda scores: scores.softmax(-1)
    >>> exercises.tried(lambda scores: scores.softmax(-1), solution, inputs, "the weights", mistakes=mistakes)
    right: the weights
    >>> try:
    ...     exercises.tried(lambda scores: scores.softmax(1), solution, inputs, "the weights", mistakes=mistakes)
    ... except exercises.WrongAnswer as wrong:
    ...     print(wrong)
    With three axes: the weights: not right. It seems that the softmax runs over the queries. It is right for two axes.

    `function`: the answer. `inputs`: the arguments of each case, by its name; each function gets copies of them.
    `mistakes`: functions of the same arguments that make frequent mistakes, by what each of them does.
    Prints `right: …`. Raises a `WrongAnswer`, which says for which inputs it is right; where the function raises, with
    the shapes and the function's line. Cost: one call of each function for each case.
    """
    if not inputs:
        raise ValueError("inputs is empty; pass the arguments of one case or more, such as {'two axes': [scores]}")
    right: list[str] = []
    for name, given in inputs.items():
        but = {reason: mistaken(*_copies(given)) for reason, mistaken in (mistakes or {}).items()}
        with case(name, right):
            same(called(function, *given, what=what), solution(*_copies(given)), what, tolerance, but)
    print(f"right: {what}")
