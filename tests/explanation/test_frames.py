"""Pages in frames, as notebooks and chapters show them: from disk and from a file server."""

import functools
import http.server
import random
import re
import threading

import pytest
import torch
from browser import Opened
from opened_page import heads, small

import clearhead as ch
from clearhead.explanation import Motion, Picture

X = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0))


class Block(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


def recorded():
    x = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    with ch.watch(block := Block()) as seen:
        block(x)
    return seen


def motion():
    pictures = [Picture(40), Picture(40)]
    for x, picture in enumerate(pictures):
        picture.rect("moved", 100 * x, 5, 30, 20)
    return Motion("A square moves", [("At the left.", pictures[0]), ("At the right.", pictures[1])])


FRAMES = {
    "explanation": lambda: small().frame(),
    "report": lambda: recorded().view(tokens=list("abcde")),
    "report of two texts": lambda: recorded().view(beside=recorded(), tokens=list("abcde")),
    "motion": lambda: motion().frame(),
}


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *given):
        pass


@pytest.fixture(params=["file", "http"])
def chapter(request, browser, tmp_path):
    """`chapter(frame)` opens a document that shows the frame, from disk or from a server: the document, the frame."""
    everything, server = (
        [],
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=tmp_path)),
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    def open_chapter(frame):
        path = tmp_path / f"chapter{len(everything)}.html"
        beginning = '<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,"><h1>The chapter</h1>'
        path.write_text(beginning + frame._repr_html_(), encoding="utf-8")
        address = path if request.param == "file" else f"http://127.0.0.1:{server.server_port}/{path.name}"
        opened = browser.open(address, Opened)
        everything.append(opened)
        return opened, opened.page.frames[1]

    yield open_chapter
    for opened in everything:
        browser.close(opened)
    server.shutdown()
    thread.join()
    server.server_close()


def check_whole(opened, inside, before):
    """The document is where it was, and the frame shows its page."""
    assert (opened.page.url, opened.page.evaluate("history.length")) == before
    assert inside.url == "about:srcdoc" and opened.page.locator("h1").inner_text() == "The chapter"
    assert inside.evaluate("document.getElementById('problem')?.hidden ?? true")


@pytest.mark.parametrize("view", ["one step", "all steps"])
def test_the_name_of_a_step_leads_to_the_step(chapter, view):
    opened, inside = chapter(small().frame())
    before = opened.page.url, opened.page.evaluate("history.length")
    if view == "all steps":
        inside.click("#view")
    links = inside.locator("#steps a")
    for n in (3, 8, 0, 5):
        links.nth(n).click()
        assert inside.locator("#count").inner_text() == f"step {n + 1} of 9"
        section = inside.locator(f"#card-{n}")
        top, height = section.evaluate("(box) => [box.getBoundingClientRect().top, innerHeight]")
        assert section.is_visible() and top < height
        check_whole(opened, inside, before)


@pytest.mark.parametrize("name", FRAMES)
def test_no_control_leads_away_from_the_page(chapter, name):
    """Links, buttons, keys and fields, drawn at random: a frame has no address of its own, and no history."""
    opened, inside = chapter(FRAMES[name]())
    before = opened.page.url, opened.page.evaluate("history.length")
    draw = random.Random(0)
    for _ in range(25):
        controls = inside.locator("a:visible, button:visible:enabled, summary:visible, td.cell:visible")
        if (count := controls.count()) and draw.random() < 0.8:
            controls.nth(draw.randrange(count)).evaluate("(control) => control.click()")
        else:
            inside.locator("body").press(draw.choice(["j", "k", "ArrowRight", "Home", "End", "Escape"]))
        check_whole(opened, inside, before)


CALLS = {
    "a dot product": lambda: ch.explain(X[0, :2, :2], X[0, :, :2], X[0, :, 2:]),
    "lengths": lambda: ch.explain(*[X[..., :2].expand(2, 3, 2)] * 3, mask=ch.Lengths([2, 3])),
    "heads": heads,
    "a module": lambda: ch.explain(ch.nn.MultiHeadAttention(4, 2), X, X, X),
}


@pytest.mark.parametrize(("width", "height"), [(896, 640), (358, 640), (390, 800), (1280, 900)])
@pytest.mark.parametrize("name", CALLS)
def test_nothing_covers_the_inputs_at_first_view(name, width, height, show):
    """On wide pages all inputs of an example stand beside each other, and are in sight."""
    opened = show(CALLS[name](), viewport={"width": width, "height": height})
    cells = opened.page.evaluate("""() => [...document.querySelectorAll("td.open")].map((cell) => {
      const [box, table] = [cell, cell.closest(".scroller")].map((each) => each.getBoundingClientRect());
      const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
      const top = document.elementFromPoint(x, y);
      return [x < table.right && y < innerHeight, top === cell || cell.contains(top)];
    })""")
    assert all(seen for inside, seen in cells if inside)
    assert sum(seen for _, seen in cells) >= (len(cells) if width > 600 and name != "heads" else 4)


def test_a_notebook_that_removes_frames_has_a_line_instead(chapter):
    frame = small().frame()
    line = "Run this cell to see the page."
    left = re.sub(r"<iframe.*?</iframe>", "", frame._repr_html_(), flags=re.S)
    assert re.sub(r"<[^>]*>", "", left) == line
    opened, _ = chapter(frame)
    covering = """() => {
      const box = document.querySelector("p").getBoundingClientRect();
      return document.elementFromPoint(box.x + 9, box.y + 9).tagName;
    }"""
    assert opened.page.evaluate(covering) == "IFRAME"
