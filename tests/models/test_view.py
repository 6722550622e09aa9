"""The report in a notebook's frame."""

import re

import pytest
import torch
import torch.nn.functional as F
from browser import Opened, Windows

import clearhead as ch


class Block(torch.nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x):
        return self.second(self.first(x))


@pytest.fixture(scope="module")
def seen():
    x = torch.randn(1, 3, 6, 8, generator=torch.Generator().manual_seed(0))
    with ch.watch(model := Two()) as recording:
        model(x)
    return recording


WORDS = ["the", "</iframe><script>", '"pump"', "was", "not", "closed"]


def test_a_notebook_shows_the_page_itself(seen, browser: Windows, tmp_path):
    """The frame is sandboxed; its worker, its colours and its numbers are there, and nothing of the page leaves it."""
    shown = seen.view("second", [2, 0], tokens=WORDS, title='A "title"')
    markup = shown._repr_html_()
    assert markup.count("<iframe") == markup.count("</iframe>") == 1 and 'sandbox="allow-scripts' in markup
    (tmp_path / "notebook.html").write_text(f"<!doctype html><meta charset=utf-8><body>{markup}", encoding="utf-8")
    opened = browser.open(tmp_path / "notebook.html", Opened)
    (frame,) = opened.page.frames[1:]
    host = "document.getElementById('clearhead')"
    for _ in range(400):
        if frame.evaluate(f"{host}?.dataset.map") == "drawn":
            break
        opened.page.wait_for_timeout(25)
    assert frame.evaluate(f"{host}.dataset.map") == "drawn"
    assert frame.locator("#title").inner_text() == 'A "title"'
    weights = frame.evaluate("clearhead.weights(0, 1, 4)")  # the second of the chosen heads, which is head 0
    torch.testing.assert_close(torch.tensor(weights), seen[1].weights[0, 0, 4], atol=2e-4, rtol=0)
    assert frame.locator(".token").all_inner_texts() == WORDS
    browser.close(opened)


def test_all_layers_and_a_file(seen, tmp_path):
    shown = seen.view(height=500)
    assert "height:500px" in shown._repr_html_() and re.search(r"Framed\(height=500\)", repr(shown))
    assert "clearhead" in shown.write(tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("opens", "chosen", "place"),
    [
        ((1, 2), {}, (1, 2)),
        (("second", -1), {}, (1, 2)),
        (("L0", 1), {"layer": [1, 0]}, (0, 1)),
        ((1, 2), {"layer": 1}, (0, 2)),
        ((1, 0), {"layer": "second", "heads": [2, 0]}, (0, 1)),
    ],
)
def test_the_page_opens_on_a_head(seen, opens, chosen, place):
    page = seen.view(**chosen, opens=opens).page
    assert tuple(page.meta()["opens"].values()) == place
    assert seen.view(**chosen).page.meta()["opens"] is None
    (layer,) = (one for one in page.meta()["layers"] if one["label"] == ("L0" if opens[0] == "L0" else "L1"))
    assert page.meta()["layers"][place[0]] == layer and layer["heads"][place[1]]["number"] == opens[1] % 3


def test_a_page_of_two_recordings_opens_on_a_head(seen):
    assert seen.view(beside=seen, tokens=WORDS, opens=(1, 1)).page.meta()["opens"] == {"layer": 1, "head": 1}


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("there is no layer 'third'", {"layer": "third"}),
        ("height", {"height": 0}),
        ("opens: the layer: there is no layer 2", {"opens": (2, 0)}),
        ("opens: the head is 3, and second has 3 heads, numbered from 0", {"opens": (1, 3)}),
    ],
)
def test_bad_input_is_one_clear_error(seen, words, given):
    with pytest.raises(ch.ClearheadError, match=words):
        seen.view(**given)
