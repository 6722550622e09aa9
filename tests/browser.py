"""A browser to open pages in, and all that goes wrong on them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from playwright.sync_api import Browser, Page, sync_playwright

# The system's Chromium; where there is none, Playwright takes its own.
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@contextmanager
def launched() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@dataclass
class Opened:
    """A page in the browser, and all that went wrong on it."""

    page: Page
    faults: list[str] = field(default_factory=list)

    def until(self, expression: str, wanted: object = True, seconds: float = 10) -> None:
        """Poll a JavaScript expression (the page's policy forbids `wait_for_function`)."""
        end = time.monotonic() + seconds
        while (got := self.page.evaluate(expression)) != wanted:
            assert time.monotonic() < end, f"{expression} is {got!r}, not {wanted!r}: {self.faults}"
            time.sleep(0.02)

    def close(self) -> None:
        """Fails if the page met an error, a dialog, a blocked request or any of the network.

        Tests that provoke one clear `faults` themselves.
        """
        violations = self.page.evaluate("window.violations || []")
        self.page.context.close()
        assert not self.faults
        assert not violations


Kind = TypeVar("Kind", bound=Opened)


def open_file(
    browser: Browser, path: Path, kind: type[Kind], hash: str = "", init: str | None = None, **context: Any
) -> Kind:
    """A page from disk, in a context of its own, watched."""
    page = browser.new_context(**context).new_page()
    watched = kind(page)
    faults = watched.faults
    page.on("pageerror", lambda error: faults.append(f"page error: {error}"))
    page.on("console", lambda message: faults.append(f"console: {message.text}"))
    page.on("request", lambda request: _note_request(request.url, path.as_uri(), faults))

    def dismiss(dialog: Any) -> None:
        faults.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    page.on("dialog", dismiss)
    page.add_init_script(
        "window.violations = []; addEventListener('securitypolicyviolation',"
        "e => window.violations.push(e.violatedDirective + ' ' + e.blockedURI));"
    )
    if init:
        page.add_init_script(init)
    page.goto(path.as_uri() + hash)
    return watched


def _note_request(url: str, own: str, faults: list[str]) -> None:
    """Anything but the page itself and data inside it is a fault."""
    if url.split("#")[0] != own and not url.startswith(("data:", "blob:")):
        faults.append(f"request: {url}")
