"""The helpers of the course's exercises: what is close is right, and a wrong answer is told where it is wrong."""

import sys
from pathlib import Path

import checks
import numpy as np
import pytest
import torch
from apart import run
from checks.compared import called, case, pairs, same

from clearhead import exercises


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


def test_infinite_and_complex_numbers_are_compared_whole(capsys):
    masked = torch.tensor([1.0, -torch.inf])
    for right in (masked, masked.bfloat16(), [masked[0].clone().requires_grad_(), masked[1]], masked.numpy()):
        checks.close(right, masked)
    checks.close(torch.tensor([1 - 2j]).conj(), [1 + 2j])
    with torch.device("meta"):
        checks.close(2.0, 2)
    assert capsys.readouterr().out == 6 * "right: the answer\n"
    for wrong in (-masked, masked.nan_to_num(neginf=-1e9), torch.tensor([1.0, torch.nan])):
        with pytest.raises(AssertionError, match=r"the answer: \S+ at \[[01]\] is not right"):
            checks.close(wrong, masked)
    for wrong in (1 + 2j, np.array(1 - 2j), torch.tensor(1j)):
        with pytest.raises(AssertionError, match=r"the answer: \S+j is not right"):
            checks.close(wrong, 1.0)


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
    with pytest.raises(
        AssertionError,
        match=r"f: ZeroDivisionError in your line `.*` for inputs of the shapes \(3,\): division by zero\.",
    ):
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


def test_a_function_that_writes_to_a_list_is_given_a_copy():
    """Or the solution would read what the answer has written, and any answer would be right."""
    given = {"a list": [[1.0, 2.0]], "arrays in a dict": [{"x": np.ones(2)}], "tensors in a tuple": [(torch.ones(2),)]}

    def first(part):
        return part if isinstance(part, list) else part["x"] if isinstance(part, dict) else part[0]

    def emptied(part):
        first(part)[:] = [0.0, 0.0] if isinstance(part, list) else 0.0
        return first(part)

    for name, inputs in given.items():
        with pytest.raises(exercises.WrongAnswer, match=r"0 at .* is not right"):
            exercises.tried(emptied, first, {name: inputs})
        exercises.tried(first, first, {name: inputs}, mistakes={"it is emptied": emptied})


def test_dots_are_no_answer_that_holds():
    with pytest.raises(exercises.WrongAnswer, match="not answered yet"):
        exercises.true(..., "three is more than two")


def test_true_says_what_does_not_hold(capsys):
    checks.true(torch.tensor(3) > 2, "three is more than two")
    assert capsys.readouterr().out == "right: three is more than two\n"
    with pytest.raises(AssertionError, match="not so: two is more than three"):
        checks.true(2 > 3, "two is more than three")


# the query is not scaled; an error of the reader's own; an answer that the check itself cannot read
ANSWERS = {
    "def answer(query, key, value):\n    w = (query @ key.mT).softmax(-1)\n    return w @ value, w": (
        "With two axes: the weights: not right. It seems that the scores were not divided by √E."
    ),
    "def answer(query, key, value):\n    w = query @ key\n    return w @ value, w": (
        "attention: RuntimeError in your line `w = query @ key` for inputs of the shapes (5, 3), (7, 3), (7, 2): mat1 "
        "and mat2 shapes cannot be multiplied (5x3 and 7x3)."
    ),
}
COURSE = Path(__file__).parents[2] / "docs" / "course"


def test_a_notebook_shows_the_message_alone(monkeypatch):
    """The kernel that runs the cells of the site; a traceback would hold lines of the check, which is the solution."""
    import nbformat  # here: it takes seconds, which each worker would spend while tests are collected
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(COURSE))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    cells = [
        nbformat.v4.new_code_cell(f"import checks\n{code}\nchecks.dot_product_attention(answer)") for code in ANSWERS
    ]
    book = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(book, kernel_name="python3", allow_errors=True, timeout=120).execute()
    for cell, said in zip(book.cells, ANSWERS.values(), strict=True):
        [error] = cell.outputs
        assert error.output_type == "error" and error.traceback == [f"WrongAnswer: {error.evalue}"]
        assert error.evalue.endswith(said) and "expected" not in error.evalue


def test_python_shows_no_line_of_the_check():
    answer, said = next(iter(ANSWERS.items()))
    start = f"import sys; sys.path.insert(0, {str(COURSE)!r}); import checks"
    done = run(f"{start}\n{answer}\nchecks.dot_product_attention(answer)")
    lines = done.errors.splitlines()
    assert done.status == 1 and lines[-1].endswith(said)
    assert lines[-2].strip() == "raise WrongAnswer(said)" and "3**0.5" not in done.errors


def test_every_check_comes_without_its_lines():
    for name, check in vars(checks).items():
        if callable(check) and not isinstance(check, type):
            assert check.__code__ is checks.close.__code__, name
    with pytest.raises(checks.WrongAnswer, match="this cannot be checked: ValueError"):
        checks.head_of_itself("one", 2, 3, 4, [{"itself": 1}], [])


def test_a_function_is_tried_on_each_input(capsys):
    x, y = torch.rand(2, 3), torch.rand(4, 2, 3)
    solution, mistakes = (lambda x: x.softmax(-1)), {"it runs over the rows": lambda x: x.softmax(-2)}
    inputs = {"two axes": (x,), "three axes": (y,)}

    def check(answer):
        exercises.tried(answer, solution, inputs, "the weights", mistakes=mistakes)

    check(lambda x: (x - x.amax(-1, keepdim=True)).softmax(-1))
    assert capsys.readouterr().out == "right: the weights\n"
    with pytest.raises(exercises.WrongAnswer, match=r"^With two axes: .* It seems that it runs over the rows\.$"):
        check(lambda x: x.softmax(0))
    with pytest.raises(exercises.WrongAnswer, match=r"^With three axes: the weights: .* It is right for two axes\.$"):
        check(lambda x: x.softmax(1))
    with pytest.raises(
        exercises.WrongAnswer, match=r"RuntimeError in your line `.*` for inputs of the shapes \(2, 3\)"
    ):
        check(lambda x: x @ x)
    for given in (None, ..., lambda x: None, lambda x: ...):
        with pytest.raises(exercises.WrongAnswer, match="not answered yet"):
            check(given)
    with pytest.raises(exercises.WrongAnswer, match="with the words"):
        exercises.close(1.0, 2.0, "a number", mistakes={"with the words": 1.0})


def test_a_check_without_a_case_is_no_right_answer() -> None:
    with pytest.raises(exercises.WrongAnswer, match="inputs is empty; pass the arguments of one case or more"):
        exercises.tried(abs, abs, {})
