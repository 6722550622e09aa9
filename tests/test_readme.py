"""The README stays short, and each block of Python in it and in the tour is a session, so that doctest runs it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 200


@pytest.mark.parametrize("name", ["README.md", "docs/start/tour.md"])
def test_each_block_of_python_is_a_session(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert blocks and all(block.startswith(">>> ") for block in blocks)
