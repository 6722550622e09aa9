"""Parts of every page: one HTML file that holds its data, its style and its program, and makes no requests."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from clearhead.base.output.text import escaped
from clearhead.base.output.written import replacing


def source(package: str, name: str) -> str:
    """A file of a package's folder `front`."""
    text = files(package).joinpath("front", name).read_text(encoding="utf-8")
    return text.replace("\r\n", "\n")


def bundled(name: str) -> str:
    """A page's program (.js) or style (.css): its files in one, as `packaging/bundle.py` makes it of `front`."""
    # made where clearhead is installed; in a clone by `make bundle`
    return files("clearhead.base").joinpath("bundle", name).read_text(encoding="utf-8")


def head(title: str, does: str, styles: Sequence[str], *scripts: str, worker: bool = False) -> str:
    """The beginning of a page, up to the script that looks whether the browser can show the page.

    `does`: what the page does, for readers without JavaScript. `styles`: the first one is the style of the page itself.
    The page's own scripts and styles, and no others, are allowed by their hashes.
    """
    guard = bundled("guard.js")
    parts = {"policy": policy(styles, guard, *scripts, worker=worker), "title": escaped(title), "does": does}
    return filled(source("clearhead.base", "head.html"), parts | {"style": styles[0], "guard": guard})


def embedded(value: Any) -> str:
    """JSON that cannot end the element that holds it, whatever its strings hold."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def policy(styles: Sequence[str], *scripts: str, worker: bool = False) -> str:
    """The content security policy: the page's own scripts and styles by hash, and nothing else. `worker`: whether
    scripts may start a worker from a string."""
    allowed, styled = (" ".join(map(_hash, texts)) for texts in (scripts, styles))
    workers = "worker-src blob:; " if worker else ""
    return (
        f"default-src 'none'; script-src {allowed}; style-src {styled}; "
        f"{workers}img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def filled(template: str, parts: Mapping[str, str]) -> str:
    """The page: each `{{name}}` of the template replaced by that part."""
    page = "".join(filled_parts(template, parts))
    return page.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate cannot be written


def filled_parts(template: str, parts: Mapping[str, str | Iterable[str]]) -> Iterator[str]:
    """The page of `filled`, one part after another. A part that is given in pieces is not joined."""
    at = 0
    for found in re.finditer(r"\{\{(\w+)\}\}", template):
        yield template[at : found.start()]
        part = parts[found[1]]
        yield from (part,) if isinstance(part, str) else part
        at = found.end()
    yield template[at:]


@dataclass(frozen=True)
class Frame:
    """A page in a notebook, or in a site that shows notebooks. It stands whole in the cell's output.

    >>> import torch, clearhead as ch
    >>> query, key, value = torch.rand(2, 4), torch.rand(3, 4), torch.rand(3, 2)
    >>> frame = ch.explain(query, key, value).frame()               # the last line of a cell shows it
    >>> frame.page[:15]
    '<!doctype html>'

    `Explanation.frame` and `Motion.frame` give one. `page`: the whole page, HTML that fetches nothing.
    The frame runs only the page's own scripts, and has no access to what is around it. `title`: for readers who hear
    the page. `height`: in pixels.
    """

    title: str
    page: str = field(repr=False)
    height: int

    def _repr_html_(self) -> str:
        # untrusted notebooks and some sites remove frames: this one covers a line that is left then
        place = "grid-area:1/1;margin:0"
        return (
            f'<div style="display:grid"><p style="{place}">Run this cell to see the page.</p>'
            f'<iframe title="{escaped(self.title)}" sandbox="allow-scripts allow-downloads" '
            f'style="{place};z-index:1;width:100%;height:{self.height}px;border:0;background:Canvas" '
            f'srcdoc="{html.escape(self.page)}"></iframe></div>'
        )


def write_page(path: Any, parts: Iterable[str], what: str = "report") -> Path:
    """Write a page that is given in parts, or raise what keeps it from being written.

    An old file stays as it was until all of the new one is written.
    """
    with replacing(path, what) as beside, beside.open("w", encoding="utf-8", errors="replace", newline="\n") as file:
        for part in parts:
            file.write(part)
    return Path(path)
