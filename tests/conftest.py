"""`--kernels DIR`: test the compiled kernels of another build, such as the one that `make sanitize` makes.
`--pictures`: take the pictures of `docs/` anew, from the page as it is.
`--device NAME`: the contract, the fuzz and the modules on another device, such as cuda, and nothing else.
"""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import explored
import other_kernels
import pytest

# A command, which compiles with settings of its own; and wrong uses, for a type checker alone
collect_ignore = ["cuda_check.py", "typed/uses.py"]
# Files with a test or a fixture of 10 seconds or more: while the last tests run, no process waits for one of these.
BEGIN = ("test_fake_cuda.py", "test_private_parts.py", "test_triton.py")
# It reads the types that `make types` keeps, which runs beside the first tests: earlier, both would find the same ones.
END = ("test_typed.py",)
OVER_RANKS = ("distributed", "test_remedies.py")
ON_DEVICES = ("test_contract.py", "test_fuzz.py", "test_devices.py", "/nn/")


def pytest_addoption(parser):
    parser.addoption("--kernels", metavar="DIR", help="a folder with a build of clearhead.engines.native._kernels")
    parser.addoption("--pictures", action="store_true", help="take the pictures of docs anew")
    parser.addoption("--device", metavar="NAME", help="run what is made for any device on this one: cuda, mps, cpu")


def pytest_configure(config):
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a script; children would ignore it too
        signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = config.getoption("--kernels")
    if folder:
        other_kernels.use(folder)
    device = config.getoption("--device")
    if device:
        import torch  # here: the process that only shares out the tests needs no PyTorch

        torch.set_default_device(device)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    explored.mark(items, whole=not any("::" in argument for argument in config.args))
    # those over ranks are side by side, in one worker: each worker that has one imports models of transformers for it
    over_ranks = lambda item: any(part in item.path.parts for part in OVER_RANKS)
    items.sort(key=lambda item: (item.path.name in END, item.path.name not in BEGIN, not over_ranks(item)))
    if "others" not in config.option.markexpr:
        deselect(config, items, [item for item in items if item.get_closest_marker("others")])
    if config.getoption("--device"):
        deselect(config, items, [item for item in items if not any(part in str(item.path) for part in ON_DEVICES)])


def deselect(config, items, left_out):
    """Leave these items out of the run."""
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def inductor_cache():
    """A new one: what was compiled before may call operations as they were before. One for all: it takes seconds.

    The compiler starts no processes of its own: each would import PyTorch to compile one or two small kernels.
    """
    from torch._inductor import config
    from torch._inductor.utils import fresh_cache

    with fresh_cache(), config.patch(compile_threads=1):
        yield


@pytest.fixture(scope="session")
def browser():
    """Chromium, one for all that open pages: Playwright can be started only once at a time."""
    from browser import launched

    with launched() as windows:
        yield windows


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`show(explanation, hash="", init=None, **context)` opens its page from disk."""
    from browser import Opened

    everything: list[Opened] = []

    def show_one(explanation: Any, hash: str = "", init: str | None = None, **context: Any) -> Any:
        path = explanation.write(tmp_path / f"page{len(everything)}.html")
        opened = browser.open(path, Opened, hash, init, **context)
        everything.append(opened)
        return opened

    yield show_one
    for opened in everything:
        browser.close(opened)
