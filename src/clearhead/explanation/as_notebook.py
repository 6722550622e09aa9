"""An explanation as a Jupyter notebook: the reason of each step as text, and its line of PyTorch as a cell to run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from clearhead.explanation import as_markup, as_script
from clearhead.explanation.document import Document


def render(document: Document) -> str:
    """The notebook, as the JSON of nbformat 4.5."""
    cells = [{"id": f"cell-{at}", **cell} for at, cell in enumerate(_cells(document))]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    notebook = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, ensure_ascii=False, indent=1) + "\n"


def _cells(document: Document) -> Iterator[dict[str, Any]]:
    lines_of = as_script.lines_of(document)
    yield _text(as_markup.opening(document))
    yield _code(as_script.HEAD.format(digits=document.digits))
    for section in document.sections:
        yield _text(as_markup.heading(section))
        for entry in section.entries:
            yield _text([*as_markup.about(entry), *as_markup.written_out(entry)])
            yield _code(f"{lines_of[entry.step.name]}\n{entry.step.name}")


def _text(lines: Sequence[str]) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": "\n".join(lines).strip("\n")}


def _code(source: str) -> dict[str, Any]:
    """A cell that has not run: what it shows is not stored, and a changed number shows its own."""
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": source.rstrip("\n")}
