"""A recording in a file: tensors as safetensors, all else as JSON in the header; no part of it can run code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.base.arrays import check_memory
from clearhead.base.errors import ClearheadError, ShapeError, UnsupportedError, require
from clearhead.base.positions import FAR
from clearhead.base.text import said
from clearhead.base.versions import Versions
from clearhead.base.written import replacing
from clearhead.biases.base import Added
from clearhead.masks.base import Spans
from clearhead.models.attention_call import AttentionCall
from clearhead.models.call import Outcome, no_key
from clearhead.models.chain.cached import Cached, Chain, Link
from clearhead.models.show.schema import (
    BOOL,
    FLOAT,
    WHOLE,
    Check,
    Damaged,
    Read,
    each,
    either,
    fields,
    flag,
    number,
    one_of,
    optional,
    parsed,
    positive,
    row,
    tensor,
    text,
    whole,
)
from clearhead.models.tap.layers import LayerName
from clearhead.problem._recorded import RecordedMask
from clearhead.problem.checked import checked
from clearhead.problem.problem import make_problem
from clearhead.problem.record import EVERY, Record, at_once
from clearhead.problem.visible import Memo, Visible
from clearhead.problem.words import Words
from clearhead.scores.dot import Dot

FORMAT = 6
HEADER = "clearhead recording"


def write(calls: Sequence[AttentionCall], path: str | Path) -> Path:
    """Write calls to a file: see `Recording.write`."""
    safetensors = require("safetensors.torch", "models", "saving a recording")
    tensors = _Tensors()
    chains = _Chains(tensors)
    entries = [_written(call, tensors, chains) for call in calls]
    header = json.dumps({"format": FORMAT, "calls": entries, "chains": chains.written})
    with replacing(path, "recording") as beside:
        try:
            if beside.exists():  # a pipe or a device, which save_file would replace by a file
                beside.write_bytes(safetensors.save(tensors.named, {HEADER: header}))
            else:
                safetensors.save_file(tensors.named, beside, {HEADER: header})
        except Exception as error:  # an OSError, or an error of safetensors, whose class depends on its version
            raise OSError(str(error)) from error
    return Path(path)


def read(path: str | Path) -> list[AttentionCall]:
    """The calls of a file."""
    safetensors = require("safetensors", "models", "loading a recording")
    try:
        with safetensors.safe_open(Path(path), "pt") as file:
            header = (file.metadata() or {}).get(HEADER)
            # copies, since the file is mapped: a later write to it would change them, and a truncation end the process
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - a file is no dict
    except Exception as error:  # copied for the same reason
        raise ClearheadError(f"cannot read a recording from {str(path)!r}: {error}.") from error
    if header is None:
        raise ClearheadError(f"{str(path)!r} is no recording: pass a file that seen.write() has written.")
    try:
        found = parsed(header)
        written = found.get("format") if isinstance(found, dict) else None
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
    align = problem.sizes.align
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
        if bool((start > sizes.keys).any()):
            raise ShapeError(f"a mask's spans begin at {int(start.max())}, and there are {sizes.keys} keys")
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
    )
