"""The exercises of the course, read from its pages: what is asked, how it is checked, and the folded solution."""

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGES = Path(__file__).parents[2] / "docs" / "course"
CELL = re.compile(r"```\{code-cell\} ipython3\n(?:---\n(?P<options>.*?)\n---\n)?(?P<code>.*?)```", re.S)


@dataclass(frozen=True)
class Exercise:
    """`asked`: the cell to write in. `check`: the lines below it that a reader takes the `#` from."""

    number: str  # "5.1": exercise 1 of chapter 5
    asked: str
    check: str
    solution: str

    def checked(self, answer: str, given: dict[str, Any]) -> None:
        """The check of an answer, written as a reader writes it, among the names of the page that the check reads."""
        names = dict(given)
        exec(self.asked, names)
        exec(answer, names)
        exec(self.check, names)


def exercises() -> dict[str, Exercise]:
    """Every exercise of every chapter, by its number."""
    found = {}
    for page in sorted(PAGES.glob("[01][0-9]_*.md")):
        _, *parts = re.split(r"^\*\*(\d)\. ", page.read_text().partition("## Exercises")[2], flags=re.M)
        for number, text in zip(parts[::2], parts[1::2], strict=True):
            asked, solution = (cell["code"] for cell in CELL.finditer(text))
            check = "".join(line[2:] + "\n" for line in asked.splitlines() if line.startswith("# "))
            name = f"{int(page.name[:2])}.{number}"
            found[name] = Exercise(name, asked, check, solution)
    return found


def checks_called(code: str) -> list[str]:
    """The calls of `checks` in some code, as they are written."""
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    return [ast.unparse(call) for call in calls if ast.unparse(call.func).startswith("checks.")]
