"""The page in a notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.base.errors import ClearheadError, require
from clearhead.base.numbers import check_count
from clearhead.models.show.paged import Paged
from clearhead.models.tap.choice import heads_of
from clearhead.report import Layer, Page
from clearhead.report.of_heads import of_heads

if TYPE_CHECKING:
    from clearhead.models.show.widget import HeadView


@dataclass(frozen=True)
class Framed:
    """A page that a notebook shows in a frame. `Recording.view` gives it.

    The frame runs the page's own scripts and no others, and has no access to the notebook, which holds the whole page.
    """

    page: Page = field(repr=False)
    height: int

    def write(self, path: Any) -> Path:
        """The page as a file."""
        return self.page.write(path)

    def widget(self) -> HeadView:
        """The page as an `anywidget`, which a notebook shows as the last line of a cell, or with others in a layout.

        Heads are sent by the kernel as they are looked at: nothing of the page is written into the notebook, and it is
        there as long as the kernel. Its `address` holds what is chosen, from both sides: see `HeadView`.
        Raises a `ClearheadError` where anywidget is not installed.
        """
        require("anywidget", "notebook", "widget()")
        from clearhead.models.show.widget import HeadView

        return HeadView(self.page, self.height)

    def _repr_html_(self) -> str:
        text = html.escape("".join(self.page.parts()))
        return (
            f'<iframe title="{html.escape(self.page.title)}" sandbox="allow-scripts allow-downloads" '
            f'style="width:100%;height:{self.height}px;border:0" srcdoc="{text}"></iframe>'
        )


def framed(paged: Paged, calls: Sequence[int] | None, heads: Any, title: str, height: int) -> Framed:
    """See `Recording.view`. `calls`: the numbers of those to show; None is all of them."""
    if calls is None and heads is not None:
        raise ClearheadError("heads are those of a layer: pass layer= too.")
    layers = paged.layers(calls)
    if calls is not None and heads is not None:
        some = [heads_of(heads, paged.calls[n].shape[1], paged.calls[n].name, "view") for n in calls]
        pairs = zip(layers, some, strict=True)
        layers = (of_heads(one, own) if isinstance(one, Layer) else one for one, own in pairs)
    return Framed(paged.page(layers, title), check_count(height, 1, "height"))
