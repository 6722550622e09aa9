"""Each planted fault is found."""

import pytest

from clearhead.explanation.diagnosis.checks import CHECKS
from diagnosis.planted import PLANTED

CASES = [
    pytest.param(name, call, id=f"{name}-{number}")
    for name, calls in PLANTED.items()
    for number, call in enumerate(calls)
]


@pytest.mark.parametrize(("name", "call"), CASES)
def test_a_planted_fault_is_found(name, call):
    diagnosis = call()
    assert name in [finding.name for finding in diagnosis], diagnosis


def test_the_table_has_every_check():
    assert {check.name for check in CHECKS} - PLANTED.keys() == {"padding attended"}  # of models: test_models.py
