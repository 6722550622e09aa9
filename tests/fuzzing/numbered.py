"""Cases by their numbers: the random choices of one, and the command that runs some and prints each failure."""

import argparse
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch


class Choices:
    """Random choices, which follow from a number."""

    def __init__(self, number: int) -> None:
        self.rng = np.random.default_rng(number)
        self.torch = torch.Generator().manual_seed(number)

    def one(self, *choices: Any) -> Any:
        return choices[self.rng.integers(len(choices))]


def main(
    failures_of: Callable[[int], Iterable[str]],
    what: str,
    about: str | None,
    parser: argparse.ArgumentParser | None = None,
    begin: Callable[[argparse.Namespace], None] = lambda given: None,
) -> int:
    """The exit status. `parser` may have further options; `begin` is called with what was given, before any case."""
    parser = parser or argparse.ArgumentParser()
    parser.description = about.splitlines()[0] if about else None
    parser.add_argument("count", type=int, nargs="?", default=1000)
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--only", type=int)
    given = parser.parse_args()
    begin(given)
    numbers = [given.only] if given.only is not None else range(given.first, given.first + given.count)
    failed = 0
    for number in numbers:
        for failure in failures_of(number):
            failed += 1
            print(failure, flush=True)
    print(f"{len(numbers)} {what}, {failed} failures")
    return 1 if failed else 0
