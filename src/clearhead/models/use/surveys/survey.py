"""survey(): statistics of every head of a model over many texts."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from clearhead.base.errors import ClearheadError
from clearhead.base.numbers import check_count, check_number
from clearhead.inspection.reductions.base import Reduction
from clearhead.models.loading import reason
from clearhead.models.use.surveys.arguments import kept_of, length_of, rank_of, settings_of
from clearhead.models.use.surveys.batches import Batch, batches
from clearhead.models.use.surveys.looks import Kept, read
from clearhead.models.use.surveys.result import Survey, Total
from clearhead.models.use.surveys.state import Done, State, done


class _NoBar:
    def __enter__(self) -> _NoBar:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, count: int) -> None:
        pass


def bar_of(texts: Any, number: int) -> Any:
    """tqdm's bar of texts, on the first rank, if it is installed; it shows itself on a terminal alone."""
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


def survey(
    model: nn.Module,
    texts: Iterable[str] | Iterable[Mapping[str, Any]],
    tokenizer: Any,
    *,
    keep: Sequence[str | Reduction] | None = None,
    state: str | Path | None = None,
    batch: int = 4096,
    max_length: int | None = None,
    rank: tuple[int, int] | None = None,
    wait: float = 600.0,
) -> Survey:
    """Statistics of every head of a model over many texts: on one process or many, and on from where it was stopped.

    >>> import torch, torch.nn.functional as F, clearhead as ch
    >>> class Reader(torch.nn.Module):
    ...     def forward(self, input_ids, attention_mask):
    ...         x = F.one_hot(input_ids, 128).float()[:, None]
    ...         return F.scaled_dot_product_attention(x, x, x, attn_mask=attention_mask[:, None, None].bool())
    >>> def tokenizer(texts):
    ...     return {"input_ids": [list(text.encode()) for text in texts]}
    >>> found = ch.survey(Reader().eval(), ["a cab", "a longer text"], tokenizer, keep=["first", ch.Entropy()])
    >>> [row] = found.table()
    >>> row["queries"], round(row["first"], 4), round(row["first uniform"], 4), round(row["Entropy"], 4)
    (18, 0.1115, 0.1111, 2.299)

    `model`: called with `input_ids` and `attention_mask`, in eval mode; of transformers, without the layer that
    makes words. `texts`: any iterable of strings, or of rows with a "text", as those of `datasets`; it is read once.
    `tokenizer`: of transformers, or a function of a list of texts that gives {"input_ids": a list of ids for each}.
    `keep`: measures of `seen.table()` by their names, each beside uniform attention, all but "value mass"; "word
    classes", what special tokens, punctuation, numbers, words and the parts that go on with a word receive; and
    reductions, as for `watch`. None is entropy, first, sink, previous, distance, and the classes where the tokenizer
    has a vocabulary. Means are over all queries (or keys) that count: every word weighs the same, padding does not
    count.
    `state`: a folder, with one file a batch that is written under another name first: killed at any point, the same
    call goes on, with the same result. Processes share it, each with its part: `rank` (number, of how many), None as
    torchrun sets them (RANK, WORLD_SIZE); every one reads all texts, computes its batches, waits for the others', and
    returns the whole. `wait`: for so many seconds without a new file. `batch`: the most tokens of one pass of the
    model, padding counted; texts are sorted by length among 1,024. `max_length`: longer texts are cut there; None is
    what the model takes. Gives a `Survey`.
    Formula: each mean is Σ over batches of a sum / Σ of counts, both float64, added in the order of the batches. These
    do not depend on ranks, so one process and many give the same bits, where the model does (one kind of device, one
    number of threads).
    Raises a `ClearheadError` for texts that are no strings or empty, for the state of another survey, which is left as
    it is, for a file of the state that is not what was written (by its SHA-256; delete it, and it is computed anew),
    and for batches of other ranks that do not come. Several processes may make the same survey in one folder at a time.
    Cost: a pass of the model, and per call one over its pairs for all measures, two over one key a query for "first"
    and "previous"; memory O(batch). The model's weights are read once for their digest.
    """
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
    return total.survey(type(model).__name__, length, len(digests))


def _read(model: nn.Module, batch: Batch, kept: Kept) -> Done:
    try:
        return done(batch, read(model, batch, kept))
    except (ClearheadError, MemoryError):
        raise
    except Exception as error:  # whatever a model raises
        raise ClearheadError(
            f"survey: {type(model).__name__} cannot read batch {batch.number}, ids {tuple(batch.ids.shape)}: "
            f"{reason(error)}\nIt is called with input_ids and attention_mask, and needs the tokenizer that it was "
            "trained with. Of an encoder-decoder pass model.get_encoder()."
        ) from error


def _all(files: State, digests: list[str], wait: float) -> Iterator[Done]:
    """The batches in their order, when they are there."""
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
