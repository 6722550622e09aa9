"""Compiled kernels of another build, such as the one that `make sanitize` makes, in place of the installed ones."""

import importlib.util
import sys
from pathlib import Path


def use(folder: str) -> None:
    (built,) = Path(folder).glob("_kernels*.so")
    spec = importlib.util.spec_from_file_location("clearhead.engines.native._kernels", built)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["clearhead.engines.native._kernels"] = module
