"""The result of `explain`: the steps, and the ways to show them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from clearhead.base.arrays import Array
from clearhead.base.errors import ClearheadError, require
from clearhead.base.numbers import check_count
from clearhead.base.output.pages import Frame, write_page
from clearhead.base.output.pictures import Axes
from clearhead.base.output.text import brief, said
from clearhead.base.output.written import check_writable, ending_of, replacing
from clearhead.base.symbolic.formulas import DIGITS, with_digits
from clearhead.base.symbolic.steps import Step
from clearhead.explanation import as_markup, as_notebook, as_plot, as_script, as_text
from clearhead.explanation.document import Document, at_pair
from clearhead.explanation.document import Part as Part
from clearhead.explanation.page import render as render_page
from clearhead.explanation.shown import Shown
from clearhead.inspection.matrix import NoSuchMethod

T = TypeVar("T")


METHODS = {"save": "explanation.write(path)", "show": "explanation.frame()"}  # by frequent guesses


@dataclass(frozen=True, eq=False)
class Explanation:
    """The steps that a computation took: print it, or look at one step by its name.

    >>> import torch, clearhead as ch
    >>> query, key, value = torch.eye(2), torch.eye(2), torch.tensor([[1.0], [3.0]])
    >>> explanation = ch.explain(query, key, value)
    >>> explanation["weights"]
    tensor([[0.6698, 0.3302],
            [0.3302, 0.6698]])
    >>> [step.name for step in explanation.steps][:4]
    ['query', 'key', 'value', 'products']

    It shares no memory with the inputs, and can be copied and pickled. Its fields are `title`; `parts`, each with a
    `title`, its `steps` and the text that is `drawn` before them; `shown`, the part of the call that is explained;
    `numpy`, whether the inputs were NumPy arrays, and so the results of steps are; and `digits`, with how many
    digits numbers are written: after the point, and in all below 0.1 and in powers of ten.
    `print(explanation)` shows it within 80 columns; `.html()` is a page that also computes with other inputs;
    `.script()`, `.notebook()`, `.markdown()` and `.to_dict()` give the same steps as a program, as a notebook to run,
    as Markdown, and as plain numbers; `.write(path)` makes a file of any of these. A notebook shows the steps as
    tables, and with `.frame()` the page.
    """

    title: str
    parts: tuple[Part, ...]
    shown: Shown
    numpy: bool = False
    digits: int = 4

    @property
    def steps(self) -> tuple[Step, ...]:
        """Every step, in order."""
        return tuple(step for part in self.parts for step in part.steps)

    @property
    def document(self) -> Document:
        """The content that each way to show the explanation prints."""
        return Document(self.title, self.parts, self.shown, self.digits)

    def _printed(self, printed: Callable[[Document], T]) -> T:
        """What prints the document, with its digits."""
        with with_digits(self.digits):
            return printed(self.document)

    def __getitem__(self, name: str) -> Array:
        """The result of the step of this name, with as many leading dimensions as the inputs have."""
        found = self.shown.squeezed(self._step(name))
        return found.numpy() if self.numpy else found

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            steps = {step.name for part in vars(self).get("parts", ()) for step in part.steps}
            instead = f"explanation[{name!r}]" if name in steps else METHODS.get(name)
            if instead is None:
                raise AttributeError(f"'Explanation' object has no attribute {name!r}")
            raise NoSuchMethod(f"Explanation has no {name}. Write {instead}.")

    def _step(self, name: str) -> Step:
        for step in self.steps:
            if step.name == name:
                return step
        known = ", ".join(step.name for step in self.steps)
        raise ClearheadError(f"no step is called {name!r:.60}; the steps are {known}.")

    def __str__(self) -> str:
        return said(self, lambda: self._printed(as_text.render))

    __repr__ = __str__

    def __rich__(self) -> Any:
        """The text for `rich`'s print and console: headings and formulas are bold, numbers plain, reasons dim."""
        text = require("rich.text", "terminal", "a terminal's styles").Text
        styles = {"title": "bold", "formula": "bold", "text": "dim", "numbers": ""}
        every = self._printed(lambda document: list(as_text.lines(document)))
        return text("\n").join(text(line, styles[kind]) for kind, line in every)

    def markdown(self) -> str:
        """The explanation as Markdown: one heading per part, one table per step. Words of the inputs are escaped."""
        return self._printed(as_markup.markdown)

    def html(self) -> str:
        """One self-contained page that shows the steps, and computes them again when an input is changed.

        It needs no network. Words of the inputs are shown as text. `write` makes a file of it.
        """
        return self._printed(render_page)

    def frame(self, height: int = 640) -> Frame:
        """The page inside a notebook: numbers are changed there, and all steps follow.

        >>> import torch, clearhead as ch
        >>> ch.explain(torch.eye(2), torch.eye(2), torch.eye(2)).frame(height=500)
        Frame(title='Scaled dot-product attention, step by step', height=500)

        As the last line of a cell it is shown. The cell's output holds the whole page, some 50 KB, which works without
        Python and without a network. `height`: of the frame, in pixels. Raises a `ClearheadError` for a height that is
        no positive integer.
        """
        return Frame(self.title, self.html(), check_count(height, 1, "height"))

    def write(self, path: str | Path) -> Path:
        """Write the explanation to a file, and return its path. The ending of the path says the form.

        >>> import tempfile, torch, clearhead as ch
        >>> explanation = ch.explain(torch.eye(2), torch.eye(2), torch.eye(2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     explanation.write(folder + "/steps.md").read_text() == explanation.markdown()
        True

        .html: the page, as `html()`; .md: Markdown; .txt: the text that `print` shows; .py: the program, as `script()`;
        .ipynb: the notebook, as `notebook()`; .json: the numbers, as `to_dict()`; .png, .svg and .pdf: the picture, as
        `plot()`, which needs matplotlib.
        Raises a `ClearheadError` for another ending, and where the file cannot be written.
        """
        ending = ending_of(path, ENDINGS, WHAT)
        check_writable(path, WHAT)
        if ending in TEXTS:
            return write_page(path, [TEXTS[ending](self)], WHAT)
        figure, picture = np.asarray(self.plot()).flat[0].figure, io.BytesIO()  # matplotlib hides errors of a file
        try:
            figure.savefig(picture, format=ending[1:], bbox_inches="tight", dpi=200)
        finally:
            require("matplotlib.pyplot", "plot", "a picture").close(figure)
        with replacing(path, WHAT) as part:
            part.write_bytes(picture.getvalue())
        return Path(path)

    def _repr_html_(self) -> str:
        return said(self, lambda: self._printed(as_markup.html))

    def script(self) -> str:
        """A short program in plain PyTorch that computes the same steps from the inputs' numbers, and prints them.

        Raises a `ClearheadError` where the inputs hold more than 20,000 numbers.
        """
        return self._printed(as_script.render)

    def notebook(self) -> str:
        """A Jupyter notebook of the same steps: the reason of each as text, and its line of plain PyTorch as a cell.

        >>> import json, torch, clearhead as ch
        >>> book = json.loads(ch.explain(torch.eye(2), torch.eye(2), torch.eye(2)).notebook())
        >>> sources = [cell["source"] for cell in book["cells"] if cell["cell_type"] == "code"]
        >>> print(sources[4])
        products = query @ key.transpose(-1, -2)
        products

        The text of a file that ends in .ipynb, which `write` makes too. No cell has run: run them in their order,
        change a number or a line, and run them again. Words of the inputs are escaped. Raises a `ClearheadError` where
        the inputs hold more than 20,000 numbers.
        """
        return self._printed(as_notebook.render)

    def plot(self, name: str = "weights", ax: Axes | None = None) -> Axes | np.ndarray:
        """Draw a step with matplotlib: "scores", "weights", "output", … Returns the axes, an array of them for several.

        `name`: a step with rows and columns; each sequence and head has a picture of its own, with its numbers in it up
        to 8 × 8: with the explanation's `digits` where they fit their cells, else with fewer. `ax`: the axes to draw
        on, where there is one picture. −∞ is hatched, NaN and ∞ are red.
        Raises a `ClearheadError` for an unknown name.
        """
        with with_digits(self.digits):
            return as_plot.plot(self._step(name), self.shown, ax)

    def to_dict(self) -> dict[str, object]:
        """The explanation as plain numbers and text, which `json.dumps` takes. NaN and infinities are text."""
        return self._printed(lambda document: document.record)


TEXTS: dict[str, Callable[[Explanation], str]] = {
    ".html": Explanation.html,
    ".md": Explanation.markdown,
    ".txt": lambda explanation: f"{explanation}\n",
    ".py": Explanation.script,
    ".ipynb": Explanation.notebook,
    ".json": lambda explanation: json.dumps(explanation.to_dict(), ensure_ascii=False),
}
ENDINGS = (*TEXTS, ".png", ".svg", ".pdf")
WHAT = "explanation"


def shown_as(make: Callable[[], Explanation], title: Any, digits: Any) -> Explanation:
    """The settled explanation that `make` gives, under this title, or its own where it is None; `digits`: its field."""
    if title is not None and (not isinstance(title, str) or not title.strip()):
        raise ClearheadError(f"title is {brief(title)}; pass a text, such as title='The first head'.")
    count = DIGITS.get() if digits is None else check_count(digits, 1, "digits", 15)  # a float64 has no more
    with with_digits(count):
        found = settled(make())
    return replace(found, title=found.title if title is None else title, digits=count)


def settled(explanation: Explanation) -> Explanation:
    """A copy that holds no function, and shares no memory with the inputs, which may change later."""

    def one(part: Part) -> Part:
        return replace(part, steps=tuple(step.settled(at_pair(step, explanation.shown)) for step in part.steps))

    return replace(explanation, parts=tuple(map(one, explanation.parts)))
