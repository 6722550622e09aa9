"""What every page of the course keeps: public names alone, pictures whose code is folded, and notebooks that run."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chapters import COURSE

DOCS = COURSE.parent
PAGES = sorted(path for folder in ("course", "guides", "start") for path in (DOCS / folder).glob("*.md"))
CELL = re.compile(r"^```\{code-cell\} ipython3\n(---\n.*?\n---\n|:tags:[^\n]*\n)?(.*?)^```", re.S | re.M)
INTERNAL = re.compile(r"clearhead\.base|\bch\.base\b|\b(?:ch|clearhead)(?:\.\w+)*\._\w")


def cells(path: Path) -> list[tuple[str, str]]:
    """The options and the code of each cell."""
    return [(found[1] or "", found[2]) for found in CELL.finditer(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_names_nothing_internal(path: Path) -> None:
    assert not INTERNAL.findall(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("text", ["ch.base.shapes.Sizes(1)", "from clearhead.base.positions import x", "ch.nn._heads"])
def test_an_internal_name_is_found(text: str) -> None:
    assert INTERNAL.search(text) and not INTERNAL.search("ch.extend.Sizes, clearhead.nn, self._cache, torch._C")


@pytest.mark.parametrize("path", sorted(COURSE.glob("[01]*.md")), ids=lambda path: path.stem)
def test_long_code_of_a_picture_is_folded(path: Path) -> None:
    for options, code in cells(path):
        folded = "hide-input" in options or "hide-cell" in options
        if "plt.show()" in code:
            assert folded or len(code.splitlines()) <= 10, f"fold this picture of {path.name}:\n{code}"
        if folded:  # on the page, and in JupyterLab
            assert "source_hidden: true" in options and "code_prompt_show" in options
        if "hide-input" in options:  # a reader need not open it: nothing is computed or checked there
            assert code.count("plt.show()") == 1 and code.rstrip().endswith("plt.show()")
            called = {ast.unparse(node.func) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)}
            assert not [name for name in called if name.startswith(("ch.attention", "ch.weights", "checks."))]


@pytest.fixture(scope="module")
def notebooks() -> Any:
    spec = importlib.util.spec_from_file_location("notebooks", DOCS / "ext" / "notebooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["", "somebody/clearhead/gh-pages"], ids=["off", "on"])
def built(request: Any, notebooks: Any, tmp_path: Path) -> tuple[str, Path, str]:
    """A site of one chapter, without the setting for Colab and with it: the setting, the site, and the page."""
    site, run = tmp_path / "site" / "course", tmp_path / "jupyter_execute" / "course"
    site.mkdir(parents=True), run.mkdir(parents=True)
    text = {"cell_type": "markdown", "metadata": {}, "source": "α"}
    notebook = {"cells": [text], "nbformat": 4, "nbformat_minor": 5}
    (run / "01_a.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    (site / "01_a.html").write_text("<p>", encoding="utf-8")
    app = SimpleNamespace(
        builder=SimpleNamespace(name="html"), outdir=site.parent, config=SimpleNamespace(colab=request.param)
    )
    context = {"body": '<p><a href="01_a.zip" download>Download this chapter as a notebook</a>, or'}
    notebooks.link(app, "course/01_a", "page.html", context, None)
    notebooks.write(app, None)
    return request.param, site, context["body"]


def test_a_page_has_a_link_to_colab_where_the_site_is_published(built: tuple[str, Path, str]) -> None:
    colab, _, page = built
    address = "https://colab.research.google.com/github/somebody/clearhead/blob/gh-pages/course/01_a.ipynb"
    assert page.count("<a ") == (2 if colab else 1)
    assert (f'<a class="colab" href="{address}">Open in Colab</a>, or' in page) == bool(colab)


def test_a_notebook_fetches_what_it_imports_in_colab_alone(built: tuple[str, Path, str]) -> None:
    colab, site, _ = built
    first, *others = json.loads((site / "01_a.ipynb").read_text(encoding="utf-8"))["cells"]
    assert (first["cell_type"] == "code") == bool(colab) and len(others) == bool(colab)
    if colab:
        source = "".join(first["source"])
        assert "somebody/clearhead/gh-pages/course/course.zip" in source
        before, line, *_ = source.split("\n    ")
        assert 'if "google.colab" in sys.modules:' in before and line.startswith("%pip install")
        ast.parse(re.sub(r"^(\s+)[%!].*", r"\1pass", source, flags=re.M))


def test_the_archive_has_what_the_chapters_import(built: tuple[str, Path, str]) -> None:
    _, site, _ = built
    with zipfile.ZipFile(site / "course.zip") as archive:
        names = {name.removeprefix("clearhead-course/") for name in archive.namelist()}
        assert "google.colab" not in archive.read("clearhead-course/01_a.ipynb").decode()
    imported = {
        node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
        for path in COURSE.glob("[01]*.md")
        for _, code in cells(path)
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    own = {
        name
        for name in imported
        if any((folder / f"{name}.py").is_file() for folder in (COURSE, COURSE / "../../examples"))
    }
    assert (
        own == {"dates", "dates_data", "diagrams", "induction", "trained"} and {f"{name}.py" for name in own} <= names
    )
    assert {"checks/__init__.py", "at_scale.json", "induction_steps.json", "notation.md", "01_a.ipynb"} <= names
    assert {f"motions/{path.name}" for path in (COURSE / "motions").glob("*.py")} <= names and "motions" in imported
    assert {f"data/{path.name}" for path in (COURSE / "data").iterdir()} <= names


def test_a_chapters_archive_has_what_it_imports_and_no_more(built: Any, notebooks: Any) -> None:
    _, site, _ = built
    with zipfile.ZipFile(site / "01_a.zip") as archive:
        names = {name.removeprefix("clearhead-course/") for name in archive.namelist()}
    assert names == {"01_a.ipynb", *notebooks.PAGES}
    modules = {file.stem: file for file in notebooks.BESIDE if file.suffix == ".py"}
    modules |= {file.parent.name: file for file in notebooks.BESIDE if file.name == "__init__.py"}
    for path in sorted(COURSE.glob("[01]?_[!b]*.md")):
        text = "\n".join(code for _, code in cells(path))
        found = notebooks.needed(text)
        assert len(set(found)) == len(found)
        own = [file.read_text(encoding="utf-8") for file in found if file.suffix == ".py"]
        for code in (text, *own):
            for name in modules.keys() & set(notebooks.IMPORTED.findall(code)):
                assert modules[name] in found, (path.name, name)
        size = sum(file.stat().st_size for file in found)
        assert (size > 500_000) == ("trained" in notebooks.IMPORTED.findall(text)), path.name


def test_nothing_is_published_yet() -> None:
    assert '\ncolab = ""\n' in (DOCS / "conf.py").read_text(encoding="utf-8")
