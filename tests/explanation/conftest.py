"""Pages of explanations, opened in a browser."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Opened, open_file
from playwright.sync_api import Browser


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """`show(explanation, hash="", init=None, **context)` opens its page from disk."""
    everything: list[Opened] = []

    def show_one(explanation: Any, hash: str = "", init: str | None = None, **context: Any) -> Opened:
        path = explanation.html(tmp_path / f"page{len(everything)}.html")
        opened = open_file(browser, path, Opened, hash, init, **context)
        everything.append(opened)
        return opened

    yield show_one
    for opened in everything:
        opened.close()
