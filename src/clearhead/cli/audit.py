"""The command `clearhead audit`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import reduce
from itertools import chain
from operator import and_
from typing import Any

import torch

from clearhead.base.errors import ClearheadError
from clearhead.base.output.text import printable
from clearhead.cli.texts import checked, is_causal, model_of
from clearhead.masks.base import Mask
from clearhead.masks.causal import Causal
from clearhead.masks.documents import Documents
from clearhead.masks.sliding_window import SlidingWindow
from clearhead.models.audits.audit import FORWARDS, audit
from clearhead.models.loading import quiet
from clearhead.models.model_calls import call_without_grad


def run(options: argparse.Namespace) -> int:
    """`clearhead audit` with these options. Returns 0 where the model attends as expected, and 1 where not."""
    model, tokenizer, folder = model_of(options, head=False)
    if model.config.is_encoder_decoder:
        raise ClearheadError(f"clearhead audit: {type(model).__name__} has two stacks; expected a model of one.")
    texts = [checked(text, f"text {number}") for number, text in enumerate(options.text, 1)]
    with quiet():
        batch, lengths = make_batch(tokenizer, texts, options.max_length, options.packed)
    mask = make_mask(options, lengths, model)
    shape = " × ".join(map(str, batch["input_ids"].shape))
    passes = FORWARDS[options.level]
    start = time.perf_counter()
    call_without_grad(model, batch)
    seconds = (time.perf_counter() - start) * passes
    told = f"{shape} ids, about {passes} forward passes, {seconds:.0f} seconds"
    print(f"Audit of {printable(str(folder))}: {told}.", file=sys.stderr)
    with quiet():
        report = audit(model, batch, mask, level=options.level, seed=options.seed)
    text = json.dumps(report.to_dict(), indent=1) if options.json else str(report)
    print("\n".join(map(printable, text.split("\n"))))
    return 0 if report.ok else 1


def make_batch(tokenizer: Any, texts: list[str], most: int, packed: bool) -> tuple[dict[str, Any], list[int]]:
    """The batch of a model, and the lengths of its texts in tokens, each cut to `most`.

    `packed`: one sequence that holds all texts, with positions that restart, as transformers packs documents; else one
    sequence for each text, padded on the right.
    """
    ids = [tokenizer(text, verbose=False)["input_ids"][:most] for text in texts]
    lengths = [len(one) for one in ids]
    if packed:
        positions = torch.cat([torch.arange(length, device="cpu") for length in lengths])[None]
        return {
            "input_ids": torch.tensor([list(chain(*ids))], device="cpu"),
            "position_ids": positions,
            "use_cache": False,
        }, lengths
    filler = tokenizer.pad_token_id or 0
    rows = [one + [filler] * (max(lengths) - len(one)) for one in ids]
    batch: dict[str, Any] = {"input_ids": torch.tensor(rows, device="cpu")}
    if len(set(lengths)) > 1:
        batch["attention_mask"] = torch.tensor([[1] * n + [0] * (max(lengths) - n) for n in lengths], device="cpu")
    return batch, lengths


def make_mask(options: argparse.Namespace, lengths: list[int], model: Any) -> Mask | None:
    """The expected mask that the options name; None for every key."""
    if options.window is not None and options.window < 1:
        raise ClearheadError(f"--window is {options.window}; expected how many keys a query sees, 1 or more.")
    causal = (options.mask or ("causal" if is_causal(model.config) else "full")) == "causal"
    parts: list[Mask] = [Causal()] if causal else []
    if options.window is not None:
        parts.append(SlidingWindow(before=options.window - 1))
    if options.packed:
        parts.append(Documents.from_lengths(lengths))
    return reduce(and_, parts) if parts else None
