"""The page as a widget of a notebook, by anywidget (optional)."""

from __future__ import annotations

from typing import Any

from anywidget import AnyWidget
from traitlets import Int, Unicode

from clearhead.base.output.pages import embedded
from clearhead.report import Page
from clearhead.report.page import widget_module


class HeadView(AnyWidget):
    """A report that a notebook shows by the page's own scripts. The kernel sends a head when the head is shown.

    `address`: the choices on the page, in the form of a link to it ("#layer=1&head=8&token=4"). It is the same in
    Python and in the notebook: read it, `observe` it, or set it. `height`: pixels.
    """

    _esm = widget_module()
    meta = Unicode().tag(sync=True)
    address = Unicode("").tag(sync=True)
    height = Int(900).tag(sync=True)

    def __init__(self, page: Page, height: int) -> None:
        super().__init__(meta=embedded(page.meta()), height=height)
        self._page = page
        self.on_msg(self._answer)

    def _answer(self, _: Any, asked: dict[str, Any], buffers: Any) -> None:
        """Sends the block that a view asks for."""
        number = asked.get("block")
        if type(number) is int and 0 <= number < len(self._page.blocks):
            self.send({"block": number}, [self._page.blocks[number]])
        else:
            self.send({"block": number, "error": f"there is no block {number!r}"}, [b""])
