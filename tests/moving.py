"""What the tests of pictures that move share: a frame as the page shows it, and as Python drew it."""

from __future__ import annotations

from typing import Any

from clearhead.explanation.motion import Motion

DRAWN = """() => [...document.querySelectorAll("#drawing svg > *")].filter(e => e.getAttribute("opacity") !== "0")
  .map(e => [e.localName, Object.fromEntries([...e.attributes].map(a => [a.name, a.value])), e.textContent])"""


def drawn(page: Any) -> list[Any]:
    """The shapes that are seen in the page's picture."""
    return [[tag, with_opacity(attributes), text] for tag, attributes, text in page.evaluate(DRAWN)]


def expected(motion: Motion, frame: int) -> list[Any]:
    """Those of a frame, in the order in which shapes appear first."""
    order = dict.fromkeys(name for _, picture in motion.frames for name in picture.shapes)
    shapes = motion.frames[frame][1].shapes
    found = [[*shapes[name]] for name in order if name in shapes]
    seen = [[tag, with_opacity(attributes), text] for tag, attributes, text in found]
    return [shape for shape in seen if shape[1]["opacity"] != "0"]


def with_opacity(attributes: dict[str, str]) -> dict[str, str]:
    return {"opacity": "1"} | attributes
