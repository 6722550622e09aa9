"""Pages of layers that a test has made."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from clearhead.report import Layer, Page
from clearhead.report.layer import LeftOut


def page_of(layers: Iterable[Layer | LeftOut], title: str) -> Page:
    page = Page(title)
    for layer in layers:
        page.add(layer)
    return page


def render(layers: Iterable[Layer | LeftOut], title: str) -> str:
    text = "".join(page_of(layers, title).parts())
    return text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate cannot be written


def write_report(path: Any, layers: Iterable[Layer | LeftOut], title: str) -> Path:
    return page_of(layers, title).write(path)
