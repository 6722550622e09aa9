"""The chapters of the course as notebooks that have not run, beside what they import.

    python docs/chapters.py build/course
    python docs/chapters.py --check build/jupyter_execute/course

The first writes them there. A notebook that is there already stays as it is, with the answers that were written into
it. The second fails if one of them has other cells than those that ran when the site was built.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "ext"))

from myst_nb.core.read import read_myst_markdown_notebook
from notebooks import BESIDE, DOCS

COURSE = DOCS / "course"
CHAPTERS = [path for path in sorted(COURSE.glob("*.md")) if "{code-cell}" in path.read_text("utf-8")]


def notebook_of(chapter: Path) -> dict[str, Any]:
    """A chapter as a notebook. Its cells are those that the site's build runs."""
    found = dict(read_myst_markdown_notebook(chapter.read_text(encoding="utf-8")))
    for number, cell in enumerate(found["cells"]):
        cell["id"] = f"cell-{number}"  # the same in each run
    found["metadata"]["language_info"] = {"name": "python"}
    return found


def check(ran: Path) -> None:
    for chapter in CHAPTERS:
        both = json.loads((ran / f"{chapter.stem}.ipynb").read_text(encoding="utf-8")), notebook_of(chapter)
        there, here = ([(cell["cell_type"], "".join(cell["source"])) for cell in one["cells"]] for one in both)
        if there != here:
            sys.exit(f"the cells of {chapter.name} that ran are not those of its notebook")


def write(folder: Path) -> None:
    for file in BESIDE:
        there = folder / (file.parent.name if file.parent.parent == COURSE else "") / file.name
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, there)
    for chapter in CHAPTERS:
        there = folder / f"{chapter.stem}.ipynb"
        if not there.exists():
            there.write_text(json.dumps(notebook_of(chapter), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{len(CHAPTERS)} chapters as notebooks: {folder}")


if __name__ == "__main__":
    check(Path(sys.argv[2])) if sys.argv[1] == "--check" else write(Path(sys.argv[1]))
