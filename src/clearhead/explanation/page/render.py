"""Writes the page: one HTML file with the steps as data, and a program that shows and recomputes them."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from clearhead.base.pages import embedded, filled, policy, program, source, style
from clearhead.explanation.page.data import page_data

if TYPE_CHECKING:
    from clearhead.explanation.explanation import Explanation


def render(explanation: Explanation) -> str:
    """The whole page as a string."""
    look, guard, script = style("explanation"), program("guard"), program("explanation")
    parts = {
        "policy": policy((look,), guard, script),
        "title": html.escape(explanation.title),
        "style": look,
        "guard": guard,
        "data": embedded(page_data(explanation)),
        "program": script,
    }
    return filled(source(__package__, "page.html"), parts)
