"""Some of the random problems; `python tests/fuzz.py 10000` runs more."""

import fuzz
import pytest

COUNT, PARTS = 300, 10


@pytest.mark.parametrize("part", range(PARTS))
def test_no_problem_is_beyond_its_budget(part):
    failures = fuzz.fuzz(range(part, COUNT, PARTS))
    assert not failures, "\n".join(failures)


def test_a_wrong_engine_is_found(monkeypatch):
    """The budgets are tight enough to tell a softmax that forgets a thousandth of the bias, or of one gradient."""
    from clearhead import _backward, _tiles

    monkeypatch.setattr(_tiles, "softmax", lambda tile, *rest, right=_tiles.softmax: right(tile * 1.001, *rest))
    assert len(fuzz.fuzz(range(40))) > 20
    monkeypatch.undo()
    right = _backward._to_keys
    monkeypatch.setattr(_backward, "_to_keys", lambda *args: right(*args) * 1.001)
    assert fuzz.fuzz(range(60))
