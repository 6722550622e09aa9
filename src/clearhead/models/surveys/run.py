"""Runs a survey: batches are computed, or read from the state, and added up in their order."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from operator import length_hint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

import clearhead
from clearhead.base.errors import ClearheadError, ShapeError
from clearhead.base.numbers import check_count, check_number
from clearhead.base.torch_state.tensor_kind import has_own_dispatch
from clearhead.base.torch_state.versions import compute_checksum, contents, without_addresses
from clearhead.inspection.reductions.base import Reduction
from clearhead.models.interception.refused import validate_model
from clearhead.models.interception.transformers_private import ORIGIN, named_backend
from clearhead.models.loading import most_tokens, reason
from clearhead.models.recorder.asked import asked_to_reduce
from clearhead.models.recordings.reduced import Means
from clearhead.models.surveys.batches import Batch, batches
from clearhead.models.surveys.examples import Examples, Spread
from clearhead.models.surveys.looks import NAMED, Kept, WordClasses, read
from clearhead.models.surveys.state import Done, State, done

USUAL = ("normalised entropy", "first", "sink", "previous", "distance")
CLASSED, EXAMPLES = "word classes", "examples"
STRONGEST = 3  # examples of each head and measure


def kept_of(keep: Any, tokenizer: Any) -> Kept:
    if keep is None:
        keep = [*USUAL, EXAMPLES, *([CLASSED] if hasattr(tokenizer, "get_vocab") else [])]
    given = list(keep) if isinstance(keep, list | tuple) else [keep]
    names = [one for one in given if isinstance(one, str)]
    reductions = [one for one in given if not isinstance(one, str)]
    wrong = [name for name in names if name not in (*NAMED, CLASSED, EXAMPLES)]
    if not given or wrong or not all(isinstance(one, Reduction) for one in reductions):
        raise ClearheadError(
            f"survey: keep is {keep!r:.300}; expected some of {', '.join(map(repr, NAMED))}, {CLASSED!r}, "
            f"{EXAMPLES!r}, and reductions such as ch.reductions.Entropy()."
        )
    if reductions:
        asked_to_reduce(reductions)  # raises for reductions that need a value of one call
    classes = WordClasses(tokenizer) if CLASSED in names else None
    measures = tuple(NAMED[name] for name in dict.fromkeys(names) if name in NAMED)
    return Kept(measures, classes, tuple(reductions), STRONGEST if EXAMPLES in names else 0)


def rank_of(rank: Any, state: Any) -> tuple[int, int]:
    """The number of this process, and the number of processes."""
    if rank is None:
        given = [os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")]
        rank = tuple(int(one) if one.isdecimal() else one for one in given)
    two = isinstance(rank, tuple | list) and [type(one) for one in rank] == [int, int]
    if not two or not 0 <= rank[0] < rank[1]:
        raise ClearheadError(f"survey: rank is {rank!r}; expected (number, of how many), such as (0, 2), or None.")
    if rank[1] > 1 and state is None:
        raise ClearheadError(f"survey: {rank[1]} ranks share a folder: pass state=, which all of them can reach.")
    return rank[0], rank[1]


def length_of(model: Any, asked_for: int | None) -> int | None:
    """The largest number of tokens of a text; None for any number."""
    validate_model(model, "survey")
    if model.training:
        raise ClearheadError("survey: the model is in training mode, whose dropout is random; call model.eval().")
    most = most_tokens(model)
    if asked_for is None:
        return most
    check_count(asked_for, 1, "survey: max_length")
    if most is not None and asked_for > most:
        raise ClearheadError(f"survey: max_length is {asked_for}, and the model takes at most {most} tokens.")
    return asked_for


_ELSEWHERE = (ORIGIN, "name_or_path", "transformers_version")  # where a model was loaded from


def settings_of(model: nn.Module, kept: Kept, batch: int, max_length: int | None) -> dict[str, str]:
    """The settings, by name, that must be the same in all runs whose states are added up."""
    parameters = list(model.parameters())
    types = sorted({str(t.dtype) for t in parameters})
    config: Any = getattr(model, "config", None)
    said = config.to_dict() if hasattr(config, "to_dict") else {}
    said = {name: value for name, value in said.items() if name not in _ELSEWHERE}
    named = [column for column in kept.columns[1:] if not column.endswith(" uniform")]
    return {
        "model": type(model).__name__,
        "configuration": compute_checksum(json.dumps(said, sort_keys=True, default=str), {}),
        "weights": _weights(model),
        "dtype": ", ".join(types),
        "device": ", ".join(sorted({t.device.type for t in parameters})) or "cpu",
        "backend": str(named_backend(config)),
        "threads": str(torch.get_num_threads()),  # sums over other batches have other last digits
        "keep": ", ".join([*named, *map(_said, kept.reductions)]),
        "batch": str(batch),
        "max_length": str(max_length),
        "examples": str(kept.examples),
        "clearhead": clearhead.__version__,
        "torch": torch.__version__,
    }


def _said(reduction: Any) -> str:
    """A reduction with its settings, all numbers of its tensors among them."""
    arrays = torch.Tensor | np.ndarray
    each = {name: contents(value) if isinstance(value, arrays) else value for name, value in vars(reduction).items()}
    return without_addresses(f"{type(reduction).__qualname__}({each})")


def _weights(model: nn.Module) -> str:
    """A digest of the weights, without those that only a layer can read: quantised, sharded, or elsewhere."""
    every = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    there = {name: one for name, one in every.items() if not (one.is_meta or has_own_dispatch(one))}
    unread = [f"{name} {tuple(every[name].shape)}" for name in sorted(every.keys() - there.keys())]
    return compute_checksum("\n".join(unread), there) + f", without {len(unread)} that are not read" * bool(unread)


def bar(total: float, unit: str, done: int = 0, hidden: bool = False) -> Any:
    """A progress bar by tqdm, if it is installed; it is shown only on a terminal."""
    try:
        tqdm = import_module("tqdm").tqdm
    except ImportError:
        return nullcontext(SimpleNamespace(update=lambda count: None))
    return tqdm(total=total, initial=done, unit=f" {unit}", disable=True if hidden else None)


POLL = 0.2  # seconds between two looks for the files of other ranks


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
) -> dict[str, Any]:
    """The means over all texts, and the other parts of a `Survey`: see `models/surveys/survey.py`."""
    kept = kept_of(keep, tokenizer)
    number, ranks = rank_of(rank, state)
    check_count(batch, 1, "survey: batch")
    check_number(wait, "survey: wait")
    length = length_of(model, max_length)
    settings = settings_of(model, kept, batch, length)
    files = None if state is None else State(state, settings)
    means, counts, digests, strongest = Means(), [0, 0, 0], [], Examples(kept.measures, kept.examples)
    spread = Spread()

    def add(found: Done) -> None:
        try:
            means.include(found.sums, found.modules)
        except ShapeError as error:
            raise ShapeError(
                f"survey: a result depends on the length of the texts, as a Pool's map. Leave it out of keep.\n{error}"
            ) from None
        strongest.include(found.examples, found.ids)
        spread.include(found.spread)
        counts[:] = [a + b for a, b in zip(counts, (found.texts, found.tokens, found.truncated), strict=True)]

    with bar(length_hint(texts) or math.inf, "texts", hidden=bool(number)) as shown:
        for each in batches(texts, tokenizer, batch, length):
            if files is None:
                add(_read(model, each, kept))
            elif each.number % ranks == number and files.load(each.number, each.digest) is None:
                files.keep(each.number, each.digest, _read(model, each, kept))
            digests.append(each.digest)
            shown.update(len(each.ids))
    if files is not None:
        for found in _all(files, digests, float(wait)):
            add(found)
        files.tidy(len(digests))
    named = getattr(tokenizer, "convert_ids_to_tokens", None)  # of a tokenizer of transformers
    return {
        **dict(zip(("texts", "tokens", "truncated"), counts, strict=True)),
        "columns": tuple(kept.columns),
        "means": means,
        "batches": len(digests),
        "max_length": length,
        "spread": spread,
        "strongest": strongest,
        "spelling": strongest.words(str if named is None else lambda token: str(named([token])[0])),
    }


def _read(model: nn.Module, batch: Batch, kept: Kept) -> Done:
    try:
        return done(batch, *read(model, batch, kept))
    except (ClearheadError, MemoryError):
        raise
    except Exception as error:  # a model may raise any error
        raise ClearheadError(
            f"survey: {type(model).__name__} cannot read batch {batch.number}, ids {tuple(batch.ids.shape)}: "
            f"{reason(error)}\nIt needs its own tokenizer. For an encoder-decoder pass model.get_encoder()."
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
        f"survey: {len(missing)} batches of other ranks are missing ({some}), and none came for {wait:g} seconds. "
        "Start those ranks, or all of them, again with the same arguments: what is in the folder is kept."
    )
