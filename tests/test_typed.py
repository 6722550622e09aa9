"""Types: a checker takes right code and refuses wrong code, and no public signature leaves a type open."""

import inspect
import re
import subprocess
import sys
import typing
from pathlib import Path

from test_house import PUBLIC

ROOT = Path(__file__).parents[1]
USES = Path(__file__).parent / "typed" / "uses.py"
OPEN = re.compile(r"\bAny\b")


def test_mypy_takes_right_uses_and_refuses_wrong_ones():
    """One run, over the types that `make lint` has kept."""
    run = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", "--no-pretty", str(USES)]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
    reported = {int(line) for line in re.findall(r"^[^:\n]*uses\.py:(\d+): error: ", done.stdout, re.MULTILINE)}
    lines = USES.read_text(encoding="utf-8").splitlines()
    expected = {number for number, line in enumerate(lines, 1) if line.endswith("# expect")}
    assert reported == expected, done.stdout + done.stderr
    assert len(expected) > 40


def signatures(name, value):
    """The functions that a public name can be called by: itself, or the public methods of a class."""
    if inspect.isfunction(value):
        yield name, value
    for cls in value.__mro__ if inspect.isclass(value) else ():
        if not cls.__module__.startswith("clearhead."):
            continue
        for method, found in vars(cls).items():
            public = not method.startswith("_") or method in ("__init__", "__call__", "__getitem__", "__iter__")
            found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
            if public and inspect.isfunction(found):
                yield f"{name}.{method}", found


def test_no_public_signature_leaves_a_type_open():
    every = [found for name, value in PUBLIC.items() for found in signatures(name, value)]
    for called, function in every:
        for one in typing.get_overloads(function) or [function]:  # what a caller sees of a function with overloads
            loose = {side: said for side, said in one.__annotations__.items() if OPEN.search(str(said))}
            assert not loose, (called, loose)
            plain = inspect.signature(one).parameters.values()
            bare = [p.name for p in plain if p.annotation is p.empty and p.name not in ("self", "cls")]
            if one.__module__ != "typing" and "return" in one.__annotations__:  # a dataclass's own methods have none
                assert not bare, (called, bare)


def test_the_test_of_signatures_sees_them():
    found = dict(signatures("Weights", PUBLIC["results.Weights"]))
    assert {"Weights.entropy", "Weights.dense", "Weights.shape", "Weights.__getitem__"} <= found.keys()
    assert OPEN.search("dict[str, Any]") and not OPEN.search("Many")
