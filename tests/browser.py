"""A browser to open pages in, and all that goes wrong on them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

# The system's Chromium; where there is none, Playwright takes its own.
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chromium-headless-shell"))), None)
# Playwright's own list, which an argument replaces; and two popups of the address bar, which each window prepares in a
# process of its own: they took more than half of a window's time.
WITHOUT = (
    "AimEnabled,AvoidCorsURLLoaderRestartOnRedirect,AvoidUnnecessaryBeforeUnloadCheckSync,DestroyProfileOnBrowserClose,"
    "HttpsFirstBalancedModeAutoEnable,HttpsUpgrades,LensOverlay,MediaRouter,NetworkTimeServiceQuerying,OptimizationHints,"
    "PaintHolding,PreconnectToSearch,TcpPortRandomizationWin,ThirdPartyStoragePartitioning,"
    "WebUIOmniboxPopup,WebUIOmniboxAimPopup"
)
ARGUMENTS = [
    f"--disable-features={WITHOUT}",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@contextmanager
def launched() -> Iterator[Windows]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield Windows(chromium)
        chromium.close()


@dataclass
class Opened:
    """A page in the browser, and all that went wrong on it."""

    page: Page
    address: str
    alone: bool = False
    faults: list[str] = field(default_factory=list)

    def until(self, expression: str, wanted: object = True, seconds: float = 10) -> None:
        """Poll a JavaScript expression (the page's policy forbids `wait_for_function`).

        The page may not have what the expression reads yet, so an error in it is one more value that is not wanted.
        """
        end = time.monotonic() + seconds
        tried = f"(() => {{ try {{ return ({expression}); }} catch (error) {{ return String(error); }} }})()"
        while (got := self.page.evaluate(tried)) != wanted:
            assert time.monotonic() < end, f"{expression} is {got!r}, not {wanted!r}: {self.faults}"
            time.sleep(0.02)


Kind = TypeVar("Kind", bound=Opened)


class Windows:
    """The browser's windows. To start one takes longer than to load a page, so one that had no fault is used again."""

    def __init__(self, chromium: Browser) -> None:
        self._chromium = chromium
        self._unused: list[Page] = []
        self._opened: dict[Page, Opened] = {}

    def open(
        self,
        path: Path | str,
        kind: type[Kind],
        hash: str = "",
        init: str | None = None,
        viewport: ViewportSize | None = None,
        color_scheme: Any = "light",
        java_script_enabled: bool = True,
        has_touch: bool = False,
        until: Any = "load",
    ) -> Kind:
        """A page from disk, watched, once `until`. With a script of its own, or touched, it has its own window."""
        alone = init is not None or not java_script_enabled or has_touch
        options = {"java_script_enabled": java_script_enabled, "has_touch": has_touch}
        page = self._unused.pop() if self._unused and not alone else self._start(init, **options)
        page.mouse.move(0, 0)
        page.set_viewport_size(viewport or {"width": 1280, "height": 720})
        page.emulate_media(media="null", color_scheme=color_scheme)
        opened = kind(page, path if isinstance(path, str) else path.as_uri(), alone)
        self._opened[page] = opened
        page.goto(opened.address + hash, wait_until=until)
        return opened

    def close(self, opened: Opened) -> None:
        """Fails if the page met an error, a dialog, a blocked request or any of the network.

        Tests that provoke one clear `faults` themselves.
        """
        violations = opened.page.evaluate("window.violations || []")
        worn = opened.page.evaluate("history.length") > 40  # a browser keeps 50 entries, and tests count them
        if opened.alone or opened.faults or violations or worn:
            opened.page.context.close()
        else:
            self._unused.append(opened.page)
        assert not opened.faults
        assert not violations

    def _start(self, init: str | None, **options: bool) -> Page:
        page = self._chromium.new_context(**options).new_page()  # type: ignore[arg-type]

        def note(fault: str) -> None:
            self._opened[page].faults.append(fault)

        def note_request(url: str) -> None:
            """Anything but the page itself and data inside it is a fault."""
            if url.split("#")[0] != self._opened[page].address and not url.startswith(("data:", "blob:")):
                note(f"request: {url}")

        def dismiss(dialog: Any) -> None:
            note(f"dialog: {dialog.message}")
            dialog.dismiss()

        page.on("pageerror", lambda error: note(f"page error: {error}"))
        page.on("console", lambda message: note(f"console: {message.text}"))
        page.on("request", lambda request: note_request(request.url))
        page.on("dialog", dismiss)
        page.add_init_script(
            "window.violations = []; addEventListener('securitypolicyviolation',"
            "e => window.violations.push(e.violatedDirective + ' ' + e.blockedURI));"
        )
        if init:
            page.add_init_script(init)
        return page
