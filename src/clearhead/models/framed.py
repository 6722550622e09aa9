"""The page in a notebook."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from typing import Any

from clearhead.report import Page


@dataclass(frozen=True)
class Framed:
    """A page that a notebook shows in a frame. `Recording.view` gives it.

    The frame runs the page's own scripts and no others, and has no access to the notebook. It is as large as the page's
    file, and stays in the notebook.
    """

    page: Page = field(repr=False)
    height: int

    def write(self, path: Any) -> Any:
        """The page as a file."""
        return self.page.write(path)

    def _repr_html_(self) -> str:
        text = html.escape("".join(self.page.parts()))
        return (
            f'<iframe title="{html.escape(self.page.title)}" sandbox="allow-scripts allow-downloads" '
            f'style="width:100%;height:{self.height}px;border:0" srcdoc="{text}"></iframe>'
        )
