"""Runs a survey: batches are computed, or read from the state, and added up in their order."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.numbers import check_count, check_number
from clearhead.models.loading import reason
from clearhead.models.use.surveys.arguments import kept_of, length_of, rank_of, settings_of
from clearhead.models.use.surveys.batches import Batch, batches
from clearhead.models.use.surveys.looks import Kept, read
from clearhead.models.use.surveys.state import Done, State, done


class _NoBar:
    def __enter__(self) -> _NoBar:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, count: int) -> None:
        pass


def bar_of(texts: Any, number: int) -> Any:
    """A progress bar of texts by tqdm, if it is installed, on the first rank; it is shown only on a terminal."""
    try:
        tqdm = import_module("tqdm").tqdm
    except ImportError:
        return _NoBar()
    total: float
    try:
        total = len(texts)
    except TypeError:
        total = math.inf
    return tqdm(total=total, unit=" texts", disable=True if number else None)


POLL = 0.2  # seconds between two looks for the files of other ranks


class Total:
    """The sum over batches, added in the order in which they are given."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.columns, self.counts = tuple(columns), [0, 0, 0]
        self._modules: dict[str, None] = {}
        self._sums: dict[str, Tensor] = {}

    def add(self, found: Done) -> None:
        for name, tensor in found.sums.items():
            before = self._sums.get(name)
            if before is not None and before.shape != tensor.shape:
                raise ShapeError(
                    f"survey: {name.rsplit(':', 2)[0]} gave a result of shape {tuple(before.shape)} before, and of "
                    f"{tuple(tensor.shape)} now: it depends on the length of the texts, as a Pool's map does, and "
                    "cannot be added up. Leave it out of keep."
                )
            self._sums[name] = tensor if before is None else before + tensor
        self._modules |= dict.fromkeys(found.modules)
        counts = (found.texts, found.tokens, found.truncated)
        self.counts = [a + b for a, b in zip(self.counts, counts, strict=True)]

    def state_dict(self) -> dict[str, Tensor]:
        """The sums, by module in the order of the calls, as `Means` takes them."""
        order = {name: number for number, name in enumerate(self._modules)}
        return dict(sorted(self._sums.items(), key=lambda item: order[item[0].rsplit(":", 2)[0]]))


def surveyed(
    model: nn.Module,
    texts: Any,
    tokenizer: Any,
    keep: Any,
    state: str | Path | None,
    batch: int,
    max_length: int | None,
    rank: tuple[int, int] | None,
    wait: float,
) -> tuple[Total, int | None, int]:
    """The sums over all texts, the largest length of a text, and the number of batches: see `models/survey.py`."""
    kept = kept_of(keep, tokenizer)
    number, ranks = rank_of(rank, state)
    check_count(batch, 1, "survey: batch")
    if check_number(wait, "survey: wait") < 0:
        raise ClearheadError(f"survey: wait is {wait}; expected seconds, 0 or more.")
    length = length_of(model, tokenizer, max_length)
    settings = settings_of(model, kept, batch, length)
    files = None if state is None else State(state, settings)
    total, digests = Total(kept.columns), []
    with bar_of(texts, number) as bar:
        for each in batches(texts, tokenizer, batch, length):
            if files is None:
                total.add(_read(model, each, kept))
            elif each.number % ranks == number and files.load(each.number, each.digest) is None:
                files.keep(each.number, each.digest, _read(model, each, kept))
            digests.append(each.digest)
            bar.update(len(each.ids))
    if files is not None:
        for found in _all(files, digests, float(wait)):
            total.add(found)
        files.tidy(len(digests))
    return total, length, len(digests)


def _read(model: nn.Module, batch: Batch, kept: Kept) -> Done:
    try:
        return done(batch, read(model, batch, kept))
    except (ClearheadError, MemoryError):
        raise
    except Exception as error:  # a model may raise any error
        raise ClearheadError(
            f"survey: {type(model).__name__} cannot read batch {batch.number}, ids {tuple(batch.ids.shape)}: "
            f"{reason(error)}\nIt is called with input_ids and attention_mask, and needs the tokenizer that it was "
            "trained with. For an encoder-decoder pass model.get_encoder()."
        ) from error


def _all(files: State, digests: list[str], wait: float) -> Iterator[Done]:
    """The batches in their order; files of other ranks are waited for."""
    missing, last = set(range(len(digests))), time.monotonic()
    while missing:
        there = {number for number in missing if files.has(number)}
        if there:
            missing, last = missing - there, time.monotonic()
        elif time.monotonic() - last > wait:
            raise _late(sorted(missing), wait)
        else:
            time.sleep(POLL)
    for number, digest in enumerate(digests):
        found = files.load(number, digest)
        if found is None:
            raise _late([number], 0.0)
        yield found


def _late(missing: list[int], wait: float) -> ClearheadError:
    some = ", ".join(map(str, missing[:10])) + (", …" if len(missing) > 10 else "")
    return ClearheadError(
        f"survey: {len(missing)} batches of other ranks are missing ({some}), and none came for {wait:g} "
        "seconds. Start those ranks, or all of them, again with the same arguments: what is in the folder is kept, and "
        "the survey goes on."
    )
