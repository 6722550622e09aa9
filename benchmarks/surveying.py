"""A survey of a real model, over the same model reading the same batches."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measure import interleaved
from benchmarks.result import Result, times
from clearhead.models.loading import bundled, load
from clearhead.models.surveys.batches import batches
from clearhead.models.surveys.looks import NAMED, Kept, read

os.environ["HF_HUB_OFFLINE"] = "1"
FOUR = ("normalised entropy", "first", "previous", "distance")
WORDS = ("the", "pump", "in", "Broad", "street", "was", "closed", "after", "Doctor", "Snow", "had", "drawn", "a", "map")


def corpus(count: int) -> list[str]:
    """Texts of 5 to 200 words."""
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=draw.randint(5, 200))) for _ in range(count)]


def survey(count: int = 128, bar: float = 0.7) -> Result:
    model, tokenizer = load(bundled())
    kept = Kept(tuple(NAMED[name] for name in FOUR), None, ())
    every = list(batches(corpus(count), tokenizer, 4096, None))

    @torch.inference_mode()
    def plain() -> None:
        for batch in every:
            model(input_ids=batch.ids, attention_mask=batch.words.long())

    calls: dict[str, Callable[[], Any]] = {"plain": plain, "survey": lambda: [read(model, b, kept) for b in every]}
    seconds = interleaved(calls, 7, 1)
    ratio, tokens = seconds["plain"] / seconds["survey"], sum(int(batch.words.sum()) for batch in every)
    what = f"BERT, {count} texts, {tokens} tokens, {len(every)} batches, four statistics: throughput over the model's"
    return Result(what, ratio, "×", f"≥ {bar}", ratio >= bar, times(seconds))


CASES: dict[str, Callable[[], Result]] = {"survey-bert": survey}
