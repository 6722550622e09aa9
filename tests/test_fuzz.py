"""Some of the random problems; `python tests/fuzz.py 10000` runs more. And what the fuzz is built on, by itself."""

import dataclasses
import itertools

import fuzz
import numpy as np
import oracle
import pytest
from fuzzing.attend import loss_of, second
from fuzzing.build import build
from fuzzing.draw import draw
from fuzzing.surroundings import RUNS
from fuzzing.table import SURROUNDINGS

PARTS = [(0, 20), (20, 160), (160, 280)]  # each a process, which imports torch


@pytest.mark.parametrize(("first", "stop"), PARTS)
def test_no_problem_is_beyond_its_budget(first, stop, request):
    device = request.config.getoption("--device")
    failures = fuzz.fuzz(first, stop, options=["--device", device] if device else [])
    assert not failures, "\n".join(failures)


def failing(task, count):
    """The first of some ordinary problems that fail, at most `count`."""
    specs = (s for s in map(draw, range(400)) if s.surroundings == "nothing" and s.layout == "as it is")
    numbers = (s.number for s in specs if s.task == task and s.problem.query.size)
    return list(itertools.islice((n for n in numbers if list(fuzz.failures_of(n))), count))


def test_a_wrong_engine_is_found(monkeypatch):
    """The budgets are tight enough to tell a softmax that forgets a thousandth of the scores, or of one gradient."""
    from clearhead.engines.tiled import backward, tiles
    from clearhead.inspection.reductions.by_query import Entropy

    pairwise, to_keys = tiles.pairwise, backward._to_keys
    monkeypatch.setattr(tiles, "pairwise", lambda *scores: pairwise(*scores) * 1.001)
    wrong_scores = failing("attend", 9)
    monkeypatch.undo()
    monkeypatch.setattr(backward, "_to_keys", lambda *args: to_keys(*args) * 1.001)
    wrong_gradient = failing("attend", 1)
    monkeypatch.undo()
    monkeypatch.setattr(Entropy, "found", lambda self, found, problem: found.entropy * 1.001)
    wrong_entropy = failing("look", 1)
    monkeypatch.undo()
    assert (len(wrong_scores), len(wrong_gradient), len(wrong_entropy)) == (9, 1, 1)
    right = [failure for n in (*wrong_scores, *wrong_gradient, *wrong_entropy) for failure in fuzz.failures_of(n)]
    assert right == []


@pytest.mark.parametrize(("number", "name"), [(478, "key"), (2256, "query"), (2256, "key"), (8159, "value")])
def test_a_wrong_second_derivative_is_found(number, name):
    """In float64, where it is wrong by 1e-8 of its size."""
    spec = draw(number)
    truth = second(spec, loss_of(spec), build(spec))
    measure, right = lambda found: found.gradients[name], truth.found.gradients[name]
    assert truth.wrong(f"second: {name}", right * (1 + 1e-8), measure)
    assert truth.wrong(f"second: {name}", right, measure) is None


@pytest.mark.parametrize("number", [3360, 8171, 3004648, 4009811, 4012724])
def test_what_cancels_is_in_the_budget(number):
    """A softmax of nearly one key, seen once and twice, and sums of nearly all of a row."""
    assert list(fuzz.failures_of(number)) == []


def test_every_surrounding_has_a_way_to_run():
    assert set(RUNS) == set(SURROUNDINGS)


def test_a_process_that_ends_names_its_problem(monkeypatch):
    monkeypatch.setattr(fuzz.sys, "executable", "/bin/false")
    failures = fuzz.fuzz(7, 8)
    assert len(failures) == 1 and failures[0].startswith("problem 7 ended its process")


@pytest.mark.parametrize("number", range(0, 60, 2))
def test_the_oracle_gradients_are_the_slopes_of_its_output(number):
    """The gradients written out in NumPy, against differences of the outputs in NumPy."""
    p = draw(number).problem
    p = dataclasses.replace(p, query=np.clip(p.query, -2, 2), key=np.clip(p.key, -2, 2), value=np.clip(p.value, -9, 9))
    g = np.random.default_rng(number)
    output = oracle.attend(p).output
    if not output.size or not np.isfinite(output).all():
        return
    loss = g.standard_normal(output.shape)
    gradients = oracle.attend(p, loss).gradients
    for name in ("query", "key", "value"):
        x = getattr(p, name)
        step = g.standard_normal(x.shape) * 1e-6
        ahead, back = (oracle.attend(dataclasses.replace(p, **{name: x + s * step})).output for s in (1, -1))
        want, got = (loss * (ahead - back)).sum() / 2, (gradients[name] * step).sum()
        scale = np.abs(gradients[name] * step).sum() + 1e-9
        assert abs(got - want) <= 1e-4 * scale, (name, got, want)
    kind, settings, learnt = p.score
    moved = {f"score.{n}": (x, lambda y, n=n: {"score": (kind, settings, learnt | {n: y})}) for n, x in learnt.items()}
    moved |= {} if p.sinks is None else {"sinks": (p.sinks, lambda y: {"sinks": y})}
    for name, (x, changed) in moved.items():
        step = g.standard_normal(x.shape) * 1e-6
        ahead, back = (oracle.attend(dataclasses.replace(p, **changed(x + s * step))).output for s in (1, -1))
        want, got = (loss * (ahead - back)).sum() / 2, (gradients[name] * step).sum()
        assert abs(got - want) <= 1e-4 * (np.abs(gradients[name] * step).sum() + 1e-9), (name, got, want)
