"""A mask's normal form and the values that follow from it, computed once for a mask and a size."""

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

STRIP = 2**22  # pairs of a residual in memory at once


class Later(NamedTuple):
    """Edges on another device: the first read blocks until the device has finished."""

    keys: int
    who: str | None  # the source of the spans, for errors


@with_outline
class Visible(NamedTuple):
    """A mask's spans, the edges of their hulls on the host (None: unreadable), and the location of unused keys."""

    spans: Spans
    known: tuple[np.ndarray, np.ndarray] | Later | None
    unseen: Unseen
    memo: Memo

    @property
    def edges(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The hulls' starts and stops on the host; from another device they are copied once, at the first read."""
        if not isinstance(self.known, Later):
            return self.known
        known = self.known
        return self.memo.derive("edges", lambda: checked_edges(self.spans, *known))

    @property
    def read(self) -> bool:
        """Whether the edges are on the host already."""
        return self.known is not None and (not isinstance(self.known, Later) or "edges" in self.memo)


_ZERO = torch.zeros(1, 1, 1, dtype=torch.int64, device="cpu")
_plain = Table(64)  # the spans of masks with a signature, by signature and sizes: all layers of a model share them


def resolve(mask: Mask, sizes: Sizes, as_written: bool, mode: Mode = CURRENT) -> Visible:
    """Return a mask in its normal form.

    Args:
        mask: The mask.
        sizes: The sizes of the call.
        as_written: Whether to return a matrix, by the logic of the expression.
        mode: The state of PyTorch here.
    """
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
        own = isinstance(mask, Combined) or "lower" in vars(type(mask))  # an inherited depends() may miss tensors
        once = mask._document_edges is not None and mask._document_edges.nested  # each call makes such a mask again
        depends = mask.depends() if own and not once else None
        if depends is not None:
            return _kept(mask, depends, sizes)
    if signature is None or mode.transforms:  # a tensor of a transform is not valid outside of it
        return visible(mask._resolve(sizes), sizes)
    host = sizes._replace(device=torch.device("cpu"))  # lowering on the host needs no read from a device
    with torch.inference_mode(False):  # a later call with gradients may use the cached mask
        found = visible(mask._resolve(host), host)
        if sizes.device != host.device:
            intervals_of(found)
            found = found._replace(spans=_on(found.spans, sizes.device))
    _plain.keep((signature, sizes), found, size_of((*found.spans.edges(), *found.spans.reads, found.known)), found.memo)
    return found


def intervals_of(visible: Visible) -> tuple[np.ndarray, np.ndarray]:
    """Return the spans' intervals on the host: see `Spans.intervals`."""
    return visible.memo.derive("intervals", lambda: edges_on_host(*visible.spans.intervals()))


def rows_of(visible: Visible, sizes: Sizes) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the edges, narrowed for each query to the keys that the residual allows in some sequence or head.

    None without a residual, and if the mask is not cached, since this computes the residual of every pair.
    """
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
    """Return the keys that any query may attend to, and the queries with an allowed key: see `seen`.

    The result is cached as long as the mask.
    """
    mode = get_mode()
    if mode.compiled or mode.traced or mode.transforms or is_capturing_graph():
        return seen(visible.spans, sizes)
    with torch.inference_mode(False), torch.no_grad():
        return visible.memo.derive("seen", lambda: seen(visible.spans, sizes))


def all_seen(visible: Visible, sizes: Sizes) -> bool:
    """Return whether a cached mask is known to have no unused key and no fully masked row."""
    if "kept" not in visible.memo or not is_on_host(visible.spans.start):
        return False
    return visible.memo.derive("all seen", lambda: all(bool(side.all()) for side in seen_of(visible, sizes)))


def finite_unseen(visible: Visible, query: Tensor, key: Tensor) -> bool:
    """Return whether all keys that no query may attend to, and all fully masked queries, are known to be finite.

    If such keys are only outside of the hulls, and every query has a key, the function reads only keys outside of some
    hull: a cache that is filled in part is not read as a whole for each token.
    """
    if visible.unseen != "outside":
        return finite(query) and finite(key)
    if "inside all" not in visible.memo:  # the intersection of all hulls, [first, last)
        assert visible.edges is not None
        start, stop = visible.edges
        within = int(start.min(-1).max()), int(stop.max(-1).min())
        visible.memo["inside all"] = (0, 0) if (stop <= start).any() else within
    first, last = visible.memo["inside all"]
    if last <= first:
        return finite(query) and finite(key)
    return (not first or finite(key[:, :, :first])) and (last == key.shape[2] or finite(key[:, :, last:]))


def _attributes(mask: Mask) -> Iterator[Any]:
    """Yield the attributes of a mask, and of the masks that it holds, each once."""
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
    """Return the normal form that a mask caches until a tensor that it depends on is written to."""
    kept = vars(mask).setdefault(KEPT, Table(4))
    named, now = [("the mask", tensor) for tensor in depends], list(_attributes(mask))
    known = kept.use(sizes)
    versions, before, found = (None, [], None) if known is None else known
    same = found is not None and len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))
    if not same or not versions.known or versions.changed(named) is not None:
        with torch.inference_mode(False):  # a later call with gradients may use the cached mask
            found = visible(mask._resolve(sizes), sizes)
        found.memo["kept"] = True
        # do not count the tensors that the residual reads: the caller holds their memory anyway
        size = size_of((*found.spans.edges(), found.known))
        kept.keep(sizes, (Versions(named), now, found), size, found.memo)
    made: Visible = found
    return made


def _on(spans: Spans, device: torch.device) -> Spans:
    """Move spans to a device."""
    residual = spans.residual
    rest = None if residual is None else lambda *sides: moved(residual(*sides), device)
    return map_edges(spans, lambda edge: moved(edge, device))._replace(residual=rest)


def _matrix(mask: Mask, sizes: Sizes) -> Spans:
    """Return spans of every key with the mask's matrix as the residual, and the tensors that the lowered mask reads."""
    keep = mask._compute_matrix(sizes)
    return all_keys(sizes, lambda *sides: part(keep, *sides), mask.lower(sizes).reads)


def visible(spans: Spans, sizes: Sizes, who: str | None = None) -> Visible:
    """Return the `Visible` of spans.

    Their values are read here, once, if they are in the host's memory; else when an engine needs them.

    Args:
        spans: The spans.
        sizes: The sizes of the call.
        who: The source of the spans, if it is not a mask's `lower`.
    """
    if get_mode().compiled:
        return Visible(spans, None, "inside", Memo())
    spans = map_edges(spans, unwrap)
    edges = spans.edges()
    if any(has_vmap_dimension(edge) for edge in edges):
        raise UnsupportedError(
            "the mask differs along a dimension of torch.func.vmap, and engines must read its values.\nGive the "
            f"mask a batch dimension, and call attention() on the whole batch.\n{MASKS_BY_SAMPLE}"
        )
    if not all(map(is_readable, edges)):  # without values no pair can be skipped
        return Visible(spans, None, "inside", Memo())
    if not all(map(is_on_host, edges)):
        return Visible(spans, Later(sizes.keys, who), "inside", Memo())
    start, stop = checked_edges(spans, sizes.keys, who)
    return Visible(spans, (start, stop), where_unseen(spans, start, stop, sizes), Memo())


def checked_edges(spans: Spans, keys: int, who: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the hulls' starts and stops on the host; raise if they exceed the number of keys."""
    start, stop = spans.host()
    if start.size and stop.size and (start.min() < 0 or stop.max() > keys):
        raise ShapeError(
            f"{'' if who is None else f'{who} gave a mask: '}the spans of a mask reach from {start.min()} to "
            f"{stop.max()}, and there are {keys} keys; lower() must return 0 ≤ start and stop ≤ Lk."
        )
    return start, stop


def seen_by(queries: Tensor, all_of: Visible | None, sizes: Sizes) -> Visible:
    """Return the mask under which all queries but these, bool (B, Lq), are fully masked."""
    stop = torch.where(queries, sizes.keys, 0).unsqueeze(1)
    if all_of is None:
        return visible(Spans(torch.zeros_like(stop), stop), sizes)
    spans = all_of.spans
    return visible(spans._replace(stop=torch.minimum(spans.stop, stop)), sizes)
