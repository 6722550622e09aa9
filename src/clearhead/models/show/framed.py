"""The page in a notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.base.errors import ClearheadError, require
from clearhead.base.numbers import check_count
from clearhead.base.written import check_writable
from clearhead.models.show.beside import Beside
from clearhead.models.show.paged import Paged
from clearhead.models.tap.choice import heads_of
from clearhead.report import Layer, Page
from clearhead.report.of_heads import of_heads

if TYPE_CHECKING:
    from clearhead.models.show.widget import HeadView


@dataclass(frozen=True)
class Framed:
    """A page that is a file, a frame in a notebook, or a widget there. `Recording.view` gives it.

    `write(path)` writes the file. A notebook shows the page in a frame, which runs the page's own scripts and no
    others, has no access to the notebook, and is held by it whole.
    """

    paged: Paged | Beside = field(repr=False)
    numbers: Sequence[int] = field(repr=False)
    heads: Sequence[Sequence[int]] | None = field(repr=False)
    title: str = field(repr=False)
    height: int

    @cached_property
    def page(self) -> Page:
        """The page, whose layers are made one at a time where it is first asked for."""
        layers = self.paged.layers(self.numbers)
        if self.heads is not None:
            pairs = zip(layers, self.heads, strict=True)
            layers = (of_heads(one, own) if isinstance(one, Layer) else one for one, own in pairs)
        return self.paged.page(layers, self.title)

    def write(self, path: Any) -> Path:
        """Write the page to a file. Raises a `ClearheadError` where it cannot be written, before it is made."""
        check_writable(path)
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
            f'<iframe title="{html.escape(self.title)}" sandbox="allow-scripts allow-downloads" '
            f'style="width:100%;height:{self.height}px;border:0" srcdoc="{text}"></iframe>'
        )


def framed(paged: Paged | Beside, calls: Sequence[int] | None, heads: Any, title: Any, height: int) -> Framed:
    """See `Recording.view`. `calls`: the numbers of those to show; None is all of them."""
    if calls is None and heads is not None:
        raise ClearheadError("heads are those of a layer: pass layer= too.")
    if not isinstance(title, str):
        raise ClearheadError(f"title is {title!r}; pass a string, such as title='Attention'.")
    numbers = range(len(paged.calls)) if calls is None else calls
    for number in numbers:
        paged.place(number)
    some = None
    if calls is not None and heads is not None:
        some = [heads_of(heads, paged.calls[n].shape[1], paged.calls[n].name, "view") for n in calls]
    return Framed(paged, numbers, some, title, check_count(height, 1, "height"))
