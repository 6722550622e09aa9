"""Pictures of some heads' weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from clearhead.base.errors import ClearheadError
from clearhead.base.output.pictures import MOST, Array, Panel
from clearhead.base.output.text import brief, escaped, said, short
from clearhead.base.output.thumbnails import picture
from clearhead.base.selected import numbers_of
from clearhead.inspection.index import parse
from clearhead.masks._draw import cell_of, of, shares
from clearhead.problem.problem import Problem

CELLS = 512  # the most rows and columns of a picture; a larger matrix has cells of the largest weight
IN_GRID = 256  # the same for each of several pictures
IN_NOTEBOOK, HEADS, PAIRS = 32, 12, 2**25  # in a notebook: the most cells, pictures, and pairs to compute

Pick = tuple[int, ...]


def picks(head: tuple[Any, ...], outer: tuple[int, ...]) -> list[Pick]:
    """The heads to draw, each by its numbers; a dimension without a given number means all of it."""
    if len(head) > len(outer):
        raise ClearheadError(
            f"plot() takes {len(outer)} numbers at most, one for each of the dimensions {outer}; got {brief(head, 80)}."
        )
    chosen = [
        list(numbers_of(head[i], size, "a head of plot()", f"there are {size}")) if i < len(head) else list(range(size))
        for i, size in enumerate(outer)
    ]
    if (count := math.prod(map(len, chosen))) > MOST or not count:
        raise ClearheadError(
            f"plot() draws 1 to {MOST} pictures, and these are {count}: choose some, such as plot(0, [3, 5])."
        )
    return list(itertools.product(*chosen))


def titles(chosen: Sequence[Pick], has_heads: bool = True) -> list[str]:
    """The title of each head: the numbers in which the heads differ."""
    count = len(chosen[0])
    last = ["sequence", "head"] if has_heads else ["sequence"]
    names = [*(f"dimension {i}" for i in range(count - len(last))), *last[max(len(last) - count, 0) :]]
    differ = [len({pick[i] for pick in chosen}) > 1 for i in range(count)]
    return [", ".join(f"{n} {p}" for n, p, d in zip(names, pick, differ, strict=True) if d) for pick in chosen]


def panels(weights: Any, chosen: Sequence[Pick], most: int) -> list[Panel]:
    """The weights of these heads, or the largest in each cell where there are more than `most` rows or columns."""
    queries, keys = weights.shape[-2:]
    problem, cell = weights.problem, cell_of(queries, keys, most)
    found = []
    with torch.no_grad():
        for pick, title in zip(chosen, titles(chosen, problem.sizes.has_heads), strict=True):
            cells = weights[pick] if cell == (1, 1) else weights._map(pick, most)
            found.append(Panel(numbers(cells), hidden(problem, weights, pick, cell), title))
    return found


def hidden(problem: Problem, weights: Any, pick: Pick, cell: tuple[int, int]) -> Array | None:
    """The cells of which no pair may attend, by the mask or by a bias of −∞; None where there is neither a mask nor a
    bias."""
    if problem.spans is None and problem.bias is None:
        return None
    part = parse(pick, weights.shape, problem.sizes)
    place = part.batches[0].start, part.heads.start
    sizes = problem.sizes
    share = shares(lambda rows: allowed(problem, *place, rows), sizes.queries, sizes.keys, cell)
    return cast(Array, share == 0)


def allowed(problem: Problem, batch: int, head: int, rows: slice) -> Tensor:
    """Which keys some queries of a head may attend to, bool (rows, Lk)."""
    keys, count = problem.sizes.keys, rows.stop - rows.start
    device = problem.sizes.device
    keep = torch.ones(count, keys, dtype=torch.bool, device=device)
    if problem.spans is not None:
        keep = of(problem.spans, batch, head, rows, keys)
    if problem.bias is not None:
        one = [slice(place, place + 1) for place in (batch, head)]
        bias = problem.bias.tile(one[0], one[1], rows, slice(None), problem.sizes)
        keep = keep & (bias[0, 0] != -torch.inf)
    return keep


def numbers(array: Any) -> Array:
    return array.detach().cpu().numpy() if isinstance(array, Tensor) else np.asarray(array)


def html(weights: Any) -> str:
    """See `Weights._repr_html_`."""
    head = f"<p><code>{escaped(short(said(weights, weights._head), 400))}</code></p>"
    *outer, _, keys = weights.shape
    if math.prod(weights.shape) > PAIRS or not math.prod(weights.shape):
        left = "Nothing is computed for this display. Look at a part: w.plot(…), w.pool(64), w[…]."
        return f"<div>{head}<p>{left}</p></div>"
    first = [(0,) * (len(outer) - 1) + (h,) for h in range(min(outer[-1], HEADS))] if outer else [()]
    try:
        drawn = panels(weights, first, IN_NOTEBOOK)
    except (ClearheadError, RuntimeError):  # tensors without numbers, and in transforms
        return f"<div>{head}</div>"
    floor = 0.1 / max(keys, 2)
    images = "".join(picture(panel, floor) for panel in drawn)
    more = math.prod(outer) - len(first)
    left = f"; {more} more not shown" if more else ""
    caption = f"Largest weights, on a log scale from {floor:.1g} to 1; grey: masked{left}"
    return f"<div>{head}{images}<p>{escaped(caption)}</p></div>"
