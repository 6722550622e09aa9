"""Long heads, calls that are left out, and how the file is written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eager import pooled, scores_of, statistics_of
from node import data_of, run_on_page
from rendered import render, write_report
from test_report_formulas import FAR, Manhattan, normal, wanted_of

import clearhead as ch
from clearhead.models.views.paged import roles
from clearhead.report import Layer, Page, describe
from clearhead.report.layer import LeftOut, seen_keys
from clearhead.report.operands import rounded, steps_of
from clearhead.scores.base import Pairwise


class Block(torch.nn.Module):
    def forward(self, query: Any, key: Any, **options: Any) -> Any:
        return ch.attention(query, key, key, **options)


def seen(
    length: int, heads: int = 1, features: int = 4, keys: int | None = None, **options: Any
) -> ch.models.Recording:
    block = Block()
    with torch.no_grad(), ch.watch(block) as recording:
        block(normal(1, heads, length, features), normal(1, heads, keys or length, features, seed=1), **options)
    return recording


def decoded(codes: Any) -> Any:
    """The weights of a map's codes, −1 where nothing is allowed: as `_blocks.py` says."""
    weights = np.where(codes == 1, 0.0, 2.0 ** ((codes.astype(np.float64) - 2) / 128 - 48))
    return np.where(codes == 0, -1.0, weights)


LONG: dict[str, dict[str, Any]] = {
    "causal": {"mask": ch.Causal()},
    "window": {"mask": ch.Causal() & ch.SlidingWindow(before=300)},
    "holes": {"mask": FAR & ch.Causal()},
    "sinks": {"sinks": torch.tensor([2.0]), "mask": ch.Causal()},
    "alibi": {"bias": ch.ALiBi(1)},
}


@pytest.mark.parametrize("name", LONG)
def test_a_long_head_from_afar(name: str) -> None:
    call = seen(1030, **LONG[name])
    (layer,) = call.layers(error=0)
    weights = call.calls[0].weights.dense()[0, 0].double().numpy()
    allowed = layer.allowed(0, 0, 1030)
    assert layer.pyramid is not None and layer.pyramid.max.shape == (1, 129, 129)
    assert (layer.pyramid.per_row, layer.pyramid.per_column) == (8, 8)
    largest, mean = (decoded(of[0]) for of in (layer.pyramid.max, layer.pyramid.mean))
    want = pooled(weights, allowed, 8, 8)
    np.testing.assert_array_equal(largest < 0, want < 0)
    np.testing.assert_allclose(largest, np.where(want < 2.0**-48, np.minimum(want, 0), want), rtol=3e-3)
    cells = np.add.reduceat(np.add.reduceat(weights, np.arange(0, 1030, 8), 0), np.arange(0, 1030, 8), 1)
    sides = np.minimum(8, 1030 - 8 * np.arange(129))
    want_mean = np.where(want < 0, -1, cells / (sides[:, None] * sides))
    np.testing.assert_allclose(mean, np.where((want >= 0) & (want_mean < 2.0**-48), 0, want_mean), rtol=4e-3)
    times = pooled(weights * allowed.sum(1, keepdims=True), allowed, 33, 33)
    np.testing.assert_allclose(layer.thumbnail[0], times, rtol=1e-5, atol=1e-5)


def test_parts_and_statistics_that_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(describe, "CHUNK", 64)  # so that an operand has several parts
    monkeypatch.setattr(describe, "AT_ONCE", 0)  # and nothing is left to the page
    biased = {"bias": ch.DenseBias(normal(150, 300, seed=3)) + ch.BiasFunction(lambda b, h, q, k: (q - k) * 0.01)}
    cases = {"tiles": biased, "holes": {"mask": FAR}, "sinks": {"sinks": torch.tensor([0.3, 1.0])}}
    layers, wanted = [], []
    for name, options in cases.items():
        call = seen(150, 2, keys=300, align=7, **options)
        (layer,) = call.layers(error=0)
        scores, keep = scores_of(layer), np.stack([layer.allowed(h, 0, 150) for h in range(2)])
        if layer.bias is not None:
            every = slice(None)
            tile = call.calls[0].problem.bias.tile(every, every, every, every, call.calls[0].problem.sizes)
            scores = scores + tile[0].double().numpy()
            assert layer.bias.tiles[0] is not None and layer.bias.tiles[0].places.shape == (2, 3)
        layers.append(layer)
        wanted.append(wanted_of(name, layer, scores, keep, 2e-5))
    run_on_page(Path(__file__).with_name("formulas.test.js"), render(layers, "Parts"), wanted, tmp_path)


def test_what_little_the_keys_receive_beside_a_sink(open_report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(describe, "AT_ONCE", 0)  # statistics are written, as those of a long head
    query, key = torch.ones(1, 1, 60, 2), torch.zeros(1, 1, 60, 2)
    key[0, 0, 0] = 7.0  # all others receive 60 / (e^9.9 + 59) = 0.0030 in all
    block = Block()
    with torch.no_grad(), ch.watch(block) as recording:
        block(query, key)
    facts = open_report(recording.layers(), "#token=7").page.inner_text("#facts")
    share = 1 / (np.exp(14 / 2**0.5) + 59)
    received = r"weight received\s+as a key, from all queries: (\S+)% of the head's attention, (\S+) ×"
    percent, times = re.findall(received, facts)[0]
    assert float(percent) == pytest.approx(100 * share, rel=0.05)
    assert float(times) == pytest.approx(60 * share, rel=0.05)


def test_a_key_that_nobody_sees_has_no_share_of_uniform_attention() -> None:
    (layer,) = seen(4, keys=7, mask=ch.Causal(), align=0).layers()
    _, expected = seen_keys(layer)
    assert expected[0].tolist() == pytest.approx([25 / 12, 13 / 12, 7 / 12, 1 / 4, 0, 0, 0])
    assert (expected[0, 4:] == 0).all()


def test_equal_tiles_stand_once() -> None:
    call = seen(600, mask=ch.DenseMask((torch.arange(600)[:, None] // 128 + torch.arange(600) // 128) % 2 == 0))
    (layer,) = call.layers(error=0)
    (tiles,) = layer.holes
    assert tiles is not None and tiles.places.shape == (5, 5) and len(tiles.tiles) < 6


@pytest.mark.parametrize("error", [1e-3, 1e-4])
@pytest.mark.parametrize("phi", ["tanh_add", "sq_diff"])
@pytest.mark.parametrize("key_heads", [4, 1])
def test_the_error_of_every_phi_follows_the_dial(phi: str, error: float, key_heads: int) -> None:
    query, key = normal(1, 4, 200, 16, seed=4), normal(1, key_heads, 300, 16, seed=5)
    query[..., :2] *= 3
    weight = normal(16, seed=6).abs() + 0.1
    scores = Pairwise(phi, query, key, weight, -0.3)  # type: ignore[arg-type]
    steps = steps_of(scores, error)
    assert steps is not None

    def weights(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        q, k = q.double()[:, :, None], k.double().repeat_interleave(4 // key_heads, 0)[:, None]
        terms = torch.tanh(q + k) if phi == "tanh_add" else (q - k).square()
        return (-0.3 * (terms * weight).sum(-1)).softmax(-1)

    mine = weights(rounded(query[0], steps[0]), rounded(key[0], steps[1]))
    worst = float((mine - weights(query[0], key[0])).abs().max())
    assert (0.02 if phi == "tanh_add" else 0.2) * error < worst < 1.5 * error


@pytest.mark.parametrize("score", [ch.Gaussian(2.0), ch.Additive(8, 8, 6)], ids=["sq_diff", "tanh_add"])
def test_the_measured_error_is_stated(score: ch.extend.Score) -> None:
    (layer,) = seen(40, 2, 8, score=score).layers(error=1e-3)
    (exact,) = seen(40, 2, 8, score=score).layers(error=0)
    assert layer.error is not None and 0 < layer.error < 2e-3 and exact.error is None
    mine, theirs = (statistics_of(scores_of(each), np.ones((2, 40, 40), bool), None, 0) for each in (layer, exact))
    assert abs(mine["weights"] - theirs["weights"]).max() == pytest.approx(layer.error, rel=0.05, abs=1e-6)


def test_the_error_is_that_of_all_queries() -> None:
    query, key = normal(1, 1, 500, 16), normal(1, 1, 500, 16, seed=1)
    with torch.no_grad(), ch.watch(block := Block()) as recording:
        block(query, key)
    (layer,) = recording.layers()
    theirs, mine = (
        (q.double() @ k.double().T / 4).softmax(-1)
        for q, k in ((query[0, 0], key[0, 0]), (torch.from_numpy(layer.query[0]), torch.from_numpy(layer.key[0])))
    )
    assert layer.error == pytest.approx(float((mine - theirs).abs().max()), rel=0.01)


def test_a_score_of_ones_own_is_left_out_where_it_is_long(tmp_path: Path) -> None:
    class Two(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> None:
            ch.attention(x, x, x)
            ch.attention(x, x, x, score=Manhattan())

    block = Two()
    with torch.no_grad(), ch.watch(block) as recording:
        block(normal(1, 1, 1030, 2))
    (layer,) = recording.layers()
    assert layer.label == "L0"
    html = recording.view().write(tmp_path / "page.html").read_text(encoding="utf-8")
    (left,) = data_of(html)["meta"]["leftOut"]
    assert left["name"] == "Two" and left["reason"].startswith("Manhattan gives each pair's score by tile() alone")
    alone = ch.models.Recording(recording.calls[1:])
    with pytest.raises(ch.UnsupportedError, match=r"Manhattan gives .* Look at call\.weights"):
        alone.layers()
    with pytest.raises(ch.UnsupportedError, match="Manhattan gives"):
        alone.view().write(tmp_path / "other.html")
    assert not (tmp_path / "other.html").exists()


def test_a_call_without_heads_or_features_is_left_out() -> None:
    for shape in ((1, 2, 4, 0), (1, 0, 4, 8)):
        with ch.watch(block := ch.nn.DotProductAttention(), values=True) as recording:
            block(*[torch.zeros(shape)] * 3)
        with pytest.raises(ch.UnsupportedError, match="holds no number"):
            recording.layers()


def test_a_failure_in_the_middle_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    (layer,) = seen(4).layers()

    def failing() -> Iterator[Layer]:
        yield layer
        raise RuntimeError("the second layer")

    path.write_text("what was there")
    with pytest.raises(RuntimeError, match="the second layer"):
        write_report(path, failing(), "A report")
    parts = Page.parts

    def half(page: Page) -> Iterator[str]:
        yield next(parts(page))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Page, "parts", half)
    with pytest.raises(ch.ClearheadError, match="No space left"):
        write_report(path, [layer], "A report")
    assert path.read_text() == "what was there" and [p.name for p in tmp_path.iterdir()] == ["page.html"]
    monkeypatch.undo()
    path.chmod(0o640)
    link = tmp_path / "link.html"
    link.symlink_to(path)
    assert write_report(link, [layer], "A report") == link
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o640
    page = path.read_text(encoding="utf-8")
    assert page == render([layer], "A report") and path.stat().st_size == len(page.encode())


def test_what_a_page_says_of_its_layers(tmp_path: Path) -> None:
    recording = seen(20, 3, mask=ch.Causal())
    words = [f"w{i % 6}" for i in range(20)]
    meta = data_of(recording.view(tokens=words).write(tmp_path / "page.html").read_text(encoding="utf-8"))["meta"]
    table, most = recording.table(tokens=words), recording.distinctive(words)
    names = [measure["name"] for measure in meta["measures"]]
    assert "induction" in names and all(m["says"] and m["formula"] and m["range"] for m in meta["measures"])
    for head, row in zip(meta["layers"][0]["heads"], table, strict=True):
        for name, found in zip(names, head["measures"], strict=True):
            value, uniform, *_ = found or (np.nan, np.nan)
            assert (value, uniform) == pytest.approx((row[name], row[f"{name} uniform"]), rel=1e-4, nan_ok=True)
    assert meta["distinctive"] == {
        "layer": most.layer, "head": most.head, "sentence": str(most), "measure": most.measure,
        "nearUniform": most.near_uniform,
    }  # fmt: skip
    page = Page("A page")
    for each in (*recording.layers(words), *recording.layers(words), LeftOut("a", "b")):
        page.add(each)
    assert [label for label, _ in page.shown] == ["L0", "L0#2"]
    data = re.search(r'id="meta">(.*?)</script>', "".join(page.parts()))
    assert data and json.loads(data[1])["leftOut"] == [{"name": "a", "reason": "b"}]


def test_roles() -> None:
    of = roles([
        ("encoder.block.0.SelfAttention", "self"), ("decoder.block.0.SelfAttention", "self"),
        ("decoder.block.0.EncDecAttention", "cross"), ("decoder.block.1.EncDecAttention", "cross"),
    ])  # fmt: skip
    assert of == ["encoder", "decoder", "cross", "cross"]
    assert roles([("a.0", "self"), ("a.1", "self")]) == ["self", "self"]
    one = roles([("model.encoder.0", "self"), ("model.decoder.0.own", "self"), ("model.decoder.0.cross", "cross")])
    assert one == ["encoder", "decoder", "cross"]
