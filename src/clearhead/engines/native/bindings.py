"""The compiled kernels: a problem as they see it, in float32 and as pointers, and calls of them.

What they compute and how is in csrc/ and docs/maths/. A call holds no lock: other Python threads run on.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clearhead.base.shapes import part
from clearhead.base.tracing import constant, plain
from clearhead.biases.base import Added
from clearhead.engines.tiled.backward import Operands
from clearhead.masks.base import Spans
from clearhead.problem.problem import Problem
from clearhead.problem.regions import Region, cut
from clearhead.problem.summary import Found, Summary

PHI = {"mul": 0, "tanh_add": 1, "sq_diff": 2}
FEW_QUERIES = 4  # up to so many, keys are read where they lie: packing them would cost more than it saves
ROWS = 48  # queries to a tile, as csrc/tile.h has it
KEEP_BYTES = 2**26  # of a mask's residual, made for some queries at a time

EVERY = slice(None)


def _new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory for a kernel to fill; its type and place are the kernel's, whatever the caller's defaults are."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32, device="cpu")


def _gradient_of(tensor: Tensor) -> Tensor:
    """Memory for a gradient, laid out as the tensor is where its columns stand side by side, else contiguous."""
    new = torch.empty_like(tensor, dtype=torch.float32)
    return new if _in_rows(new) else _new(*tensor.shape)


def _in_rows(tensor: Tensor) -> bool:
    return tensor.shape[-1] <= 1 or tensor.stride(-1) == 1


@cache
def kernels() -> Any:
    """The extension module, or None where this installation has none."""
    try:
        return importlib.import_module("clearhead.engines.native._kernels")
    except ImportError:
        return None


@constant
def available() -> bool:
    """Whether this installation has the kernels; compiled code takes the answer as it is."""
    return kernels() is not None


@cache
def chosen(instructions: str | None = None) -> Any:
    """The kernels for the best instruction set of this CPU, or for the one named."""
    module = kernels()
    return module.Cpu(instructions or module.available()[0])


class Call:
    """One call's problem, or a part of one, and the tensors that its pointers lead to, which must outlive it."""

    def __init__(self, problem: Problem) -> None:
        self.module = kernels()
        self.native = native = self.module.Problem()
        self._held: list[Tensor] = []
        lowered = problem.lowered
        assert lowered is not None
        native.phi = PHI[lowered.phi]
        native.batch, native.heads, native.queries, native.width = lowered.query.shape
        native.key_heads, native.keys = lowered.key.shape[1:3]
        native.threads = torch.get_num_threads()
        native.scale = lowered.scale
        native.query, native.key = self.numbers(lowered.query), self.numbers(lowered.key)
        if problem.value is not None:
            native.value_width = problem.value.shape[-1]
            native.value = self.numbers(problem.value)
        if lowered.weight is not None:
            native.weight = self.vector(lowered.weight)
        if problem.plain and lowered.softcap is None:
            return
        native.softcap = lowered.softcap or 0.0
        shape = (native.batch, native.heads, native.queries, native.keys)
        if problem.sinks is not None:
            native.sinks = self.vector(problem.sinks)
        if problem.spans is not None:
            self._mask(problem.spans, shape)
        if problem.bias is not None:
            self._bias(problem.bias, shape)
        if problem.poison is not None:
            queries, keys = problem.poison
            native.bad_queries = self.broadcast(queries[..., 0].float())
            native.bad_keys = self.broadcast(keys[:, :, 0].float())
        if problem.seed is not None:
            # its hash counts sequences, heads and keys from 0: a part with dropout is one of queries alone
            native.dropout_p, native.seed = problem.dropout_p, int(problem.seed) & (2**64 - 1)
            native.first_query = 0 if problem.origin is None else problem.origin[2].start

    def _mask(self, spans: Spans, shape: tuple[int, ...]) -> None:
        self.native.start = self.broadcast(spans.start, shape[:3])
        self.native.stop = self.broadcast(spans.stop, shape[:3])
        if spans.residual is not None:
            self.native.keep = self.broadcast(spans.rest(*(slice(0, size) for size in shape)), shape)

    def _bias(self, bias: Added, shape: tuple[int, ...]) -> None:
        if bias.dense is not None:
            self.native.dense = self.broadcast(bias.dense.float(), shape)
        if bias.relative is not None:
            along = bias.relative.float()
            if along.stride(-1) != 1:
                along = along.contiguous()
            self.native.relative = self.broadcast(along, (*shape[:2], along.shape[-1]))

    def numbers(self, tensor: Tensor) -> Any:
        """A (B, H, L, width) tensor in float32, its columns side by side."""
        if tensor.dtype is not torch.float32 or tensor.is_neg():
            tensor = tensor.resolve_neg().to(torch.float32)
        return self._array(tensor if _in_rows(tensor) else tensor.contiguous())

    def into(self, tensor: Tensor, rows: slice = EVERY) -> Any:
        """Some rows of a float32 (B, H, L, width) tensor, to be written: itself, never a copy."""
        assert tensor.dtype is torch.float32 and _in_rows(tensor), (tensor.dtype, tensor.shape, tensor.stride())
        return self._array(tensor if rows == EVERY else tensor[:, :, rows])

    def _array(self, tensor: Tensor) -> Any:
        assert plain(tensor), f"a kernel was given a {type(tensor).__name__} on {tensor.device}"
        self._held.append(tensor)
        return self.module.Array(tensor.data_ptr(), *tensor.stride())

    def vector(self, tensor: Tensor) -> Any:
        return self._array(tensor.resolve_neg().to(torch.float32))

    def broadcast(self, tensor: Tensor, shape: tuple[int, ...] | None = None) -> Any:
        """A tensor whose dimensions of size 1 are repeated."""
        tensor = tensor.resolve_neg()
        return self._array(tensor if shape is None else tensor.expand(shape))


def bands(problem: Problem) -> Iterator[slice]:
    """All queries at once, or, where a mask has a residual to be made, as many as that allows."""
    spans, sizes = problem.spans, problem.sizes
    if spans is None or spans.residual is None:
        yield EVERY
        return
    if math.prod(sizes.shape) <= KEEP_BYTES:
        yield EVERY
        return
    batch, heads, queries, keys = (slice(0, size) for size in (sizes.batch, sizes.heads, 1, sizes.keys))
    one = spans.rest(batch, heads, queries, keys)  # how far it broadcasts
    rows = max(1, KEEP_BYTES // max(1, one.numel()) // ROWS) * ROWS
    for row in range(0, sizes.queries, rows):
        yield slice(row, min(row + rows, sizes.queries)) if rows < sizes.queries else EVERY


class Forward(NamedTuple):
    """The output in float32, what the gradients need besides it, and whether all that was looked at was finite."""

    output: Tensor  # (B, H, Lq, Ev)
    stats: Tensor  # (B, H, Lq, 2), where they were asked for
    finite: bool


def forward(problem: Problem, keep_stats: bool, as_read: bool = True) -> Forward:
    """The output of a lowered problem that has a value and keys.

    Few queries go the way of decoding, unless `as_read` is False.
    """
    lowered, value = problem.lowered, problem.value
    assert lowered is not None and value is not None
    lead = lowered.query.shape[:3]
    # as SDPA lays it out: heads side by side, so that modules need no copy to join them
    batch, heads, queries, width = *lead, value.shape[-1]
    strides = (queries * heads * width, width, heads * width, 1)
    output = torch.empty_strided((batch, heads, queries, width), strides, dtype=torch.float32, device="cpu")
    stats = _new(*lead, 2) if keep_stats else output
    finite = True
    for rows in bands(problem):
        call = Call(cut(problem, Region(queries=rows)))
        native = call.native
        native.out = call.into(output, rows)
        if keep_stats:
            native.stats = call.into(stats, rows)
        cpu = chosen()
        finite &= cpu.decode(native) if as_read and _few(problem) else cpu.forward(native)
    return Forward(output, stats, finite)


def gradients(problem: Problem, wanted: tuple[bool, ...], grad: Tensor, kept: Forward) -> Operands:
    """The gradients to the operands (see tiled/backward.py), each of its operand's dtype; None where not wanted."""
    lowered, value, added = problem.lowered, problem.value, problem.bias or Added()
    assert lowered is not None and value is not None
    if _few(problem):
        # the sums of these scores were taken in another order; large ones differ by more than their softmax can bear
        kept = kept._replace(stats=forward(problem, keep_stats=True, as_read=False).stats)
    operands = (lowered.query, lowered.key, value, lowered.weight, problem.sinks, added.dense, added.relative)
    sums: list[Tensor | None] = [
        torch.zeros_like(t, dtype=torch.float32, memory_format=torch.contiguous_format)
        if t is not None and want
        else None
        for t, want in zip(operands, wanted, strict=True)
    ]
    for i, t in enumerate((lowered.query, lowered.key, value)):  # which the kernel fills, laid out as they are
        sums[i] = _gradient_of(t)
    delta = _new(*kept.stats.shape[:3])
    parts = list(bands(problem))
    if len(parts) > 1:
        sums[1], sums[2] = (torch.zeros_like(t) for t in sums[1:3] if t is not None)
    for rows in parts:
        _add_gradients(problem, rows, sums, grad, delta, kept)
    if sums[4] is not None and problem.sinks is not None:
        share = torch.exp(problem.sinks.detach().float().view(1, -1, 1) - kept.stats[..., 0]) * kept.stats[..., 1]
        sums[4] = -(share * delta).sum((0, 2))
    return tuple(
        s.to(t.dtype) if s is not None and t is not None and want else None
        for s, t, want in zip(sums, operands, wanted, strict=True)
    )


def _few(problem: Problem) -> bool:
    """Whether the keys are read where they lie: packing them would cost more than it saves."""
    return problem.sizes.queries <= FEW_QUERIES and problem.groups * problem.sizes.queries <= ROWS


def _add_gradients(
    problem: Problem, rows: slice, sums: list[Tensor | None], grad: Tensor, delta: Tensor, kept: Forward
) -> None:
    call = Call(cut(problem, Region(queries=rows)))
    native, found = call.native, call.module.Gradients()
    known = (kept.output, kept.stats, grad)
    native.out, native.stats, found.grad = (call.numbers(t if rows == EVERY else t[:, :, rows]) for t in known)
    found.delta = call.broadcast(delta[:, :, rows])
    query, key, value, weight, _, dense, relative = sums
    assert query is not None and key is not None and value is not None
    found.query = call.into(query, rows)
    whole = rows == EVERY
    # a part of the queries has keys, weight and distances of its own, which are added
    own_key, own_value = (t if whole else torch.empty_like(t) for t in (key, value))
    own_weight = weight if weight is None or whole else torch.zeros_like(weight)
    found.key, found.value = call.into(own_key), call.into(own_value)
    if own_weight is not None:
        found.weight = call.vector(own_weight)
    own_dense = dense if dense is None or whole else torch.zeros_like(part(dense, EVERY, EVERY, rows))
    if own_dense is not None:
        shape = (native.batch, native.heads, native.queries, native.keys)
        found.dense, found.dense_size = call.broadcast(own_dense, shape), own_dense.numel()
    along = None
    if relative is not None:
        shown = range(problem.sizes.queries)[rows]
        place = slice(problem.sizes.queries - shown.stop, relative.shape[-1] - shown.start)
        along = relative if whole else torch.zeros_like(relative[..., place])
        distances = (native.batch, native.heads, along.shape[-1])
        found.relative, found.relative_size = call.broadcast(along, distances), along.numel()
    chosen().backward(native, found)
    if whole:
        return
    for total, mine in ((key, own_key), (value, own_value), (weight, own_weight)):
        if total is not None and mine is not None:
            total.add_(mine)
    if dense is not None and own_dense is not None:
        part(dense, EVERY, EVERY, rows).add_(own_dense)
    if relative is not None and along is not None:
        relative[..., place].add_(along)


def summarise(problem: Problem, summary: Summary) -> Found | None:
    """One pass over a guarded problem; None where its mask has a residual too large to be made at once."""
    if next(bands(problem)) != EVERY:
        return None
    sizes = problem.sizes
    call = Call(problem if summary.output else problem._replace(value=None))
    native, buffers = call.native, call.module.Summary()
    lead = (sizes.batch, sizes.heads, sizes.queries)
    cell_rows, cell_columns = summary.mean or summary.peak or (max(sizes.queries, 1), max(sizes.keys, 1))
    cells = (sizes.batch, sizes.heads, -(-sizes.queries // cell_rows), -(-sizes.keys // cell_columns))
    width = native.value_width
    found = Found(
        output=_new(*lead, width) if summary.output else None,
        entropy=_new(*lead) if summary.entropy else None,
        largest=_new(*lead) if summary.normaliser else None,
        rest=_new(*lead) if summary.normaliser else None,
        values=_new(*lead, summary.top) if summary.top else None,
        indices=_new(*lead, summary.top, dtype=torch.int64) if summary.top else None,
        received=_new(sizes.batch, sizes.heads, sizes.keys) if summary.received else None,
        mean=_zeros(*cells) if summary.mean else None,
        peak=_zeros(*cells) if summary.peak else None,
    )
    for name, tensor in found._asdict().items():
        if not isinstance(tensor, Tensor):
            continue
        if name == "output":
            native.out = call.into(tensor)
        else:
            setattr(buffers, name, call.broadcast(tensor))
    buffers.k, buffers.cell_rows, buffers.cell_columns = summary.top, cell_rows, cell_columns
    return found._replace(finite=chosen().summarise(native, buffers))


def scores(problem: Problem) -> Tensor:
    """The scores of a guarded problem or of a part of one, with bias, −∞ where a pair is not allowed."""
    call = Call(problem._replace(value=None))
    native = call.native
    tile = _new(native.batch, native.heads, native.queries, native.keys)
    native.out = call.into(tile)
    chosen().scores(native)
    return tile


def forward_bytes(problem: Problem) -> int:
    """The work memory of a forward pass, and copies of inputs in another dtype."""
    sizes, value = problem.sizes, problem.value
    if 0 in sizes.shape or value is None:
        return 0
    rows = next(bands(problem))
    call = Call(cut(problem, Region(queries=rows)))
    copied = sum(t.numel() for t in (problem.query, problem.key, value) if t.dtype != torch.float32)
    return int(chosen().forward_bytes(call.native)) + 4 * copied
