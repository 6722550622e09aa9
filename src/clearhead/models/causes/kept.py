"""The folder of a sweep: what is done, from which an interrupted sweep goes on."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.base.output.pages import write_page
from clearhead.base.torch_state.torch_private import tree_map_only
from clearhead.base.torch_state.versions import compute_checksum, contents, without_addresses
from clearhead.models.causes.cells import Cell
from clearhead.models.edits.base import Edit
from clearhead.models.edits.from_run import FromRun
from clearhead.models.recordings.call import Call
from clearhead.models.recordings.calls import Calls
from clearhead.problem.reads import tensors_in

HEADER, VERSION, CHECKSUM = "clearhead sweep", 3, "sha256"
Run = Callable[[list[list[Edit]]], list[float]]  # the metric of some cells, given by their edits


class _Line(NamedTuple):
    """A run of the model: the metric of its cells, and the digests of their edits."""

    values: list[float]
    edits: list[str]


class Kept:
    """The metric of the cells that are done, in a file where a folder is given: a line for each run of the model.

    Its first line says what the sweep is of: the cells, the metric by name, its number without an edit, and the inputs.
    """

    def __init__(self, folder: Any, cells: list[Cell], plain: float, metric: Any, inputs: Any) -> None:
        self._lines: list[_Line] = []
        self._cells, self._plain = cells, plain
        self._path: Path | None = None
        if folder is None:
            return
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._path = Path(folder) / "sweep.jsonl"
            text = self._path.read_text("utf-8", "replace") if self._path.exists() else ""
        except (OSError, TypeError, ValueError) as error:
            raise ClearheadError(f"sweep: cannot write to the folder {folder!r:.200} ({error}).") from error
        tensors: list[Tensor] = []
        tree_map_only(Tensor, tensors.append, dict(inputs) if isinstance(inputs, Mapping) else inputs)
        name = getattr(metric, "name", None) or getattr(metric, "__qualname__", type(metric).__qualname__)
        header = {"cells": cells, "metric": name, "inputs": _digest(tensors)}
        first = _seal_line({HEADER: VERSION, **header, "plain": plain})
        whole, _, rest = text.rpartition("\n")  # the last line may be one whose write was interrupted
        if not whole and first.startswith(rest):
            self._write(first, "w")
            return
        before, *lines = (self._open_line(line, number) for number, line in enumerate(whole.split("\n"), 1))
        differ = [f"its {name}" for name, value in header.items() if before.get(name) != value]
        if not differ and not _near([before["plain"]], [plain]):
            differ = [f"the metric without an edit, {before['plain']} there and {plain} here"]
        if differ:
            raise self._another(f"in {', '.join(differ)}")
        self._lines = [_Line(**line) for line in lines]
        if rest:
            write_page(self._path, [f"{whole}\n"], "sweep")

    @property
    def numbers(self) -> list[float]:
        return [value for line in self._lines for value in line.values]

    @property
    def together(self) -> int:
        """How many cells one run has had at the most."""
        return max((len(line.values) for line in self._lines), default=0)

    def check(self, edits: list[list[Edit]], run: Run) -> None:
        """Raise where the cells that are done had other edits than these.

        Their descriptions are compared, and the line with the largest effect is computed again, because a description
        does not say what a function does or what a recording holds.
        """
        if not self._lines:
            return
        known = [each for line in self._lines for each in line.edits]
        for cell, own, before in zip(self._cells, edits, known, strict=False):
            if _described(own) != before:
                raise self._another(f"in the edits of {cell}, which are {own!r:.200} here")
        starts = list(itertools.accumulate((len(line.values) for line in self._lines), initial=0))
        sizes = [max(abs(value - self._plain) for value in line.values) for line in self._lines]
        most = max(range(len(sizes)), key=lambda n: -1.0 if math.isnan(sizes[n]) else sizes[n])
        values = run(edits[starts[most] : starts[most + 1]])
        if not _near(self._lines[most].values, values):
            there, here = self._lines[most].values[0], values[0]
            raise self._another(
                f"in what its edits, its model or its metric do: of {self._cells[starts[most]]} the metric is "
                f"{there:.6g} there, and {here:.6g} here"
            )

    def add(self, edits: list[list[Edit]], run: Run) -> None:
        """Run the model with the edits of the next cells, and keep their numbers."""
        said = [_described(own) if self._path is not None else "" for own in edits]
        line = _Line(run(edits), said)
        self._lines.append(line)
        if self._path is not None:
            self._write(_seal_line(line._asdict()), "a")

    def _another(self, differs: str) -> ClearheadError:
        return ClearheadError(
            f"sweep: {self._path} is of another sweep, which differs {differs}. Pass a folder that only this sweep "
            "uses."
        )

    def _open_line(self, text: str, number: int) -> dict[str, Any]:
        """What a line holds."""
        try:
            line = json.loads(text)
            if line.pop(CHECKSUM) != compute_checksum(json.dumps(line), {}):
                raise ValueError("the checksum differs")
        except Exception as error:  # errors of JSON, and of a line that is no object
            raise ClearheadError(
                f"sweep: line {number} of {str(self._path)!r} is not what a sweep of this version wrote there: its "
                "checksum is missing or another. Delete it and all lines after it: the same call computes them anew."
            ) from error
        return dict(line)

    def _write(self, line: str, mode: str) -> None:
        assert self._path is not None
        try:
            with self._path.open(mode, encoding="utf-8", newline="\n") as file:
                file.write(line + "\n")
        except OSError as error:
            raise ClearheadError(
                f"sweep: cannot write {str(self._path)!r}: {error.strerror}. The lines in it stay: start again with "
                "the same arguments once it can be written."
            ) from error


def _seal_line(line: dict[str, Any]) -> str:
    """A line of the file: what it holds, and the checksum of this."""
    return json.dumps(line | {CHECKSUM: compute_checksum(json.dumps(line), {})})


def _near(some: list[Any], others: list[float]) -> bool:
    """Whether numbers are the same but for rounding; NaN is the same as NaN."""
    return len(some) == len(others) and all(
        math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-6) or (math.isnan(one) and math.isnan(other))
        for one, other in zip(some, others, strict=True)
    )


def _described(edits: Sequence[Edit]) -> str:
    """A digest of some edits: their text, and the numbers of the tensors that they hold or read."""
    held = [value.source if isinstance(value, FromRun) else value for one in edits for value in vars(one).values()]
    arrays = [value for value in held if isinstance(value, np.ndarray)]
    tensors = [tensor for value in held if not isinstance(value, Calls | Call) for tensor in tensors_in(value)]
    return _digest([*arrays, *tensors], without_addresses(repr(list(edits))))


def _digest(tensors: Iterable[Tensor | np.ndarray], text: str = "") -> str:
    return compute_checksum("\n".join([text, *map(contents, tensors)]), {})
