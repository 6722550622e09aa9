"""The report as a module of JavaScript that a notebook's widget shows, by the page's own scripts."""

from __future__ import annotations

from clearhead.report.page import program_with_markup


def module() -> str:
    """An ES module as `anywidget` takes it: its `render` shows the model's `meta`, and asks it for blocks.

    The model is asked `{"block": number}` and answers the same with the bytes of `Page.block`, or `{"error": text}`
    too. Its `address` is what a link to a page holds: what is chosen, changed from both sides. `height` is that of the
    box in pixels.
    """
    return program_with_markup("widget")
