"""Recordings whose files were changed: one error before memory is asked for, or a whole recording."""

import json
import random
import re
import struct
import sys

import pytest
import torch

import clearhead as ch

pytest.importorskip("safetensors", reason="the extra [models] is not installed")
import damage
from safetensors.torch import load, save

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limit of a process's memory is Linux's")


def test_random_changes_are_refused_in_words_or_harmless(tmp_path):
    found = damage.tried(range(250), tmp_path)
    assert [case for case in found if case[2] not in ("refused", "read")] == []
    assert len(found) == 250 and {case[2] for case in found} == {"refused", "read"}


def lengths(found):
    """A length that the file does not bear out, of each chain."""
    for chain in found["chains"]:
        for link in chain:
            link["length"] = 10**12


def test_a_changed_byte_anywhere_is_refused(tmp_path):
    """A changed number would be a wrong result. Of a bool each byte but 0 is True, so some changes change nothing."""
    draw = random.Random(0)
    for seen in damage.recordings():
        path = seen.write(tmp_path / "seen")
        raw, whole = path.read_bytes(), ch.models.load_recording(path)
        (length,) = struct.unpack("<Q", raw[:8])
        parts = ((0, 8 + length), (8 + length, len(raw)))
        for at in (draw.randrange(*part) for part in parts for _ in range(40)):
            path.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << draw.randrange(8)]) + raw[at + 1 :])
            try:
                again = ch.models.load_recording(path)
            except ch.ClearheadError as error:
                assert str(path) in str(error)
            else:
                assert raw[at] == 1
                pairs = zip(whole.calls, again.calls, strict=True)
                assert all(old.weights.dense().equal(new.weights.dense()) for old, new in pairs)


def test_edges_beyond_the_keys_in_a_file_are_nothing_or_refused(tmp_path):
    """Tables of the page are indexed by these edges."""
    with torch.no_grad(), ch.watch(block := damage.Masked()) as seen:
        block(torch.randn(2, 2, 9, 4), attention_mask=torch.ones(2, 9))
    path = seen.write(tmp_path / "seen")
    whole = ch.models.load_recording(path)
    raw, (header, inner, _) = path.read_bytes(), damage.parts(path)
    for low, high in ((-3, -3), (2, -(2**60)), (2**60, 3), (-3, 2), (2, 2**60), (-5, -3)):
        tensors, sides = load(raw), inner["calls"][3]["spans"][:2]
        wide = torch.broadcast_tensors(*(tensors[side] for side in sides))  # the start may be one for all queries
        for side, edges, edge in zip(sides, wide, (low, high), strict=True):
            tensors[side] = edges.clone()
            tensors[side].view(-1)[-1] = edge
        path.write_bytes(damage.seal(save(tensors, header["__metadata__"])))
        if high > low:
            with pytest.raises(ch.ClearheadError, match="there are 9 keys"):
                ch.models.load_recording(path)
            continue
        again = ch.models.load_recording(path)
        assert again[3].problem.spans.start.min() >= 0 and again[3].problem.spans.stop.min() >= 0
        assert again[3].weights.dense()[0].equal(whole[3].weights.dense()[0])
        assert not again[3].weights.dense()[1, :, -1].any()
        again.view(layer=3, sequence=1).write(tmp_path / "page.html")


NAMED = {
    "another format": (lambda found: found.update(format=99), "has format 99, and this version reads 8"),
    "a format that is a text": (lambda found: found.update(format="8"), "Expected `int`, got `str` - at `$.format`"),
    "no calls": (lambda found: found.pop("calls"), "missing required field `calls`"),
    "calls that are no list": (lambda found: found.update(calls=3), "Expected `array`, got `int` - at `$.calls`"),
    "chains that are a number": (lambda found: found.update(chains=1.5), "got `float` - at `$.chains`"),
    "chains that are a text": (lambda found: found.update(chains="x"), "got `str` - at `$.chains`"),
    "chains of nothing": (lambda found: found.update(chains=[]), "calls[0].key is (0, 0); expected the number of"),
    "chains that are an object": (lambda found: found.update(chains={}), "got `object` - at `$.chains`"),
    "a chain that is not there": (lambda found: found["calls"][0].update(key=[9, 0]), "key is (9, 0); expected the"),
    "spans as key": (
        lambda found: found["chains"][0][0].update(new=found["calls"][0]["spans"][0]),
        "chains[0][0].new has shape",
    ),
    "a key of another place": (lambda found: found["chains"][0][0].update(start=3), "chains[0][0] does not fit"),
    "a key filled past its end": (
        lambda found: found["chains"][0][0].update(filled=10**9),
        "chains[0][0] does not fit",
    ),
    "lengths beyond memory": (lengths, ".length is 1000000000000; expected "),
    "spans that are words": (
        lambda found: found["calls"][0].update(spans=["a"]),
        "'a' is not the name of a tensor of the file",
    ),
    "another key": (lambda found: found["calls"][0].update(more=1), "unknown field `more` - at `$.calls[0]`"),
    "no key": (lambda found: found["calls"][0].pop("run"), "missing required field `run` - at `$.calls[0]`"),
    "a kind": (lambda found: found["calls"][0].update(kind="both"), "'both' - at `$.calls[0].kind`"),
    "a scale": (lambda found: found["calls"][0].update(scale="1"), "got `str` - at `$.calls[0].scale`"),
    "a scale beyond floats": (lambda found: found["calls"][0].update(scale=10**400), "range - at `$.calls[0].scale`"),
    "no number": (lambda found: found["calls"][0].update(scale=float("nan")), "JSON is malformed"),
    "a tensor": (lambda found: found["calls"][0].update(query="99"), "'99' is not the name of a tensor of the file"),
    "a dtype": (lambda found: found["calls"][0].update(sinks=found["calls"][1]["spans"][0]), "dtype torch.int64; exp"),
}


@pytest.mark.parametrize("name", NAMED)
def test_what_is_wrong_is_said(name, tmp_path):
    change, says = NAMED[name]
    path = damage.recordings()[0 if "length" in name else 1].write(tmp_path / "seen")
    header, inner, data = damage.parts(path)
    change(inner)
    header["__metadata__"]["clearhead recording"] = json.dumps(inner)
    new = json.dumps(header).encode()
    path.write_bytes(damage.seal(struct.pack("<Q", len(new)) + new + data))
    with pytest.raises(ch.ClearheadError, match=re.escape(says)) as error:
        ch.models.load_recording(path)
    assert str(path) in str(error.value)


def test_a_recording_saved_over_its_own_file_is_the_same(tmp_path):
    first, _ = damage.recordings()
    path = first.write(tmp_path / "seen")
    again = ch.models.load_recording(path)
    again.write(path)
    for old, new in zip(first.calls, ch.models.load_recording(path).calls, strict=True):
        assert old.weights.dense().equal(new.weights.dense()) and old.key.equal(new.key)


def test_what_is_loaded_does_not_change_with_its_file(tmp_path):
    first, _ = damage.recordings()
    path = first.write(tmp_path / "seen")
    again = ch.models.load_recording(path)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        file.write(bytes(size - size // 2))
    for old, new in zip(first.calls, again.calls, strict=True):
        assert old.query.equal(new.query) and old.key.equal(new.key)
