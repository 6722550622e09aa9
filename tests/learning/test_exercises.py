"""No wrong answer to an exercise of the course passes, it is told why, and right answers of every form pass."""

import re

import answers_0_to_5
import answers_6_to_11
import checks
import numpy as np
import pytest
import torch
from exercises import checks_called, exercises

import clearhead as ch

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
