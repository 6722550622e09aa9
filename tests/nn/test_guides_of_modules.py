"""The guides that a builder of modules reads: their cells run, one after the other."""

import re
from pathlib import Path

import pytest
import torch

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
CELL = re.compile(r"^```\{code-cell\} ipython3\n(?::[^\n]*\n)*(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", ["variable_lengths_and_packing", "moving_from"])
def test_the_cells_run(name):
    cells, scope = CELL.findall((GUIDES / f"{name}.md").read_text(encoding="utf-8")), {}
    assert len(cells) > 5 and any("positions=positions" in cell or "gate=" in cell for cell in cells)
    with torch.random.fork_rng():
        for cell in cells:
            exec(cell, scope)  # each has its own assertions
