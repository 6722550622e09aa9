"""A mask's normal form and the values that follow from it, made once for a mask and a size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from clearhead.base.errors import ShapeError, UnsupportedError
from clearhead.base.kept import Memo, Table, size_of
from clearhead.base.output.text import with_outline
from clearhead.base.shapes import Sizes, moved, part
from clearhead.base.torch_state.mode import CURRENT, Mode, get_mode, is_capturing_graph
from clearhead.base.torch_state.tensor_kind import MASKS_BY_SAMPLE, has_vmap_dimension, is_on_host, is_readable, unwrap
from clearhead.base.torch_state.versions import Versions
from clearhead.masks._read import KEPT
from clearhead.masks._spans import edges_on_host
from clearhead.masks.base import Mask, Spans, all_keys, map_edges
from clearhead.masks.combined import Combined
from clearhead.problem.held_keys import HeldKeys
from clearhead.problem.unseen import Unseen, finite, seen, where_unseen

STRIP = 2**22  # pairs of a residual that are looked at together


class Later(NamedTuple):
    """Edges that lie on another device: whoever reads them waits for it."""

    keys: int
    who: str | None  # who gave the spans, as an error names it


@with_outline
class Visible(NamedTuple):
    """A mask's spans, the edges of their hulls on the host (None: hidden), and where the keys are that none sees."""

    spans: Spans
    known: tuple[np.ndarray, np.ndarray] | Later | None
    unseen: Unseen
    memo: Memo

    @property
    def edges(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The hulls' starts and stops on the host; where they lie on another device, they are read once, here."""
        if not isinstance(self.known, Later):
            return self.known
        known = self.known
        return self.memo.derive("edges", lambda: checked_edges(self.spans, *known))

    @property
    def read(self) -> bool:
        """Whether the edges are on the host already."""
        return self.known is not None and (not isinstance(self.known, Later) or "edges" in self.memo)


_ZERO = torch.zeros(1, 1, 1, dtype=torch.int64, device="cpu")
_plain = Table(64)  # of masks that are plain values, by signature and sizes: a model's layers use the same spans


def resolve(mask: Mask, sizes: Sizes, as_written: bool, mode: Mode = CURRENT) -> Visible:
    """A mask in its normal form. `as_written`: as a matrix, by the logic of its expression. `mode`: that of here."""
    if as_written:
        return visible(_matrix(mask, sizes), sizes)
    if mode.compiled:
        return Visible(mask._resolve(sizes), None, "inside", Memo())
    if type(mask) is HeldKeys and sizes.device.type == "cpu" and mode.eager:
        stop, nothing = mask.valid_lens.view(-1, 1, 1), not all(mask.ends) or not sizes.queries
        unseen: Unseen = "inside" if nothing else "none" if min(mask.ends) == sizes.keys else "outside"
        edges = np.array(mask.ends, np.int64).reshape(-1, 1, 1)
        memo = Memo({"inside all": (0, min(mask.ends, default=0))})
        return Visible(Spans(_ZERO, stop), (np.zeros(edges.shape, np.int64), edges), unseen, memo)
    signature = None if mode.traced or isinstance(sizes.align, Tensor) else mask.signature()
    known: Visible | None = None if signature is None else _plain.use((signature, sizes))
    if known is not None:
        return known
    if signature is None and not mode.transforms and not mode.traced and not isinstance(sizes.align, Tensor):
        own = isinstance(mask, Combined) or "lower" in vars(type(mask))  # an inherited one may name too few
        once = mask._document_edges is not None and mask._document_edges.nested  # made anew in each call
        depends = mask.depends() if own and not once else None
        if depends is not None:
            return _kept(mask, depends, sizes)
    if signature is None or mode.transforms:  # tensors made inside a transform are not valid outside of it
        return visible(mask._resolve(sizes), sizes)
    host = sizes._replace(device=torch.device("cpu"))  # a plain value is lowered there: no other device is read
    with torch.inference_mode(False):  # a remembered mask may be used where gradients are wanted
        found = visible(mask._resolve(host), host)
        if sizes.device != host.device:
            intervals_of(found)
            found = found._replace(spans=_on(found.spans, sizes.device))
    _plain.keep((signature, sizes), found, size_of((*found.spans.edges(), *found.spans.reads, found.known)), found.memo)
    return found


def intervals_of(visible: Visible) -> tuple[np.ndarray, np.ndarray]:
    """The spans' intervals on the host: see `Spans.intervals`."""
    return visible.memo.derive("intervals", lambda: edges_on_host(*visible.spans.intervals()))


def rows_of(visible: Visible, sizes: Sizes) -> tuple[np.ndarray, np.ndarray] | None:
    """The edges, narrowed for each query to the keys that the residual leaves to some sequence or head. None without a
    residual, and where the mask is not kept, since the residual is asked for every pair."""
    spans, edges = visible.spans, visible.edges
    kept = "kept" in visible.memo and is_on_host(spans.start)
    if spans.residual is None or edges is None or not kept or not sizes.keys:
        return None
    if "rows" not in visible.memo:
        every, first, last = slice(None), np.zeros(sizes.queries, np.int64), np.zeros(sizes.queries, np.int64)
        step = max(1, STRIP // max(1, sizes.batch * sizes.heads * sizes.keys))
        for top in range(0, sizes.queries, step):
            rows = slice(top, min(top + step, sizes.queries))
            with torch.inference_mode(False), torch.no_grad():
                some = spans.rest(every, every, rows, every).any(1).any(0).numpy()  # (rows or 1, Lk or 1)
            some = np.broadcast_to(some, (rows.stop - rows.start, sizes.keys))
            seen = some.any(-1)
            first[rows] = np.where(seen, some.argmax(-1), 0)
            last[rows] = np.where(seen, sizes.keys - some[:, ::-1].argmax(-1), 0)
        visible.memo["rows"] = np.maximum(edges[0], first), np.minimum(edges[1], last)
    found: tuple[np.ndarray, np.ndarray] = visible.memo["rows"]
    return found


def seen_of(visible: Visible, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Which keys and queries see and are seen by some: see `seen`. Found once for as long as the mask is kept."""
    mode = get_mode()
    if mode.compiled or mode.traced or mode.transforms or is_capturing_graph():
        return seen(visible.spans, sizes)
    with torch.inference_mode(False), torch.no_grad():
        return visible.memo.derive("seen", lambda: seen(visible.spans, sizes))


def all_seen(visible: Visible, sizes: Sizes) -> bool:
    """Whether a mask that is kept is known to hide no key from all queries, and no query from all keys."""
    if "kept" not in visible.memo or not is_on_host(visible.spans.start):
        return False
    return visible.memo.derive("all seen", lambda: all(bool(side.all()) for side in seen_of(visible, sizes)))


def finite_unseen(visible: Visible, query: Tensor, key: Tensor) -> bool:
    """Whether every key that no query sees is known to be finite, and every query that sees nothing.

    Where the keys are outside of hulls that leave no query without keys, only keys outside of some hull are read: a
    cache that is filled in part is not read as a whole for each token.
    """
    if visible.unseen != "outside":
        return finite(query) and finite(key)
    if "inside all" not in visible.memo:  # the first and the last key of all hulls together, the last one excluded
        assert visible.edges is not None
        start, stop = visible.edges
        within = int(start.min(-1).max()), int(stop.max(-1).min())
        visible.memo["inside all"] = (0, 0) if (stop <= start).any() else within
    first, last = visible.memo["inside all"]
    if last <= first:
        return finite(query) and finite(key)
    return (not first or finite(key[:, :, :first])) and (last == key.shape[2] or finite(key[:, :, last:]))


def _attributes(mask: Mask) -> Iterator[Any]:
    """The attributes of a mask, and of the masks that it holds, each of them once."""
    waiting, met = [mask], {id(mask)}
    while waiting:
        one = waiting.pop()
        yield type(one)
        for name, value in vars(one).items():
            if name.startswith(KEPT):
                continue
            yield value
            masks = [part for part in (value if isinstance(value, tuple) else (value,)) if isinstance(part, Mask)]
            waiting += [part for part in masks if id(part) not in met]
            met |= set(map(id, masks))


def _kept(mask: Mask, depends: tuple[Tensor, ...], sizes: Sizes) -> Visible:
    """The normal form that a mask keeps, until a tensor that it depends on is written to."""
    kept = vars(mask).setdefault(KEPT, Table(4))
    named, now = [("the mask", tensor) for tensor in depends], list(_attributes(mask))
    known = kept.use(sizes)
    versions, before, found = (None, [], None) if known is None else known
    same = found is not None and len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))
    if not same or not versions.known or versions.changed(named) is not None:
        with torch.inference_mode(False):  # a kept mask may be used where gradients are wanted
            found = visible(mask._resolve(sizes), sizes)
        found.memo["kept"] = True
        # the caller's tensors, which the residual reads, are the caller's memory
        size = size_of((*found.spans.edges(), found.known))
        kept.keep(sizes, (Versions(named), now, found), size, found.memo)
    made: Visible = found
    return made


def _on(spans: Spans, device: torch.device) -> Spans:
    residual = spans.residual
    rest = None if residual is None else lambda *sides: moved(residual(*sides), device)
    return map_edges(spans, lambda edge: moved(edge, device))._replace(residual=rest)


def _matrix(mask: Mask, sizes: Sizes) -> Spans:
    """Spans of every key, with the mask's matrix as the residual. It is lowered too, to know what it reads."""
    keep = mask._compute_matrix(sizes)
    return all_keys(sizes, lambda *sides: part(keep, *sides), mask.lower(sizes).reads)


def visible(spans: Spans, sizes: Sizes, who: str | None = None) -> Visible:
    """The `Visible` of spans. `who`: their source, if it is no mask's `lower`. Their values are read here, once, where
    they lie in the host's memory; else when an engine asks for them."""
    if get_mode().compiled:
        return Visible(spans, None, "inside", Memo())
    spans = map_edges(spans, unwrap)
    edges = spans.edges()
    if any(has_vmap_dimension(edge) for edge in edges):
        raise UnsupportedError(
            "the mask differs along a dimension that torch.func.vmap has hidden, and engines must read it. Give the "
            f"mask a batch dimension, and call attention() on the whole batch.\n{MASKS_BY_SAMPLE}"
        )
    if not all(map(is_readable, edges)):  # there are shapes and no values, so nothing can be skipped
        return Visible(spans, None, "inside", Memo())
    if not all(map(is_on_host, edges)):
        return Visible(spans, Later(sizes.keys, who), "inside", Memo())
    start, stop = checked_edges(spans, sizes.keys, who)
    return Visible(spans, (start, stop), where_unseen(spans, start, stop, sizes), Memo())


def checked_edges(spans: Spans, keys: int, who: str | None) -> tuple[np.ndarray, np.ndarray]:
    """The hulls' starts and stops on the host, or an error where they reach beyond the keys."""
    start, stop = spans.host()
    if start.size and stop.size and (start.min() < 0 or stop.max() > keys):
        raise ShapeError(
            f"{'' if who is None else f'{who} gave a mask: '}the spans of a mask reach from {start.min()} to "
            f"{stop.max()}, and there are {keys} keys: lower() must give 0 ≤ start and stop ≤ Lk."
        )
    return start, stop


def seen_by(queries: Tensor, all_of: Visible | None, sizes: Sizes) -> Visible:
    """The same mask, under which only these queries, bool (B, Lq), see any key."""
    stop = torch.where(queries, sizes.keys, 0).unsqueeze(1)
    if all_of is None:
        return visible(Spans(torch.zeros_like(stop), stop), sizes)
    spans = all_of.spans
    return visible(spans._replace(stop=torch.minimum(spans.stop, stop)), sizes)
