"""The table of φ: where one of them, or a part of one, is missing, an import fails."""

import re
from pathlib import Path

import pytest
import torch

from clearhead.engines.native import bindings
from clearhead.scores import pair_functions
from clearhead.scores.pair_functions import PHIS

TABLE = Path(pair_functions.__file__)
PACKAGE = TABLE.parents[1]
every_phi = pytest.mark.parametrize("phi", PHIS)


def run_without(path, pattern):
    """Run a module without the first text that the pattern finds."""
    source, count = re.subn(pattern, "", path.read_text(encoding="utf-8"), count=1, flags=re.DOTALL)
    assert count
    exec(compile(source, path.name, "exec"), {"__name__": path.stem})


@every_phi
def test_an_import_fails_where_a_phi_is_missing(phi, monkeypatch):
    """In the table, in the list of the kernels in Triton, and in that of C++, which makes the cases of its kernels."""
    with pytest.raises(ImportError, match="pair_functions has the φ"):
        run_without(TABLE, rf'    "{phi}": PairFunction.*?\n    \),\n')
    with pytest.raises(ImportError, match="score has the φ"):
        run_without(PACKAGE / "engines/triton/kernels/score.py", rf'"{phi}"(, )?')
    monkeypatch.setattr(bindings.kernels(), "phis", lambda: [name for name in PHIS if name != phi])
    monkeypatch.setattr(bindings, "_known", {})
    with pytest.raises(ImportError, match="_kernels has the φ"):
        bindings.kernels()


@every_phi
def test_an_entry_has_every_part(phi):
    for entry in (PHIS[phi], PHIS[phi].triton):
        for part in entry._fields:
            with pytest.raises(TypeError, match=f"missing 1 required positional argument: '{part}'"):
                type(entry)(**{name: value for name, value in entry._asdict().items() if name != part})


def test_kernels_and_the_page_have_every_phi():
    assert bindings.kernels().phis() == list(PHIS)
    page = (PACKAGE / "report/front/weights.js").read_text(encoding="utf-8")
    assert re.findall(r"^  (\w+): \(a, b\) =>", page, re.M) == list(PHIS)


@every_phi
def test_derivatives_are_those_of_the_formula(phi):
    x = torch.linspace(-2, 2, 50, dtype=torch.float64).requires_grad_()
    value = PHIS[phi].value(x)
    (want,) = torch.autograd.grad(value.sum(), x)
    for out in range(3):
        given = x.detach().clone(), value.detach().clone()
        assert torch.allclose(PHIS[phi].derivative(*given, (None, *given)[out]), want, rtol=1e-12)
