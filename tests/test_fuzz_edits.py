"""Some of the random edits; `python tests/fuzz_edits.py 10000` runs more."""

import pytest
import torch

pytest.importorskip("transformers", reason="the extra [models] is not installed")
import fuzz_edits

from clearhead.models.edits import changed as _changed
from clearhead.models.edits import edit

COUNT, PARTS = 150, 3


@pytest.mark.parametrize("part", range(PARTS))
def test_random_edits_are_as_by_hand(part):
    size = COUNT // PARTS
    failures = [f for number in range(part * size, (part + 1) * size) for f in fuzz_edits.failures_of(number)]
    assert not failures, "\n".join(failures)


def missed(*words, count=60):
    """Which of these words no failure of the first numbers has. The numbers end where none is missed."""
    left = set(words)
    for number in range(count):
        left -= {word for failure in fuzz_edits.failures_of(number) for word in left if word in failure}
        if not left:
            break
    return left


def test_a_problem_that_is_not_checked_is_found(monkeypatch):
    """What is wrong is taken, or ends in an error of another kind."""
    monkeypatch.setattr(_changed, "checked", lambda problem, who, like: problem)
    assert not missed("")


def test_an_edit_of_another_head_is_found(monkeypatch):
    """One that changes the head before its own: both the sum by hand and the bits of the others tell."""
    changed = edit.changed

    def shifted(change, place, result):
        heads = change.problem.sizes.heads
        regions = [(one[0], one[1], tuple((n - 1) % heads for n in one[2][:1]), one[3]) for one in change.regions]
        return changed(change._replace(regions=regions), place, result)

    monkeypatch.setattr(edit, "changed", shifted)
    assert not missed("off by", "what no edit names")


def test_every_kind_is_drawn():
    torch.manual_seed(0)
    made = [fuzz_edits.drawn(number) for number in range(900)]
    assert {type(one.module).__name__ for one, _ in made} == {"LlamaModel", "BertModel", "GPT2Model", "Sequential"}
    wrong = {one.wrong for _, edits in made for one in edits}
    assert wrong == {"", *fuzz_edits.WRONG, *fuzz_edits.WRONG_AFTER, *fuzz_edits.WRONG_SOURCE}
