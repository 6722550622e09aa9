"""The cells of the course's chapters, as a reader would run them."""

from __future__ import annotations

import re
from pathlib import Path

COURSE = Path(__file__).parents[2] / "docs" / "course"
CELL = re.compile(r"```\{code-cell\} ipython3\n(?:---\n.*?\n---\n)?(.*?)```", re.S)


def cells(chapter: int, sections: int | None = None) -> list[str]:
    """Its cells in order, or those that stand before the second heading (1), the third (2), …"""
    (path,) = (path for path in COURSE.glob(f"{chapter:02}_*.md") if path.name != "00_before.md")
    text = path.read_text(encoding="utf-8")
    ends = [*(found.start() for found in re.finditer(r"^## ", text, re.M)), len(text)]
    return [
        found[1].rstrip().removesuffix(";")
        for found in CELL.finditer(text[: ends[-1 if sections is None else sections]])
    ]
