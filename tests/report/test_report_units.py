"""Functions of the pages that need no page, run by Node.js."""

from pathlib import Path

from node import run_units


def test_functions_without_a_page() -> None:
    run_units(Path(__file__).with_name("pure.test.js"))
