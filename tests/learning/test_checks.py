"""The helpers of the course's exercises: what is close is right, and a wrong answer is told where it is wrong."""

import checks
import numpy as np
import pytest
import torch
from checks.compared import called, case, pairs, same


def test_close_takes_what_is_close_and_nothing_else(capsys):
    checks.close(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0 + 1e-6]), "the sum")
    checks.close(0.5, torch.tensor(0.5, dtype=torch.float64))
    assert capsys.readouterr().out == "right: the sum\nright: the answer\n"
    with pytest.raises(AssertionError, match=r"^the sum: 2 at \[1\] is not right\.$"):
        checks.close(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]), "the sum")
    with pytest.raises(AssertionError, match=r"the shape is \(2,\), and \(1, 2\) was asked for"):
        checks.close(torch.zeros(2), torch.zeros(1, 2))
    with pytest.raises(AssertionError, match=r"the answer: nan at \[0\] is not right"):
        checks.close(torch.tensor([float("nan")]), torch.zeros(1))
    with pytest.raises(AssertionError, match=r"the answer: True is not right\."):
        checks.close(True, False)


def test_close_takes_what_a_reader_may_give(capsys):
    for given in ([1.0, 2.0], np.array([1.0, 2.0]), torch.tensor([1, 2]), [torch.tensor(1.0), torch.tensor(2.0)]):
        checks.close(given, torch.tensor([1.0, 2.0], requires_grad=True))
    assert capsys.readouterr().out == 4 * "right: the answer\n"
    with pytest.raises(AssertionError, match="the answer: not answered yet"):
        checks.close(None, 1.0)
    for given in ("yes", [1.0, "two"], [[1.0], [1.0, 2.0]]):
        with pytest.raises(AssertionError, match="which is no number, array or tensor"):
            checks.close(given, 1.0)


def test_a_known_mistake_is_named_by_what_it_gives():
    but = {"this is the sum": torch.tensor(6.0), "it is a row": torch.tensor([2.0, 2.0]), "0 / 0": float("nan")}
    for found, why in ((6, "this is the sum"), ([2, 2], "it is a row"), (float("nan"), "0 / 0")):
        with pytest.raises(AssertionError, match=rf"^the mean: not right\. It seems that {why}\.$"):
            same(found, 2.0, "the mean", but=but)
    with pytest.raises(AssertionError, match=r"^the mean: 5 is not right\.$"):
        same(5, 2.0, "the mean", but=but)
    same(2, 2.0, "the mean", but={"this is the sum": 2.0})


def test_a_function_gets_copies_and_its_errors_name_the_shapes():
    x = torch.zeros(3)
    assert called(lambda x: x.add_(1), x, what="f").tolist() == [1, 1, 1] and x.tolist() == [0, 0, 0]
    with pytest.raises(AssertionError, match=r"f: ZeroDivisionError for inputs of the shapes \(3,\): division by zero"):
        called(lambda x: 1 / 0, x, what="f")
    with pytest.raises(AssertionError, match="f: not answered yet"):
        called(lambda x: None, x, what="f")


def test_an_error_says_for_what_the_answer_is_right():
    right = []
    for name in ("two axes", "three axes"):
        with case(name, right):
            pass
    said = r"^With four axes: wrong\. It is right for two axes and three axes\.$"
    with pytest.raises(AssertionError, match=said), case("four axes", right):
        raise AssertionError("wrong.")


def test_the_first_pair_that_differs_is_named():
    wanted = torch.ones(4, 4).tril().bool()
    pairs(wanted.int(), wanted, "the mask")
    for (i, j), words in {(0, 2): "may see key 2, which comes later", (3, 0): "may not see key 0, the first"}.items():
        found = wanted.clone()
        found[i, j] ^= True
        with pytest.raises(AssertionError, match=f"the mask: query {i} {words}"):
            pairs(found, wanted, "the mask")


def test_true_says_what_does_not_hold(capsys):
    checks.true(torch.tensor(3) > 2, "three is more than two")
    assert capsys.readouterr().out == "right: three is more than two\n"
    with pytest.raises(AssertionError, match="not so: two is more than three"):
        checks.true(2 > 3, "two is more than three")
