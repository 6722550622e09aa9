"""Some of the random modules; `python tests/fuzz_modules.py 10000` runs more. And the budget is tight enough."""

import itertools

import fuzz
import fuzz_modules
import pytest
import torch

from clearhead.nn import KeyValueCache, RotaryEmbedding, _heads, _options, multi_head_attention


@pytest.mark.parametrize(("first", "stop"), [(0, 40), (40, 160)])
def test_no_module_is_beyond_its_budget(first, stop):
    failures = fuzz.fuzz(first, stop, program=fuzz_modules.__file__)
    assert not failures, "\n".join(failures)


def split_by_number(projected, name, head_dim):
    even = projected.shape[-1] % 2 == 0
    return projected.unflatten(-1, (2, -1)).transpose(1, 2) if even else projected[:, None]


COMMIT = KeyValueCache._commit


def without_owner(self, step, by):
    COMMIT(self, step, None)


FAULTS = {
    "heads of another width": (_heads, "split_heads", split_by_number),
    "a cache of any module": (KeyValueCache, "_commit", without_owner),
    "keys that are not turned": (RotaryEmbedding, "forward", lambda self, x, offset=0, positions=None: x),
    "a norm that is left out": (_options, "apply_norm", lambda name, norm, heads: heads),
    "a scale that is left out": (_options, "scale_query", lambda query, factor: query),
    "a gate that is open": (_options, "compute_gate", lambda kind, logits, heads: torch.ones_like(heads)),
    "positions that are not read": (_options, "validate_positions", lambda *given: None),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name, monkeypatch):
    monkeypatch.setattr(*FAULTS[name])
    found = itertools.islice((n for n in range(1000) if list(fuzz_modules.failures_of(n))), 1)
    number = next(found, None)
    monkeypatch.undo()
    assert number is not None and list(fuzz_modules.failures_of(number)) == []


def test_the_budget_tells_a_rounding_of_a_lower_precision(monkeypatch):
    """A thousandth of the scores is beyond it in float32."""
    attended = multi_head_attention.RecordingModule._attend
    scaled = lambda self, query, *given, **options: attended(self, query * 1.001, *given, **options)
    monkeypatch.setattr(multi_head_attention.RecordingModule, "_attend", scaled)
    with torch.no_grad():
        assert sum(bool(list(fuzz_modules.failures_of(n))) for n in range(60)) > 9
