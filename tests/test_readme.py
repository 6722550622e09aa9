"""What the README gives to be pasted into a file runs as it stands; its sessions are doctests."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_what_is_to_be_pasted_runs(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    plain = [block for block in blocks if ">>>" not in block]
    assert plain and plain[0] is blocks[0]  # the first thing that a new reader meets
    for block in plain:
        (tmp_path / "pasted.py").write_text(block, encoding="utf-8")
        run = subprocess.run(
            [sys.executable, "-W", "error", "pasted.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert not run.returncode, run.stderr
        assert "torch.Size([1, 4, 6, 16])" in run.stdout and "step by step" in run.stdout
