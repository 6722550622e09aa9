"""Whatever the tokens hold, the page shows it as text and runs nothing of it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
import torch
from rendered import page_of, render

import clearhead as ch
from clearhead.report.layer import LeftOut

Make = Callable[..., Any]

ROOT = "document.getElementById('clearhead').shadowRoot"
HOSTILE = {
    "</script><script>alert(1)</script>": "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(2)>": "<img src=x onerror=alert(2)>",
    "<style>*{display:none}</style>": "<style>*{display:none}</style>",
    "<!--": "<!--",
    "&lt;b&gt;": "&lt;b&gt;",
    "javascript:alert(3)": "javascript:alert(3)",
    "__proto__": "__proto__",
    "שלום": "שלום",
    "مرحبا": "مرحبا",
    "👩‍👩‍👧": "👩‍👩‍👧",
    "日": "日",
    "\u202eevil": "⟨U+202E⟩evil",
    "a\u2028b": "a⟨U+2028⟩b",
    "\u200b": "⟨U+200B⟩",
    "\x00": "⟨U+0000⟩",
    " ": "␣",
    "\n": "⏎",
    "\t\t": "⇥⇥",
    "\u00a0": "⍽",
    "": "∅",
    "W" * 500: "W" * 500,
}


def test_hostile_tokens_are_text(make_case: Make, open_report: Make) -> None:
    tokens = list(HOSTILE)
    layer = make_case(len(tokens), query_tokens=tokens, name="<b>x</b></script>").layer
    page = open_report([layer], viewport={"width": 360, "height": 740}).page
    shown = page.evaluate(
        "Array.from(document.getElementById('clearhead').shadowRoot.querySelectorAll('.token'), e => e.textContent)"
    )
    assert shown == list(HOSTILE.values())
    assert (
        page.evaluate(
            "document.getElementById('clearhead').shadowRoot.querySelectorAll('.token *, img, #where :not(wbr)').length"
        )
        == 0
    )
    assert page.evaluate("document.scripts.length") == page.evaluate(
        "document.querySelectorAll('head script, body > script').length"
    )
    for index in range(len(tokens)):  # each in titles, lists, sentences and on the map
        page.evaluate(f"document.getElementById('clearhead').shadowRoot.querySelectorAll('.token')[{index}].click()")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_hostile_title_is_text(make_case: Make, open_report: Make) -> None:
    title = "</title><script>alert(1)</script>{{program}}&amp;"
    page = open_report([], html=render([make_case(3).layer], title)).page
    assert page.title() == title
    assert page.text_content("h1") == title


RUNNING = {
    "[CLS] unbelievable, really (so) [SEP]":
        ["[CLS]", "un", "##believ", "##able", ",", "really", "(", "so", ")", "[SEP]"],
    "The cat⏎ sat.": ["The", "Ġcat", "Ċ", "Ġsat", "."],
    "The cats␣": ["▁The", "▁cat", "s", "▁"],
    "The cat sat.": ["The", " cat", " sat", "."],
    "日本語": ["日", "本", "語"],
    "it's a-b": ["it", "'", "s", "a", "-", "b"],
}  # fmt: skip


def test_running_text(make_case: Make, open_report: Make) -> None:
    layers = [make_case(len(tokens), query_tokens=tokens).layer for tokens in RUNNING.values()]
    opened = open_report(layers)
    for number, text in enumerate(RUNNING):
        opened.page.evaluate(f"location.hash = 'layer={number}'")
        opened.until("document.getElementById('clearhead').shadowRoot.querySelector('.prose').textContent", text)


def test_the_policy_stops_what_is_injected(make_case: Make, open_report: Make) -> None:
    """If markup did get in, it could still run and load nothing."""
    html = render([make_case(3).layer], "A report")
    html = html.replace("<body>", "<body><script>window.ran = 1</script><p style='color:red'>", 1)
    opened = open_report([], html=html)
    page = opened.page
    failed: list[str | None] = []
    page.on("requestfailed", lambda request: failed.append(request.failure))
    page.evaluate("""() => {
        const image = document.createElement('img');
        image.src = 'https://example.invalid/x';
        image.setAttribute('onerror', 'window.ran = 2');
        document.body.append(image);
    }""")
    opened.until("window.violations.some(v => v.startsWith('script-src-attr'))")
    assert page.evaluate("window.ran === undefined")
    violated = {violation.split(" ")[0] for violation in page.evaluate("window.violations")}
    assert {"script-src-elem", "style-src-attr", "img-src", "script-src-attr"} <= violated
    assert failed == ["csp"]  # the image's request never left
    opened.faults.clear()
    page.evaluate("window.violations = []")


def test_a_missing_decompressor_is_said(make_case: Make, open_report: Make) -> None:
    layers = [make_case(3).layer]
    page = open_report(layers, wait=False, init="delete window.DecompressionStream").page
    assert page.locator("#problem").is_visible()
    assert "no DecompressionStream" in page.inner_text("#problem")


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        (lambda html: html[: html.index('id="block-1"')].rsplit("<script", 1)[0], "the file is cut short"),
        (lambda html: re.sub(r'<script type="application/json" id="meta">.', "\\g<0>!", html), "could not be shown"),
    ],
    ids=["data is missing", "a program does not parse"],
)
def test_a_damaged_file_is_said(make_case: Make, open_report: Make, damaged: Any, said: str) -> None:
    opened = open_report([], html=damaged(render([make_case(3).layer], "A report")), wait=False)
    opened.until("document.documentElement.dataset.problem", "yes")
    assert opened.page.locator("#problem").is_visible()
    assert said in opened.page.inner_text("#problem")
    opened.faults.clear()


def test_without_javascript_there_is_a_message(make_case: Make, open_report: Make) -> None:
    layers = [make_case(3).layer]
    opened = open_report(layers, wait=False, java_script_enabled=False)
    assert "needs\nJavaScript" in (opened.page.text_content("body") or "")
    assert opened.page.locator("noscript p").is_visible()
    assert not opened.page.locator("#page").is_visible()


def test_nan_and_infinity_do_not_break_the_page(make_case: Make, open_report: Make) -> None:
    layer = make_case(4, heads=1).layer
    layer.entropy[:] = np.nan
    layer.received[:] = np.inf
    page = open_report([layer]).page
    assert page.inner_text("#pair-title")


def test_what_is_left_out_is_said_and_stays_text(make_case: Make, open_report: Make) -> None:
    html = render([make_case(3).layer, LeftOut("<img src=x>", "its scores are more than a page holds.")], "A report")
    page = open_report([], html=html).page
    assert page.inner_text("#left-out") == "Not shown: <img src=x>: its scores are more than a page holds."
    assert page.evaluate(f"{ROOT}.querySelectorAll('#left-out *').length") == 0


class Slow:
    """A server of one page, in pieces that end inside its blocks; if `held`, the last one comes when told to."""

    def __init__(self) -> None:
        self.html, self.held, self.free = b"", False, Event()
        slow = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.end_headers()
                cuts = [0, *(found.end() + 4 for found in re.finditer(rb'id="block-\d+">', slow.html)), len(slow.html)]
                for start, stop in pairwise(cuts):
                    if slow.held and stop == cuts[-1]:
                        slow.free.wait(60)
                    self.wfile.write(slow.html[start:stop])
                    self.wfile.flush()
                    time.sleep(0.2)

            def log_message(self, *said: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=self.server.serve_forever, daemon=True).start()

    def __call__(self, html: str, held: bool = False) -> str:
        """The address of a page."""
        self.html, self.held = html.encode(), held
        self.free.clear()
        return f"http://127.0.0.1:{self.server.server_port}/report.html"

    def go_on(self) -> None:
        self.free.set()


@pytest.fixture
def slow_server() -> Iterator[Slow]:
    slow = Slow()
    yield slow
    slow.go_on()
    slow.server.shutdown()
    slow.server.server_close()


def test_a_page_that_comes_slowly(make_case: Make, open_report: Make, slow_server: Slow) -> None:
    case = make_case(20)
    page = open_report([], address=slow_server(render([case.layer], "A report"))).page
    np.testing.assert_allclose(page.evaluate("clearhead.weights(0, 1, 3)"), case.weights[1, 3], atol=1e-6)


EARLY = """(() => {
  const host = document.getElementById("clearhead");
  const root = host.shadowRoot;
  const map = root.getElementById("map-picture");
  const pen = new OffscreenCanvas(map.width, map.height).getContext("2d", { willReadFrequently: true });
  if (map.width * map.height) pen.drawImage(map, 0, 0);
  const colours = new Uint32Array(pen.getImageData(0, 0, map.width, map.height).data.buffer);
  return {
    reading: document.readyState, inert: root.querySelector("main").inert, shown: host.dataset.shown ?? null,
    colours: new Set(colours).size, words: root.querySelectorAll(".token").length,
    where: root.getElementById("where").textContent, map: host.dataset.map,
  };
})()"""


@pytest.fixture(scope="module")
def long_head() -> str:
    """The page of a causal head of 4,096 tokens."""

    class Block(torch.nn.Module):
        def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return ch.attention(query, key, key, mask=ch.Causal())

    block = Block()
    torch.manual_seed(0)
    with torch.no_grad(), ch.watch(block) as seen:
        block(*torch.randn(2, 1, 1, 4096, 8))
    return "".join(page_of(seen.layers(), "A report").parts())


@pytest.mark.parametrize("width, height", [(2600, 2200), (400, 900)])
def test_a_long_head_is_seen_from_afar_while_it_is_being_read(
    open_report: Make, slow_server: Slow, long_head: str, width: int, height: int
) -> None:
    address = slow_server(long_head, held=True)
    viewport = {"width": width, "height": height}
    report = open_report([], address=address, wait=False, until="commit", viewport=viewport)
    report.until("document.getElementById('clearhead')?.dataset.map", "drawn")
    report.until(f"{EARLY}.colours > 50", True)
    early = report.page.evaluate(EARLY)
    assert (early["reading"], early["inert"], early["shown"], early["map"]) == ("loading", True, None, "drawn")
    assert early["words"] > 100 and early["where"].startswith("L0H0")
    report.page.keyboard.press("?")  # nothing can be chosen yet, and nothing fails
    report.page.mouse.move(200, 600)
    slow_server.go_on()
    report.settle()
    assert report.shown.startswith("0/0/out/2048/")
    late = report.page.evaluate(EARLY)
    assert (late["inert"], late["map"]) == (False, "drawn")
    assert report.page.locator(".token[style*=background]").count() > 0


def test_single_pairs_of_a_long_head_wait_for_its_query_and_key(
    open_report: Make, slow_server: Slow, long_head: str
) -> None:
    report = open_report([], "#zoom=0.40.0.40", address=slow_server(long_head))
    cells = report.page.evaluate("clearhead.cells().slice(30 * 4096, 30 * 4096 + 31)")
    row = report.page.evaluate("clearhead.weights(0, 0, 30)")
    np.testing.assert_allclose(np.array(cells) / 31, row[:31], rtol=1e-5)  # in times uniform
