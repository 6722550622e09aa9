"""The helpers of the course's exercises: a right answer is said to be right, and a wrong one says where."""

import checks
import numpy as np
import pytest
import torch


def test_close_takes_what_is_close_and_nothing_else(capsys):
    checks.close(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0 + 1e-6]), "the sum")
    checks.close(0.5, torch.tensor(0.5, dtype=torch.float64))
    assert capsys.readouterr().out == "right: the sum\nright: the answer\n"
    with pytest.raises(AssertionError, match=r"the sum: found 2 at \[1\]; expected is 3"):
        checks.close(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]), "the sum")
    with pytest.raises(AssertionError, match=r"the shape is \(2,\); expected is \(1, 2\)"):
        checks.close(torch.zeros(2), torch.zeros(1, 2))
    with pytest.raises(AssertionError, match=r"the answer: found nan at \[0\]"):
        checks.close(torch.tensor([float("nan")]), torch.zeros(1))
    with pytest.raises(AssertionError, match=r"the answer: found True; expected is False\."):
        checks.close(True, False)


def test_close_takes_what_a_reader_may_give(capsys):
    for given in ([1.0, 2.0], np.array([1.0, 2.0]), torch.tensor([1, 2]), [torch.tensor(1.0), torch.tensor(2.0)]):
        checks.close(given, torch.tensor([1.0, 2.0], requires_grad=True))
    assert capsys.readouterr().out == 4 * "right: the answer\n"
    with pytest.raises(AssertionError, match="the answer: still None"):
        checks.close(None, 1.0)
    for given in ("yes", [1.0, "two"], [[1.0], [1.0, 2.0]]):
        with pytest.raises(AssertionError, match="expected is a number, an array or a tensor"):
            checks.close(given, 1.0)


def test_true_says_what_does_not_hold(capsys):
    checks.true(torch.tensor(3) > 2, "three is more than two")
    assert capsys.readouterr().out == "right: three is more than two\n"
    with pytest.raises(AssertionError, match="not so: two is more than three"):
        checks.true(2 > 3, "two is more than three")
