"""Calls of the compiled kernels: a problem as the kernels read it, with pointers to the operands in place.

The kernels are in csrc/, and their mathematics in docs/maths/. A call releases the GIL, so other Python threads run on.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from clearhead.base.shapes import Sizes, part
from clearhead.base.torch_state.mode import assume_constant
from clearhead.engines.native.blocks import EVERY, blocks_of, rows_at_once
from clearhead.engines.tiled.tiles import new_sum
from clearhead.problem.packing import Operands, operands
from clearhead.problem.partial import Partial, Rows
from clearhead.problem.problem import Problem
from clearhead.problem.region import Region
from clearhead.problem.regions import cut
from clearhead.problem.summary import KEYS, Found, Sent, Summary
from clearhead.scores.base import Pairwise
from clearhead.scores.pair_functions import NUMBERS, number_phis

MODULE = "clearhead.engines.native._kernels"
DTYPES = dict.fromkeys(KEYS, torch.int64)  # the dtypes of statistics that are not float32
CPU = torch.device("cpu")  # faster than the string "cpu" in each call
READ = (torch.float32, torch.bfloat16, torch.float16)  # the dtypes of operands; the kernels compute in float32

# The module by its name, and the kernels by their instruction sets. functools.cache would make torch.compile warn.
_known: dict[str | None, Any] = {}


def _new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Allocate memory on the CPU for a kernel to fill, whatever the default dtype and device are."""
    return torch.empty(*shape, dtype=dtype, device=CPU)  # separate sizes are faster than a tuple


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32, device=CPU)


def _side_by_side(tensor: Tensor) -> bool:
    """Return whether the columns are contiguous; the first test is the fastest, and true for most tensors."""
    return tensor.is_contiguous() or tensor.stride(-1) == 1 or tensor.shape[-1] <= 1


def _gradient_of(tensor: Tensor) -> Tensor:
    """Allocate memory for a gradient, in the layout of the tensor if its columns are contiguous, else contiguous."""
    new = torch.empty_like(tensor, dtype=torch.float32)
    return new if _side_by_side(new) else _new(*tensor.shape)


def kernels() -> Any:
    """Return the extension module; None if this installation has none."""
    if MODULE not in _known:
        try:
            _known[MODULE] = importlib.import_module(MODULE)
        except ImportError:
            _known[MODULE] = None
        else:
            number_phis(_known[MODULE].phis(), MODULE)
    return _known[MODULE]


def warn_without_kernels() -> None:
    """Warn, once in a process, if this installation should have kernels and has none; Windows wheels have none."""
    if sys.platform != "win32" and importlib.util.find_spec(MODULE) is None:
        warnings.warn(
            "clearhead was installed without its kernels: pip found no C++ compiler with OpenMP. PyTorch's kernels "
            "and operations run in place of the engine 'native'.\nFor the kernels install g++ or clang++, then "
            "the sources again: pip install --force-reinstall --no-deps --no-cache-dir .\n"
            "To silence this: warnings.filterwarnings('ignore', message='clearhead was installed without').",
            RuntimeWarning,
            stacklevel=3,
        )


@assume_constant
def available() -> bool:
    """Return whether this installation has the kernels; compiled code treats the answer as a constant."""
    return kernels() is not None


def chosen(instructions: str | None = None) -> Any:
    """Return the kernels for the best instruction set of this CPU, or for a named one."""
    if instructions not in _known:
        module = kernels()
        _known[instructions] = module.Cpu(instructions or module.available()[0])
    return _known[instructions]


def read_by_kernels(problem: Problem) -> Any:
    """Return a lowered problem, or a part of one, as the kernels read it.

    The result keeps the tensors alive that it points to.
    """
    lowered, bias, value, module = problem.scores, problem.bias, problem.value, kernels()
    assert isinstance(lowered, Pairwise)
    edges: tuple[Tensor | None, ...] = (None, None, None, None)
    dense = relative = queries = keys = None
    blocks = blocks_of(problem, module)
    if problem.visible is not None:
        spans = problem.visible.spans
        edges = spans.start, spans.stop, *(spans.gaps or (None, None))
    if bias is not None:
        dense = None if bias.dense is None else _operand(bias.dense)
        relative = None if bias.relative is None else _rows(_float(bias.relative))
    if problem.poison is not None:
        queries, keys = problem.poison[0][..., 0], problem.poison[1][:, :, 0]
    seed = first = 0
    if problem.seed is not None:
        # the hash of dropout counts sequences, heads and keys from 0: with dropout only the queries may be a part
        seed, first = int(problem.seed) & (2**64 - 1), 0 if problem.origin is None else problem.origin[2].start
    numbers = NUMBERS[lowered.phi], lowered.scale, lowered.softcap or 0.0, torch.get_num_threads()
    inputs = _rows(lowered.query), _rows(lowered.key), None if value is None else _rows(value)
    weight = None if lowered.weight is None else _float(lowered.weight)
    sinks = None if problem.sinks is None else _float(problem.sinks)
    added = dense, relative, queries, keys
    return module.Problem(*numbers, *inputs, weight, sinks, *edges, blocks, *added, problem.dropout_p, seed, first)


def _float(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 whose memory holds its numbers: a lazy negation is carried out."""
    if tensor.dtype is torch.float32 and not tensor.is_neg():
        return tensor
    return tensor.resolve_neg().to(torch.float32)


def _operand(tensor: Tensor) -> Tensor:
    """Return a tensor of a dtype that the kernels read: the same object, unless it is a lazy negation."""
    if tensor.dtype not in READ:
        return _float(tensor)
    return tensor.resolve_neg() if tensor.is_neg() else tensor  # the check is faster than the call


def _rows(tensor: Tensor) -> Tensor:
    """Return an operand whose rows are contiguous."""
    if tensor.dtype in READ and (tensor.is_contiguous() or tensor.stride(-1) == 1) and not tensor.is_neg():
        return tensor  # the fast path: most operands are like this
    tensor = _operand(tensor)
    return tensor if _side_by_side(tensor) else tensor.contiguous()


def bands(problem: Problem) -> Iterator[slice]:
    """Yield all queries at once; if their mask's map of blocks would be large, as many queries as the map allows."""
    rows, queries = rows_at_once(problem), problem.sizes.queries
    if rows >= queries:
        yield EVERY
        return
    for row in range(0, queries, rows):
        yield slice(row, min(row + rows, queries))


def forward(problem: Problem, rows: bool, few: bool) -> Partial:
    """Compute the output of a lowered problem that has a value and keys.

    `few`: do not pack the keys (csrc/decode.h).
    """
    value = problem.value
    assert value is not None
    batch, heads, queries, width = *problem.sizes[:3], value.shape[-1]
    # SDPA's layout, with adjacent heads: modules merge the heads without a copy
    strides = (queries * heads * width, width, heads * width, 1)
    output = torch.empty_strided((batch, heads, queries, width), strides, dtype=torch.float32, device=CPU)
    maximum, log_sum = (_new(batch, heads, queries), _new(batch, heads, queries)) if rows else (None, None)
    if one_pass(problem):
        finite = chosen().forward(read_by_kernels(problem), few, output, maximum, log_sum)
        return Partial(output, maximum, log_sum, finite)
    finite = True
    for band in bands(problem):
        found = [None if t is None else t[:, :, band] for t in (output, maximum, log_sum)]
        finite &= chosen().forward(read_by_kernels(cut(problem, Region(queries=band))), few, *found)
    return Partial(output, maximum, log_sum, finite)


def merge(problem: Problem, into: Partial) -> None:
    """Merge the result of a problem without sinks into the result over other keys, `into`."""
    for band in bands(problem):
        chosen().merge(read_by_kernels(cut(problem, Region(queries=band))), *into.at(band)[:3])


def gradients(
    problem: Problem, rows: Rows, grad: Tensor | None, wanted: tuple[bool, ...], sent: Sent | None = None
) -> Operands:
    """Compute the gradients of the operands, without the sinks; None where not wanted.

    Without a value there is no `grad`.
    """
    query, key, value, weight, dense, relative, _ = operands(problem)
    several = not one_pass(problem)
    of_inputs = (None if t is None else _gradient_of(t) for t in (query, key, value))
    learnt = (new_sum(t, want, torch.float32) for t, want in zip((weight, dense, relative), wanted[3:], strict=False))
    sums = Operands(*(t.zero_() if several and t is not None else t for t in of_inputs), *learnt)
    write_gradients(problem, sums, rows, grad, sent, adds=several)
    return Operands(*(t if want else None for t, want in zip(sums, wanted, strict=True)))


def write_gradients(
    problem: Problem, sums: Operands, rows: Rows, grad: Tensor | None, sent: Sent | None, adds: bool
) -> None:
    """Write the gradients of a problem's bands to the sums of query, key and value, or add them (`adds`)."""
    query, key, value, weight, dense, relative, _ = sums
    known = None if grad is None else _rows(grad), *map(_float, rows)
    assert query is not None
    if not adds:  # there is one band
        chosen().backward(read_by_kernels(problem), *known, *sums[:6], _sent(sent, problem.sizes), False)
        return
    assert sent is None
    for band in bands(problem):
        queries = range(problem.sizes.queries)[band]
        along = slice(
            problem.sizes.queries - queries.stop, None if relative is None else relative.shape[-1] - queries.start
        )
        # a kernel adds to whole arrays of weight and bias, so add a band's part of an array here
        of_band = None if dense is None else part(dense, EVERY, EVERY, band)
        learnt = weight, of_band, None if relative is None else relative[..., along]
        own = [new_sum(total, True, torch.float32) for total in learnt]
        given = (None if t is None else t[:, :, band] for t in known)
        read = read_by_kernels(cut(problem, Region(queries=band)))
        chosen().backward(read, *given, query[:, :, band], key, value, *own, None, True)
        for total, mine in zip(learnt, own, strict=True):
            if total is not None and mine is not None:
                total.add_(mine)


def one_pass(problem: Problem) -> bool:
    """Return whether one call of a kernel covers all queries."""
    return rows_at_once(problem) >= problem.sizes.queries


def summarise(problem: Problem, summary: Summary) -> Found:
    """Compute the statistics of a guarded problem in one pass."""
    sizes = problem.sizes
    if not summary.output:
        problem = problem._replace(value=None)
    cell = summary.mean or summary.peak or (max(sizes.queries, 1), max(sizes.keys, 1))
    arrays = {
        name: _zeros(*shape) if name in ("mean", "peak") else _new(*shape, dtype=DTYPES.get(name, torch.float32))
        for name, shape in summary.shapes(problem).items()
    }
    found = Found(**arrays)  # type: ignore[arg-type]
    read = read_by_kernels(problem)
    held = {"position": _per_query(summary.distance, sizes), "factors": _per_query(summary.factors, sizes)}
    wanted = kernels().Summary(_present(held | arrays), summary.top, *cell)
    return found._replace(finite=chosen().summarise(read, found.output, found.maximum, found.log_sum, wanted))


def contributions(
    problem: Problem, rows: Rows, grad: Tensor | None, sent: Sent | None, by_key: bool, positive: bool
) -> Tensor:
    """Compute Σ_j of w_ij Ṗ_ij, or Σ_i (`by_key`), or the sum of its positive products."""
    sizes = problem.sizes
    found = _new(sizes.batch, sizes.heads, sizes.keys if by_key else sizes.queries)
    known = None if grad is None else _rows(grad), _float(rows.maximum), _float(rows.log_sum)
    sums = (None, found) if by_key else (found, None)
    chosen().contributions(read_by_kernels(problem), *known, _sent(sent, sizes), *sums, positive)
    return found


def _sent(sent: Sent | None, sizes: Sizes) -> Any:
    """Return the gradients of statistics as the kernels read them.

    The result keeps the tensors alive that it points to.
    """
    if sent is None:
        return None
    factors, position = _per_query(sent.factors, sizes), _per_query(sent.position, sizes)
    arrays = sent._asdict() | {"position": position, "factors": factors}
    floats = {n: _rows(_float(t)) if t.is_floating_point() else t for n, t in _present(arrays).items()}
    of_all_queries = max(sizes.queries, 1)  # the rows of a cell if there is no map
    cell = sent.cell if sent.mean is not None else (of_all_queries, 1)
    return kernels().Sent(floats, 0 if sent.indices is None else sent.indices.shape[-1], *cell)


def _per_query(tensor: Tensor | None, sizes: Sizes) -> Tensor | None:
    if tensor is None:
        return None
    wide = tensor if tensor.dtype == torch.int64 else _float(tensor)
    return wide.expand(*sizes.shape[:3])


def _present(arrays: dict[str, Any]) -> dict[str, Tensor]:
    return {name: t for name, t in arrays.items() if isinstance(t, Tensor)}


def scores(problem: Problem) -> Tensor:
    """Compute the scores of a guarded problem or a part of one, with the bias, and −∞ at masked pairs."""
    tile = _new(*problem.sizes.shape)
    chosen().scores(read_by_kernels(problem._replace(value=None)), tile)
    return tile


def forward_bytes(problem: Problem, few: bool) -> int:
    """Return the bytes of a forward pass's work memory; `few` as in `forward`."""
    if 0 in problem.sizes.shape or problem.value is None:
        return 0
    return int(chosen().forward_bytes(read_by_kernels(cut(problem, Region(queries=next(bands(problem))))), few))
