"""The page in a notebook, and the head on which it opens."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.base.errors import ClearheadError, require
from clearhead.base.numbers import check_count
from clearhead.base.output.pages import Frame
from clearhead.base.output.text import brief, listed
from clearhead.base.output.written import check_page_ending, check_writable
from clearhead.base.selected import numbers_of
from clearhead.models.interception.choice import heads_of
from clearhead.models.recordings.attention_call import AttentionCall
from clearhead.models.recordings.calls import chosen_calls, labels
from clearhead.models.views.beside import Beside
from clearhead.models.views.paged import Paged
from clearhead.report import Layer, Page
from clearhead.report.layer import LeftOut, of_heads

if TYPE_CHECKING:
    from clearhead.models.views.widget import HeadView


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
        from clearhead.models.views.widget import HeadView

        return HeadView(self.page, self.height)

    def _repr_html_(self) -> str:
        return Frame(self.title, "".join(self.page.parts()), self.height)._repr_html_()


def framed(
    paged: Paged | Beside, calls: Sequence[int] | None, heads: Any, title: str, height: int, opens: Any = None
) -> Framed:
    """The page of `Recording.view`. `calls`: the numbers of the calls to show; None shows all."""
    numbers = range(len(paged.calls)) if calls is None else calls
    for number in numbers:
        paged.place(number)
    some = [heads_of(heads, paged.calls[n].shape[1], paged.calls[n].name, "view") for n in numbers]
    if opens is not None:
        layer, head = opens
        names = "opens: the layer", "opens: the head"
        opens = opened(paged.calls, numbers, some, layer, head, names)
    return Framed(paged, numbers, None if heads is None else some, title, check_count(height, 1, "height"), opens)


def opened(
    calls: Sequence[AttentionCall],
    shown: Sequence[int],
    heads: Sequence[Sequence[int] | None],
    layer: Any,
    head: Any,
    names: tuple[str, str],
) -> tuple[str, int]:
    """The label of the layer and the number of the head on which a page opens, each the first one where it is None.

    `shown`: the numbers of the calls on the page. `heads`: of each of these the heads on the page, None for all.
    `names`: what the layer and the head are called in errors.
    """
    said = [str(label) for label in labels(calls)]
    meant = [shown[0]] if layer is None else chosen_calls(calls, layer, names[0])
    found = [number for number in shown if number in meant]
    if len(found) != 1:
        some = listed(said[number] for number in found or shown)
        raise ClearheadError(f"{names[0]}: {brief(layer)} means {len(found)} layers of the page; pass one of {some}.")
    call, label = calls[found[0]], said[found[0]]
    own = heads[shown.index(found[0])] or range(call.shape[1])
    if head is None:
        return label, own[0]
    wanted, *more = numbers_of(head, call.shape[1], names[1], f"{call.name} has {call.shape[1]} heads")
    if more or wanted not in own:
        some = ", ".join(map(str, own))
        raise ClearheadError(f"{names[1]} is {brief(head)}; expected one of the heads {some} of {call.name}.")
    return label, wanted
