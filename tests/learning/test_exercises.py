"""No wrong answer to an exercise of the course passes, it is told why, and right answers of every form pass.

The exercises are read from the pages: what is asked, how it is checked, and the folded solution.
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import answers_0_to_5
import answers_6_to_11
import checks
import numpy as np
import pytest
import torch

import clearhead as ch

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


EXERCISES = exercises()
GIVEN = answers_0_to_5.GIVEN | answers_6_to_11.GIVEN
RIGHT = answers_0_to_5.RIGHT | answers_6_to_11.RIGHT
WRONG = answers_0_to_5.WRONG | answers_6_to_11.WRONG
NAMES = {"ch": ch, "checks": checks, "np": np, "torch": torch}


def checked(number, answer):
    EXERCISES[number].checked(answer, NAMES | GIVEN.get(number, {}))


def test_every_exercise_has_three_wrong_answers_and_two_right_ones():
    assert set(EXERCISES) == set(RIGHT) == set(WRONG) and len(EXERCISES) == 38
    assert min(map(len, WRONG.values())) >= 3
    assert min(map(len, RIGHT.values())) >= 2


@pytest.mark.parametrize("number", EXERCISES)
def test_a_page_checks_its_solution_as_it_checks_an_answer(number):
    exercise = EXERCISES[number]
    [check] = checks_called(exercise.check)
    assert check in checks_called(exercise.solution)
    assert callable(getattr(checks, check.removeprefix("checks.").partition("(")[0]))


@pytest.mark.parametrize("number", EXERCISES)
def test_an_answer_left_as_it_was_is_not_answered_yet(number):
    with pytest.raises(AssertionError, match="not answered yet"):
        checked(number, "")


@pytest.mark.parametrize("number", EXERCISES)
def test_right_answers_of_every_form_pass(number, capsys):
    for answer in RIGHT[number]:
        checked(number, answer)
        assert re.search(r"^right: .*\n\Z", capsys.readouterr().out, re.M), answer


@pytest.mark.parametrize("number", EXERCISES)
def test_a_wrong_answer_is_told_why(number):
    for why, answer in WRONG[number].items():
        with pytest.raises(AssertionError, match=why) as raised:
            checked(number, answer)
        assert "expected" not in str(raised.value)
