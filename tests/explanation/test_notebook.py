"""An explanation as a notebook: its cells, run in their order, compute every step."""

import json
import sys
from pathlib import Path

import pytest
import torch
from opened_page import HOSTILE

import clearhead as ch


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def of_module():
    torch.manual_seed(0)
    module, x = ch.nn.MultiHeadAttention(4, 2), drawn(1, 3, 4)
    return ch.explain(module, x, x, x, mask=ch.Causal())


MADE = {
    "words": lambda: ch.explain(*[drawn(3, 4)] * 3, mask=ch.Causal(), tokens=["a", "*b*", "`c`"]),
    "gradients": lambda: ch.explain(*[drawn(2, 2)] * 3, score=ch.Additive(2, 2, 2), gradients=True),
    "a module": of_module,
    "another title": lambda: ch.explain(*[drawn(2, 2)] * 3, title="".join(HOSTILE)),
}


@pytest.mark.parametrize("name", MADE)
def test_the_cells_compute_every_step(name):
    explanation = MADE[name]()  # of four digits, which are PyTorch's own: a cell sets how tensors are printed
    cells = json.loads(explanation.notebook())["cells"]
    texts = [cell["source"] for cell in cells if cell["cell_type"] == "markdown"]
    codes = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
    space = {}
    exec(codes[0], space)
    for step, code in zip(explanation.steps, codes[1:], strict=True):
        line, shown = code.rsplit("\n", 1)
        exec(line, space)
        mine = explanation[step.name]
        found = eval(shown, space)
        torch.testing.assert_close(found.to(mine.dtype).detach(), mine, rtol=1e-4, atol=1e-5)
    assert len(texts) == 1 + len(explanation.parts) + len(explanation.steps)
    markdown = explanation.markdown()
    lines = [line for text in texts for line in text.splitlines()]
    assert all(line.strip() in markdown for line in lines)  # the same words, escaped in the same way
    assert not any("<" in line for line in lines)


def test_its_form_is_that_of_nbformat_4_5():
    book = json.loads(MADE["words"]().notebook())
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5) and book["metadata"]["kernelspec"]["name"] == "python3"
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    for cell in book["cells"]:
        more = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert cell.keys() == {"id", "cell_type", "metadata", "source"} | more
    assert not any("outputs" in cell and cell["outputs"] for cell in book["cells"])


def test_jupyter_takes_and_runs_it(monkeypatch):
    import nbformat  # here: it takes seconds
    from nbclient import NotebookClient

    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    explanation = MADE["gradients"]()
    book = nbformat.reads(explanation.notebook(), as_version=4)
    nbformat.validate(book)
    NotebookClient(book, kernel_name="python3", timeout=120).execute()
    shown = [cell.outputs[-1].data["text/plain"] for cell in book.cells if cell.cell_type == "code" and cell.outputs]
    assert len(shown) == len(explanation.steps) and all(text.startswith("tensor(") for text in shown)
