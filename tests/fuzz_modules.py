"""Random modules of `clearhead.nn`, right and wrong calls of them, beside formulas in NumPy.

    python tests/fuzz_modules.py 10000                   the first ten thousand
    python tests/fuzz_modules.py 10000 --from 25000      those from number 25000 on
    python tests/fuzz_modules.py --only 1234             one again, with its traceback
    python tests/fuzz_modules.py 200 --compiled          calls that are right in compiled code (aot_eager)
    python tests/fuzz_modules.py 200 --ranks 2           modules shared out over ranks (ranks/random_modules.py)

A problem follows from its number (`fuzzing/modules.py`): a module, whose layers may be pruned, replaced or converted by
hand, and calls of it, with caches, prepared keys, masks and lengths. The truth is `fuzzing/module_oracle.py`, which
reads the parameters. What is right is within a budget of roundings; what is wrong is one error in words, or as the
oracle has it. Problems run in child processes, as those of `fuzz.py`.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import fuzz


def ended(number: int, **given: Any) -> tuple[list[str], str]:
    """What fails in one problem, here; and how it ended."""
    from fuzzing.modules import tried

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return tried(number, **given)
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)
        place = next((f for f in reversed(at) if "clearhead" in f.filename), at[-1])
        words = "".join(str(error).splitlines()[:1])
        return [f"{number}: {type(error).__name__}: {words} ({Path(place.filename).name}:{place.lineno})"], "failed"


def failures_of(number: int) -> list[str]:
    """What fails in one problem, here."""
    return ended(number)[0]


def over_ranks(
    first: int, stop: int, ranks: int = 2, function: str = "ranks.random_modules:everything"
) -> tuple[list[str], Counter[str]]:
    """What fails in these problems over ranks, and how many ended in each way. The processes are kept for all problems,
    up to one after which they cannot go on."""
    from ranks.processes import on_ranks

    failures: list[str] = []
    ends: Counter[str] = Counter()
    while first < stop:
        with tempfile.TemporaryDirectory() as folder:
            answers = on_ranks(ranks, function, first, stop, f"{folder}/told", patience=300 + stop - first)
        failures += [said for answer in answers for said in answer["wrong"]]
        ends.update(answers[0]["ends"])
        first = max(answer["next"] for answer in answers)
    return failures, ends


def main() -> int:
    parser = fuzz.arguments(__doc__)
    parser.add_argument("--compiled", action="store_true", help="calls that are right run in compiled code")
    parser.add_argument("--ranks", type=int, default=1, help="modules are shared out over so many processes")
    options = parser.parse_args()
    if options.compiled and (options.child or options.only is not None):
        from fuzzing import modules

        modules.RUN = modules.compiled
    if options.child:
        first, stop, at = options.child.split(":")
        fuzz.run_all(int(first), int(stop), at, failures_of)
        return 0
    if options.ranks > 1:
        first, stop = (options.first, options.first + options.count) if options.only is None else (options.only,) * 2
        failures, ends = over_ranks(first, stop + (options.only is not None), options.ranks)
        print("\n".join(failures), *(f"{count:6} {end}" for end, count in ends.most_common()), sep="\n")
        return 1 if failures else 0
    if options.only is not None:
        from fuzzing.modules import check

        found = check(options.only)
        print("\n".join(found) or "    all is within its budget")
        return 1 if found else 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    begun = time.monotonic()
    stop = options.first + options.count
    failures = fuzz.fuzz(
        options.first, stop, options.jobs, ["--compiled"] * options.compiled, lambda number: None, program=__file__
    )
    rate = options.count / (time.monotonic() - begun)
    print(f"{options.count} modules, {rate:.0f} a second, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
