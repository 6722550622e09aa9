"""The page in a notebook."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.base.errors import ClearheadError, require
from clearhead.base.numbers import check_count
from clearhead.base.pages import Frame
from clearhead.base.written import check_page_ending, check_writable
from clearhead.models.show.beside import Beside
from clearhead.models.show.opened import opened_by
from clearhead.models.show.paged import Paged
from clearhead.models.tap.choice import heads_of
from clearhead.report import Layer, Page
from clearhead.report.layer import LeftOut, of_heads

if TYPE_CHECKING:
    from clearhead.models.show.widget import HeadView


@dataclass(frozen=True)
class Framed:
    """A page as a file, as a frame in a notebook, or as a widget in a notebook. `Recording.view` returns it.

    `write(path)` writes the file. A notebook shows the page in a frame, which runs only the page's own scripts and has
    no access to the notebook. The notebook's file holds the whole page.
    """

    paged: Paged | Beside = field(repr=False)
    numbers: Sequence[int] = field(repr=False)
    heads: Sequence[Sequence[int]] | None = field(repr=False)
    title: str = field(repr=False)
    height: int
    opens: tuple[str, int] | None = field(default=None, repr=False)

    @cached_property
    def page(self) -> Page:
        """The page. Its layers are made one at a time when it is first read."""
        layers: Iterable[Layer | LeftOut] = map(self.paged.layer, self.numbers)
        if self.heads is not None:
            pairs = zip(layers, self.heads, strict=True)
            layers = (of_heads(one, own) if isinstance(one, Layer) else one for one, own in pairs)
        page = self.paged.page(layers, self.title)
        if self.opens is not None:
            page.open_on(*self.opens)
        return page

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the page to a file. The path ends in .html, or has no ending.

        Raises a `ClearheadError`, before the page is made, for another ending and where the file cannot be written.
        """
        check_page_ending(path)
        check_writable(path)
        return self.page.write(path)

    def widget(self) -> HeadView:
        """The page as an `anywidget`, which a notebook shows as the last line of a cell, or with others in a layout.

        The kernel sends heads when they are shown. Nothing of the page is written into the notebook, so the widget
        works as long as the kernel runs. Its `address` holds the choices on the page: see `HeadView`. Raises a
        `ClearheadError` where anywidget is not installed.
        """
        require("anywidget", "notebook", "widget()")
        from clearhead.models.show.widget import HeadView

        return HeadView(self.page, self.height)

    def _repr_html_(self) -> str:
        return Frame(self.title, "".join(self.page.parts()), self.height)._repr_html_()


def framed(
    paged: Paged | Beside, calls: Sequence[int] | None, heads: Any, title: Any, height: int, opens: Any = None
) -> Framed:
    """The page of `Recording.view`. `calls`: the numbers of the calls to show; None shows all."""
    if calls is None and heads is not None:
        raise ClearheadError("heads= chooses heads of a layer: pass layer= too.")
    if not isinstance(title, str):
        raise ClearheadError(f"title is {title!r}; pass a string, such as title='Attention'.")
    numbers = range(len(paged.calls)) if calls is None else calls
    for number in numbers:
        paged.place(number)
    some = None
    if calls is not None and heads is not None:
        some = [heads_of(heads, paged.calls[n].shape[1], paged.calls[n].name, "view") for n in calls]
    first = opened_by(paged.calls, numbers, some or [None] * len(numbers), opens)
    return Framed(paged, numbers, some, title, check_count(height, 1, "height"), first)
