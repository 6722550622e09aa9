"""Some of the random edits of transformers models; `python tests/fuzz_edited_models.py 1000` runs more."""

import pytest

pytest.importorskip("transformers", reason="the extra [models] is not installed")
import fuzz_edited_models

from clearhead.models.edits import edit


@pytest.mark.parametrize("number", range(60))
def test_random_edits_are_as_by_hand(number):
    failures = list(fuzz_edited_models.failures_of(number))
    assert not failures, "\n".join(failures)


def test_a_position_that_is_off_by_one_is_found(monkeypatch):
    spot_of = edit.spot_of

    def later(*given):
        spot = spot_of(*given)
        return spot._replace(queries=range(spot.queries.start + 1, spot.queries.stop + 1))

    monkeypatch.setattr(edit, "spot_of", later)
    missed = {"logits", "recorded weights"}
    for number in range(20):
        missed -= {what for failure in fuzz_edited_models.failures_of(number) for what in missed if what in failure}
        if not missed:
            return
    raise AssertionError(f"no failure names {missed}")


def test_every_kind_is_drawn():
    cases = [fuzz_edited_models.drawn(number) for number in range(150)]
    known = fuzz_edited_models.DECODERS | fuzz_edited_models.BOTH | fuzz_edited_models.ENCODERS
    assert {case.name for case in cases} == set(known)
    ways = {key for case in cases if case.how is not None for key in case.how}
    assert ways == {"cache_implementation", "use_cache", "prefill_chunk_size", "num_beams"}
