"""Opens every page of the built site from disk, wide and narrow, light and dark; exits with a list of what is wrong.

    python docs/check.py build/site

Wrong are: a request to the network, an error in the console, a link or an anchor that leads nowhere, a picture without
words for those who don't see it, a formula in another font than the one that is shipped, a page body that is wider than
the window, a search from disk that finds nothing, and what axe-core finds serious or critical for readers who cannot
see a page well or use no mouse. A page inside a page is looked at with it.
"""

import shutil
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin

from playwright.sync_api import BrowserContext, Page, sync_playwright

WIDTHS = (1340, 390)  # the first is just enough for the contents on both sides
SCHEMES = ("light", "dark")
# One look at a page: what its links lead to, its anchors, its pictures without words, and how wide it is
LOOK = """() => ({
    links: [...document.querySelectorAll("a[href]")].map(a => a.href),
    ids: [...document.querySelectorAll("[id]")].map(e => e.id),
    pictures: [...document.images].filter(i => !i.alt.trim() || i.alt.includes("_images/") || !i.naturalWidth)
        .map(i => i.getAttribute("src").slice(0, 80)),
})"""
WIDE = """() => document.documentElement.scrollWidth <= innerWidth ? "" :
    [...document.querySelectorAll("article *")].filter(e => e.getBoundingClientRect().right > innerWidth + 1)
        .slice(0, 3).map(e => `<${e.localName} class="${e.className}">`).join(", ") || "the page"
"""
FONT = """() => document.fonts.ready.then(() => document.querySelector("math") === null
    || [...document.fonts].some(font => font.family.includes("STIX Two Math") && font.status === "loaded"))"""
# What axe-core finds in a page, or in one inside it: each fault is named with the first places where it is.
AXE = Path(__file__).parents[1] / "node_modules" / "axe-core" / "axe.min.js"
BARRIERS = """() => axe.run({resultTypes: ["violations"], preload: false, iframes: false})
    .then(found => found.violations
    .filter(fault => ["serious", "critical"].includes(fault.impact))
    .map(fault => `${fault.id}, ${fault.help}: ` + fault.nodes.slice(0, 3).map(node => node.target.flat().join(" "))
        .join(", ") + (fault.nodes.length > 3 ? ` and ${fault.nodes.length - 3} more` : "")))"""


class Site:
    def __init__(self, root: Path, context: BrowserContext) -> None:
        self.root, self.faults = root.resolve(), set[str]()
        self.axe = AXE.read_text(encoding="utf-8")
        self.pages = sorted(path for path in self.root.rglob("*.html") if "_static" not in path.parts)
        self.ids: dict[str, set[str]] = {}
        self.links: dict[str, list[str]] = {}
        self.page = self.watched(context)
        self.shown = ""

    def watched(self, context: BrowserContext) -> Page:
        page = context.new_page()
        page.on("pageerror", lambda error: self.fault(f"an error: {error}"))
        page.on("console", lambda line: line.type in ("error", "warning") and self.fault(f"the console: {line.text}"))
        page.on("request", lambda request: self.requested(request.url))
        page.on("requestfailed", lambda request: self.fault(f"not found: {request.url}"))
        return page

    def fault(self, text: str) -> None:
        self.faults.add(f"{self.shown}: {text}")

    def requested(self, address: str) -> None:
        if not address.startswith((self.root.as_uri() + "/", "data:", "blob:")):
            self.fault(f"a request to {address}")

    def open(self, path: Path) -> None:
        """A page in all widths and both schemes."""
        self.shown = str(path.relative_to(self.root))
        self.page.goto(path.as_uri())
        for scheme, width in product(SCHEMES, WIDTHS):
            self.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            self.page.set_viewport_size({"width": width, "height": 800})
            if wide := self.page.evaluate(WIDE):
                self.fault(f"wider than {width} pixels: {wide}")
            if width == WIDTHS[0]:
                self.barriers(scheme)
        if not self.page.evaluate(FONT):
            self.fault("formulas without the mathematical font")
        seen = self.page.evaluate(LOOK)
        for picture in seen["pictures"]:
            self.fault(f"a picture without words, or none: {picture}")
        self.ids[path.as_uri()], self.links[path.as_uri()] = set(seen["ids"]), seen["links"]

    def barriers(self, scheme: str) -> None:
        """What keeps a reader out who cannot see the page well, or use a mouse."""
        for frame in self.page.frames:
            frame.evaluate(self.axe)
            for found in frame.evaluate(BARRIERS):
                self.fault(f"a barrier in the {scheme} page: {found}")

    def follow(self) -> None:
        """Links inside the site: each to a file that is there, and an anchor that is in it."""
        for page, links in self.links.items():
            self.shown = unquote(page.removeprefix(self.root.as_uri() + "/"))
            for link in {urljoin(page, link) for link in links}:
                target, anchor = urldefrag(link)
                if target.startswith("file:") and not Path(unquote(target.removeprefix("file://"))).is_file():
                    self.fault(f"a dead link: {link}")
                elif target in self.ids and anchor and unquote(anchor) not in self.ids[target]:
                    self.fault(f"a dead anchor: {link}")

    def search(self, word: str) -> None:
        self.shown = f"search for {word}"
        self.page.goto((self.root / "search.html").as_uri() + f"?q={word}")
        found, none = "#search-results li a", "#search-results .search-summary:has-text('did not match')"
        try:
            self.page.wait_for_selector(f"{found}, {none}", timeout=10_000)
        except Exception:
            self.fault("it does not end")
        if not self.page.query_selector(found):
            self.fault("nothing found")


def faults_of(root: Path) -> Iterator[str]:
    """What is wrong with the site in this folder."""
    with sync_playwright() as playwright:
        programs = ("chromium", "chromium-browser", "chromium-headless-shell")
        system = next(filter(None, map(shutil.which, programs)), None)  # or Playwright's own
        browser = playwright.chromium.launch(executable_path=system, args=["--no-sandbox", "--disable-gpu"])
        site = Site(root, browser.new_context())
        for path in site.pages:
            site.open(path)
        site.follow()
        site.search("softmax")
        browser.close()
    if len(site.pages) < 10:
        yield f"only {len(site.pages)} pages in {root}"
    yield from sorted(site.faults)


if __name__ == "__main__":
    found = [*faults_of(Path(sys.argv[1]))]
    for fault in found:
        print(fault)
    sys.exit(f"{len(found)} faults" if found else 0)
