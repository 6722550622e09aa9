"""Writes the page: one HTML file with the steps as data, and a program that shows and recomputes them."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from clearhead.base.pages import ARITHMETIC, embedded, filled, policy, program_of, source
from clearhead.explanation.page.data import page_data

if TYPE_CHECKING:
    from clearhead.explanation.explanation import Explanation

SCRIPTS = (
    "data.js",
    "steps.js",
    "colour.js",
    "tables.js",
    "written.js",
    "cards.js",
    "edit.js",
    "controls.js",
    "keys.js",
    "main.js",
)


def render(explanation: Explanation) -> str:
    """The whole page as a string."""
    style, guard = source(__package__, "page.css"), source("clearhead.base", "guard.js")
    shared = (source("clearhead.base", name) for name in ("ramp.js", *ARITHMETIC))
    program = program_of(*shared, *(source(__package__, name) for name in SCRIPTS))
    parts = {
        "policy": policy((style,), guard, program),
        "title": html.escape(explanation.title),
        "style": style,
        "guard": guard,
        "data": embedded(page_data(explanation)),
        "program": program,
    }
    return filled(source(__package__, "page.html"), parts)
