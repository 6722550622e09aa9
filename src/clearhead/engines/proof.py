"""The proof before the first use: small problems compared with `tiled`, on the device and in the dtype.

The GPU kernels are compiled, interpreted and traced in tests, but not run on every device. So an engine that uses them
compares outputs, gradients and statistics of a few small problems at the first use of a device: once for an engine,
device, driver, versions and sources, and for each dtype and each kind of call, such as "mul, rows up to 64", because
kernels of another width have other tiles. The result is cached beside Triton's compiled kernels. If a result differs,
it becomes an objection of the engine.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from clearhead.base.shapes import Sizes
from clearhead.base.torch_state.contexts import without_autocast
from clearhead.biases.base import Added
from clearhead.engines.base import Engine, by_autograd
from clearhead.engines.tiled.engine import PLAIN
from clearhead.masks.base import Spans
from clearhead.problem.packing import Operands, operands, with_operands
from clearhead.problem.partial import Partial, Rows, log_sum_exp
from clearhead.problem.problem import Problem
from clearhead.problem.summary import Found, Summary
from clearhead.problem.visible import visible
from clearhead.scores.base import Pairwise

Problems = Callable[[torch.device, torch.dtype], Iterator[tuple[str, Problem]]]  # yields names and problems

DRIVER = Path("/proc/driver/nvidia/version")  # the loaded driver, on Linux
_found: dict[tuple[str, torch.device, torch.dtype, str, str], list[str]] = {}


def objections(engine: Engine, device: torch.device, dtype: torch.dtype, kind: str, problems: Problems) -> list[str]:
    """Return what differs on this device in this dtype, in the `problems` of this kind; empty if nothing does."""
    about = device, dtype, kind, torch.get_float32_matmul_precision()
    key = (engine.name, *about)
    if key not in _found:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return ["it was not proved on this device yet, and a CUDA graph is captured: call once before the capture"]
        file = _file(engine, *about)
        known = _read(file)
        if known is None:
            known = differences(engine, device, dtype, problems)
            _write(file, known)
        _found[key] = known
    return _found[key]


def differences(engine: Engine, device: torch.device, dtype: torch.dtype, problems: Problems) -> list[str]:
    """Compare the engine with `tiled`; return one line for each result that differs."""
    found = []
    with torch.inference_mode(False), torch.no_grad(), without_autocast(device):
        for name, problem in problems(device, dtype):
            try:
                found += [f"{name}: {line}" for line in _compared(engine, problem, dtype)]
            except Exception as error:  # the compiler and the driver may raise any error
                found.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
    return [f"on {_title(device)} it differs from tiled in {line}" for line in found]


def _compared(engine: Engine, problem: Problem, dtype: torch.dtype) -> Iterator[str]:
    got, want = (one.forward(problem, rows=True) for one in (engine, PLAIN))
    followed = engine.transparent(problem)  # then no kernel reads maximum and log_sum apart: only their sum matters
    yield from _far("output", got.output, want.output, dtype)
    assert want.maximum is not None and want.log_sum is not None
    assert got.maximum is not None and got.log_sum is not None
    mine, theirs = log_sum_exp(got.maximum, got.log_sum), log_sum_exp(want.maximum, want.log_sum)
    yield from _far("log-sum-exp", mine, theirs, dtype)
    for name in () if followed else ("maximum", "log_sum"):
        yield from _far(name, getattr(got, name), getattr(want, name), dtype)
    if problem.sizes.queries == 1:  # decoding has no other kernels for gradients
        return
    grad = numbers(want.output.shape, problem.sizes.device, 9)
    wanted = (*(t is not None for t in operands(problem)[:-1]), False)  # the rows determine the gradient of the sinks
    each = [_gradients(one, problem, rows, grad, wanted) for one, rows in ((engine, got), (PLAIN, want))]
    for name, mine, theirs in zip(Operands._fields, *each, strict=True):
        yield from _far(f"the gradient of {name}", mine, theirs, dtype)
    asked, summary = problem._replace(value=None, seed=None, dropout_p=0.0), _summary(problem)
    if problem.sinks is None and engine.fuses(asked, summary):
        statistics: list[Found] = [one.summarise(asked, summary) for one in (engine, PLAIN)]
        for name, mine, theirs in zip(Found._fields[:-1], *statistics, strict=False):
            yield from _far(name, mine, theirs, dtype)


def _gradients(
    engine: Engine, problem: Problem, found: Partial, grad: Tensor, wanted: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    if engine.transparent(problem):
        leaves = [
            t if t is None else t.detach().requires_grad_(w) for t, w in zip(operands(problem), wanted, strict=True)
        ]
        return by_autograd(engine, with_operands(problem, leaves), wanted, grad, create_graph=False)
    assert found.maximum is not None and found.log_sum is not None
    rows = Rows(found.maximum, found.log_sum, (grad * found.output).sum(-1))
    return engine.backward(problem, rows, grad, wanted)


def _far(name: str, got: Tensor | None, want: Tensor | None, dtype: torch.dtype) -> Iterator[str]:
    """Yield a line if two results differ by more than their rounding."""
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


def draw_operands(
    queries: int, keys: int, width: int, values: int, device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    """Draw query, key and value of two sequences, with two heads that share one key head."""
    shapes = (2, 2, queries, width), (2, 1, keys, width), (2, 1, keys, values)
    return [numbers(shape, device, seed).to(dtype) for seed, shape in enumerate(shapes)]


def make_example(scores: Pairwise, value: Tensor, everything: bool) -> Problem:
    """Make a problem over these operands, with a mask if there are several queries.

    With `everything` it also has a softcap, a bias and sinks.
    """
    batch, heads, queries, keys = *scores.query.shape[:3], scores.key.shape[2]
    sizes = Sizes(batch, heads, queries, keys, value.device)
    mask = visible(_gaps(sizes), sizes) if queries > 1 else None
    if not everything:
        return Problem(scores, value, sizes, mask)
    shapes = (1, heads, 1, keys), (1, heads, queries + keys - 1), (heads,)
    dense, along, sinks = (numbers(shape, value.device, seed) for seed, shape in enumerate(shapes, 4))
    return Problem(scores._replace(softcap=3.0), value, sizes, mask, Added(dense, along), sinks)


def _gaps(sizes: Sizes) -> Spans:
    """Return spans of the first keys and a window for each query; the last query is fully masked."""
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


def numbers(shape: tuple[int, ...], device: torch.device, seed: int) -> Tensor:
    """Draw normal numbers, without a change of PyTorch's global generators."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device)


def _title(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _file(engine: Engine, device: torch.device, dtype: torch.dtype, kind: str, precision: str) -> Path:
    """Return the path of the result, in Triton's cache, by all that the result depends on."""
    import triton

    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted(Path(inspect.getfile(type(engine))).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    driver = DRIVER.read_text(encoding="utf-8") if device.type == "cuda" and DRIVER.exists() else None
    ability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    about = (_title(device), ability, driver, torch.__version__, triton.__version__, str(dtype), kind, precision)
    digest.update(repr(about).encode())
    return Path(triton.knobs.cache.dir) / f"clearhead-{digest.hexdigest()[:32]}.json"


def _read(file: Path) -> list[str] | None:
    try:
        return list(map(str, json.loads(file.read_text(encoding="utf-8"))))
    except (OSError, ValueError, TypeError):
        return None


def _write(file: Path, lines: list[str]) -> None:
    """Write the file as a whole or not at all; if the folder is not writable, each process runs the proof."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as to:
            json.dump(lines, to)
        os.replace(name, file)
    except OSError:
        return
