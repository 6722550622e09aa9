"""The plugin of pytest: its fixture, its option, and what it imports while tests are collected."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import clearhead as ch

SOURCE = Path(ch.__file__).parents[1]
ROOT = Path(__file__).parents[1]
MODELS = """
import pytest, torch
import torch.nn.functional as F
import clearhead as ch

class Block(torch.nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.causal = causal
    def forward(self, x):
        return x + F.scaled_dot_product_attention(x, x, x, is_causal=self.causal)

def test_healthy(assert_attends):
    assert_attends(Block(True), torch.rand(1, 6, 8), ch.Causal())

def test_faulty(assert_attends):
    assert_attends(Block(False), torch.rand(1, 6, 8), ch.Causal())

def test_faulty_at_a_level_of_its_own(assert_attends):
    assert_attends(Block(False), torch.rand(1, 6, 8), ch.Causal(), level="all")
"""
COLLECTS = """
import sys
def pytest_collection_finish(session):
    print("collected", len(session.items), session.config.getoption("--attends"))
    print("imported", sorted({"clearhead", "torch", "numpy"} & set(sys.modules)))
"""


def run_pytest(folder, *arguments, **variables):
    """The result of pytest in a folder, where it has this plugin alone, unless `variables` have it load others."""
    settings = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", **variables}
    environment = {name: value for name, value in (os.environ | settings).items() if value}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_the_fixture_raises_the_report_at_the_level_of_the_option(tmp_path):
    (tmp_path / "test_models.py").write_text(MODELS)
    done = run_pytest(tmp_path, "-p", "pytest_clearhead", "--attends=outputs", "-rA")
    assert "2 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "PASSED test_models.py::test_healthy" in done.stdout
    _, of_outputs, of_all = re.split(r"^_+ test_faulty.* _+$", done.stdout, flags=re.MULTILINE)
    for text in (of_outputs, of_all):
        assert "does not attend as expected: Causal()" in text and "not-causal" in text
        assert "pytest_clearhead.py" not in text and "audit.py:" not in text  # the failure is at the line of the test
    assert re.search(r"FAIL +computed", of_all) and not re.search(r"FAIL +computed", of_outputs)
    assert re.search(r"gradient +", of_all)


def test_nothing_of_clearhead_is_imported_while_tests_are_collected(tmp_path):
    (tmp_path / "conftest.py").write_text(COLLECTS)
    (tmp_path / "test_one.py").write_text("def test_one(assert_attends):\n    pass\n")
    done = run_pytest(tmp_path, "-p", "pytest_clearhead", "--collect-only", "-s")
    assert "collected 1 layers" in done.stdout and "imported []" in done.stdout, done.stdout + done.stderr
    done = run_pytest(tmp_path, "-p", "pytest_clearhead", "--attends=some")
    assert done.returncode == 4 and "invalid choice: 'some'" in done.stderr


def test_an_installed_plugin_is_loaded_once(tmp_path):
    """The entry point has the name of the module, by which pytest knows a plugin that `-p` has loaded."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (entry,) = project["project"]["entry-points"]["pytest11"].items()
    assert entry == ("pytest_clearhead", "pytest_clearhead")
    assert "src/pytest_clearhead.py" in project["tool"]["scikit-build"]["wheel"]["packages"]
    installed = tmp_path / "installed" / "other-1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[pytest11]\npytest_clearhead = pytest_clearhead\n")
    (tmp_path / "conftest.py").write_text(COLLECTS)
    (tmp_path / "test_one.py").write_text("def test_one(assert_attends):\n    pass\n")
    path = os.pathsep.join([str(SOURCE), str(installed.parent)])
    for arguments in ((), ("-p", "pytest_clearhead")):
        variables = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "", "PYTHONPATH": path}
        done = run_pytest(tmp_path, *arguments, "--attends=all", "--collect-only", "-s", **variables)
        assert "collected 1 all" in done.stdout, done.stdout + done.stderr
