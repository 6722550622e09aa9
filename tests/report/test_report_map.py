"""The map: the numbers of its cells, zoom and movement, words, the lens, and work that leaves the page free."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from clearhead.report import Layer
from clearhead.report._blocks import map_codes
from clearhead.report.layer import Pyramid

Make = Callable[..., Any]

MAP = "clearhead.map()"
HOST = "document.getElementById('clearhead')"


def cells_of(page: Any) -> np.ndarray[Any, Any]:
    """The numbers of all cells, as one text, which is faster than so many numbers; NaN arrives as null."""
    shown, cells = page.evaluate(f"[{MAP}, JSON.stringify(clearhead.cells())]")
    return np.array(json.loads(cells), dtype=float).reshape(shown["down"]["cells"], shown["across"]["cells"])


def pooled(values: Any, seen: Any, per: tuple[int, int], mean: bool) -> np.ndarray[Any, Any]:
    """The largest, or the mean, of each cell, 0 for pairs that are not allowed; -1 where none is."""
    rows, columns = (range(0, length, step) for length, step in zip(values.shape, per, strict=True))
    cells = []
    for i in rows:
        for j in columns:
            part = (slice(i, i + per[0]), slice(j, j + per[1]))
            inside = np.where(seen[part], values[part], 0)
            cells.append(-1 if not seen[part].any() else inside.mean() if mean else inside.max())
    return np.array(cells).reshape(len(rows), len(columns))


def drawn(opened: Any) -> None:
    opened.until(f"{HOST}.dataset.map", "drawn")


def at(shown: Any, i: int, j: int) -> dict[str, float]:
    """The middle of a pair's cell, in CSS pixels of the map."""
    places = {}
    for name, origin, side, index in (("x", "left", "across", j), ("y", "top", "down", i)):
        axis = shown[side]
        pixel = (index // axis["per"] + 0.5) * axis["cell"] - axis["offset"]
        places[name] = (shown[origin] + pixel) / shown["ratio"]
    return places


@pytest.mark.parametrize("mask", ["all", "causal", "band", "holes", "blind"])
def test_cells_of_several_pairs(make_case: Make, open_report: Make, mask: str) -> None:
    queries, keys = 371, 290  # the last cells are cut
    i = np.arange(queries)
    given = {
        "all": {},
        "causal": {"stop": np.minimum(i + 1, keys)},
        "band": {"start": np.clip(i - 20, 0, keys), "stop": np.clip(i + 9, 0, keys)},
        "holes": {"bias": np.where((i[:, None] + np.arange(keys)) % 3 == 0, -np.inf, 0.1)[None]},
        "blind": {"stop": np.where(i % 2, keys, 0)},
    }[mask]
    case = make_case(queries, keys, heads=1, kind="cross", **given)
    j = np.arange(keys)
    seen = (case.layer.start[0][:, None] <= j) & (j < case.layer.stop[0][:, None])
    if mask == "holes":
        seen &= np.isfinite(given["bias"][0])
    opened = open_report([case.layer], viewport={"width": 330, "height": 520})
    page = opened.page
    for scale, mean in product(("log", "uniform"), (False, True)):
        page.evaluate(f"location.hash = '#scale={scale}{'&pool=mean' if mean else ''}&all=1'")
        opened.until(f"{MAP}.mean === {str(mean).lower()} && {MAP}.relative === {str(scale == 'uniform').lower()}")
        drawn(opened)
        shown = page.evaluate(MAP)
        per = (shown["down"]["per"], shown["across"]["per"])
        assert per == (2, 2)
        weights = case.weights[0] * (seen.sum(1, keepdims=True) if scale == "uniform" else 1)
        np.testing.assert_allclose(cells_of(page), pooled(weights, seen, per, mean), rtol=1e-5, atol=1e-30)
        assert ("mean weight of 2 × 2" if mean else "largest weight of 2 × 2") in page.inner_text("#map-note")


def test_a_weight_that_is_none_is_red(make_case: Make, open_report: Make) -> None:
    layer = make_case(6, heads=1).layer
    layer.query[0, 2, 0] = np.nan
    page = open_report([layer], "#token=1").page
    assert (np.isnan(cells_of(page)) == (np.arange(6) == 2)[:, None]).all()
    shown = page.evaluate(MAP)
    place = at(shown, 2, 3)
    colour = page.evaluate(
        f"""([x, y]) => Array.from({HOST}.shadowRoot.getElementById('map-picture').getContext('2d')
        .getImageData(x, y, 1, 1).data)""",
        [place["x"] * shown["ratio"], place["y"] * shown["ratio"]],
    )
    assert colour == [0xE0, 0, 0, 255]


@pytest.fixture
def long(make_case: Make) -> Any:
    n = 300
    return make_case(n, heads=1, stop=np.arange(n) + 1, query_tokens=[f"w{i}" for i in range(n)])


def test_the_wheel_zooms_where_it_points(long: Any, open_report: Make) -> None:
    opened = open_report([long.layer])
    page = opened.page
    whole = page.evaluate(MAP)
    page.locator("#map").hover(position=at(whole, 200, 100))
    page.evaluate("scrollTo(0, 0)")
    page.locator("#map").scroll_into_view_if_needed()
    page.locator("#map").hover(position=at(whole, 200, 100))
    page.mouse.wheel(0, -100)  # without Ctrl and focus the page scrolls
    assert page.evaluate(MAP)["across"]["cell"] == whole["across"]["cell"]
    page.locator("#map").hover(position=at(whole, 200, 100))
    page.keyboard.down("Control")
    for _ in range(6):
        page.mouse.wheel(0, -100)
    page.keyboard.up("Control")
    drawn(opened)
    closer = page.evaluate(MAP)
    assert closer["across"]["cell"] > 3 * whole["across"]["cell"]
    assert closer["across"]["room"] == whole["across"]["room"]
    before, after = at(whole, 200, 100), at(closer, 200, 100)
    assert abs(before["x"] - after["x"]) <= closer["across"]["cell"] / closer["ratio"]
    assert abs(before["y"] - after["y"]) <= closer["down"]["cell"] / closer["ratio"]
    assert page.evaluate("visualViewport.scale") == 1


def test_keys_and_buttons_zoom_to_single_pairs_and_back(long: Any, open_report: Make) -> None:
    opened = open_report([long.layer], "#token=150&pair=20")
    page = opened.page
    whole = page.evaluate(MAP)
    page.locator("#map").focus()
    for _ in range(9):
        page.keyboard.press("+")
    drawn(opened)
    closest = page.evaluate(MAP)
    assert closest["across"]["cell"] == round(44 * closest["ratio"]) and page.locator("#zoom-in").is_disabled()
    assert 150 in closest["down"]["words"] and 20 in closest["across"]["words"]
    page.keyboard.press("ArrowRight")  # the pair moves, and the map with it
    for _ in range(25):
        page.keyboard.press("ArrowDown")
    opened.until(f"{HOST}.dataset.shown", "0/0/out/175/21")
    drawn(opened)
    assert 175 in page.evaluate(MAP)["down"]["words"]
    page.keyboard.press("-")
    assert page.evaluate(MAP)["across"]["cell"] < closest["across"]["cell"]
    page.keyboard.press("0")
    drawn(opened)
    assert page.evaluate(MAP)["down"] == whole["down"] and page.locator("#zoom-whole").is_disabled()
    opened.until("location.hash.includes('zoom=')", False)
    page.locator("#zoom-in").click()
    assert page.evaluate(MAP)["down"]["cell"] == 2 * whole["down"]["cell"]
    page.locator("#zoom-whole").click()
    assert page.evaluate(MAP)["down"] == whole["down"]


def test_dragging_moves_and_chooses_nothing(long: Any, open_report: Make) -> None:
    opened = open_report([long.layer], "#token=150&pair=20&zoom=100.140.10.50")
    page = opened.page
    shown = page.evaluate(MAP)
    assert shown["down"]["seen"][0] == 100 and shown["across"]["seen"][0] == 10
    page.locator("#map").scroll_into_view_if_needed()
    box = page.locator("#map").bounding_box()
    start = at(shown, 120, 30)
    page.mouse.move(box["x"] + start["x"], box["y"] + start["y"])
    page.mouse.down()
    for step in (20, 40, 60):
        page.mouse.move(box["x"] + start["x"] - step, box["y"] + start["y"] + step / 2)
    page.mouse.up()
    drawn(opened)
    moved = page.evaluate(MAP)
    assert moved["across"]["offset"] - shown["across"]["offset"] == 60 * shown["ratio"]
    assert moved["down"]["offset"] - shown["down"]["offset"] == -30 * shown["ratio"]
    assert opened.shown == "0/0/out/150/20"


def test_a_link_holds_what_is_seen(long: Any, make_case: Make, open_report: Make) -> None:
    other = make_case(9, heads=1, name="other").layer
    opened = open_report([long.layer, other], "#token=150&pair=20&zoom=100.140.10.50")
    page = opened.page
    entries = page.evaluate("history.length")
    page.locator("#map").focus()
    page.keyboard.press("+")
    opened.until("location.hash.includes('zoom=100.140.10.50')", False)
    assert page.evaluate("history.length") == entries  # replaced
    drawn(opened)
    shown = page.evaluate(MAP)
    again = open_report([long.layer, other], page.evaluate("location.hash"))
    for side in ("down", "across"):
        there = again.page.evaluate(MAP)[side]
        assert there["cell"] == shown[side]["cell"]
        assert abs(there["offset"] - shown[side]["offset"]) <= there["cell"] / 2
    page.locator(".head").last.click()  # another text: the whole of it
    opened.until("location.hash.includes('zoom')", False)
    seen = f"JSON.stringify({MAP}.down.seen)"
    for bad in ("5", "9.3.1.2", "a.b.c.d", "1.2.3.4.5", "-1.2.3.4"):
        again.page.evaluate("location.hash = '#zoom=100.140.10.50'")
        again.until(f"{seen} === '[0,300]'", False)
        again.page.evaluate(f"location.hash = '#zoom={bad}'")
        again.until(seen, "[0,300]")
    past = open_report([long.layer], "#zoom=290.900.295.900").page.evaluate(MAP)
    assert past["down"]["seen"][1] <= 300


def test_each_axis_has_words_as_soon_as_they_fit(make_case: Make, open_report: Make) -> None:
    case = make_case(200, 5, heads=1, kind="cross", key_tokens=["das", "Wasser", "war", "es", "."])
    opened = open_report([case.layer])
    shown = opened.page.evaluate(MAP)
    assert shown["across"]["words"] == [0, 1, 2, 3, 4] and shown["down"]["words"] == []
    opened.page.locator("#map").focus()
    for _ in range(3):
        opened.page.keyboard.press("+")
    shown = opened.page.evaluate(MAP)
    assert shown["across"]["words"] == [0, 1, 2, 3, 4]
    first, last = shown["down"]["seen"]
    assert shown["down"]["words"] == list(range(first, last)) and last - first < 100


def test_the_lens_shows_the_pairs_around_one_with_their_words(long: Any, open_report: Make) -> None:
    opened = open_report([long.layer])
    page = opened.page
    assert page.locator("#lens").is_hidden()
    shown = page.evaluate(MAP)
    page.locator("#map").scroll_into_view_if_needed()
    for i, j in ((150, 100), (290, 5), (5, 2), (160, 150), (299, 299)):
        place = at(shown, i, j)
        page.locator("#map").hover(position=place)
        page.wait_for_timeout(100)  # the weights of another query come a moment later, and a hand moves on
        page.locator("#map").hover(position={"x": place["x"] + 0.2, "y": place["y"]})
        opened.until(f"{MAP}.lens?.rows.includes('w{i}')")
        lens = page.evaluate(MAP)["lens"]
        assert len(lens["rows"]) == len(lens["columns"]) == 15 and f"w{j}" in lens["columns"]
        for query, key, weight in lens["values"]:
            assert weight == pytest.approx(long.weights[0, query, key], rel=1e-5)
        box, picture = page.locator("#lens").bounding_box(), page.locator("#map").bounding_box()
        x, y = picture["x"] + place["x"], picture["y"] + place["y"]
        inside = box["x"] <= x <= box["x"] + box["width"] and box["y"] <= y <= box["y"] + box["height"]
        assert not inside
        weight = long.weights[0, i, j]
        rank = 1 + (long.weights[0, i, : i + 1] > weight).sum()
        text = page.inner_text("#map-pair").replace("\u2068", "").replace("\u2069", "")
        assert text.startswith(f"w{i} → w{j} ") and f", rank {rank} of the {i + 1} keys of “w{i}”, " in text
        assert float(text.split(", ")[2].split()[0]) == pytest.approx(weight * (i + 1), rel=0.06)
    page.mouse.move(0, 0)
    opened.until(f"{MAP}.lens", None)
    page.locator(".token").nth(100).hover()  # a query previewed in the text, with its strongest key
    opened.until(f"{MAP}.lens?.rows.includes('w100')")
    assert f"w{long.weights[0, 100].argmax()}" in page.evaluate(MAP)["lens"]["columns"]


def test_pointing_does_not_draw_the_picture_again(long: Any, open_report: Make) -> None:
    opened = open_report([long.layer])
    page = opened.page
    shown = page.evaluate(MAP)
    page.evaluate(
        f"""() => {{
            const pen = {HOST}.shadowRoot.getElementById('map-picture').getContext('2d');
            window.draws = 0;
            const draw = pen.drawImage.bind(pen);
            pen.drawImage = (...given) => {{ window.draws++; draw(...given); }};
        }}"""
    )
    for i, j in ((150, 100), (120, 5)):
        page.locator("#map").hover(position=at(shown, i, j))
        opened.until(f"{MAP}.lens?.rows.includes('w{i}')")
    assert page.evaluate("window.draws") == 0
    page.locator("#map").focus()
    page.keyboard.press("+")
    opened.until("window.draws > 0")


def test_beside_the_map_a_whole_token_is_named(long: Any, open_report: Make) -> None:
    opened = open_report([long.layer])
    page = opened.page
    shown = page.evaluate(MAP)
    place = at(shown, 0, 40)
    page.locator("#map").hover(position={"x": place["x"], "y": shown["top"] / shown["ratio"] - 5})
    text = page.inner_text("#map-pair")
    assert "w40" in text and "receives" in text


def test_a_tap_on_a_phone_names_the_pair(long: Any, open_report: Make) -> None:
    opened = open_report([long.layer], viewport={"width": 390, "height": 800}, has_touch=True)
    page = opened.page
    shown = page.evaluate(MAP)
    page.locator("#map").tap(position=at(shown, 200, 100))
    i, j = map(int, opened.shown.split("/")[3:])
    text = page.inner_text("#map-pair").replace("\u2068", "").replace("\u2069", "")
    assert text.startswith(f"w{i} → w{j} ")
    assert abs(i - 200) <= 2 and abs(j - 100) <= 2
    assert page.locator("#lens").is_visible()
    opened.until("document.documentElement.scrollWidth <= innerWidth")


def test_two_fingers_zoom(long: Any, open_report: Make) -> None:
    opened = open_report([long.layer])
    page = opened.page
    whole = page.evaluate(MAP)
    place = at(whole, 150, 60)
    page.evaluate(
        f"""([x, y]) => {{
            const map = {HOST}.shadowRoot.getElementById('map');
            const box = map.getBoundingClientRect();
            const send = (type, pointerId, shift) => map.dispatchEvent(new PointerEvent(type, {{ pointerId,
                pointerType: 'touch', clientX: box.left + x + shift, clientY: box.top + y, bubbles: true }}));
            map.setPointerCapture = () => 0;
            send('pointerdown', 1, -20);
            send('pointerdown', 2, 20);
            for (let shift = 20; shift <= 80; shift += 4) {{
                send('pointermove', 1, -shift);
                send('pointermove', 2, shift);
            }}
            send('pointerup', 1, -80);
            send('pointerup', 2, 80);
        }}""",
        [place["x"], place["y"]],
    )
    drawn(opened)
    closer = page.evaluate(MAP)
    assert 3 <= closer["across"]["cell"] / whole["across"]["cell"] <= 6
    assert abs(at(closer, 150, 60)["x"] - place["x"]) <= 2 * closer["across"]["cell"]
    assert opened.shown == open_report([long.layer]).shown


WATCH = """window.long = [];
new PerformanceObserver((list) => list.getEntries().forEach((e) => window.long.push(e.duration)))
    .observe({ type: 'longtask' });"""


def test_a_long_head_is_computed_beside_the_page(make_case: Make, open_report: Make) -> None:
    n = 4096
    case = make_case(n, heads=1, features=16, stop=np.arange(n) + 1)
    page = (opened := open_report([case.layer])).page
    per = page.evaluate(MAP)["down"]["per"]
    counts = np.arange(n)[:, None] + 1
    seen = np.tri(n, dtype=bool)
    np.testing.assert_allclose(
        cells_of(page), pooled(case.weights[0] * counts, seen, (per, per), False), rtol=1e-5, atol=1e-30
    )
    page.evaluate(f"() => {{ {WATCH} }}")
    longest = []
    # closer: what is seen is computed anew. In one of the three the machine may be busy with other things
    for _ in range(3):
        page.evaluate("window.long.length = 0")
        page.locator("#zoom-in").click()
        opened.until(f"{HOST}.dataset.map", "drawn", seconds=60)
        longest.append(max(page.evaluate("window.long"), default=0))
    assert page.evaluate(MAP)["down"]["per"] < per / 4
    assert min(longest) <= 60


COUNT = """window.asked = 0;
const Real = window.Worker;
window.Worker = class extends Real {
    postMessage(message, moved) {
      if (message.asked?.job === 'tile') window.asked++;
      super.postMessage(message, moved ?? []);
    }
    terminate() { window.asked = -1e9; super.terminate(); }
};"""


def test_the_tiles_come_from_the_worker(long: Any, open_report: Make) -> None:
    opened = open_report([long.layer], init=COUNT)
    shown = opened.page.evaluate(MAP)
    assert opened.page.evaluate("window.asked") == (-(-shown["down"]["cells"] // 256)) ** 2


BROKEN = ["delete window.Worker;", "window.Worker = class { constructor() { throw Error(); } };"]


@pytest.mark.parametrize("broken", BROKEN, ids=["none", "refused"])
def test_without_a_worker_the_page_computes_itself(long: Any, open_report: Make, broken: str) -> None:
    opened = open_report([long.layer], "#scale=log", init=broken)
    seen = np.tri(300, dtype=bool)
    per = opened.page.evaluate(MAP)["down"]["per"]
    np.testing.assert_allclose(cells_of(opened.page), pooled(long.weights[0], seen, (per, per), False), rtol=1e-5)
    opened.page.locator("#map").focus()
    opened.page.keyboard.press("+")
    drawn(opened)


def test_from_afar_the_cells_are_those_that_python_wrote(open_report: Make) -> None:
    n, per, d = 2400, 3, 8
    rng = np.random.default_rng(0)
    query, key = (rng.standard_normal((1, n, d)).astype(np.float32) for _ in "qk")
    scores = query[0].astype(np.float64) @ key[0].T.astype(np.float64)
    seen = np.tri(n, dtype=bool)
    scores[~seen] = -np.inf
    logsumexp = np.log(np.exp(scores).sum(1))
    weights = np.exp(scores - logsumexp[:, None])
    blocks = weights.reshape(n // per, per, n // per, per)
    largest, mean = blocks.max((1, 3)), blocks.mean((1, 3))
    allowed = np.tri(n // per, dtype=bool)
    layer = Layer(
        name="long", kind="self", query=query, key=key, scale=1.0, softcap=None,
        start=np.zeros((1, n), np.int32), stop=np.arange(1, n + 1, dtype=np.int32)[None], bias=None,
        logsumexp=logsumexp[None], entropy=np.ones((1, n)), received=weights.sum(0)[None], distance=None,
        thumbnail=np.ones((1, 32, 32), np.float32),
        query_tokens=[f"w{i}" for i in range(n)], key_tokens=[f"w{i}" for i in range(n)],
        pyramid=Pyramid(map_codes(largest, allowed)[None], map_codes(mean, allowed)[None], per, per),
    )  # fmt: skip
    for pool, cells in (("max", largest), ("mean", mean)):
        opened = open_report([layer], f"#scale=log&pool={pool}&token=1200", viewport={"width": 700, "height": 700})
        shown = opened.page.evaluate(MAP)
        wide = shown["down"]["per"]
        assert wide > per  # a cell of the screen overlaps several of the file: all of them count
        wanted = np.full((shown["down"]["cells"],) * 2, -1.0)
        for row in range(len(wanted)):
            for column in range(len(wanted)):
                over = [
                    slice(at * wide // per, min(len(cells), -(-min(n, (at + 1) * wide) // per))) for at in (row, column)
                ]
                if allowed[tuple(over)].any():
                    part = cells[tuple(over)]
                    wanted[row, column] = part.max() if pool == "max" else part.mean()
        np.testing.assert_allclose(cells_of(opened.page), wanted, rtol=0.004)  # codes are 1/128 of an octave apart
        if pool == "max":
            opened.page.locator("#map").focus()
            for _ in range(4):
                opened.page.keyboard.press("+")
            drawn(opened)
            assert opened.page.evaluate(MAP)["down"]["per"] < per  # exact now
