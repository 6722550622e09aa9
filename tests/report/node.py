"""The page's own scripts in Node.js, on the data of a page that Python has written."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from clearhead.base.pages import source

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="Node.js is not installed: the page's scripts are not run alone")
SCRIPTS = ("data.js", "weights.js", "tiles.js")


def data_of(html: str) -> dict[str, Any]:
    """The metadata of a page, and its blocks as they stand there."""
    found = re.search(r'<script type="application/json" id="meta">(.*?)</script>', html, re.DOTALL)
    assert found
    blocks = re.findall(r'id="block-(\d+)">([^<]*)</script>', html)
    ordered = sorted((int(number), text) for number, text in blocks)
    assert [number for number, _ in ordered] == list(range(len(ordered)))
    return {"meta": json.loads(found[1]), "blocks": [text for _, text in ordered]}


def run_units(units: Path, html: str, wanted: Any, folder: Path) -> None:
    """Run a file of tests for Node.js: it finds `data`, of the page, and `wanted`, beside the page's scripts."""
    assert NODE is not None
    (folder / "given.json").write_text(json.dumps({"data": data_of(html), "wanted": wanted}))
    scripts = "".join(source("clearhead.report", name) for name in SCRIPTS)
    given = 'const { data, wanted } = JSON.parse(require("fs").readFileSync(`${__dirname}/given.json`, "utf8"));\n'
    joined = folder / units.name
    joined.write_text(f'"use strict";\n{given}{scripts}\n{units.read_text()}')
    done = subprocess.run([NODE, "--test", str(joined)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    ran = re.search(r"^# pass (\d+)$", done.stdout, re.MULTILINE)
    assert ran and int(ran[1]) > 0, done.stdout
