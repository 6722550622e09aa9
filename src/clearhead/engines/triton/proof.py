"""The proof before the first answer: small problems against `tiled`, on the device and in the dtype of the call.

No kernel here was ever run on a device when it was written: each was compiled and interpreted. So a device's first use
compares outputs, gradients and statistics of every score, once for a device, driver, versions and these sources; the
result is kept beside the kernels that Triton has compiled. Where something differs, the engine objects in these words.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import triton
from torch import Tensor

from clearhead.base.shapes import Sizes
from clearhead.base.tracing import without_autocast
from clearhead.biases.base import Added
from clearhead.engines.base import Engine
from clearhead.engines.tiled.engine import PLAIN
from clearhead.masks.base import Spans
from clearhead.problem.partial import Rows
from clearhead.problem.problem import Problem
from clearhead.problem.summary import Found, Summary
from clearhead.problem.visible import visible
from clearhead.scores.base import Pairwise

LENGTH, KEYS, WIDTH = 70, 75, 10  # more than one block of either side, and none of them whole
DRIVER = Path("/proc/driver/nvidia/version")  # Linux says there which driver is loaded
_found: dict[tuple[torch.device, torch.dtype, str], list[str]] = {}


def objections(engine: Engine, device: torch.device, dtype: torch.dtype) -> list[str]:
    """What differed on this device in this dtype; empty where nothing did."""
    key = device, dtype, torch.get_float32_matmul_precision()
    if key not in _found:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return ["it was not proved on this device yet, and a CUDA graph is captured: call once before the capture"]
        file = _file(*key)
        known = _read(file)
        if known is None:
            known = differences(engine, device, dtype)
            _write(file, known)
        _found[key] = known
    return _found[key]


def differences(engine: Engine, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Compare the engine with `tiled`; one line for each result that differs."""
    found = []
    with torch.inference_mode(False), torch.no_grad(), without_autocast(device):
        for name, problem in _problems(device, dtype):
            try:
                found += [f"{name}: {line}" for line in _compared(engine, problem, dtype)]
            except Exception as error:  # of the compiler or the driver, of any kind
                found.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
    return [f"on {_title(device)} it differs from tiled in {line}" for line in found]


def _compared(engine: Engine, problem: Problem, dtype: torch.dtype) -> Iterator[str]:
    got, want = (one.forward(problem, rows=True) for one in (engine, PLAIN))
    yield from _far("output", got.output, want.output, dtype)
    assert want.maximum is not None and want.log_sum is not None
    assert got.maximum is not None and got.log_sum is not None
    for name in ("maximum", "log_sum"):
        yield from _far(name, getattr(got, name), getattr(want, name), dtype)
    if problem.sizes.queries == 1:  # decoding has no kernel of its own for gradients
        return
    grad = _numbers(want.output.shape, problem.sizes.device, 9)
    wanted = (True, True, True, *(t is not None for t in (_weight(problem), *_added(problem))), False)
    each = []
    for one, rows in ((engine, got), (PLAIN, want)):
        assert rows.maximum is not None and rows.log_sum is not None
        known = Rows(rows.maximum, rows.log_sum, (grad * rows.output).sum(-1))
        each.append(one.backward(problem, known, grad, wanted))
    for name, mine, theirs in zip(each[0]._fields, *each, strict=True):
        yield from _far(f"the gradient of {name}", mine, theirs, dtype)
    if problem.sinks is None:
        asked = problem._replace(value=None, seed=None, dropout_p=0.0)
        statistics: list[Found] = [one.summarise(asked, _summary(problem)) for one in (engine, PLAIN)]
        for name, mine, theirs in zip(Found._fields[:-1], *statistics, strict=False):
            yield from _far(name, mine, theirs, dtype)


def _far(name: str, got: Tensor | None, want: Tensor | None, dtype: torch.dtype) -> Iterator[str]:
    """A line where the two are further apart than their roundings explain."""
    if got is None or want is None or not want.is_floating_point():
        return
    got, want = got.double(), want.double()
    same = got.isfinite() == want.isfinite()
    finite = got.isfinite() & want.isfinite()
    off = (got - want)[finite].norm() / want[finite].norm().clamp(min=1e-30)
    allowed = 4 * torch.finfo(dtype).eps
    if dtype is torch.float32:
        allowed = 5e-5 if torch.get_float32_matmul_precision() == "highest" else 1e-2
    if not bool(same.all()) or not float(off) <= allowed:
        yield f"{name}, by {float(off):.2g} of its size"


def _problems(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Problem]]:
    """A problem of each score with all that kernels may have code for, one with little of it, and one query."""
    for phi in ("mul", "tanh_add", "sq_diff"):
        for kind, queries in (("everything", LENGTH), ("statistics", LENGTH), ("one query", 1)):
            sizes = Sizes(2, 2, queries, KEYS if queries > 1 else 1200, device)
            query, key, value = (
                _numbers((2, heads, length, WIDTH), device, seed).to(dtype)
                for seed, (heads, length) in enumerate(((2, queries), (1, sizes.keys), (1, sizes.keys)))
            )
            weight = None if phi == "mul" else _numbers((WIDTH,), device, 3).abs().to(dtype)
            scale = {"mul": WIDTH**-0.5, "tanh_add": 0.5, "sq_diff": -0.05}[phi]
            scores = Pairwise(phi, query, key, weight, scale, None)
            problem = Problem(scores, value, sizes)
            if kind != "one query":
                problem = problem._replace(visible=visible(_gaps(sizes), sizes))
            if kind == "everything":
                dense, along = _numbers((1, 2, 1, KEYS), device, 4), _numbers((1, 2, queries + KEYS - 1), device, 5)
                seed = torch.tensor(1234567, dtype=torch.int64, device=device)
                problem = problem._replace(scores=scores._replace(softcap=3.0), bias=Added(dense, along))
                problem = problem._replace(sinks=_numbers((2,), device, 6), dropout_p=0.25, seed=seed)
            yield f"{phi}, {kind}", problem


def _gaps(sizes: Sizes) -> Spans:
    """The first keys and a window for each query, nothing for the last one."""
    row = torch.arange(sizes.queries, device=sizes.device).view(1, 1, -1)
    stop = torch.where(row == sizes.queries - 1, 0, (row + 40).clamp(max=sizes.keys))
    low = torch.minimum(torch.full_like(row, 5), stop)
    high = torch.minimum(torch.maximum(row - 9, low), stop)
    return Spans(torch.zeros_like(row), stop, gaps=(low.unsqueeze(-1), high.unsqueeze(-1)))


def _summary(problem: Problem) -> Summary:
    sizes = problem.sizes
    position = torch.arange(sizes.queries, device=sizes.device).expand(sizes.batch, 1, -1)
    cell = (32, 16)
    return Summary(rows=True, entropy=True, distance=position, best=True, top=3, received=True, mean=cell, peak=cell)


def _numbers(shape: tuple[int, ...], device: torch.device, seed: int) -> Tensor:
    """Normal numbers that leave torch's generators as they are."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device)


def _weight(problem: Problem) -> Tensor | None:
    return None if problem.lowered is None else problem.lowered.weight


def _added(problem: Problem) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if problem.bias is None else (problem.bias.dense, problem.bias.relative)


def _title(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _file(device: torch.device, dtype: torch.dtype, precision: str) -> Path:
    """Where the result is kept, by all that it depends on."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    driver = DRIVER.read_text(encoding="utf-8") if device.type == "cuda" and DRIVER.exists() else None
    ability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    about = (_title(device), ability, driver, torch.__version__, triton.__version__, str(dtype), precision)
    digest.update(repr(about).encode())
    return Path(triton.knobs.cache.dir) / f"clearhead-{digest.hexdigest()[:32]}.json"


def _read(file: Path) -> list[str] | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, list) and all(isinstance(line, str) for line in found) else None


def _write(file: Path, lines: list[str]) -> None:
    """Whole or not at all; a folder that cannot be written to costs a proof in each process."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as to:
            json.dump(lines, to)
        os.replace(name, file)
    except OSError:
        return
