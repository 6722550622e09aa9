"""A device "cuda" without a GPU, which counts what would make the host wait: see `device.cpp`.

It has to be there before PyTorch is imported, so it is used in a process of its own: `import device` first of all.
"""

import collections
import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import traceback
import types
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
TORCH = Path(importlib.util.find_spec("torch").origin).parent
BUILT = HERE.parents[1] / "build" / "fake_cuda"


def why_not() -> str | None:
    """Why there can be no such device here; None where there can."""
    if (TORCH / "lib" / "libtorch_cuda.so").exists():
        return "this PyTorch is built for CUDA, and has a device of that name"
    if not (TORCH / "lib" / "libtorch_cpu.so").exists():
        return "the fake device is built for Linux alone"
    if compiler() is None:
        return "there is no C++ compiler: neither c++, g++ nor clang++"
    return None


def compiler() -> str | None:
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def built() -> Path:
    """The library, built where its source or PyTorch has changed: in about ten seconds."""
    source = HERE / "device.cpp"
    version = (TORCH / "version.py").read_bytes()
    path = BUILT / f"device_{hashlib.sha256(source.read_bytes() + version).hexdigest()[:16]}.so"
    if not path.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        include = [f"-I{TORCH / 'include'}", f"-I{TORCH / 'include/torch/csrc/api/include'}"]
        own = path.with_suffix(f".{os.getpid()}")  # two that build at once write to files of their own
        command = [compiler(), "-O0", "-std=c++20", "-shared", "-fPIC", *include, str(source), "-o", str(own)]
        subprocess.run([*command, f"-L{TORCH / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"], check=True)
        own.rename(path)
    return path


class Counts(NamedTuple):
    """What would make the host wait for a GPU, and how many operations ran."""

    reads: int  # of a value, by .item(), bool() and the like
    downloads: int  # copies to the host
    uploads: int  # copies from the host which it waits for
    operations: int


class Device:
    """The counts of what has run; in `places`, once it is a Counter, who made the host wait, and how often."""

    def __init__(self) -> None:
        for name in ("libc10.so", "libtorch_cpu.so"):
            ctypes.CDLL(str(TORCH / "lib" / name), mode=ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(str(built()), mode=ctypes.RTLD_GLOBAL)

        self.places: collections.Counter[str] | None = None
        self._told = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)(
            self._note
        )  # kept: the library holds its address alone
        self.library.observe(self._told)

    def refuse_float64(self, refuse: bool = True) -> None:
        """As Apple's devices do: a tensor of float64 there is an error, until it is no longer refused."""
        self.library.refuse_float64(int(refuse))

    def names(self, dtypes: bool = False) -> list[str]:
        """The names of the operations, or of the dtypes of tensors, since this was asked before."""
        self.library.names.restype = ctypes.c_char_p
        found: str = self.library.names(int(dtypes)).decode()
        return found.split()

    def _note(self, name: bytes) -> int:
        """Note a place, and say whether it counts: a number that a compiled graph copies is one of the kernel's own,
        for which the graph stands here."""
        every = traceback.extract_stack()
        if name.endswith(b"from the host") and any(frame.filename.startswith("<eval_with_key>") for frame in every):
            return 0
        if self.places is not None:
            frames = [frame for frame in every if "/clearhead/" in frame.filename]
            where = [f"{frame.filename.split('/clearhead/')[1]}:{frame.lineno}" for frame in frames[-3:]]
            self.places[f"{name.decode()}: {' < '.join(reversed(where)) or 'outside of clearhead'}"] += 1
        return 1

    def counts(self) -> Counts:
        found = []
        for name in Counts._fields:
            function = getattr(self.library, f"count_of_{name}")
            function.restype = ctypes.c_long
            found.append(function())
        return Counts(*found)


OLD = types.SimpleNamespace(major=6, minor=0)  # too old for Triton


def there(properties: types.SimpleNamespace = OLD) -> Device:
    """The device; `torch.cuda` says that it is there, and has one state of random numbers that nothing changes."""
    device = Device()
    import torch
    import torch.cuda.random as random

    class Nothing:
        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    cuda = torch.cuda
    answers = {
        **dict.fromkeys(("is_available", "is_initialized"), True),
        **{
            "device_count": 1,
            "current_device": 0,
            "get_device_properties": properties,
        },
        "is_current_stream_capturing": False,
        **dict.fromkeys(("_lazy_init", "synchronize", "set_device", "manual_seed", "manual_seed_all"), None),
    }
    for name, answer in answers.items():
        setattr(cuda, name, lambda *_, answer=answer: answer)
    state = torch.zeros(16, dtype=torch.uint8, device="cpu")
    for module in (cuda, random):
        module.get_rng_state, module.set_rng_state = lambda *_: state, lambda *_: None
    random._lazy_init, cuda.device = lambda: None, Nothing
    return device
