"""What `show_versions` prints, and what an installation without kernels says."""

import sys

import numpy
import torch
from apart import run

import clearhead as ch

HIDE = "import sys; sys.modules['clearhead.engines.native._kernels'] = None\n"


def test_versions_are_those_of_the_packages(capsys):
    ch.show_versions()
    first, *lines = capsys.readouterr().out.splitlines()
    rows = {line[:15].strip(): line[16:] for line in lines}
    assert first == f"clearhead {ch.__version__}"
    assert rows["torch"] == torch.__version__.partition("+")[0] or rows["torch"] == torch.__version__
    assert rows["numpy"] == numpy.__version__ and rows["threads"] == str(torch.get_num_threads())
    assert rows["python"] == sys.version.split()[0]
    plan = ch.plan(*[torch.rand(1, 4, 300, 64)] * 3, mask=ch.Causal())
    assert {plan.engine, *plan.declined} == set(rows["engines"].split(", "))
    assert rows["kernels"].split()[0] in ("avx512_bf16", "avx512", "avx2", "baseline")


def test_without_kernels_the_import_says_so_once():
    code = HIDE + "import clearhead as ch, torch\nimport clearhead.models, importlib; import clearhead\n"
    done = run(code + "x = torch.rand(2, 3, 4)\nassert ch.attention(x, x, x).shape == x.shape\nch.show_versions()")
    assert done.status == 0, done.errors
    assert done.errors.count("RuntimeWarning") == 1
    assert "no C++ compiler" in done.errors and "native" in done.errors and "pip install" in done.errors
    assert "kernels       none" in done.out and "engines       flex, sdpa, triton, tiled, reference" in done.out


def test_the_warning_can_be_silenced_and_no_other_installation_has_it():
    quiet = "import warnings; warnings.filterwarnings('ignore', message='clearhead was installed without')\n"
    silenced = run(HIDE + quiet + "import clearhead")
    assert (silenced.status, silenced.errors) == (0, "")
    windows = "import sys, torch; sys.platform = 'win32'\n"  # after torch, which looks for libraries by it
    for one in (run(HIDE + windows + "import clearhead", strict=True), run("import clearhead", strict=True)):
        assert one.status == 0, one.errors
