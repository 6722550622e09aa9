"""The page in a headless Chromium: its first view, a row, a tile, the zoom, and the memory of its process."""

from __future__ import annotations

import itertools
import re
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from benchmarks.pages import LONG, of_head, of_text
from benchmarks.result import Result

TIMES = 7
VIEW = 480  # pairs a side that the map of this window shows, a pixel each
# Milliseconds since the address was opened. `drawn`: when heads, text and map are drawn for the first time, of a long
# head from afar; `whole`: when all is, the weights of the chosen token too.
DRAWN = """window.drawn = window.whole = 0; new MutationObserver(() => {
  const data = document.getElementById("clearhead")?.dataset;
  if (data?.overview !== "drawn" || data.map !== "drawn") return;
  window.drawn ||= performance.now();
  if (data.shown) window.whole ||= performance.now();
}).observe(document, { subtree: true, childList: true, attributes: true });"""
# The median time in milliseconds of a call that gets a number that is never twice the same.
MEDIAN = """async (call) => { const taken = [];
  for (let at = 0; at < 15; at++) {
    const began = performance.now();
    await call(at);
    taken.push(performance.now() - began);
  }
  return taken.sort((a, b) => a - b)[7]; }"""


@cache
def page_of(length: int) -> Path:
    """The page of the bundled BERT on 512 tokens, or of one head of more."""
    path = Path(tempfile.mkdtemp()) / "page.html"
    return (
        of_text(512)[0].view(tokens=of_text(512)[1]).write(path)
        if length == 512
        else of_head(length).view().write(path)
    )


@contextmanager
def chromium() -> Iterator[Callable[[int, str], Page]]:
    """Opens pages, one window each, and waits until they are drawn."""
    with sync_playwright() as playwright:
        programs = ("chromium", "chromium-browser", "chromium-headless-shell")  # what readers have, first
        program = next(filter(None, map(shutil.which, programs)), None)
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])

        def opened(length: int, hash: str = "") -> Page:
            page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
            page.add_init_script(DRAWN)
            page.goto(page_of(length).as_uri() + hash)
            settle(page)
            return page

        yield opened
        browser.close()


def settle(page: Page) -> None:
    """Waits until the map is drawn. (The page's policy forbids `wait_for_function`.)"""
    while not page.evaluate("window.whole && document.getElementById('clearhead').dataset.map === 'drawn'"):
        page.wait_for_timeout(10)


def at_most(what: str, value: float, unit: str, bar: float) -> Result:
    return Result(what, value, unit, f"≤ {bar:g}", value <= bar, {})


def first_view(length: int, bar: float) -> Callable[[], Result]:
    def run() -> Result:
        with chromium() as opened:
            taken = []
            for _ in range(TIMES):
                page = opened(length, "")
                taken.append(page.evaluate("[window.drawn, window.whole]"))
                page.context.close()
        drawn, whole = map(statistics.median, zip(*taken, strict=True))
        what = "BERT, 6 × 12 heads, 512 tokens" if length == 512 else f"one head of {length:,} tokens"
        said = f"first view of {what}: heads, text, map; all of the chosen token: {whole:.0f} ms"
        return at_most(said, drawn, "ms", bar)

    return run


def exact(what: str, call: str, bar: float) -> Callable[[], Result]:
    """A call of the page's hooks on one head of 16,384 tokens."""

    def run() -> Result:
        with chromium() as opened:
            taken = opened(16384, "").evaluate(f"({MEDIAN})((at) => clearhead.{call})")
        return at_most(f"{what} of a head of 16,384 tokens", taken, "ms", bar)

    return run


def whole_view(length: int, bar: float) -> Callable[[], Result]:
    """The map where a pixel is one pair, each time another part of it."""

    def run() -> Result:
        taken = []
        with chromium() as opened:
            page = opened(length, "")
            for at in range(TIMES):
                first = length // 2 + 1000 * at
                page.evaluate(
                    f"window.began = performance.now(); location.hash = '#zoom={first}.{first + VIEW}.64.{64 + VIEW}'"
                )
                page.wait_for_timeout(1)
                took = f"""new Promise((done) => {{ const look = () => {{
                    const {{ map, shown }} = document.getElementById("clearhead").dataset;
                    const {{ per, seen: [top] }} = clearhead.map().down;
                    const there = per === 1 && map === "drawn" && Math.abs(top - {first}) < 2 && shown;
                    if (there) done(performance.now() - window.began);
                    else setTimeout(look, 2); }}; look(); }})"""
                taken.append(page.evaluate(took))
        return at_most(
            f"a view of {VIEW} × {VIEW} single pairs of {length:,} tokens", statistics.median(taken), "ms", bar
        )

    return run


def zoom() -> Result:
    """From the whole head to single pairs and back by the wheel: how long the frames take."""
    with chromium() as opened:
        page = opened(LONG, "")
        box = page.locator("#map").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 200, box["y"] + 300)
        page.evaluate("""window.frames = []; (function next(now) {
            window.frames.push(now); requestAnimationFrame(next); })(performance.now())""")
        for way in (-240, 240):
            for _ in range(40):
                page.mouse.wheel(0, way)
                page.wait_for_timeout(30)
        frames: list[float] = page.evaluate("window.frames.slice(1)")
    gaps = sorted(later - earlier for earlier, later in itertools.pairwise(frames))
    return at_most(f"95% of the frames of a zoom in {LONG:,} tokens within", gaps[int(0.95 * len(gaps))], "ms", 25)


def memory() -> Result:
    """The most memory that the process of the page has held, of the system's own account."""
    with chromium() as opened:
        page = opened(LONG, "")
        for first in (0, 60000, 120000):
            page.evaluate(f"location.hash = '#zoom={first}.{first + VIEW}.{first}.{first + VIEW}&token={first}'")
            page.wait_for_timeout(300)
            settle(page)
        peaks = [peak for status in Path("/proc").glob("[0-9]*/status") if (peak := renderer_peak(status))]
    return at_most(f"peak of the process that shows {LONG:,} tokens", max(peaks), "MB", 500)


def renderer_peak(status: Path) -> float | None:
    """Megabytes, of a Chromium that shows pages."""
    try:
        if b"--type=renderer" not in (status.parent / "cmdline").read_bytes():
            return None
        found = re.search(r"VmHWM:\s+(\d+)", status.read_text())
        return int(found[1]) * 1024 / 1e6 if found else None
    except OSError:
        return None  # it has ended


CASES: dict[str, Callable[[], Result]] = {
    "view-512": first_view(512, 500),
    "view-16384": first_view(16384, 500),
    "view-131072": first_view(LONG, 700),
    "view-row": exact("a row", "weights(0, 0, 16383 - at)", 10),
    "view-column": exact("a column", "weights(0, 0, at, 'in')", 10),
    "view-tile": exact("256 × 256 pairs", "tile(0, 0, 8192 + 256 * at, 256 * at)", 15),
    "view-whole": whole_view(16384, 400),
    "view-zoom": zoom,
    "view-memory": memory,
}
