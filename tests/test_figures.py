"""The page of figures names the cases that repeat them."""

import re
from pathlib import Path

from benchmarks.cases import CASES

PAGE = Path(__file__).parents[1] / "docs" / "figures.md"


def test_every_row_names_its_case():
    measured, _, _ = PAGE.read_text(encoding="utf-8").partition("## Two models that are trained")
    lines = [line.rstrip("| ") for line in measured.splitlines() if line[:1] == "|"]
    names = [line.rpartition("|")[2].strip() for line in lines if set(line) > set("|-")]
    assert len(names) > 50
    for name in names:
        cases = re.findall(r"`([^`]+)`", name)
        assert name == "case" or cases
        assert set(cases) <= CASES.keys()
