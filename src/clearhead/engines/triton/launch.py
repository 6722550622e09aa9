"""Calls of the kernels: their inputs, results and numbers of programs. No function here blocks on the device."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from clearhead.base.errors import UnsupportedError
from clearhead.base.torch_state.mode import is_capturing_graph
from clearhead.base.torch_state.tensor_kind import has_no_values
from clearhead.engines.tiled.backward import add_along
from clearhead.engines.tiled.tiles import new_sum
from clearhead.engines.triton import kernel_inputs
from clearhead.engines.triton.blocks import PROGRAMS, SHARED, SPLIT, Blocks, blocks_for, power
from clearhead.engines.triton.given import Given, Parts, Ranges, Rows, Side, View, view, viewed
from clearhead.engines.triton.groups import grouped
from clearhead.engines.triton.kernels import backward as back
from clearhead.engines.triton.kernels import decode, forward, lay, poison, summarise
from clearhead.engines.triton.ranges import ranges
from clearhead.problem import partial as of_queries
from clearhead.problem.packing import Operands, operands
from clearhead.problem.partial import Partial
from clearhead.problem.problem import Problem
from clearhead.problem.region import Region
from clearhead.problem.summary import KEYS, Found, Sent, Summary
from clearhead.scores.pair_functions import NUMBERS, PHIS

INTERPRETER, NVIDIA, AMD = 0, 1, 2
CHECKED = 64  # rows that a program searches for numbers that are not finite
BAND = 2**24  # numbers of a band of Ṡ, from which the gradient of a bias is summed


@cache
def backend() -> int:
    """Return the target for which kernels are compiled here."""
    if triton.knobs.runtime.interpret:
        return INTERPRETER
    return AMD if torch.version.hip else NVIDIA


def start(kernel: Any, programs: tuple[int, ...], *arguments: Any, warps: int = 4, **constants: Any) -> None:
    """Start a kernel, whose first argument is a tensor, or tuples that begin with one.

    It is not named `launch`, so that a check can replace it by a function that only compiles. An empty part of a
    problem has no programs, and a device starts none. For tensors without values nothing is computed.
    """
    first = arguments[0]
    while isinstance(first, tuple):
        first = first[0]
    if 0 in programs or has_no_values(first):
        return
    if not is_capturing_graph():
        kernel[programs](*arguments, num_warps=warps, num_stages=1, **constants)
        return
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_cache_hook = _refuse_to_compile
        kernel[programs](*arguments, num_warps=warps, num_stages=1, **constants)


def _refuse_to_compile(*_: Any, fn: Any, **__: Any) -> bool:
    """Raise if Triton is about to compile while a CUDA graph is captured: a driver may fail to load the code."""
    if is_capturing_graph():
        raise UnsupportedError(
            f"the kernel {fn.name!r} was not compiled yet for a call of this kind (dtypes, widths, lengths, mask), and "
            "a CUDA graph is captured: make the same call once before the capture, or pass engine='tiled'."
        )
    return False


def on(tensor: Tensor) -> AbstractContextManager[Any]:
    """Set the current device, on which Triton starts kernels, to that of the tensor."""
    return nullcontext() if not tensor.is_cuda or has_no_values(tensor) else torch.cuda.device(tensor.device)


def _new(tensor: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return tensor.new_empty(shape, dtype=dtype)


def given(problem: Problem, blocks: Blocks, top: int = 0) -> Given:
    """Return a problem in normal form, whose dot product has no weight, as the kernels read it."""
    lowered, value = problem.lowered, problem.value
    assert lowered is not None
    batch, heads, queries, keys = problem.sizes.shape
    width = lowered.query.shape[-1]
    wide = -(-width // 4) * 4
    raised = PHIS[lowered.phi].triton.exponentials
    query, key = _sides(problem)
    weight = sums = None
    if lowered.phi != "mul":
        query, key = (_laid(side, width, wide, size, raised) for side, size in ((query, blocks[0]), (key, blocks[1])))
        weight, sums = _new(lowered.query, wide), _new(lowered.query, 2) if raised else None
        own = None if lowered.weight is None else lowered.weight.contiguous()
        start(lay.weigh_kernel, (1,), weight, sums, own, width, wide, WIDTH=min(power(wide), 256))
    tiles = ranges(problem, blocks.queries, blocks.keys)
    added = problem.bias
    # float16 would underflow for such small terms, and sums of its values do not overflow
    tiny = value is None or value.dtype is torch.float16
    shift = 0 if tiny else math.ceil(math.log2(2 * max(1, keys) / (1 - problem.dropout_p)))
    values = 0 if value is None else value.shape[-1]
    parts = 1 if tiles is None else tiles.shape[3]
    widths = power(width), power(values or 1), power(top or 1, 1)
    products = 3 if torch.get_float32_matmul_precision() == "highest" else 1
    constants = parts, *widths, products, backend()
    shape = kernel_inputs.make_shape(NUMBERS[lowered.phi], blocks.queries, blocks.keys, *constants)
    return Given(
        query,
        key,
        view(value),
        weight,
        sums,
        kernel_inputs.read_spans(problem),
        None if tiles is None else Ranges(viewed(tiles, batch, heads)),
        None if added is None else view(added.dense, batch, heads, queries, keys),
        None if added is None or added.relative is None else view(added.relative, batch, heads, queries + keys - 1),
        problem.sinks,
        0 if problem.sinks is None else problem.sinks.stride(0),
        kernel_inputs.read_dropout(problem),
        problem.groups,
        width,
        wide,
        values,
        lowered.scale,
        lowered.softcap,
        float(shift),
        2.0**shift,
        shape,
    )


def _sides(problem: Problem) -> tuple[Side, Side]:
    """Return queries and keys with their non-finite rows: see kernels/poison.py and `problem.guard`."""
    lowered, value, masked = problem.lowered, problem.value, problem.visible is not None
    assert lowered is not None
    query, key = (Side(viewed(t), t.shape[2], t.shape[1]) for t in (lowered.query, lowered.key))
    if problem.poison is not None:  # the problem is guarded: its poison lists the non-finite rows
        of_query, of_key = problem.poison[0][..., 0], problem.poison[1][:, :, 0]
        return query._replace(poison=viewed(of_query)), key._replace(poison=viewed(of_key))
    batch, width = lowered.query.shape[0], lowered.query.shape[-1]
    rows = [batch * side.heads * side.length for side in (query, key)]
    found = lowered.query.new_zeros(rows[0] + rows[1] + 1, dtype=torch.float32)
    odd = found.narrow(0, rows[0] + rows[1], 1)
    query = query._replace(poison=View(found, query.heads * query.length, query.length, 1), odd=odd)
    of_queries = batch * query.heads * -(-query.length // CHECKED)
    of_keys = 0
    if masked:
        key_poison = View(found.narrow(0, rows[0], rows[1]), key.heads * key.length, key.length, 1)
        key = key._replace(poison=key_poison, odd=odd)
        of_keys = batch * key.heads * -(-key.length // CHECKED)
    start(
        poison.poison_kernel,
        (of_queries + of_keys,),
        query,
        key,
        view(value) if masked else None,
        kernel_inputs.read_spans(problem) if PHIS[lowered.phi].triton.overflow else None,
        width,
        0 if value is None else value.shape[-1],
        of_queries,
        WIDTH=64,
        BLOCK=CHECKED,
    )
    return query, key


def _laid(side: Side, width: int, wide: int, block: int, raised: bool) -> Side:
    """Return queries or keys in the layout by dimension, for a φ that is no matrix product."""
    tensor, blocks = side.view.at, -(-side.length // block)
    rows = tensor.shape[0] * side.heads
    reach = _new(tensor, rows, blocks) if raised else None
    laid = _new(tensor, rows, wide, blocks * block)
    side = side._replace(laid=laid, reach=reach, padded=blocks * block, blocks=blocks)
    options = {"RAISE": raised, "WIDTH": min(power(wide), 64), "BLOCK": block}
    start(lay.lay_kernel, (rows * blocks,), side, width, wide, **options)
    return side


def _blocks(problem: Problem, pass_: str) -> Blocks:
    lowered, value = problem.lowered, problem.value
    assert lowered is not None
    width, values = lowered.query.shape[-1], 0 if value is None else value.shape[-1]
    size = max(t.element_size() for t in (lowered.query, value) if t is not None)
    return blocks_for(lowered.phi, pass_, width, values, size, problem.sizes.queries, problem.plain)


def _programs(problem: Problem, block: int) -> int:
    return problem.sizes.batch * problem.sizes.heads * -(-problem.sizes.queries // block)


def output(problem: Problem, rows: bool) -> Partial:
    """Compute the output of a problem that has a value, and its rows."""
    value, lead = problem.value, problem.sizes.shape[:3]
    assert value is not None
    maximum, log_sum = (_new(value, *lead), _new(value, *lead)) if rows else (None, None)
    found = Parts(_new(value, *lead, value.shape[-1]), maximum, log_sum)
    folded = grouped(problem)
    blocks = _blocks(folded, "forward")
    shares = _shares(folded, blocks)
    if folded is not problem and problem.sinks is not None:  # the kernel that joins shares adds the sink of each head
        shares = max(shares, 2)
    programs = _programs(folded, blocks.queries)
    with on(value):
        read = given(folded, blocks)
        if shares == 1:
            start(forward.forward_kernel, (programs, 1), read, found, warps=blocks.warps, SPLITS=1)
        else:
            ends = (_new(value, shares, *lead) for _ in range(2))
            parts = Parts(_new(value, shares, *lead, value.shape[-1]), *ends)  # type: ignore[arg-type]
            start(forward.forward_kernel, (programs, shares), read, parts, warps=blocks.warps, SPLITS=shares)
            query = read.query._replace(heads=lead[1], length=lead[2])
            whole = read._replace(**kernel_inputs.read_sinks(problem), query=query)
            start(decode.join_kernel, (math.prod(lead),), whole, parts, found, SPLITS=shares, SHARES=power(shares, 1))
    return Partial(found.output, maximum, log_sum)  # type: ignore[arg-type]


def _shares(problem: Problem, blocks: Blocks) -> int:
    """Return the number of parts of the keys of few queries, so that all of a device's processors have one."""
    sizes = problem.sizes
    if sizes.queries > SHARED or problem.value is None:
        return 1
    wanted = min(PROGRAMS // max(1, _programs(problem, blocks.queries)), sizes.keys // SPLIT)
    return 1 if wanted < 2 else 1 << (wanted.bit_length() - 1)


def statistics(problem: Problem, summary: Summary) -> Found:
    """Compute the statistics of a problem; the groups are columns of its value."""
    query, value = problem.query, problem.value
    lead, sizes = problem.sizes.shape[:3], problem.sizes
    rows = summary.rows or summary.received or bool(summary.mean or summary.peak)
    by_query = summary._replace(output=value is not None, groups=None, rows=rows, received=False, mean=None, peak=None)
    found = {
        name: _new(query, *shape, dtype=torch.int64 if name in KEYS else torch.float32)
        for name, shape in by_query.shapes(problem).items()
    }
    blocks = _blocks(problem, "summarise")
    of_kernel: dict[str, Any] = {"largest" if name == "values" else name: t for name, t in found.items()}
    parts = Parts(**of_kernel, position=view(summary.distance, *lead), number=summary.top)
    with on(query):
        read = given(problem, blocks, summary.top)
        programs = (_programs(problem, blocks.queries), 1)
        start(forward.forward_kernel, programs, read, parts, warps=blocks.warps, SPLITS=1)
        if summary.top:
            found["indices"] = kernel_inputs.fill_up_keys(found["indices"], sizes.keys)
        if rows:
            known = Rows(viewed(found["maximum"]), viewed(found["log_sum"]))
            factors = None if summary.factors is None else viewed(summary.factors.float(), *lead)
            found |= _of_keys(problem, read, known, factors, summary, blocks)
    if not summary.rows:
        found = {name: t for name, t in found.items() if name not in ("maximum", "log_sum")}
    return Found(**found)  # type: ignore[arg-type]


def _of_keys(
    problem: Problem, read: Given, known: Rows, factors: View | None, summary: Summary, blocks: Blocks
) -> dict[str, Tensor]:
    """Compute the sums over queries: by key, and by cell of a map."""
    sizes, query, found = problem.sizes, problem.query, {}
    if summary.received:
        found["received"] = _new(query, sizes.batch, sizes.heads, sizes.keys)
        programs = sizes.batch * sizes.heads * -(-sizes.keys // blocks.keys)
        start(summarise.received_kernel, (programs,), read, known, factors, found["received"], warps=blocks.warps)
    cell = summary.mean or summary.peak
    if cell is not None:
        down, across = -(-sizes.queries // cell[0]), -(-sizes.keys // cell[1])
        maps = [
            _new(query, sizes.batch, sizes.heads, down, across) if kind else None
            for kind in (summary.mean, summary.peak)
        ]
        programs = sizes.batch * sizes.heads * down * across
        shape = (*cell, down, across)
        start(summarise.cells_kernel, (programs,), read, known, factors, *maps, *shape, warps=blocks.warps)
        found |= {name: t for name, t in zip(("mean", "peak"), maps, strict=True) if t is not None}
    return found


def gradients(
    problem: Problem, rows: of_queries.Rows, grad: Tensor | None, wanted: tuple[bool, ...], sent: Sent | None
) -> Operands:
    """Compute the gradients of a problem's operands, without the sinks; None where not wanted."""
    lowered, (query, key, value, weight, dense, relative, _) = problem.lowered, operands(problem)
    assert lowered is not None and query is not None and key is not None
    found = Operands(None, None, None)
    with on(query):
        sent_back = None if grad is None or value is None else viewed(grad)
        beside = kernel_inputs.read_sent(sent, rows, problem.sizes.shape[:3])
        known = None if beside is not None else Rows(*(viewed(row.float()) for row in rows))
        blocks = _blocks(problem, "backward" if beside is None else "backward of statistics")
        read = given(problem, blocks)
        arguments = (read, known, sent_back, beside)
        of_weight = weight is not None and wanted[3]
        if wanted[0] or of_weight:
            to, of_each = _sums(read.query, query), None
            if of_weight:
                of_each = torch.zeros_like(to)
            programs = (_programs(problem, blocks.queries),)
            start(back.to_query_kernel, programs, *arguments, to, of_each, warps=blocks.warps)
            found = found._replace(query=kernel_inputs.apply_factors(to, query, lowered) if wanted[0] else None)
            if of_each is not None:
                found = found._replace(weight=of_each.sum((0, 2))[: read.width] * lowered.scale)
        if wanted[1] or (wanted[2] and sent_back is not None):
            to = _sums(read.key, key)
            to_value = None if sent_back is None or value is None else _new(query, *value.shape)
            programs = (key.shape[0] * key.shape[1] * -(-key.shape[2] // blocks.keys),)
            start(back.to_key_kernel, programs, *arguments, to, to_value, warps=blocks.warps)
            of_key = kernel_inputs.apply_factors(to, key, lowered) if wanted[1] else None
            found = found._replace(key=of_key, value=to_value if wanted[2] else None)
        if (dense is not None and wanted[4]) or (relative is not None and wanted[5]):
            found = _of_bias(problem, blocks, arguments, wanted, found)
    return found


def _sums(side: Side, tensor: Tensor) -> Tensor:
    """Allocate the sums of a side's gradient, in the layout of the side.

    A dot product writes them once, so they need no zeros.
    """
    if side.laid is None:
        return _new(tensor, *tensor.shape)
    return torch.zeros_like(side.laid)


def _of_bias(
    problem: Problem, blocks: Blocks, arguments: tuple[Any, ...], wanted: tuple[bool, ...], found: Operands
) -> Operands:
    """Compute the gradients of a bias: sums of Ṡ along its repeated axes, for a band of queries at a time."""
    added, sizes = problem.bias, problem.sizes
    assert added is not None
    each = (added.dense, wanted[4]), (added.relative, wanted[5])
    sums = [new_sum(t, want, torch.float32) for t, want in each]
    across, lead = -(-sizes.keys // blocks.keys), sizes.batch * sizes.heads
    row = blocks.queries * lead * sizes.keys
    count = -(-sizes.queries // blocks.queries) if row else 0  # a part without pairs has no band
    at_once = max(1, min(count, BAND // max(1, row)))
    for first in range(0, count, at_once):
        some = min(at_once, count - first)
        band = _new(problem.query, sizes.batch, sizes.heads, some * blocks.queries, sizes.keys)
        start(back.slopes_kernel, (lead * some * across,), *arguments, first, some, band, warps=blocks.warps)
        queries = slice(first * blocks.queries, min((first + some) * blocks.queries, sizes.queries))
        slope = band[:, :, : queries.stop - queries.start]
        if sums[0] is not None:
            target = sums[0] if sums[0].shape[2] == 1 else sums[0][:, :, queries]
            target.add_(slope.sum_to_size(target.shape))
        if sums[1] is not None:
            every = Region(slice(0, sizes.batch), slice(0, sizes.heads), queries, slice(0, sizes.keys))
            add_along(sums[1], slope, every, sizes)
    return found._replace(dense=sums[0], relative=sums[1])
