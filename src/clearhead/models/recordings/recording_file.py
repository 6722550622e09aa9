"""A recording in a file: tensors as safetensors, all else as JSON in the header; no part of it can run code."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import msgspec
import torch
from msgspec import Meta, Struct, structs
from torch import Tensor

from clearhead.base.arrays import FLOATS, check_memory
from clearhead.base.errors import ClearheadError, UnsupportedError, require
from clearhead.base.kept import Memo
from clearhead.base.numbers import MOST
from clearhead.base.output.text import said
from clearhead.base.output.written import replacing
from clearhead.base.positions import FAR
from clearhead.base.torch_state.versions import Versions, compute_checksum
from clearhead.biases.base import Added
from clearhead.masks.base import Spans
from clearhead.models.interception.layers import LayerName
from clearhead.models.interception.modules import Kind
from clearhead.models.recordings.attention_call import AttentionCall, CallContext, CallInputs, CallResult
from clearhead.models.recordings.cached import Cached, Chain, Link
from clearhead.models.recordings.call import Outcome, whole_or_shape
from clearhead.problem._recorded import RecordedMask
from clearhead.problem.checked import checked
from clearhead.problem.problem import make_problem
from clearhead.problem.record import EVERY, Record, at_once
from clearhead.problem.visible import Visible
from clearhead.problem.words import Words
from clearhead.scores.dot import Dot

FORMAT = 8
EMPTY = 2**24  # the largest product of the other sizes of an empty tensor, which the file's bytes do not limit


class TensorSpec(NamedTuple):
    """The shape and the dtypes of a tensor of the file.

    A name in `shape` stands for a size: the first tensor with the name sets it, and later ones must have the same size.
    "B or 1" takes the size B or 1, and a size of 1 sets nothing.
    """

    shape: str
    dtypes: Sequence[torch.dtype] = FLOATS

    def validate(self, tensor: Tensor, name: str, sizes: dict[str, int]) -> None:
        """Raise a ValueError unless a tensor fits. `sizes`: those that are set; new ones are added."""
        known = dict(sizes)
        dims = [dim.partition(" or ") for dim in self.shape.split(", ")]
        fits = tensor.dtype in self.dtypes and tensor.ndim == len(dims)
        for size, (dim, or_one, _) in zip(tensor.shape, dims, strict=False):
            fits = fits and ((or_one and size == 1) or sizes.setdefault(dim, size) == size)
        if not fits:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}; expected ({self.shape}) with the "
                f"sizes {known}, of {' or '.join(map(str, self.dtypes))}"
            )


INTEGERS, BOOLS = [torch.int64], [torch.bool]
Size = Annotated[int, Meta(ge=0, le=MOST)]
CachedIndex = tuple[Size, Size]  # the number of a chain, and of one of its links


class Entry(Struct, forbid_unknown_fields=True):
    """A record of the header. A tensor stands in it by its name in the file."""


class LinkEntry(Entry):
    """A `Link`. `slots`: a byte for each slot of a cache with empty slots, so that the file confirms its length."""

    base: Size
    length: Size
    start: Size
    new: Annotated[Tensor, TensorSpec("B, Hk, n, E")]
    filled: Size
    rows: Annotated[Tensor | None, TensorSpec("B, rows", BOOLS)]
    query: Size | None
    rejected: Size
    slots: Annotated[Tensor | None, TensorSpec("length", [torch.uint8])]


class SpansEntry(Entry, array_like=True):
    start: Annotated[Tensor, TensorSpec("B or 1, H or 1, Lq or 1", INTEGERS)]
    stop: Annotated[Tensor, TensorSpec("B or 1, H or 1, Lq or 1", INTEGERS)]
    residual: Annotated[Tensor | None, TensorSpec("B or 1, H or 1, Lq or 1, Lk or 1", BOOLS)]
    gap_start: Annotated[Tensor | None, TensorSpec("B or 1, H or 1, Lq or 1, gaps", INTEGERS)]
    gap_stop: Annotated[Tensor | None, TensorSpec("B or 1, H or 1, Lq or 1, gaps", INTEGERS)]


class BiasEntry(Entry, array_like=True):
    dense: Annotated[Tensor | None, TensorSpec("B or 1, H or 1, Lq or 1, Lk or 1")]
    relative: Annotated[Tensor | None, TensorSpec("B or 1, H or 1, distances")]


class PaddingEntry(Entry, array_like=True):
    queries: Annotated[Tensor | None, TensorSpec("B, Lq", BOOLS)]
    keys: Annotated[Tensor | None, TensorSpec("B, Lk", BOOLS)]


class OutcomeEntry(Entry, array_like=True):
    output: Annotated[Tensor | None, TensorSpec("B, H, Lq, Ev")]
    grad: Annotated[Tensor | None, TensorSpec("B, H, Lq, Ev")]


class PositionsEntry(Entry):
    tensor: Annotated[Tensor, TensorSpec("B or 1", INTEGERS)]


class LayerEntry(Entry):
    number: Size
    stack: str


class CallEntry(Entry):
    """An `AttentionCall`."""

    name: str
    kind: Kind
    backend: str
    run: Size
    query: Annotated[Tensor, TensorSpec("B, H, Lq, E")]
    key: CachedIndex
    value: CachedIndex | None
    scale: float | None
    softcap: float | None
    align: Literal["upper_left", "lower_right"] | Annotated[int, Meta(ge=-FAR, le=FAR)] | PositionsEntry | None
    mask: str | None
    spans: SpansEntry | None
    bias: BiasEntry | None
    sinks: Annotated[Tensor | None, TensorSpec("H")]
    uniform: Annotated[Tensor | None, TensorSpec("B or 1, H or 1, Lq or 1, 1", BOOLS)]
    padding: PaddingEntry | None
    outcome: OutcomeEntry | None
    dropped: bool
    factor: Annotated[Tensor | None, TensorSpec("B, H, Lq")]
    layer: LayerEntry
    edited: bool
    windows_of: Annotated[int, Meta(ge=1, le=MOST)] | None


class Version(Struct):
    """The one entry that the header of every format has."""

    format: int


class Header(Version, forbid_unknown_fields=True):
    chains: list[list[LinkEntry]]
    calls: list[CallEntry]


def encode_header(calls: Sequence[AttentionCall]) -> tuple[str, dict[str, Tensor]]:
    """Give the header of a recording, and the tensors by the names that they have in it."""
    tensors, numbers = _TensorTable(), dict[Chain, int]()
    entries = [_make_call_entry(call, numbers) for call in calls]
    chains = [[LinkEntry(*link, _make_slots(link)) for link in chain.links] for chain in numbers]
    header = msgspec.json.encode(Header(FORMAT, chains, entries), enc_hook=tensors.add)
    return header.decode(), tensors.named


def decode_header(header: str, tensors: Mapping[str, Tensor]) -> list[AttentionCall]:
    """Give the calls of a header. Raises a ValueError for one that `encode_header` does not write."""

    def find_tensor(_: type, name: Any) -> Tensor:
        found = tensors.get(name) if isinstance(name, str) else None
        if found is None:
            raise ValueError(f"{name!r:.60} is not the name of a tensor of the file")
        if not found.numel() and math.prod(max(size, 1) for size in found.shape) > EMPTY:
            raise ValueError(f"a tensor of shape {tuple(found.shape)} holds no numbers; expected smaller sizes")
        return found

    read = msgspec.json.decode(header, type=Header, dec_hook=find_tensor)
    chains = [_make_chain(links, f"chains[{i}]") for i, links in enumerate(read.chains)]
    return [_make_call(entry, chains, f"calls[{i}]") for i, entry in enumerate(read.calls)]


class _TensorTable:
    """Tensors by their names in the file, each once: layers share their masks."""

    def __init__(self) -> None:
        self.named: dict[str, Tensor] = {}
        self._known: dict[Any, tuple[str, Tensor]] = {}  # keeps the tensors alive, so that no address is used again

    def add(self, tensor: Tensor) -> str:
        """Give the name of a tensor, which may be in the table already."""
        place = tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
        if place not in self._known:
            check_memory(tensor, "a tensor of the recording")
            name = str(len(self._known))
            self._known[place] = name, tensor
            self.named[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        return self._known[place][0]


def _make_call_entry(call: AttentionCall, numbers: dict[Chain, int]) -> CallEntry:
    """Give the entry of a call. `numbers`: of the chains, to which those of the call are added."""

    def locate(cached: Cached) -> CachedIndex:
        return numbers.setdefault(cached.chain, len(numbers)), cached.number

    problem, score, outcome = call.inputs.record.problem, call.score, call.outcome
    if not isinstance(score, Dot) or problem.lowered is None or problem.lowered.weight is not None:
        raise UnsupportedError(
            f"{call.name} scores by {type(score).__name__}, and files hold dot products alone. Save the others: "
            "ch.models.Recording([call for call in seen.calls if …]).write(path)."
        )
    call.inputs.record.check()
    align = None if problem.documents is not None else problem.sizes.align  # positions count in the row there
    bias = spans = None
    if problem.bias is not None:
        dense = problem.bias.dense
        if problem.bias.function is not None:
            written = problem.bias.function(*EVERY)
            dense = written if dense is None else dense + written
        bias = BiasEntry(dense, problem.bias.relative)
    if problem.spans is not None:
        residual = None if problem.spans.residual is None else problem.spans.rest(*EVERY)
        spans = SpansEntry(problem.spans.start, problem.spans.stop, residual, *(problem.spans.gaps or (None, None)))
    return CallEntry(
        name=call.name,
        kind=call.kind,
        backend=call.backend,
        run=call.run,
        query=call.query,
        key=locate(call.cached_key),
        value=None if call.cached_value is None else locate(call.cached_value),
        scale=None if score.scale is None else float(score.scale),
        softcap=None if score.softcap is None else float(score.softcap),
        align=PositionsEntry(align) if isinstance(align, Tensor) else align,
        mask=None if call.mask is None else said(call.mask, call.mask.title),
        spans=spans,
        bias=bias,
        sinks=problem.sinks,
        uniform=call.uniform,
        padding=None if call.padding is None else PaddingEntry(*call.padding),
        outcome=None if outcome is None else OutcomeEntry(outcome.output, outcome.grad),
        dropped=outcome is not None and outcome.dropped,
        factor=call.factor,
        layer=LayerEntry(call.layer.number, call.layer.stack),
        edited=call.edited,
        windows_of=call.windows_of,
    )


def _make_slots(link: Link) -> Tensor | None:
    return _SLOT.expand(link.length) if link.length > _count_keys(link) else None


_SLOT = torch.zeros(1, dtype=torch.uint8, device="cpu")  # one memory for all links, so equal lengths are written once


def _count_keys(link: Link) -> int:
    """The number of a call's places whose keys are in the file."""
    return max(link.filled - link.base, link.new.shape[2])


def _make_chain(entries: Sequence[LinkEntry], name: str) -> Chain:
    """Give a chain. A length that no tensor of the file confirms is an error, since memory is allocated by it."""
    links: list[Link] = []
    for i, entry in enumerate(entries):
        _validate_tensors(entry, f"{name}[{i}]", {"length": entry.length})
        link = Link(*structs.astuple(entry)[:-1])
        link.validate(links[-1] if links else None, f"{name}[{i}]")
        if entry.slots is None and link.length > _count_keys(link):
            raise ValueError(f"{name}[{i}].length is {link.length}; expected {_count_keys(link)}, the keys that it has")
        links.append(link)
    return Chain(links)


def _validate_tensors(entry: Entry, name: str, sizes: dict[str, int]) -> None:
    """Raise a ValueError unless each tensor of an entry fits its `TensorSpec` and these sizes."""
    for field, spec in _list_specs(type(entry)):
        value = getattr(entry, field)
        if isinstance(value, Entry):
            _validate_tensors(value, f"{name}.{field}", sizes)
        elif isinstance(value, Tensor):
            spec.validate(value, f"{name}.{field}", sizes)


@cache
def _list_specs(kind: type[Entry]) -> list[tuple[str, Any]]:
    """The fields of a class of entries, each with its `TensorSpec` where it is a tensor."""
    hints = get_type_hints(kind, include_extras=True)
    return [(field, getattr(hint, "__metadata__", (None,))[0]) for field, hint in hints.items()]


def _find_cached(index: CachedIndex, chains: Sequence[Chain], shape: str, name: str, sizes: dict[str, int]) -> Cached:
    """Give the link of an index, whose keys have this shape, in the form of a `TensorSpec`."""
    chain, number = index
    if chain >= len(chains) or number >= len(chains[chain].links):
        raise ValueError(f"{name} is {index}; expected the number of a chain and of one of its links")
    found = Cached(chains[chain], number)
    TensorSpec(shape).validate(whole_or_shape(found), name, sizes)
    return found


def _make_call(entry: CallEntry, chains: Sequence[Chain], name: str) -> AttentionCall:
    """Give the call of an entry."""
    sizes, value = {"1": 1}, None
    key = _find_cached(entry.key, chains, "B, Hk, Lk, E", f"{name}.key", sizes)
    if entry.value is not None:
        value = _find_cached(entry.value, chains, "B, Hk, Lk, Ev", f"{name}.value", sizes)
    if not sizes["Hk"]:
        raise ValueError(f"{name}.key has no heads")
    _validate_tensors(entry, name, sizes)
    score = Dot(entry.scale, entry.softcap)
    problem = make_problem(
        entry.query if entry.uniform is None else entry.query.masked_fill(entry.uniform, 0.0),
        whole_or_shape(key),
        score=score,
        sinks=entry.sinks,
        align=entry.align.tensor if isinstance(entry.align, PositionsEntry) else entry.align,
    )
    if entry.bias is not None:
        problem = problem._replace(bias=Added(*structs.astuple(entry.bias)))
    if entry.spans is not None:
        start, stop, residual, *gaps = structs.astuple(entry.spans)
        rest = None if residual is None else at_once(residual)
        spans = Spans(start, stop, rest, gaps=tuple(gaps) if any(gap is not None for gap in gaps) else None)
        problem = problem._replace(visible=Visible(spans, None, "inside", Memo()))
    problem = checked(problem, name)
    mask = None if problem.spans is None else RecordedMask(problem.spans, problem.sizes, entry.mask)
    outcome = None if entry.outcome is None else Outcome(entry.outcome.output, entry.outcome.grad, entry.dropped)
    padding = None if entry.padding is None else Words(*structs.astuple(entry.padding))
    layer = LayerName(entry.layer.number, entry.layer.stack, cross=entry.kind == "cross")
    record = Record(problem, Versions(()), copied=True)
    return AttentionCall(
        CallInputs(entry.query, key, score, mask, record, value, entry.uniform, padding),
        CallResult(outcome, entry.factor, entry.edited),
        CallContext(entry.name, entry.kind, entry.backend, layer, entry.run, windows_of=entry.windows_of),
    )


HEADER, CHECKSUM = "clearhead recording", "sha256"


def write_recording(calls: Sequence[AttentionCall], path: str | Path) -> Path:
    """Write calls to a file: see `Recording.write`."""
    safetensors = require("safetensors.torch", "models", "saving a recording")
    header, tensors = encode_header(calls)
    metadata = {HEADER: header, CHECKSUM: compute_checksum(header, tensors)}
    with replacing(path, "recording") as beside:
        try:
            if beside.exists():  # a pipe or a device, which save_file would replace by a file
                beside.write_bytes(safetensors.save(tensors, metadata))
            else:
                safetensors.save_file(tensors, beside, metadata)
        except Exception as error:  # an OSError, or an error of safetensors, whose class depends on its version
            raise OSError(str(error)) from error
    return Path(path)


def read_recording(path: str | Path) -> list[AttentionCall]:
    """Read the calls of a file."""
    safetensors = require("safetensors", "models", "loading a recording")
    try:
        with safetensors.safe_open(Path(path), "pt") as file:
            metadata = file.metadata() or {}
            # copies, since the file is mapped: a later write to it would change them, and a truncation end the process
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - a file is no dict
    except Exception as error:  # copied for the same reason
        raise ClearheadError(f"cannot read a recording from {str(path)!r}: {error}.") from error
    header = metadata.get(HEADER)
    if header is None:
        raise ClearheadError(f"{str(path)!r} is no recording: pass a file that seen.write() has written.")
    try:
        written = msgspec.json.decode(header, type=Version).format
        if written == FORMAT:
            if metadata.get(CHECKSUM) != compute_checksum(header, tensors):
                raise ValueError("its checksum is not that of its content")
            return decode_header(header, tensors)
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:  # a ClearheadError is a ValueError
        raise ClearheadError(f"the recording in {str(path)!r} is damaged: {error}. Record the model again.") from error
    raise ClearheadError(
        f"the recording in {str(path)!r} has format {written}, and this version reads {FORMAT}: record the model again."
    )
