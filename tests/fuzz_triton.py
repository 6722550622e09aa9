"""Random problems on the engine `triton`, in the strict interpreter, against the formulas in NumPy.

    python tests/fuzz_triton.py 2000                   the first two thousand
    python tests/fuzz_triton.py 2000 --from 500        those from number 500 on
    python tests/fuzz_triton.py --only 123             one again, shown

Problem N is the first of the draws TRIES · N, TRIES · N + 1, … of `fuzzing/draw.py` that the engine takes and that is
small, in ordinary surroundings, with tiles and shares of the keys that are drawn too. Outputs and gradients, or looks
at the weights and the gradients of statistics, are within the budget of `fuzzing/budget.py`; the interpreter refuses
what a GPU would do otherwise (`interpreted/strict.py`). Problems run in child processes, as those of `fuzz.py`.
"""

from __future__ import annotations

import os
import random
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fuzz

TRIES = 64
MOST = 80  # tiles of a problem, each counted three times and once for each dimension that it is summed by
TILES = ((16, 16), (16, 32), (32, 16), (32, 32), (64, 32), (64, 64))
ORDINARY = ("nothing", "unseen garbage")


def problem(number: int) -> tuple[Any, tuple[int, int], int]:
    """A problem that the engine takes, the tile it is computed in, and how many keys a program has at least."""
    from fuzzing.draw import draw

    r = random.Random(number)
    tile, split = r.choice(TILES), r.choice([16, 32, 512])
    for tried in range(TRIES * number, TRIES * (number + 1)):
        spec = draw(tried)
        if spec.surroundings not in ORDINARY:
            spec = replace(spec, surroundings="nothing")
        if taken(spec, tile):
            return spec, tile, split
    raise LookupError(f"none of {TRIES} draws is a problem that the engine takes: raise TRIES")


def taken(spec: Any, tile: tuple[int, int]) -> bool:
    """Whether the engine takes a problem, and it is small."""
    from fuzzing.build import build

    import clearhead as ch
    from clearhead.engines.triton.engine import DTYPES, Triton
    from clearhead.problem.problem import make_problem

    if spec.problem.by_functions or spec.dtype not in [str(t).split(".")[1] for t in DTYPES]:
        return False
    built = build(spec)
    try:
        made = make_problem(*built.inputs, **built.options, dropout_p=spec.problem.dropout_p)
    except ch.ClearheadError:  # a wrong call, which other programs try
        return False
    if Triton().objections(made):
        return False
    batch, heads, queries, keys = made.sizes.shape
    summed = 0 if made.lowered.phi == "mul" else made.lowered.query.shape[-1]
    return batch * heads * -(-queries // tile[0]) * -(-keys // tile[1]) * (3 + summed) <= MOST


def failures_of(number: int) -> Iterator[str]:
    """What fails in one problem, here."""
    from fuzzing.attend import check_attend
    from fuzzing.looks import check_looks
    from fuzzing.statistics import check_statistics
    from interpreted import strict

    from clearhead.engines.triton import launch
    from clearhead.engines.triton.blocks import Blocks

    about = f"problem {number}"
    before = launch._blocks, launch.SPLIT, strict.launches
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            spec, tile, split = problem(number)
            about = f"{about} ({spec}, tiles {tile}, {split} keys to a program)"
            launch._blocks, launch.SPLIT = lambda problem, pass_: Blocks(*tile), split
            for check in (check_attend,) if spec.task == "attend" else (check_looks, check_statistics):
                for failure in check(spec, ("triton",)):
                    yield f"{about}\n    {failure}"
        if strict.launches == before[2]:
            yield f"{about}\n    no kernel ran"
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)
        place = next((f for f in reversed(at) if "clearhead" in f.filename), at[-1])
        cause = error.__cause__ or error  # Triton wraps what a kernel raises
        words = " ".join(str(cause).splitlines()[:1])
        yield f"{about}\n    {type(cause).__name__}: {words} ({Path(place.filename).name}:{place.lineno})"
    finally:
        launch._blocks, launch.SPLIT = before[:2]


def main() -> int:
    options = fuzz.arguments(__doc__, 2000).parse_args()
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, here or in a child
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.child or options.only is not None:
        from interpreted import strict

        strict.install()
    if options.child:
        first, stop, at = options.child.split(":")
        fuzz.run_all(int(first), int(stop), at, failures_of)
        return 0
    if options.only is not None:
        found = list(failures_of(options.only))
        print("\n".join(found) or f"{problem(options.only)[0]}\n    all is within its budget")
        return 1 if found else 0
    begun, stop = time.monotonic(), options.first + options.count
    failures = fuzz.fuzz(options.first, stop, options.jobs, (), lambda number: None, program=__file__)
    took = (time.monotonic() - begun) / options.count
    print(f"{options.count} problems, {took:.2f} s each, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
