"""Plant each fault of `table.py` in a copy of `src`, one at a time, and run the tests that should find it.

    python -m tests.mutants                     all of them; the last lines name those that no test found
    python -m tests.mutants softcap padding     those whose file, or what they break, has one of these words
    python -m tests.mutants --all               the whole of `make test` for each, and not the tests that are named
    python -m tests.mutants --trust             without a first run of the same tests on what is not mutated

Each run is a fork of this process, which has imported what all of them need.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before PyTorch reads it

from .table import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "clearhead"
SECONDS = 600  # one that takes longer hangs: it is found
# Every process takes clearhead from PYTHONPATH, and not from where an editable install says.
CUSTOM = "import sys\nsys.meta_path[:] = [one for one in sys.meta_path if 'ScikitBuild' not in type(one).__name__]\n"


@functools.cache
def kernels() -> str:
    """The compiled kernels. Another process says where they are: this one must not import clearhead."""
    code = "from clearhead.engines.native import bindings; print(bindings.kernels().__file__)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@contextlib.contextmanager
def copied(mutant: Mutant | None) -> Iterator[Path]:
    """A folder with a copy of the package, in which the fault is planted."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "clearhead"
        shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__", "csrc", "_kernels*"))
        shutil.copy(kernels(), package / "engines" / "native")
        shutil.copy(SOURCE.parent / "pytest_clearhead.py", folder)  # where it is installed, pytest loads it
        shutil.copy(ROOT / "package.json", folder)  # it says that the page's files are modules
        (Path(folder) / "sitecustomize.py").write_text(CUSTOM)
        if mutant is not None:
            file = package / mutant.file
            text = file.read_text(encoding="utf-8")
            assert text.count(mutant.old) == 1, f"{mutant.file}: {mutant.old!r} stands {text.count(mutant.old)} times"
            file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
            if file.suffix == ".js":  # a page has the bundle
                command = [
                    "node",
                    str(ROOT / "packaging" / "bundle.mjs"),
                    str(package / "base" / "bundle"),
                    str(package),
                ]
                subprocess.run(command, check=True)
        yield Path(folder)


def passes(mutant: Mutant | None, tests: Sequence[str]) -> tuple[bool, str]:
    """Whether the tests are green with this fault; and the last line that they printed."""
    with copied(mutant) as folder, tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if not child:
            os.setsid()  # what it starts ends with it
            os.dup2(said.fileno(), 1), os.dup2(said.fileno(), 2)
            status = _run(folder, tests)
            sys.stdout.flush()
            os._exit(status)
        end = time.monotonic() + SECONDS
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if ended == (0, 0):
            os.waitpid(child, 0)
            return False, "it hangs"
        said.seek(0)
        text = said.read()
        status = os.waitstatus_to_exitcode(ended[1])
        failed = [line for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        assert status <= 0 or failed, f"pytest could not run {tests}:\n{text}"
        return status == 0, failed[0][:150] if failed else f"signal {-status}"


def _run(folder: Path, tests: Sequence[str]) -> int:
    import pytest

    os.environ["PYTHONPATH"] = str(folder)
    sys.meta_path[:] = [one for one in sys.meta_path if "ScikitBuild" not in type(one).__name__]
    sys.path.insert(0, str(folder))
    os.chdir(ROOT)
    import clearhead

    assert Path(clearhead.__file__).is_relative_to(folder), clearhead.__file__
    given = ["-x", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning", "-m", "not explore"]
    return int(pytest.main([*given, *tests]))


def tests_of(mutant: Mutant) -> list[str]:
    return [f"tests/{one}" for one in mutant.tests.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only mutants whose file, or what they break, has one of these")
    parser.add_argument("--all", action="store_true", help="run the whole suite for each")
    parser.add_argument("--trust", action="store_true", help="take the tests to be green without a mutant")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if not options.words or any(w in f"{m.file} {m.breaks}" for w in options.words)]
    import playwright.sync_api  # noqa: F401
    import pytest  # noqa: F401 - each fork has them then
    import torch  # noqa: F401
    import transformers  # noqa: F401

    if not options.trust:
        named = sorted({test for mutant in chosen for test in tests_of(mutant)})
        green, why = passes(None, [] if options.all else named)
        if not green:
            print(f"without a mutant the tests are red: {why}")
            return 2
    survivors = []
    for mutant in chosen:
        begun = time.monotonic()
        survives, why = passes(mutant, [] if options.all else tests_of(mutant))
        survivors += [mutant] * survives
        what = "SURVIVES" if survives else f"found by {why}"
        print(f"{time.monotonic() - begun:4.0f} s  {mutant.file}: {mutant.breaks}: {what}", flush=True)
    print(f"{len(chosen)} mutants, {len(survivors)} survive")
    for mutant in survivors:
        print(f"  {mutant.file}: {mutant.breaks}\n    {mutant.old!r} -> {mutant.new!r}\n    {mutant.tests}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
