"""`--kernels DIR`: test the compiled kernels of another build, such as the one that `make sanitize` makes."""

import importlib.util
import sys
from pathlib import Path


def pytest_addoption(parser):
    parser.addoption("--kernels", metavar="DIR", help="a folder with a build of clearhead._kernels")


def pytest_configure(config):
    folder = config.getoption("--kernels")
    if folder:
        (built,) = Path(folder).glob("_kernels*.so")
        spec = importlib.util.spec_from_file_location("clearhead._kernels", built)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules["clearhead._kernels"] = module
