"""The table of planted faults fits the sources: `python -m tests.mutants` plants them."""

from pathlib import Path

from mutants.table import MUTANTS

import clearhead as ch

SOURCE = Path(ch.__file__).parent
TESTS = Path(__file__).parent


def test_each_text_stands_once_and_its_tests_are_there():
    for mutant in MUTANTS:
        said = f"{mutant.file}: {mutant.breaks}"
        assert (SOURCE / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1, said
        assert mutant.new != mutant.old, said
        for named in mutant.tests.split(","):
            file, _, test = named.partition("::")
            assert f"def {test}" in (TESTS / file).read_text(encoding="utf-8"), said


def test_no_two_are_the_same():
    assert len({(one.file, one.old, one.new) for one in MUTANTS}) == len(MUTANTS) >= 60
