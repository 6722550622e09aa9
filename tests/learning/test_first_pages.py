"""Chapters 1 to 6 open on a page that computes: there the task of each can be done, in a frame, on a telephone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from browser import Opened
from chapters import cells

SEEN = "(name) => [clearhead.numbers(name), clearhead.sizes(name)]"

# chapter: the input, the row and the column that are changed, what is typed, and what is then so of the weights w
TASKS = {
    1: ("bandwidth", 0, 0, "50", lambda w: (w - 0.25).abs().max() < 0.01),
    2: ("key", 2, 1, "20", lambda w: w[0, 0, 1, 2] > 0.99),
    3: ("mask_lengths", 0, 0, "3", lambda w: (w[0] > 0).all()),
    4: ("w_v", 0, 1, "10", lambda w: (w[0, 0, :, 1] > 0.9).all()),
    5: ("b_query", 0, 2, "3", lambda w: (w[0, 1] - w[0, 0]).abs().max() > 0.25),
}


def run(chapter: int) -> Any:
    """The page's frame, which its cell ends with; the answer has been checked by its own cell."""
    *before, page, answer = cells(chapter, 1)
    names: dict[str, Any] = {}
    for cell in before:
        exec(cell, names)
    lines, _, last = page.rpartition("\n")
    exec(lines, names)
    frame = eval(last, names)
    exec(answer, names)
    return frame


def weights(inside: Any) -> torch.Tensor:
    flat, sizes = inside.evaluate(SEEN, "weights")
    return torch.tensor([float(x) for x in flat]).reshape(sizes)


@pytest.mark.parametrize("chapter", TASKS)
def test_the_task_can_be_done_in_the_frame(chapter: int, browser: Any, tmp_path: Path, capsys: Any) -> None:
    step, row, column, typed, wanted = TASKS[chapter]
    frame = run(chapter)
    assert capsys.readouterr().out.count("right: ") >= 1
    path = tmp_path / "chapter.html"
    path.write_text(f"<!doctype html><meta charset=utf-8><body>{frame._repr_html_()}", encoding="utf-8")
    opened = browser.open(path, Opened, viewport={"width": 390, "height": 800})
    opened.until("frames.length")
    inside = opened.page.frames[1]
    inside.wait_for_selector("#cards")
    before = weights(inside)
    assert not wanted(before)
    assert inside.evaluate("document.documentElement.scrollWidth <= innerWidth")
    inside.get_by_role("button", name="all steps").click()
    table = inside.locator("figure").filter(has=inside.locator(f"figcaption b:text-is('{step}')")).first
    table.locator("tbody tr").nth(row).locator("td").nth(column).click()
    opened.page.keyboard.type(typed)
    opened.page.keyboard.press("Enter")
    after = weights(inside)
    assert wanted(after)
    if chapter == 5:  # head 0 stays as it is
        torch.testing.assert_close(before[:, 0], after[:, 0])
    browser.close(opened)
