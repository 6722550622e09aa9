"""A recording in a file: tensors as safetensors, all else as JSON in the header; no part of it can run code."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.base.arrays import FLOATS, check_memory
from clearhead.base.errors import ClearheadError, UnsupportedError, require
from clearhead.base.kept import Memo
from clearhead.base.numbers import MOST
from clearhead.base.positions import FAR
from clearhead.base.text import said
from clearhead.base.versions import Versions
from clearhead.base.written import replacing
from clearhead.biases.base import Added
from clearhead.masks.base import Spans
from clearhead.models.attention_call import AttentionCall
from clearhead.models.call import Outcome, no_key
from clearhead.models.chain.cached import Cached, Chain, Link
from clearhead.models.tap.layers import LayerName
from clearhead.problem._recorded import RecordedMask
from clearhead.problem.checked import checked
from clearhead.problem.problem import make_problem
from clearhead.problem.record import EVERY, Record, at_once
from clearhead.problem.visible import Visible
from clearhead.problem.words import Words
from clearhead.scores.dot import Dot

EMPTY = 2**24  # the largest product of the other sizes of an empty tensor, which the file's bytes do not limit


class Damaged(ValueError):
    """A value that the header may not hold."""

    def __init__(self, name: str, value: Any, expected: str) -> None:
        shown = f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else f"{value!r:.60}"
        super().__init__(f"{name} is {shown}; expected {expected}")


class Read:
    """The parts read so far: the tensors by name, the chains of keys, and the named sizes of one call."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.chains: list[Any] = []
        self.sizes: dict[str, int] = {}


Check = Callable[[Any, str, Read], Any]


def parsed(text: str) -> Any:
    """The value of strict JSON text: NaN, infinities and repeated keys are errors."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("an object of its header has a key twice")
        return found

    def refuse(name: str) -> None:
        raise ValueError(f"its header has the number {name}")

    return json.loads(text, object_pairs_hook=once, parse_constant=refuse)


def whole(least: int = 0, most: int = MOST) -> Check:
    """A whole number."""

    def check(value: Any, name: str, read: Read) -> int:
        if type(value) is not int or not least <= value <= most:
            raise Damaged(name, value, f"a whole number, {least:,} to {most:,}")
        return value

    return check


def number(value: Any, name: str, read: Read) -> float:
    """A finite number."""
    if type(value) not in (int, float) or abs(value) > torch.finfo(torch.float64).max or not math.isfinite(value):
        raise Damaged(name, value, "a finite number")
    return float(value)


def positive(value: Any, name: str, read: Read) -> float:
    """A softcap: a number above 0 whose square, as a float, is above 0 too."""
    found = number(value, name, read)
    if not found > 0 or not 0 < found * found < math.inf:
        raise Damaged(name, value, "a number above 0")
    return found


def text(value: Any, name: str, read: Read) -> str:
    if not isinstance(value, str):
        raise Damaged(name, value, "a text")
    return value


def flag(value: Any, name: str, read: Read) -> bool:
    if not isinstance(value, bool):
        raise Damaged(name, value, "true or false")
    return value


def one_of(*values: str) -> Check:
    def check(value: Any, name: str, read: Read) -> str:
        if not isinstance(value, str) or value not in values:
            raise Damaged(name, value, " or ".join(map(repr, values)))
        return value

    return check


def optional(inner: Check) -> Check:
    """Either null, which means None, or a value that `inner` takes."""
    return lambda value, name, read: None if value is None else inner(value, name, read)


def either(on: type, one: Check, other: Check) -> Check:
    """The check `one` for values of this type in JSON, and `other` for all others."""
    return lambda value, name, read: (one if isinstance(value, on) else other)(value, name, read)


def each(inner: Check) -> Check:
    """A list of any length, each of whose values `inner` takes."""

    def check(value: Any, name: str, read: Read) -> list[Any]:
        if not isinstance(value, list):
            raise Damaged(name, value, "a list")
        return [inner(one, f"{name}[{i}]", read) for i, one in enumerate(value)]

    return check


def row(*inner: Check) -> Check:
    """A list with one value for each of these checks."""

    def check(value: Any, name: str, read: Read) -> list[Any]:
        if not isinstance(value, list) or len(value) != len(inner):
            raise Damaged(name, value, f"a list of {len(inner)}")
        return [one(part, f"{name}[{i}]", read) for i, (one, part) in enumerate(zip(inner, value, strict=True))]

    return check


def fields(**inner: Check) -> Check:
    """An object with exactly these keys, which are read in this order."""

    def check(value: Any, name: str, read: Read) -> dict[str, Any]:
        if not isinstance(value, dict) or value.keys() != inner.keys():
            raise Damaged(name, sorted(value) if isinstance(value, dict) else value, f"an object of {', '.join(inner)}")
        return {key: one(value[key], f"{name}.{key}", read) for key, one in inner.items()}

    return check


def tensor(dtypes: Sequence[torch.dtype], shape: str) -> Check:
    """The name of a tensor of the file, of one of these dtypes.

    `shape`: such as "B|1 H Lq 1". A name stands for a size: the first tensor with the name sets it, and all later ones
    must have the same. "B|1" stands for this size or 1, and "n" for any size.
    """

    def check(value: Any, name: str, read: Read) -> Tensor:
        found = read.tensors.get(value) if isinstance(value, str) else None
        if found is None:
            raise Damaged(name, value, "the name of a tensor of the file")
        if found.dtype not in dtypes:
            raise Damaged(name, found, " or ".join(map(str, dtypes)))
        if not found.numel() and math.prod(max(size, 1) for size in found.shape) > EMPTY:
            raise Damaged(name, found, "numbers, or smaller sizes")
        dims = shape.split()
        if found.ndim != len(dims) or not all(
            _fits(dim, size, read) for dim, size in zip(dims, found.shape, strict=False)
        ):
            known = {dim: size for dim, size in read.sizes.items() if dim in shape.replace("|", " ").split()}
            raise Damaged(name, found, f"({shape.replace(' ', ', ')})" + (f", {known}" if known else ""))
        return found

    return check


def _fits(dim: str, size: int, read: Read) -> bool:
    if dim == "n" or dim == str(size):
        return True
    expected, _, or_one = dim.partition("|")
    return (or_one == "1" == str(size)) or read.sizes.setdefault(expected, size) == size


FLOAT, WHOLE, BOOL = FLOATS, (torch.int64,), (torch.bool,)


FORMAT = 8
HEADER, CHECKSUM = "clearhead recording", "sha256"


def write(calls: Sequence[AttentionCall], path: str | Path) -> Path:
    """Write calls to a file: see `Recording.write`."""
    safetensors = require("safetensors.torch", "models", "saving a recording")
    tensors = _Tensors()
    chains = _Chains(tensors)
    entries = [_written(call, tensors, chains) for call in calls]
    header = json.dumps({"format": FORMAT, "calls": entries, "chains": chains.written})
    words = {HEADER: header, CHECKSUM: compute_checksum(header, tensors.named)}
    with replacing(path, "recording") as beside:
        try:
            if beside.exists():  # a pipe or a device, which save_file would replace by a file
                beside.write_bytes(safetensors.save(tensors.named, words))
            else:
                safetensors.save_file(tensors.named, beside, words)
        except Exception as error:  # an OSError, or an error of safetensors, whose class depends on its version
            raise OSError(str(error)) from error
    return Path(path)


def read(path: str | Path) -> list[AttentionCall]:
    """The calls of a file."""
    safetensors = require("safetensors", "models", "loading a recording")
    try:
        with safetensors.safe_open(Path(path), "pt") as file:
            words = file.metadata() or {}
            # copies, since the file is mapped: a later write to it would change them, and a truncation end the process
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - a file is no dict
    except Exception as error:  # copied for the same reason
        raise ClearheadError(f"cannot read a recording from {str(path)!r}: {error}.") from error
    header = words.get(HEADER)
    if header is None:
        raise ClearheadError(f"{str(path)!r} is no recording: pass a file that seen.write() has written.")
    try:
        found = parsed(header)
        written = found.get("format") if isinstance(found, dict) else None
        if written == FORMAT and words.get(CHECKSUM) != compute_checksum(header, tensors):
            raise ValueError("its checksum is not that of its content")
        calls = _FILE(found, "the header", Read(tensors))["calls"] if written == FORMAT else []
    except (ValueError, RecursionError) as error:  # a ClearheadError is a ValueError
        raise ClearheadError(
            f"the recording in {str(path)!r} is damaged: {error}. Record the model again, or take a copy of the file "
            "that is whole."
        ) from error
    if written != FORMAT:
        raise ClearheadError(
            f"the recording in {str(path)!r} has format {written!r:.60}, and this version reads {FORMAT}: record the "
            "model again, or load it with the version that wrote it."
        )
    return list(calls)


def compute_checksum(header: str, tensors: Mapping[str, Tensor]) -> str:
    """A digest of all that a file holds."""
    digest = hashlib.sha256(header.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class _Tensors:
    """Tensors by number, each once: layers share their masks."""

    def __init__(self) -> None:
        self.named: dict[str, Tensor] = {}
        self._known: dict[Any, tuple[str, Tensor]] = {}  # keeps the tensors alive, so that no address is used again

    def put(self, tensor: Tensor | None) -> str | None:
        if tensor is None:
            return None
        place = tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
        if place not in self._known:
            check_memory(tensor, "a tensor of the recording")
            name = str(len(self._known))
            self._known[place] = name, tensor
            self.named[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        return self._known[place][0]


class _Chains:
    """Chains of keys and values by number, each once."""

    def __init__(self, tensors: _Tensors) -> None:
        self.written: list[list[dict[str, Any]]] = []
        self._tensors = tensors
        self._known: dict[Chain, int] = {}
        self._slots: dict[int, Tensor] = {}

    def put(self, cached: Cached | None) -> tuple[int, int] | None:
        """The number of the chain, and of the link in the chain."""
        if cached is None:
            return None
        chain = cached.chain
        if chain not in self._known:
            self._known[chain] = len(self._known)
            self.written.append([self._link(link) for link in chain.links])
        return self._known[chain], cached.number

    def _link(self, link: Link) -> dict[str, Any]:
        """The entry of a link. `slots`: a byte for each slot of a cache with empty slots: see `_length`."""
        put, slots = self._tensors.put, None
        if link.length > _stands(link):
            slots = self._slots.setdefault(link.length, torch.zeros(link.length, dtype=torch.uint8, device="cpu"))
        return link._asdict() | {"new": put(link.new), "rows": put(link.rows), "slots": put(slots)}


def _stands(link: Link) -> int:
    """The number of a call's places whose keys are in the file."""
    return max(link.filled - link.base, link.new.shape[2])


def _chain(value: Any, name: str, read: Read) -> None:
    """Read a chain. A length that no tensor of the file confirms is an error, since memory is allocated by it."""
    links: list[Link] = []
    for i, entry in enumerate(each(_LINK)(value, name, read)):
        slots = entry.pop("slots")
        link = Link(**entry)
        link.check(links[-1] if links else None)
        if link.length > _stands(link) and (slots is None or len(slots) != link.length):
            raise Damaged(f"{name}[{i}].length", link.length, f"{_stands(link)}, the keys that there are")
        links.append(link)
    read.chains.append(Chain(links))


def _cached(width: str) -> Check:
    """A chain, by its number, and the number of one of its links: (B, Hk, Lk, width)."""
    pair = row(whole(), whole())

    def check(value: Any, name: str, read: Read) -> Cached:
        chain, number = pair(value, name, read)
        if chain >= len(read.chains) or number >= len(read.chains[chain].links):
            raise Damaged(name, value, "the number of a chain and of one of its links")
        found = Cached(read.chains[chain], number)
        for dim, size in zip(("B", "Hk", "Lk", width), found.shape, strict=True):
            if read.sizes.setdefault(dim, size) != size:
                raise Damaged(name, tuple(found.shape), f"(B, Hk, Lk, {width}), where {dim} is {read.sizes[dim]}")
        if read.sizes["Hk"] == 0 or read.sizes["H"] % read.sizes["Hk"]:
            raise Damaged(name, tuple(found.shape), f"heads that divide those of the query, {read.sizes['H']}")
        read.sizes["distances"] = max(read.sizes["Lq"] + read.sizes["Lk"] - 1, 0)
        return found

    return check


def _one_call(value: Any, name: str, read: Read) -> AttentionCall:
    read.sizes = {}
    return _call(_CALL(value, name, read))


_LINK = fields(
    base=whole(),
    length=whole(),
    start=whole(),
    new=tensor(FLOAT, "n n n n"),
    filled=whole(),
    rows=optional(tensor(BOOL, "n n")),
    query=optional(whole()),
    rejected=whole(),
    slots=optional(tensor((torch.uint8,), "n")),
)
_EDGE, _GAP = tensor(WHOLE, "B|1 H|1 Lq|1"), tensor(WHOLE, "B|1 H|1 Lq|1 n")
_OUTPUT = tensor(FLOAT, "B H Lq Ev")
_POSITIONS = fields(tensor=tensor(WHOLE, "B|1"))
_CALL = fields(
    name=text,
    kind=one_of("self", "cross"),
    backend=text,
    run=whole(),
    query=tensor(FLOAT, "B H Lq E"),
    key=_cached("E"),
    scale=optional(number),
    softcap=optional(positive),
    align=optional(either(str, one_of("upper_left", "lower_right"), either(int, whole(-FAR, FAR), _POSITIONS))),
    mask=optional(text),
    spans=optional(row(_EDGE, _EDGE, optional(tensor(BOOL, "B|1 H|1 Lq|1 Lk|1")), optional(_GAP), optional(_GAP))),
    bias=optional(row(optional(tensor(FLOAT, "B|1 H|1 Lq|1 Lk|1")), optional(tensor(FLOAT, "B|1 H|1 distances")))),
    sinks=optional(tensor(FLOAT, "H")),
    uniform=optional(tensor(BOOL, "B|1 H|1 Lq|1 1")),
    padding=optional(row(optional(tensor(BOOL, "B Lq")), optional(tensor(BOOL, "B Lk")))),
    value=optional(_cached("Ev")),
    outcome=optional(row(optional(_OUTPUT), optional(_OUTPUT))),
    dropped=flag,
    factor=optional(tensor(FLOAT, "B H Lq")),
    layer=fields(number=whole(), stack=text),
    edited=flag,
    windows_of=optional(whole(1)),
)
_FILE = fields(format=whole(), chains=each(_chain), calls=each(_one_call))


def _written(call: AttentionCall, tensors: _Tensors, chains: _Chains) -> dict[str, Any]:
    problem, score = call.kept.problem, call.score
    if not isinstance(score, Dot) or problem.lowered is None or problem.lowered.weight is not None:
        raise UnsupportedError(
            f"{call.name} scores by {type(score).__name__}, and files hold dot products alone. Save the others: "
            "ch.models.Recording([call for call in seen.calls if …]).write(path)."
        )
    call.kept.check()
    align = None if problem.documents is not None else problem.sizes.align  # positions count in the row there
    return {
        "name": call.name,
        "kind": call.kind,
        "backend": call.backend,
        "run": call.run,
        "query": tensors.put(call.query),
        "key": chains.put(call.cached_key),
        "scale": None if score.scale is None else float(score.scale),
        "softcap": None if score.softcap is None else float(score.softcap),
        "align": {"tensor": tensors.put(align)} if isinstance(align, Tensor) else align,
        "mask": None if call.mask is None else said(call.mask, call.mask.title),
        "spans": None if problem.spans is None else _edges(problem.spans, tensors),
        "bias": None if problem.bias is None else _bias(problem.bias, tensors),
        "sinks": tensors.put(problem.sinks),
        "uniform": tensors.put(call.uniform),
        "padding": None if call.padding is None else [tensors.put(side) for side in call.padding],
        "value": chains.put(call.cached_value),
        "outcome": None if call.outcome is None else [tensors.put(t) for t in (call.outcome.output, call.outcome.grad)],
        "dropped": call.outcome is not None and call.outcome.dropped,
        "factor": tensors.put(call.factor),
        "layer": {"number": call.layer.number, "stack": call.layer.stack},
        "edited": call.edited,
        "windows_of": call.windows_of,
    }


def _edges(spans: Spans, tensors: _Tensors) -> list[str | None]:
    rest = None if spans.residual is None else spans.rest(*EVERY)
    return [tensors.put(edge) for edge in (spans.start, spans.stop, rest, *(spans.gaps or (None, None)))]


def _bias(bias: Added, tensors: _Tensors) -> list[str | None]:
    dense = bias.dense
    if bias.function is not None:
        written = bias.function(*EVERY)
        dense = written if dense is None else dense + written
    return [tensors.put(dense), tensors.put(bias.relative)]


def _call(read: Mapping[str, Any]) -> AttentionCall:
    """The call that an entry describes."""
    query, key, uniform, align = (read[name] for name in ("query", "key", "uniform", "align"))
    score, outcome = Dot(read["scale"], read["softcap"]), read["outcome"]
    problem = make_problem(
        query if uniform is None else query.masked_fill(uniform, 0.0),
        key.tensor() if key.whole else no_key(key),
        score=score,
        sinks=read["sinks"],
        align=align["tensor"] if isinstance(align, dict) else align,
    )
    sizes, mask, outcome = problem.sizes, None, read["outcome"]
    if read["bias"] is not None:
        problem = problem._replace(bias=Added(*read["bias"]))
    if read["spans"] is not None:
        start, stop, rest, low, high = read["spans"]
        gaps = None if low is None and high is None else (low, high)
        spans = Spans(start, stop, None if rest is None else at_once(rest), gaps=gaps)
        problem = problem._replace(visible=Visible(spans, None, "inside", Memo()))
    problem = checked(problem, "the file")
    if problem.spans is not None:
        if problem.spans.residual is not None:
            problem.spans.rest(*EVERY)  # all of it is there: its shape is checked
        mask = RecordedMask(problem.spans, sizes, read["mask"])
    return AttentionCall(
        read["name"],
        read["kind"],
        query,
        key,
        score,
        mask,
        read["backend"],
        Record(problem, Versions(()), copied=True),
        uniform,
        None if read["padding"] is None else Words(*read["padding"]),
        read["run"],
        read["value"],
        None if outcome is None else Outcome(outcome[0], outcome[1], read["dropped"]),
        factor=read["factor"],
        layer=LayerName(**read["layer"], cross=read["kind"] == "cross"),
        edited=read["edited"],
        windows_of=read["windows_of"],
    )
