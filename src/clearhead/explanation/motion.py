"""A picture that moves: frames of named shapes, which one small page plays, steps through, and prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from clearhead.base.output.pages import Frame, bundled, embedded, filled, head, source, write_page
from clearhead.base.output.text import escaped

WIDTH = 360  # the units across: a telephone shows about one pixel for each


class Shape(NamedTuple):
    """An element of SVG."""

    tag: str
    attributes: dict[str, str]
    text: str


class Picture:
    """A drawing of 360 × `height` units. A shape of one name in two frames of a `Motion` is one shape, which moves.

    >>> from clearhead.explanation import Picture
    >>> picture = Picture(40)
    >>> picture.rect("weight 0", 10, 5, 30, 20, look="square", opacity=0.25)
    >>> picture.text("number 0", 25, 19, "0.25")
    >>> print(picture.svg("One weight"))
    <svg viewBox="0 0 360 40" role="img" aria-label="One weight">
    <rect class="square" x="10" y="5" width="30" height="20" opacity="0.25"></rect>
    <text class="ink" x="25" y="19" text-anchor="middle">0.25</text>
    </svg>

    `look`: the classes of a shape, which the style gives a colour for light and for dark pages.
    """

    def __init__(self, height: float) -> None:
        self.height = height
        self.shapes: dict[str, Shape] = {}

    def add(self, name: str, tag: str, look: str, text: str = "", /, **attributes: float | str) -> None:
        """A shape on top of those before it. In the name of an attribute `_` stands for `-`."""
        written = {
            key.replace("_", "-"): value if isinstance(value, str) else short(value)
            for key, value in attributes.items()
        }
        self.shapes[name] = Shape(tag, {"class": look} | written, text)

    def rect(
        self, name: str, x: float, y: float, width: float, height: float, look: str = "square", **more: float | str
    ) -> None:
        self.add(name, "rect", look, x=x, y=y, width=width, height=height, **more)

    def line(
        self, name: str, x: float, y: float, to_x: float, to_y: float, look: str = "line", **more: float | str
    ) -> None:
        self.add(name, "line", look, x1=x, y1=y, x2=to_x, y2=to_y, **more)

    def path(self, name: str, points: Iterable[tuple[float, float]], look: str = "curve", **more: float | str) -> None:
        """A line through points."""
        self.add(name, "path", look, d="M" + "L".join(f"{short(x)} {short(y)}" for x, y in points), **more)

    def text(
        self, name: str, x: float, y: float, text: str, look: str = "ink", anchor: str = "middle", **more: float | str
    ) -> None:
        self.add(name, "text", look, text, x=x, y=y, text_anchor=anchor, **more)

    def svg(self, words: str, look: str = "") -> str:
        """The drawing as one element. `words`: what it shows, for those who do not see it. `look`: its class."""
        shapes = "\n".join(_element(shape) for shape in self.shapes.values())
        named = f' class="{escaped(look)}"' if look else ""
        box = f'viewBox="0 0 {WIDTH} {short(self.height)}"'
        return f'<svg{named} {box} role="img" aria-label="{escaped(words)}">\n{shapes}\n</svg>'


def short(x: float) -> str:
    """A number with two digits after the point at most."""
    text = f"{x:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _element(shape: Shape) -> str:
    attributes = "".join(f' {name}="{escaped(value)}"' for name, value in shape.attributes.items())
    return f"<{shape.tag}{attributes}>{escaped(shape.text)}</{shape.tag}>"


@dataclass(frozen=True)
class Motion:
    """Pictures of one height, each with a sentence, as one page with a player. A notebook shows the page in a frame.

    >>> from clearhead.explanation import Motion, Picture
    >>> pictures = [Picture(40), Picture(40)]
    >>> for x, picture in enumerate(pictures):
    ...     picture.rect("moved", 100 * x, 5, 30, 20)
    >>> motion = Motion("A square moves", [("At the left.", pictures[0]), ("At the right.", pictures[1])])
    >>> motion.frame()
    Frame(title='A square moves', height=213)

    The page plays nothing by itself. Between two frames it moves what differs in a number alone, and changes all else
    halfway; for readers who want less motion it shows one frame after another. Print, and a browser without
    JavaScript, show the frame `still`. `pause`: the seconds for which each frame stands while the page plays.
    """

    title: str
    frames: Sequence[tuple[str, Picture]]
    pause: float = 1.2
    still: int = -1

    def html(self) -> str:
        """The whole page as a string."""
        words, picture = self.frames[self.still]
        script = bundled("motion.js")
        longest = max((words for words, _ in self.frames), key=len)
        parts = {
            "head": head(self.title, "This page moves the picture below", (bundled("motion.css"),), script),
            "title": escaped(self.title),
            "still": picture.svg(words),
            "words": escaped(words),
            "longest": escaped(longest),
            "count": str(len(self.frames)),
            "last": str(len(self.frames) - 1),
            "data": embedded(self._data()),
            "program": script,
        }
        return filled(source(__package__, "motion.html"), parts)

    def frame(self) -> Frame:
        """The page in a frame, for notebooks: as high as it is on a wide page, with its widest picture."""
        return Frame(self.title, self.html(), round(self.frames[0][1].height * 4 / 3) + 160)

    def write(self, path: str | Path) -> Path:
        """Write the page to a file, which a browser shows as large as its window allows, and return the path."""
        return write_page(path, [self.html()], "motion")

    def _repr_html_(self) -> str:
        return self.frame()._repr_html_()

    def _data(self) -> dict[str, Any]:
        pictures = [picture for _, picture in self.frames]
        names = dict.fromkeys(name for picture in pictures for name in picture.shapes)
        shapes = [_moving([picture.shapes.get(name) for picture in pictures]) for name in names]
        return {
            "words": [words for words, _ in self.frames],
            "height": pictures[0].height,
            "pause": self.pause,
            "shapes": shapes,
        }


def _moving(frames: Sequence[Shape | None]) -> dict[str, Any]:
    """One shape in all frames: each attribute once, or its value in each frame. Where it is absent, it is unseen."""
    held = next(shape for shape in frames if shape)
    states, texts = list[dict[str, str]](), list[str]()
    for shape in frames:
        held = shape or held
        states.append({"opacity": "1"} | held.attributes | ({} if shape else {"opacity": "0"}))
        texts.append(held.text)
    columns = {name: _once([state[name] for state in states]) for name in states[0]}
    return {"tag": held.tag, "attributes": columns, "text": _once(texts)}


def _once(values: list[str]) -> str | list[str]:
    return values[0] if len(set(values)) == 1 else values
