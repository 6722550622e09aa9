"""The page's own modules in Node.js, on the data of a page that Python has written."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import clearhead

ROOT = Path(__file__).parents[2]


def data_of(html: str) -> dict[str, Any]:
    """The metadata of a page, and its blocks as they stand there."""
    found = re.search(r'<script type="application/json" id="meta">(.*?)</script>', html, re.DOTALL)
    assert found
    blocks = re.findall(r'id="block-(\d+)">([^<]*)</script>', html)
    ordered = sorted((int(number), text) for number, text in blocks)
    assert [number for number, _ in ordered] == list(range(len(ordered)))
    return {"meta": json.loads(found[1]), "blocks": [text for _, text in ordered]}


def run_on_page(units: Path, html: str, wanted: Any, folder: Path) -> None:
    """Run a file of tests for Node.js: it reads `data`, of the page, and `wanted` from the file that `GIVEN` names."""
    given = folder / "given.json"
    given.write_text(json.dumps({"data": data_of(html), "wanted": wanted}))
    run_units(units, GIVEN=str(given))


def run_units(*units: Path, **surroundings: str) -> None:
    """Run files of tests for Node.js, on the modules of the package that Python has imported."""
    with tempfile.TemporaryDirectory() as folder:
        src, tests = Path(folder, "src"), Path(folder, "tests", "report")
        src.mkdir(), tests.mkdir(parents=True)
        (src / "clearhead").symlink_to(Path(clearhead.__file__).parent)
        shutil.copy(ROOT / "package.json", folder)
        copies = [shutil.copy(unit, tests) for unit in units]
        done = subprocess.run(
            ["node", "--test", *copies], capture_output=True, text=True, timeout=120, env=os.environ | surroundings
        )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    ran = re.search(r"^(?:#|ℹ) pass (\d+)$", done.stdout, re.MULTILINE)
    assert ran and int(ran[1]) >= len(units), done.stdout
