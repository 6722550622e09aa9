"""The table of planted faults fits the sources: `python -m tests.mutants` plants them."""

from pathlib import Path

import pytest
from mutants.table import MUTANTS

import clearhead as ch

SOURCE = Path(ch.__file__).parent
TESTS = Path(__file__).parent


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: f"{one.file}: {one.breaks}")
def test_its_text_stands_once_and_its_tests_are_there(mutant):
    assert (SOURCE / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1 and mutant.new != mutant.old
    for named in mutant.tests.split(","):
        file, _, test = named.partition("::")
        assert f"def {test}" in (TESTS / file).read_text(encoding="utf-8")


def test_no_two_are_the_same():
    assert len({(one.file, one.old, one.new) for one in MUTANTS}) == len(MUTANTS) >= 60
