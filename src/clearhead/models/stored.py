"""A recording in a file: tensors as safetensors, all else as JSON in their header, nothing that can run code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError, UnsupportedError, require
from clearhead.base.versions import Versions
from clearhead.biases.base import Added
from clearhead.masks.base import Spans
from clearhead.models._outcome import Outcome
from clearhead.models._padding import Real
from clearhead.models.attention_call import AttentionCall, no_key
from clearhead.models.generation._cached import Cached, Chain, Link
from clearhead.problem._recorded import RecordedMask
from clearhead.problem.problem import make_problem
from clearhead.problem.record import EVERY, Record, at_once
from clearhead.problem.visible import visible
from clearhead.scores.dot import Dot

FORMAT = 4
HEADER = "clearhead recording"


def save(calls: Sequence[AttentionCall], path: str | Path) -> Path:
    """Write calls to a file; see `Recording.save`."""
    safetensors = require("safetensors.torch", "models", "saving a recording")
    tensors = _Tensors()
    chains = _Chains(tensors)
    entries = [_written(call, tensors, chains) for call in calls]
    header = json.dumps({"format": FORMAT, "calls": entries, "chains": chains.written})
    try:
        safetensors.save_file(tensors.named, Path(path), {HEADER: header})
    except Exception as error:  # an OSError, or the library's own, which is another in each of its versions
        raise ClearheadError(
            f"cannot write the recording to {str(path)!r}: {error}. Pass a file in a folder that exists."
        ) from error
    return Path(path)


def read(path: str | Path) -> list[AttentionCall]:
    """The calls of a file."""
    safetensors = require("safetensors", "models", "loading a recording")
    try:
        with safetensors.safe_open(Path(path), "pt") as file:
            header = (file.metadata() or {}).get(HEADER)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a file is no dict
    except Exception as error:  # as above
        raise ClearheadError(f"cannot read a recording from {str(path)!r}: {error}.") from error
    if header is None:
        raise ClearheadError(f"{str(path)!r} is no recording: pass a file that seen.save() has written.")
    try:
        found = json.loads(header)
        known = found["format"] == FORMAT
        chains = [_chain(links, tensors) for links in found["chains"]] if known else []
        calls = [_call(entry, tensors, chains) for entry in found["calls"]] if known else []
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ClearheadError(f"the recording in {str(path)!r} is damaged: {type(error).__name__} {error}.") from error
    if not known:
        raise ClearheadError(
            f"the recording in {str(path)!r} has format {found['format']}, and this version reads {FORMAT}: record the "
            "model again, or load it with the version that wrote it."
        )
    return calls


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

    def put(self, cached: Cached | None) -> tuple[int, int] | None:
        """Which chain, and which of its links."""
        if cached is None:
            return None
        chain = cached.chain
        if chain not in self._known:
            self._known[chain] = len(self._known)
            put = self._tensors.put
            self.written.append(
                [link._asdict() | {"new": put(link.new), "rows": put(link.rows)} for link in chain.links]
            )
        return self._known[chain], cached.number


def _chain(written: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor]) -> Chain:
    links: list[Link] = []
    for entry in written:
        rows = None if entry["rows"] is None else tensors[entry["rows"]]
        links.append(Link(**{**entry, "new": tensors[entry["new"]], "rows": rows}))
        links[-1].check(links[-2] if len(links) > 1 else None)
    return Chain(links)


def _written(call: AttentionCall, tensors: _Tensors, chains: _Chains) -> dict[str, Any]:
    problem, score = call.kept.problem, call.score
    if not isinstance(score, Dot) or problem.lowered is None or problem.lowered.weight is not None:
        raise UnsupportedError(
            f"{call.name} scores by {type(score).__name__}, and files hold dot products alone. Save the others: "
            "ch.Recording([call for call in seen.calls if …]).save(path)."
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
        "mask": None if call.mask is None else call.mask.title(),
        "spans": None if problem.spans is None else _edges(problem.spans, tensors),
        "bias": None if problem.bias is None else _bias(problem.bias, tensors),
        "sinks": tensors.put(problem.sinks),
        "uniform": tensors.put(call.uniform),
        "padding": None if call.padding is None else [tensors.put(side) for side in call.padding],
        "value": chains.put(call.cached_value),
        "outcome": None if call.outcome is None else [tensors.put(t) for t in (call.outcome.output, call.outcome.grad)],
        "dropped": call.outcome is not None and call.outcome.dropped,
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


def _call(entry: Mapping[str, Any], tensors: Mapping[str, Tensor], chains: Sequence[Chain]) -> AttentionCall:
    def get(name: str | None) -> Tensor | None:
        return None if name is None else tensors[name]

    def cached(place: Sequence[int]) -> Cached:
        chain, number = place
        return Cached(chains[chain], range(len(chains[chain].links))[number])

    query, key = tensors[entry["query"]], cached(entry["key"])
    score, uniform, align = Dot(entry["scale"], entry["softcap"]), get(entry["uniform"]), entry["align"]
    problem = make_problem(
        query if uniform is None else query.masked_fill(uniform, 0.0),
        key.tensor() if key.whole else no_key(key),
        score=score,
        sinks=get(entry["sinks"]),
        align=tensors[align["tensor"]] if isinstance(align, dict) else align,
    )
    if entry["bias"] is not None:
        dense, relative = entry["bias"]
        problem = problem._replace(bias=Added(get(dense), get(relative)))
    mask = None
    if entry["spans"] is not None:
        start, stop, rest, low, high = entry["spans"]
        gaps = None if low is None else (tensors[low], tensors[high])
        spans = Spans(tensors[start], tensors[stop], None if rest is None else at_once(tensors[rest]), gaps=gaps)
        problem = problem._replace(visible=visible(spans, problem.sizes))
        mask = RecordedMask(spans, problem.sizes, entry["mask"])
    padding = None if entry["padding"] is None else Real(*map(get, entry["padding"]))
    record = Record(problem, Versions(()), copied=True)
    written = entry["outcome"]
    return AttentionCall(
        entry["name"],
        entry["kind"],
        query,
        key,
        score,
        mask,
        entry["backend"],
        record,
        uniform,
        padding,
        entry["run"],
        None if entry["value"] is None else cached(entry["value"]),
        None if written is None else Outcome(get(written[0]), get(written[1]), entry.get("dropped", False)),
    )
