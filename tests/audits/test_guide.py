"""The guide of audits has a row for each code of a finding, and no other."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"[a-z]+(-[a-z]+)+")


def test_each_code_has_a_row():
    written = set()
    for path in (ROOT / "src/clearhead/models/audits").glob("*.py"):
        constants = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Constant)]
        written |= {node.value for node in constants if isinstance(node.value, str) and CODE.fullmatch(node.value)}
    assert len(written) > 30
    _, _, rows = (ROOT / "docs/guides/auditing.md").read_text("utf-8").partition("## What the codes mean")
    first_cells = (line.split("|")[1] for line in rows.splitlines() if line.startswith("| `"))
    explained = {code for cell in first_cells for code in re.findall(r"`([^`]+)`", cell)}
    assert explained == written
