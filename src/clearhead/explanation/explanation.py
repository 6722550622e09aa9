"""What `explain` gives: the steps, and the ways to show them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from clearhead.base.errors import ClearheadError, require
from clearhead.base.renamed import refuse
from clearhead.base.steps import Step
from clearhead.base.text import said
from clearhead.explanation import as_file, as_markup, as_plot, as_script, as_text
from clearhead.explanation.document import Document, at_pair
from clearhead.explanation.document import Part as Part
from clearhead.explanation.page.render import render as render_page
from clearhead.explanation.shown import Shown


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

    It shares no memory with the inputs, and can be copied and pickled.
    `title`; `parts`, each with its `title`, its `steps` and what is `drawn` before them; `shown`, the places of the
    call that it is about. `print(explanation)` shows it within 80 columns; `.html()` is a page
    that computes with other inputs, too; `.script()`, `.markdown()` and `.to_dict()` give the same steps as a program,
    as text for a page, and as plain numbers; `.write(path)` makes a file of any of these. A notebook shows the steps as
    tables.
    """

    title: str
    parts: tuple[Part, ...]
    shown: Shown

    @property
    def steps(self) -> tuple[Step, ...]:
        """Every step, in order."""
        return tuple(step for part in self.parts for step in part.steps)

    @property
    def document(self) -> Document:
        """What each way to show it prints."""
        return Document(self.title, self.parts, self.shown)

    def __getitem__(self, name: str) -> Tensor:
        """The result of the step of this name, with as many leading dimensions as the inputs have."""
        return self.shown.squeezed(self._step(name))

    def _step(self, name: str) -> Step:
        for step in self.steps:
            if step.name == name:
                return step
        known = ", ".join(step.name for step in self.steps)
        raise ClearheadError(f"no step is called {name!r:.60}; the steps are {known}.")

    def __str__(self) -> str:
        return said(self, lambda: as_text.render(self.document))

    __repr__ = __str__

    def __rich__(self) -> Any:
        """For `rich`'s print and console: headings and formulas bold, numbers plain, reasons dim."""
        text = require("rich.text", "terminal", "a terminal's styles").Text
        styles = {"title": "bold", "formula": "bold", "text": "dim", "numbers": ""}
        every = as_text.lines(self.document)
        return text("\n").join(text(line, styles[kind]) for kind, line in every)

    def markdown(self) -> str:
        """The same as Markdown: a heading a part, a table a step. Words of the inputs are escaped."""
        return as_markup.markdown(self.document)

    def html(self, path: None = None) -> str:
        """One self-contained page that shows the steps, and computes them again when an input is changed.

        It needs no network. Words of the inputs are shown as text. `write` makes a file of it.
        """
        if path is not None:
            refuse("Explanation.html", {"path": path})
        return render_page(self.document)

    def write(self, path: str | Path) -> Path:
        """Write the explanation to a file, and return its path. The ending of the path says the form.

        >>> import tempfile, torch, clearhead as ch
        >>> explanation = ch.explain(torch.eye(2), torch.eye(2), torch.eye(2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     explanation.write(folder + "/steps.md").read_text() == explanation.markdown()
        True

        .html: the page, as `html()`; .md: Markdown; .txt: the text that `print` shows; .py: the program, as `script()`;
        .json: the numbers, as `to_dict()`; .png, .svg and .pdf: the picture, as `plot()`, which needs matplotlib.
        Raises a `ClearheadError` for another ending, and where the file cannot be written.
        """
        return as_file.write(self, path)

    def _repr_html_(self) -> str:
        return said(self, lambda: as_markup.html(self.document))

    def script(self) -> str:
        """A short program in plain PyTorch that computes the same steps from the inputs' numbers, and prints them.

        Raises a `ClearheadError` where the inputs hold more than 20,000 numbers.
        """
        return as_script.render(self.document)

    def plot(self, name: str = "weights", ax: Any = None) -> Any:
        """Draw a step with matplotlib: "scores", "weights", "output", … Returns the axes, an array of them for several.

        `name`: a step with rows and columns; of several sequences or heads each has a picture. `ax`: the axes to draw
        on, where there is one picture. What is not finite is left white. Raises a `ClearheadError` for an unknown name.
        """
        return as_plot.plot(self._step(name), self.shown, ax)

    def to_dict(self) -> dict[str, Any]:
        """The same as numbers and text alone, which `json.dumps` takes; NaN and infinities as text."""
        return self.document.record


@dataclass(frozen=True)
class Said:
    """The right-hand side of the one number of a step that is written out."""

    text: str

    def __call__(self, at: tuple[int, ...]) -> str:
        return self.text


def settled(explanation: Explanation) -> Explanation:
    """The same for good: apart from the memory of the inputs, which may change later, and from any function."""

    def one(step: Step) -> Step:
        value = step.value.detach() if step.code else step.value.detach().clone()
        said = Said(step.cell(at_pair(step, explanation.shown))) if step.cell and value.numel() else None
        return replace(step, value=value, cell=said, made=None, by=None)

    parts = tuple(replace(part, steps=tuple(map(one, part.steps))) for part in explanation.parts)
    return replace(explanation, parts=parts)
