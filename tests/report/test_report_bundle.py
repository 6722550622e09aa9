"""The programs of the pages: their bundle is that of the sources, and is made where it is not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clearhead.base.output import pages

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "clearhead"
FRONTS = {"base": set(), "report": {"base"}, "explanation": {"base"}}  # each may import of those
PROGRAMS = ("guard", "load", "report", "survey", "explanation", "motion", "widget")


def modules() -> dict[Path, set[Path]]:
    """Each module of JavaScript, and those that it imports."""
    found = {}
    for path in SOURCES.rglob("front/*.js"):
        imported = re.findall(r'^(?:import|\}) .*?"(\.[^"]+)";$', path.read_text(encoding="utf-8"), re.M)
        found[path] = {(path.parent / name).resolve() for name in imported}
    return found


def bundled(root: Path, path: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "packaging/bundle.py"]
    return subprocess.run(command, cwd=root, env=os.environ | {"PATH": path}, capture_output=True, text=True)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """What the bundle is made of, and the bundle, elsewhere; without what npm has installed."""
    shutil.copytree(ROOT / "packaging", tmp_path / "packaging")
    for name in ("package.json", "package-lock.json"):
        shutil.copy(ROOT / name, tmp_path)
    for folder in {path.parent for path in modules()} | {SOURCES / "base" / "bundle"}:
        shutil.copytree(folder, tmp_path / folder.relative_to(ROOT))
    return tmp_path


def test_the_bundle_is_that_of_the_sources() -> None:
    code = "import bundle; raise SystemExit(not bundle.current())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "packaging", check=False)
    assert done.returncode == 0, "a source of a page has changed since its program was bundled: run `make bundle`."


def test_the_bundle_of_a_release_needs_no_node(copy: Path) -> None:
    assert bundled(copy, path="").returncode == 0


def test_a_clone_without_node_is_told_what_to_install(copy: Path) -> None:
    script = copy / "src/clearhead/report/front/main.js"
    script.write_text(script.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    done = bundled(copy, path="")
    assert done.returncode == 1 and "npm is not found. Install Node.js 18 or newer" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ("report", "survey", "outside", "explanation", "motion"))
def test_no_style_can_end_its_element(name: str) -> None:
    style = pages.bundled(f"{name}.css")
    assert len(style) > 100 and "</style" not in style.lower()


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_program_can_end_its_element(name: str) -> None:
    program = pages.bundled(f"{name}.js")
    assert len(program) > 200 and not re.search(r"</script|<script|<!--|\r", program, re.IGNORECASE)


def test_modules_of_pages_import_downward_and_in_no_circle() -> None:
    left = modules()
    assert sum(map(len, left.values())) > 100
    for path, imported in left.items():
        package = path.relative_to(SOURCES).parts[0]
        for other in imported:
            assert other in left, f"{path.name} imports {other}, which is not there"
            floor = other.relative_to(SOURCES).parts[0]
            assert floor == package or floor in FRONTS[package], f"{path} imports {other}"
    while left:
        free = {path for path, imported in left.items() if not imported & left.keys()}
        assert free, f"a circle among {sorted(path.name for path in left)}"
        left = {path: imported for path, imported in left.items() if path not in free}
