"""Run the cases of some groups of the table, or one in so many of them, each named before it is run.

python -m bad_input.run 1 functions weights
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

import clearhead as ch
from bad_input.empties import EMPTIES
from bad_input.entries import ENTRIES, Entry
from bad_input.values import KINDS, TOGETHER

# Tensors of the right size whose numbers are elsewhere or gone: refused, or right, where only shapes are read.
HIDDEN = ("sparse tensor", "meta tensor", "fake tensor", "freed tensor")
MAY_BE_TENSORS = ("mask", "bias", "sinks", "align", "valid_lens", "attn_mask")
SECONDS, BYTES = 10, 16 * 2**30  # what one case may take
PYTHON = re.compile(r"missing \d+ required|unexpected keyword|takes \d+ positional|takes from \d+ to")


def cases(groups: list[str]) -> Iterator[tuple[str, Entry, dict[str, Any], str | None]]:
    """The name of each case, its entry, its arguments, and what it may give: None, nothing but an error."""
    for name, entry in ENTRIES.items():
        if entry.group not in groups:
            continue
        for argument, usual in entry.usual.items():
            for kind, make in KINDS.items():
                if kind == "freed tensor" and not (
                    isinstance(usual, Tensor) or (usual is None and argument in MAY_BE_TENSORS)
                ):
                    continue  # an error shows what it was given, and PyTorch's own text of such a tensor may crash
                takes = entry.takes.get(argument, {}).get(kind)
                takes = "hidden" if takes is None and kind in HIDDEN else takes
                yield f"{name}: {argument} is {kind}", entry, entry.usual | {argument: (make, usual)}, takes
        for kind in TOGETHER if entry.together else ():
            given = {n: (KINDS[kind], entry.usual[n]) for n in entry.together}
            takes = entry.takes_together.get(kind, "hidden" if kind in HIDDEN else None)
            yield f"{name}: {', '.join(entry.together)} are each {kind}", entry, entry.usual | given, takes


def wrong(entry: Entry, given: dict[str, Any], takes: str | None) -> str | None:
    """What is wrong with a case, in words."""
    made = {n: v[0](v[1]) if isinstance(v, tuple) and len(v) == 2 and callable(v[0]) else v for n, v in given.items()}
    try:
        result = entry.call(**made)
    except ch.ClearheadError:
        if takes == "hidden":
            return None
        # a message is enough; but what is listed as right must not be refused, where it is not hidden
        return "is refused, and is listed as right" if takes in ("same", "nan", "else") else None
    except Exception as error:
        if takes == "own" or (isinstance(error, TypeError) and PYTHON.search(str(error))):
            return None
        return told(error)
    results = flat(result)
    if takes == "hidden":
        takes = "shape" if any(isinstance(t, FakeTensor) or t.is_meta for t in results) else "same"
    if takes is None:
        return f"is taken silently, and gives {shown(result)}"
    usual = entry.call(**entry.usual)
    return next((words for pair in zip(results, flat(usual), strict=True) if (words := differs(*pair, takes))), None)


def told(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = next((f for f in reversed(frames) if "/clearhead/" in f.filename), frames[-1])
    words = (str(error).splitlines() or [""])[0][:120]
    return f"is {type(error).__name__}: {words} ({Path(place.filename).name}:{place.lineno})"


def differs(got: Any, usual: Any, takes: str) -> str | None:
    if takes == "else":
        return None
    if got.shape != usual.shape:
        return f"gives the shape {tuple(got.shape)}, not {tuple(usual.shape)}"
    got = got.to_dense() if got.layout == torch.sparse_coo else got
    if takes == "same" and not torch.allclose(got.double(), usual.double(), equal_nan=True, atol=1e-6):
        return "gives something else than the usual argument"
    if takes == "nan" and not got.isnan().any():
        return "hides what is NaN"
    return None


def flat(result: Any) -> list[Tensor]:
    return [t for one in result for t in flat(one)] if isinstance(result, list | tuple) else [torch.as_tensor(result)]


def shown(result: Any) -> str:
    if isinstance(result, Tensor | np.ndarray):
        return f"{type(result).__name__} {tuple(result.shape)}"
    return f"{result!r:.60}"


def too_long(*_: Any) -> None:
    raise TimeoutError(f"not done in {SECONDS} seconds")


def main() -> None:
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    signal.signal(signal.SIGALRM, too_long)
    every, *groups = sys.argv[1:]
    skip = set(json.loads(sys.stdin.read() or "[]"))
    for number, (name, entry, given, takes) in enumerate(cases(groups)):
        if name in skip or number % int(every):
            continue
        print(json.dumps(["at", name]), flush=True)
        signal.alarm(SECONDS)
        found = wrong(entry, given, takes)
        if found:
            print(json.dumps(["wrong", f"{name} {found}"]), flush=True)
    for name, case in EMPTIES.items() if "empties" in groups else ():
        if name in skip:
            continue
        print(json.dumps(["at", name]), flush=True)
        signal.alarm(SECONDS)
        try:
            found = case()
        except ch.ClearheadError as error:
            found = f"is refused: {str(error).splitlines()[0]}"
        except Exception as error:
            found = told(error)
        if found:
            print(json.dumps(["wrong", f"{name} {found}"]), flush=True)
    print(json.dumps(["done", ""]), flush=True)


if __name__ == "__main__":
    main()
