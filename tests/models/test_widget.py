"""The report as a widget: in JupyterLab itself, and by a model of its own."""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from browser import Opened, Windows

import clearhead as ch
from clearhead.report.page import widget_module

pytest.importorskip("anywidget", reason="the widget is shown by anywidget, which is not installed")

MODEL = """
import torch, clearhead as ch
import torch.nn.functional as F

class Block(torch.nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

model = torch.nn.Sequential(Block(), Block())
with ch.watch(model) as seen:
    model(torch.randn(1, 3, 6, 8, generator=torch.Generator().manual_seed(0)))
"""
WORDS = ["the", "</div><script>alert(1)</script>", '"pump"', "was", "not", "closed"]
CELLS = [
    f"{MODEL}\nshown = seen.view(tokens={WORDS!r}, title='A <title>', height=640).widget()\nshown",
    "print('chosen', shown.address)",
    "shown.address = '#layer=1&head=2&token=4&view=in'",
    "shown",
]


@pytest.fixture(scope="module")
def seen():
    names: dict[str, object] = {}
    exec(MODEL, names)
    return names["seen"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The address of a JupyterLab with one notebook, which knows nothing of this user's settings."""
    folder = tmp_path_factory.mktemp("lab")
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    cell = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
    cells = [cell | {"id": f"cell-{at}", "source": source} for at, source in enumerate(CELLS)]
    notebook = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    (folder / "try.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    own = {name: str(folder / name) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")}
    options = [f"--port={port}", "--ip=127.0.0.1", "--no-browser", "--allow-root", "--IdentityProvider.token="]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyter", "lab", *options, f"--ServerApp.root_dir={folder}"],
            env=os.environ | own, stdout=log, stderr=log,
        )  # fmt: skip
        address = f"http://127.0.0.1:{port}"
        end = time.monotonic() + 90
        while True:
            try:
                urllib.request.urlopen(f"{address}/api").close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < end, (folder / "log").read_text()
                time.sleep(0.1)
        yield f"{address}/lab/tree/try.ipynb?reset"
        server.terminate()
        server.wait(30)


SHOWN = ".clearhead"


def connected(lab: str) -> bool:
    """Whether the notebook has a kernel that waits for it."""
    try:
        with urllib.request.urlopen(lab.partition("/lab/")[0] + "/api/kernels") as answer:
            return any(one["execution_state"] == "idle" and one["connections"] for one in json.load(answer))
    except OSError:
        return False  # one that has just been started is not always listed yet


def test_in_jupyterlab(lab, seen, browser: Windows):
    page = browser._chromium.new_context(viewport={"width": 1400, "height": 1000}).new_page()
    errors, requests = [], []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.on("dialog", lambda dialog: errors.append(dialog.message))
    opened = Opened(page, lab)
    page.goto(lab)
    end = time.monotonic() + 90
    while not connected(lab):
        assert time.monotonic() < end
        page.wait_for_timeout(100)
    data = "(at = 0) => ({ ...document.querySelectorAll('.clearhead')[at]?.dataset })"
    cell = page.locator(".jp-Notebook .jp-CodeCell")

    def run(at: int) -> None:
        cell.nth(at).locator(".cm-content").click()
        page.keyboard.press("Shift+Enter")

    run(0)
    opened.until(f"({data})().map", "drawn", 60)
    root = page.locator(SHOWN).first
    assert root.locator("#title").inner_text() == "A <title>"
    assert root.locator(".token").all_inner_texts() == WORDS

    # what is shown is what was watched
    layer, head, view, token, pair = page.evaluate(f"({data})().shown").split("/")
    assert view == "out"
    weights = seen[int(layer)].weights[0, int(head), int(token)]
    said = [float(text[:-1]) / 100 for text in root.locator("#strongest .number").all_inner_texts()]
    torch.testing.assert_close(torch.tensor(said), weights.sort(descending=True).values[: len(said)], atol=6e-4, rtol=0)
    assert int(pair) == int(weights.argmax()) and len(page.workers) > 0

    # its keys are its own: m shows the whole page and makes no Markdown, b compares, and adds no cell
    root.locator(".token").first.focus()
    page.keyboard.press("m")
    root.locator(".head[tabindex='0']").wait_for()
    root.locator(".head[tabindex='0']").focus()
    page.keyboard.press("a")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("b")
    opened.until(f"document.querySelector('{SHOWN}').shadowRoot.getElementById('compare').hidden", False)
    assert cell.count() == len(CELLS)

    # what is chosen is known on both sides
    root.locator(".token").nth(5).click()
    opened.until(f"({data})().shown.split('/')[3]", "5")
    run(1)
    chosen = cell.nth(1).locator(".jp-OutputArea-output")
    chosen.wait_for()
    assert "token=5" in chosen.inner_text() and "&b=" in chosen.inner_text()
    run(2)
    opened.until(f"({data})().shown.startsWith('1/2/in/4/')", True)

    # a second place follows the first; what is cleared ends with its worker
    run(3)
    opened.until(f"({data})(1).map", "drawn", 30)
    assert page.evaluate(f"({data})(1).shown") == page.evaluate(f"({data})(0).shown")
    working = len(page.workers)
    page.keyboard.press("Escape")
    cell.nth(3).locator(".jp-InputPrompt").click()
    page.evaluate("document.querySelectorAll('.clearhead')[1].closest('.jp-OutputArea-child').scrollIntoView()")
    page.get_by_text("Edit", exact=True).click()
    page.get_by_text("Clear Cell Output", exact=True).click()
    opened.until("document.querySelectorAll('.clearhead').length", 1)
    end = time.monotonic() + 10
    while len(page.workers) >= working:
        assert time.monotonic() < end
        page.wait_for_timeout(50)

    # the notebook's theme
    assert page.evaluate(f"({data})().theme") == "light"
    page.evaluate("document.body.dataset.jpThemeLight = 'false'")
    opened.until(f"({data})().theme", "dark")

    origin = lab.partition("/lab/")[0]
    assert not errors and not [url for url in requests if not url.startswith((origin, "data:", "blob:"))]
    page.context.close()


ALONE = """<!doctype html><meta charset=utf-8><body>
<script type="application/json" id="given">{given}</script>
<script type="module">
import widget from "data:text/javascript;base64,{module}";
const given = JSON.parse(document.getElementById("given").textContent);
const known = {{ meta: given.meta, address: "", height: 500 }};
const heard = new Map();
window.model = {{
  asked: [],
  get: (name) => known[name],
  set: (name, value) => {{ known[name] = value; }},
  save_changes: () => {{}},
  on: (name, call) => heard.set(name, call),
  off: (name, call) => heard.get(name) === call && heard.delete(name),
  answer(block, said = {{}}) {{
    const bytes = Uint8Array.from(atob(given.blocks[block]), (sign) => sign.charCodeAt(0));
    heard.get("msg:custom")({{ block, ...said }}, [new DataView(bytes.buffer)]);
  }},
  send({{ block }}) {{ this.asked.push(block); if (!window.silent) setTimeout(() => this.answer(block)); }},
  get heard() {{ return heard.size; }},
}};
window.silent = location.hash === "#silent";
window.close = widget.render({{ model: window.model, el: document.body }});
</script>"""


@pytest.fixture
def alone(seen, browser: Windows, tmp_path: Path):
    """The widget with a model of its own, `model`, that answers unless the address says "#silent"."""
    page = seen.view().page
    blocks = [base64.b64encode(page.blocks[number]).decode() for number in range(len(page.blocks))]
    given = json.dumps({"meta": json.dumps(page.meta()), "blocks": blocks}).replace("<", "\\u003c")
    text = base64.b64encode(widget_module().encode()).decode()
    (tmp_path / "alone.html").write_text(ALONE.format(given=given, module=text), encoding="utf-8")
    every: list[Opened] = []

    def opened(hash: str = "", init: str | None = None) -> Opened:
        every.append(browser.open(tmp_path / "alone.html", Opened, hash, init=init))
        return every[-1]

    yield opened
    for one in every:
        browser.close(one)


NOTICE = "document.querySelector('[role=status]')"


def test_blocks_are_asked_for_when_they_are_needed_and_once(alone):
    opened = alone()
    opened.until("document.querySelector('.clearhead')?.dataset.map", "drawn")
    asked = opened.page.evaluate("model.asked")
    assert len(asked) == len(set(asked)) and opened.page.evaluate(f"{NOTICE}.hidden")
    opened.page.evaluate("window.close()")
    assert opened.page.evaluate("model.heard") == 0
    end = time.monotonic() + 10
    while opened.page.workers:
        assert time.monotonic() < end
        opened.page.wait_for_timeout(20)


def test_a_kernel_that_does_not_answer(alone):
    """It is said, and taken back when the answer comes."""
    hasty = "const wait = window.setTimeout; window.setTimeout = (call, ms) => wait(call, ms === 10000 ? 50 : ms);"
    opened = alone("#silent", init=hasty)
    opened.until(f"{NOTICE}?.hidden", False)
    assert "kernel does not answer" in opened.page.evaluate(f"{NOTICE}.textContent")
    opened.page.evaluate("window.silent = false; for (const block of model.asked) model.answer(block)")
    opened.until("document.querySelector('.clearhead').dataset.map", "drawn")
    assert opened.page.evaluate(f"{NOTICE}.hidden")


def test_a_block_that_there_is_not(alone, seen):
    opened = alone("#silent")
    opened.until("window.model?.asked.length > 0", True)
    opened.page.evaluate("model.answer(model.asked[0], { error: 'there is no block <b>9</b>' })")
    opened.until(f"{NOTICE}.hidden", False)
    assert "there is no block <b>9</b>" in opened.page.evaluate(f"{NOTICE}.textContent")
    assert opened.faults and all("there is no block" in fault for fault in opened.faults)
    opened.faults.clear()

    said: list[tuple[object, list[bytes]]] = []
    shown = seen.view().widget()
    shown.send = lambda content, buffers: said.append((content, buffers))
    for asked in ({"block": 0}, {"block": -1}, {"block": 10**6}, {"block": "0"}, {"block": True}, {}):
        shown._handle_custom_msg(asked, [])
    assert said[0] == ({"block": 0}, [shown._page.blocks[0]])
    assert all("error" in content and buffers == [b""] for content, buffers in said[1:]) and len(said) == 6


def test_without_anywidget(seen, monkeypatch):
    monkeypatch.setitem(sys.modules, "anywidget", None)
    with pytest.raises(ch.ClearheadError, match=re.escape("pip install 'clearhead[notebook]'")):
        seen.view().widget()
