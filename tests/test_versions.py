"""What `show_versions` prints, and what an installation without kernels says."""

import subprocess
import sys

import numpy
import torch

import clearhead as ch

HIDE = "import sys; sys.modules['clearhead.engines.native._kernels'] = None\n"


def python(code, *options):
    return subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True)


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
    done = python(code + "x = torch.rand(2, 3, 4)\nassert ch.attention(x, x, x).shape == x.shape\nch.show_versions()")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("RuntimeWarning") == 1
    assert "no C++ compiler" in done.stderr and "native" in done.stderr and "pip install" in done.stderr
    assert "kernels       none" in done.stdout and "engines       flex, sdpa, triton, tiled, reference" in done.stdout


def test_the_warning_can_be_silenced_and_no_other_installation_has_it():
    quiet = "import warnings; warnings.filterwarnings('ignore', message='clearhead was installed without')\n"
    assert python(HIDE + quiet + "import clearhead").stderr == ""
    windows = "import sys, torch; sys.platform = 'win32'\n"  # after torch, which looks for libraries by it
    assert python(HIDE + windows + "import clearhead", "-W", "error").returncode == 0
    assert python("import clearhead", "-W", "error").returncode == 0
