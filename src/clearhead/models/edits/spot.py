"""The place of a call in the whole sequence, and the parts of masks and biases that belong to the call."""

from __future__ import annotations

from functools import reduce
from operator import and_
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.base.arrays import check_memory
from clearhead.base.errors import ShapeError, UnsupportedError
from clearhead.base.shapes import Sizes, as_scores, fit, part, placed
from clearhead.biases.base import Added, Bias, Sum, lowered
from clearhead.biases.dense import DenseBias
from clearhead.masks.base import Mask
from clearhead.masks.combined import with_leaves
from clearhead.masks.dense import DenseMask
from clearhead.masks.first_keys import FirstKeys
from clearhead.models.interception.layers import Site
from clearhead.models.interception.modules import Running
from clearhead.problem._recorded import RecordedMask
from clearhead.problem.problem import Problem
from clearhead.problem.region import EVERY, Region, bias_part, visible_part
from clearhead.problem.visible import Visible, resolve
from clearhead.scores.base import Pairwise

RUNS = 3  # more runs cannot be spans of a few intervals


class Unmasked(NamedTuple):
    """The call's `query` (B, H, Lq, E). The problem has 0 in its `blind` rows, whose keys a finite mask hides.

    `blind`, bool (B or 1, H or 1, Lq, 1): the backend gave these queries equal weights for all keys.
    """

    query: Tensor
    blind: Tensor


class Spot(NamedTuple):
    """The positions of a call's queries and keys, from 0 on, padding counted.

    In a generation each step's queries come after those before, and a cache may hold only the last keys. `filled`: the
    number of keys that are there; a static cache also has empty slots. `heads`: the numbers of the problem's heads,
    among the `all_heads` of the module. `rows`: the positions of the output's queries, for `Edit.after`. `site`: the
    module, and its layer. `turner`: the module that may have a part which turns queries and keys, see `turned_by`.
    """

    queries: range
    keys: range
    filled: int
    heads: range
    all_heads: int
    unmasked: Unmasked | None = None
    rows: tuple[int, ...] = ()
    site: Site | None = None
    turner: nn.Module | None = None

    @property
    def newest(self) -> int:
        """The number of positions of the keys' sequence so far."""
        return self.keys.start + self.filled

    def of_heads(self, heads: slice, batch: slice = EVERY) -> Spot:
        """The spot of some of the heads, and sequences."""
        unmasked = self.unmasked
        if unmasked is not None:
            unmasked = Unmasked(unmasked.query[batch, heads], part(unmasked.blind, batch, heads))
        return self._replace(heads=self.heads[heads], unmasked=unmasked)

    def mask(self, mask: Mask, sizes: Sizes) -> Visible:
        """The part of a mask of the whole sequence and of all heads, for the problem's queries, keys and heads.

        A matrix in it may have tokens that are still to be generated: see `tensor`.
        """
        whole = self._whole(sizes)
        visible = resolve(self._so_far(mask), whole, as_written=False)
        return visible if whole.shape == sizes.shape else visible_part(visible, self._region, whole)

    def bias(self, bias: Bias | Tensor, sizes: Sizes) -> Added:
        """The part of a bias of the whole sequence and of all heads, for the problem's queries, keys and heads.

        A matrix may have tokens that are still to be generated: see `tensor`.
        """
        if isinstance(bias, Sum):
            return self.bias(bias.left, sizes).plus(self.bias(bias.right, sizes))
        if isinstance(bias, Tensor) or type(bias) is DenseBias:
            name, sizes = "AddBias: bias", sizes._replace(leading=None)
            matrix = bias if isinstance(bias, Tensor) else bias.tensor
            return Added(dense=fit(placed(self.tensor(matrix, name), sizes.device, name), sizes, name))
        whole = self._whole(sizes)
        added = lowered(bias, whole)
        return added if whole.shape == sizes.shape else bias_part(added, self._region, whole)

    def tensor(self, tensor: Tensor, name: str) -> Tensor:
        """The part of a tensor (..., Lq, Lk) of the whole sequence, or a longer one, and of all heads.

        It is for the problem's queries, keys and heads, with 0 in empty slots of the cache.
        """
        four = as_scores(check_memory(tensor, name), 4)
        rows, columns = four.shape[-2:]
        if (rows != 1 and rows < self.queries.stop) or (columns != 1 and columns < self.newest):
            raise ShapeError(
                f"{name} has shape {tuple(tensor.shape)}; expected (..., Lq, Lk) of the whole sequence, of at least "
                f"{self.queries.stop} queries and {self.newest} keys, with the tokens that are still to be generated."
            )
        if four.ndim == 4 and four.shape[1] != 1:
            if four.shape[1] != self.all_heads:
                raise ShapeError(
                    f"{name} has shape {tuple(tensor.shape)}, of {four.shape[1]} heads. Pass one of all heads of the "
                    f"module, (..., {self.all_heads}, Lq, Lk), or one for all alike, (..., 1, Lq, Lk)."
                )
            four = four[:, self._region.heads]
        if rows != 1:
            four = four[..., self.queries.start : self.queries.stop, :]
        if columns != 1:
            four = four[..., self.keys.start : self.keys.stop]
            four = F.pad(four, (0, len(self.keys) - four.shape[-1]))
        return four

    def _so_far(self, mask: Mask) -> Mask:
        """The mask with its matrices cut to the queries and keys of the whole sequence so far."""
        rows, columns, heads = range(self.queries.stop), range(self.keys.stop), range(self.all_heads)
        ends = self._replace(queries=rows, keys=columns, filled=self.newest, heads=heads)

        def cut(leaf: Mask) -> Mask:
            return DenseMask(ends.tensor(leaf.keep, "DenseMask: keep")) if type(leaf) is DenseMask else leaf

        return with_leaves(mask, cut)

    def _whole(self, sizes: Sizes) -> Sizes:
        """The sizes of the whole sequence's scores, whose query 0 stands at key 0."""
        return Sizes(sizes.batch, self.all_heads, self.queries.stop, self.keys.stop, sizes.device, align="upper_left")

    @property
    def _region(self) -> Region:
        queries, keys = (slice(places.start, places.stop) for places in (self.queries, self.keys))
        return Region(heads=slice(self.heads.start, self.heads.stop), queries=queries, keys=keys)


def turned_by(model: nn.Module) -> str:
    """A part of the model that turns queries and keys by their position (RoPE), as its name or a name in it says; ""
    where there is none."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        said = f"{kind} {name.rpartition('.')[2]}".lower()
        function = any(word.startswith("rotary") and held is not None for word, held in vars(module).items())
        if function or "rotary" in said or "Rope" in kind or "RoPE" in kind:
            return name or kind
    return ""


def spot_of(problem: Problem, running: Running, site: Site) -> Spot:
    """The spot of a call, by the token count of its cache, else by its alignment, else by the positions that the model
    was given, else by its last query's keys."""
    sizes = problem.sizes
    queries, keys, heads = sizes.queries, sizes.keys, sizes.heads
    told = isinstance(sizes.align, int | Tensor)
    total = None if told else running.tokens
    first, before, filled = 0, 0, keys
    if not told and site.kind == "cross":
        first = 0 if total is None else total - queries
    elif total is not None or sizes.align != "upper_left":  # whose mask may hide keys after the last query
        first = _first(problem, site.name, running) if total is None else total - queries
        total = first + queries
        before = 0 if told else max(total - keys, 0)  # the keys that a sliding window has dropped
        filled = min(total, keys)
    return Spot(range(first, first + queries), range(before, before + keys), filled, range(heads), heads)


def _first(problem: Problem, name: str, running: Running) -> int:
    """The position of the first query."""
    sizes = problem.sizes
    align = sizes.align
    if isinstance(align, Tensor):
        if len(set(align.flatten().tolist())) > 1:
            places = f"queries of {name} stand at the positions {align.tolist()}"
            raise UnsupportedError(f"{places}, and an edit names one for all. Run the sequences one by one.")
        return int(align.reshape(-1)[0])
    if isinstance(align, int):
        return align
    if sizes.queries == sizes.keys:
        return 0
    if problem.spans is not None and sizes.queries:
        # a static cache has slots behind the last query, and the last key of a sparse mask may be any before it
        last = max(int(problem.spans.stop[..., -1].max()), min(running.reached(sizes.queries), sizes.keys))
        return max(last - sizes.queries, 0)
    return sizes.keys - sizes.queries


def of_weights(problem: Problem, weights: Tensor) -> Problem:
    """The problem whose softmax gives these weights (B or 1, H or 1, Lq, Lk) over their sum, in every row."""
    sizes, scores = problem.sizes, problem.scores
    if isinstance(scores, Pairwise):
        scores = scores._replace(scale=0.0)
    else:  # a function of the score may make any number of 0
        query, key = (tensor.new_zeros(*tensor.shape[:3], 1) for tensor in (scores.query, scores.key))
        scores = Pairwise("mul", query, key)
    bias = Added(dense=weights.log().expand(-1, -1, sizes.queries, sizes.keys))
    return problem._replace(scores=scores, bias=bias, sinks=None)


def without_keys(problem: Problem, cut: np.ndarray) -> Problem:
    """The problem in which no query sees the keys `cut`, bool (Lk,)."""
    sizes = problem.sizes._replace(leading=None)
    edges = np.flatnonzero(np.diff(cut.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    if len(edges) <= RUNS:
        masks: list[Mask] = [FirstKeys(int(start)) | ~FirstKeys(int(stop)) for start, stop in edges]
    else:
        masks = [DenseMask(torch.from_numpy(~cut).to(sizes.device)[None, None, None])]
    if problem.spans is not None:
        masks = [RecordedMask(problem.spans, sizes), *masks]
    return problem._replace(visible=resolve(reduce(and_, masks), sizes, as_written=False))
