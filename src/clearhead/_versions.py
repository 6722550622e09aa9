"""show_versions(): what runs here, for a report of an error."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from clearhead.engines.choose import ENGINES
from clearhead.engines.native import bindings

PACKAGES = ("torch", "numpy", "transformers", "triton", "matplotlib", "anywidget")


def versions() -> str:
    """The lines that `show_versions` prints."""
    kernels, threads = bindings.kernels(), torch.get_num_threads()
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    rows = {
        "kernels": "none: without the engine native, PyTorch's kernels and operations compute",
        "engines": ", ".join(one.name for one in ENGINES if one.name != "native" or kernels is not None),
        "threads": f"{threads}",
        "machine": f"{platform.system()} {platform.machine()}, {name}",
        "python": platform.python_version(),
    }
    if kernels is not None:
        best, *others = kernels.available()
        rows["kernels"] = f"{best}" + f" (this CPU also runs {', '.join(others)})" * bool(others)
    return "\n".join(f"  {row.ljust(13)} {text}" for row, text in (rows | {p: _version(p) for p in PACKAGES}).items())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def show_versions() -> None:
    """Print the versions of clearhead and of what it runs on: paste them into a report of an error.

    >>> import clearhead as ch
    >>> ch.show_versions()  # doctest: +ELLIPSIS
    clearhead 0.1.0
      kernels       ...
      engines       ...sdpa, triton, tiled, reference
      threads       ...
      machine       ...
      python        3...
      torch         2...
      numpy         ...
      transformers  ...
      triton        ...
      matplotlib    ...
      anywidget     ...

    `kernels`: the instruction set of the compiled kernels that runs on this CPU, or none where clearhead was built
    without a compiler. `engines`: those that there are, in the order in which they are asked. `threads`: those of
    PyTorch, which the kernels use too. The command `clearhead --version` prints the same. Cost: no package is imported.
    """
    import clearhead

    print(f"clearhead {clearhead.__version__}\n{versions()}")
